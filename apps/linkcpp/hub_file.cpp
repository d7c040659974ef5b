#include "hub_file.h"

#include <cstdlib>
#include <filesystem>

#include "base/file.h"
#include "base/platform.h"

namespace linkcpp::cli {
namespace {

Result<std::filesystem::path> hub_path() {
    LINKCPP_TRY(const std::filesystem::path dir, runtime_dir());
    return dir / "hub";
}

}  // namespace

Result<HubFile> HubFile::write(const net::JoinLine& line) {
    LINKCPP_TRY(const std::filesystem::path path, hub_path());
    std::string text = line.text() + "\n";
    LINKCPP_CHECK(write_file_atomically(path, text, 0600));
    return HubFile(std::move(text));
}

HubFile::~HubFile() {
    if (text_.empty()) { return; }
    const auto path = hub_path();
    if (!path) { return; }
    const auto now = read_file(*path, 4096);
    std::error_code error;
    if (now && *now == text_) { std::filesystem::remove(*path, error); }
}

Result<net::JoinLine> find_hub(std::string_view text) {
    if (text.empty()) {
        const char* variable = std::getenv("LINKCPP_HUB");
        if (variable != nullptr && *variable != '\0') { return net::parse_join_line(variable); }
        LINKCPP_TRY(const std::filesystem::path path, hub_path());
        const auto line = read_file(path, 4096);
        if (line) { return net::parse_join_line(*line); }
        return fail(ErrorKind::not_found,
                    "no hub is running on this machine; start one with `linkcpp serve -m MODEL.gguf`, "
                    "or give the join line of another (or set LINKCPP_HUB)");
    }
    if (text.starts_with('@')) {
        LINKCPP_TRY(const std::string line, read_file(std::filesystem::path(text.substr(1)), 4096));
        return net::parse_join_line(line);
    }
    return net::parse_join_line(text);
}

}  // namespace linkcpp::cli
