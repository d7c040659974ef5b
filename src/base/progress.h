// Progress of long work, for a person: "slicing 412 MiB of 1.5 GiB  27%  1.1 GiB/s  1 s left".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace linkcpp {

// On a terminal one line that is drawn over, ten times a second at most; elsewhere a line every 5 seconds.
// Silent for work that ends within half a second. One thread at a time.
class Progress {
  public:
    enum class Unit { bytes, items };

    // `total` 0: not known. `quiet`: nothing is ever drawn.
    Progress(std::string_view what, std::uint64_t total, Unit unit = Unit::bytes, bool quiet = false);
    // Ends the line.
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    void add(std::uint64_t amount) { set(done_ + amount); }
    void set(std::uint64_t done);

  private:
    void draw(TimePoint now);

    std::string what_;
    std::uint64_t total_;
    std::uint64_t done_ = 0;
    Unit unit_;
    bool quiet_;
    bool terminal_;
    bool drawn_ = false;
    TimePoint start_;
    TimePoint next_draw_;
};

}  // namespace linkcpp
