// Where commands on the same machine find the hub that runs there: a file that only its user can read.
#pragma once

#include <string_view>

#include "base/error.h"
#include "net/join_line.h"

namespace linkcpp::cli {

// Removes the file at the end, if it is still this hub's.
class HubFile {
  public:
    static Result<HubFile> write(const net::JoinLine& line);
    HubFile(HubFile&& other) noexcept : text_(std::exchange(other.text_, {})) {}
    HubFile& operator=(HubFile&&) = delete;
    ~HubFile();

  private:
    explicit HubFile(std::string text) : text_(std::move(text)) {}
    std::string text_;
};

// `text`: a join line, or a file that holds one ("@FILE"), or empty: $LINKCPP_HUB, else the hub on this machine.
// Errors: not_found, saying how to start one.
Result<net::JoinLine> find_hub(std::string_view text);

}  // namespace linkcpp::cli
