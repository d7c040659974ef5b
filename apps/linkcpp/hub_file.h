// Where commands on the same machine find the hubs that run there: a file for each, that only its user can read.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "net/join_line.h"

namespace linkcpp::cli {

// Locked while the hub runs, removed at its end; a file that a killed hub has left behind has no lock. The operator's
// token lies in a file of its own beside it: a join line may be passed on.
class HubFile {
  public:
    static Result<HubFile> write(const net::JoinLine& line, const std::string& operator_token);
    HubFile(HubFile&& other) noexcept : path_(std::exchange(other.path_, {})), lock_(std::move(other.lock_)) {}
    HubFile& operator=(HubFile&&) = delete;
    ~HubFile();

  private:
    HubFile(std::filesystem::path path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
    std::filesystem::path path_;
    UniqueFd lock_;
};

// `text`: a join line, or a file that holds one ("@FILE"), or empty: $LINKCPP_HUB, else the hub on this machine, of
// several the one that was started last. Errors: not_found, saying how to start one.
Result<net::JoinLine> find_hub(std::string_view text);

// The token of whoever runs that hub. Errors: not_found (it runs on another machine, or for another user).
Result<std::string> find_operator_token(const net::JoinLine& hub);

// A join line holds a secret, and command lines are everybody's to see: where `line` is one that was given as an
// argument, the program starts itself anew with the line in its environment instead. `more`: further variables to set
// then. Returns when there is nothing to hide or to set.
Status hide_join_line(const std::string& line, const std::map<std::string, std::string>& more = {});

// Waiting by spinning takes cores from others on this machine; see docs/design/waiting.md.
std::map<std::string, std::string> short_spin();

}  // namespace linkcpp::cli
