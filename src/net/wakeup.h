// Wakes a thread that sleeps in poll(2).
#pragma once

#include "base/error.h"
#include "base/file.h"

namespace linkcpp::net {

// signal() from any thread; fd() is readable from then until clear().
class Wakeup {
  public:
    Wakeup();
    void signal() const;
    void clear() const;
    int fd() const { return read_.get(); }

  private:
    UniqueFd read_;
    UniqueFd write_;
};

}  // namespace linkcpp::net
