#include "hub_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/platform.h"

namespace linkcpp::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxLineBytes = 4096;
constexpr Duration kRestart = std::chrono::seconds(3);  // within which `linkcpp serve` has started its hub again

Result<fs::path> hubs_dir() {
    LINKCPP_TRY(const fs::path dir, runtime_dir());
    std::error_code error;
    fs::create_directories(dir / "hubs", error);
    if (error) { return fail_errno(error.value(), (dir / "hubs").string()); }
    return dir / "hubs";
}

fs::path operator_path(fs::path line_path) {
    return line_path.replace_extension(".operator");
}

// Whether the hub that wrote the file still runs.
bool is_held(const fs::path& path) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    return fd && ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0;
}

// The files of hubs that run, the latest first; those of killed ones are removed, and `killed` says that there were
// some.
std::vector<fs::path> running_hubs(const fs::path& dir, bool& killed) {
    std::vector<std::pair<fs::file_time_type, fs::path>> found;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(dir, error)) {
        if (entry.path().extension() != ".line") { continue; }
        if (is_held(entry.path())) {
            found.emplace_back(entry.last_write_time(error), entry.path());
        } else {
            killed = true;
            fs::remove(entry.path(), error);
            fs::remove(operator_path(entry.path()), error);
        }
    }
    std::ranges::sort(found, std::greater<>());
    std::vector<fs::path> paths;
    for (auto& [time, path] : found) { paths.push_back(std::move(path)); }
    return paths;
}

// The same; one that was killed may be about to be started again.
std::vector<fs::path> hubs_soon(const fs::path& dir) {
    bool killed = false;
    std::vector<fs::path> paths = running_hubs(dir, killed);
    const TimePoint deadline = steady_now() + kRestart;
    while (killed && paths.empty() && steady_now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        paths = running_hubs(dir, killed);
    }
    return paths;
}

// "@FILE": the first word of that file that is a join line. Anything else is taken for one itself.
Result<net::JoinLine> line_or_file(std::string_view text) {
    if (!text.starts_with('@')) { return net::parse_join_line(text); }
    LINKCPP_TRY(const std::string held, read_file(fs::path(text.substr(1)), kMaxLineBytes));
    const std::size_t begin = held.find("linkcpp://");
    if (begin == std::string::npos) {
        return fail(ErrorKind::invalid, "{}: no join line (linkcpp://…) is in it", text.substr(1));
    }
    const std::size_t end = held.find_first_of(" '\"\r\n\t", begin);
    return net::parse_join_line(std::string_view(held).substr(begin, end - begin));
}

}  // namespace

Result<HubFile> HubFile::write(const net::JoinLine& line, const std::string& operator_token) {
    LINKCPP_TRY(const fs::path dir, hubs_dir());
    const fs::path path = dir / fmt::format("{}.line", line.hub.port);
    const std::string text = line.text() + "\n";
    LINKCPP_TRY(AtomicFile file, AtomicFile::create(path, 0600));
    LINKCPP_CHECK(write_at(file.fd(), as_bytes(text), 0, path.string()));
    // Locked before it has a name: nobody takes it for one that was left behind.
    UniqueFd lock(::fcntl(file.fd(), F_DUPFD_CLOEXEC, 3));
    if (!lock || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) { return fail_errno(errno, path.string()); }
    LINKCPP_CHECK(write_file_atomically(operator_path(path), operator_token + "\n", 0600));
    LINKCPP_CHECK(file.commit());
    return HubFile(path, std::move(lock));
}

HubFile::~HubFile() {
    std::error_code error;
    if (path_.empty()) { return; }
    fs::remove(path_, error);
    fs::remove(operator_path(path_), error);
}

Result<net::JoinLine> find_hub(std::string_view text) {
    if (text.empty()) {
        const char* variable = std::getenv("LINKCPP_HUB");
        if (variable != nullptr && *variable != '\0') { return line_or_file(variable); }
        LINKCPP_TRY(const fs::path dir, hubs_dir());
        for (const fs::path& path : hubs_soon(dir)) {
            const auto line = read_file(path, kMaxLineBytes);
            if (line) { return net::parse_join_line(*line); }
        }
        return fail(ErrorKind::not_found,
                    "no hub is running on this machine; start one with `linkcpp serve -m MODEL.gguf`, "
                    "or give the join line of another (or set LINKCPP_HUB)");
    }
    return line_or_file(text);
}

Result<std::string> find_operator_token(const net::JoinLine& hub) {
    LINKCPP_TRY(const fs::path dir, hubs_dir());
    for (const fs::path& path : hubs_soon(dir)) {
        const auto text = read_file(path, kMaxLineBytes);
        const auto line = text ? net::parse_join_line(*text) : Result<net::JoinLine>(std::unexpected(text.error()));
        // Another hub must not hear it.
        if (!line || line->fingerprint != hub.fingerprint || line->hub.port != hub.hub.port) { continue; }
        LINKCPP_TRY(std::string token, read_file(operator_path(path), kMaxLineBytes));
        while (!token.empty() && token.back() == '\n') { token.pop_back(); }
        return token;
    }
    return fail(ErrorKind::not_found,
                "the hub at {} does not run on this machine under this user; this is for whoever runs it",
                hub.hub.text());
}

Status hide_join_line(const std::string& line, const std::map<std::string, std::string>& more) {
    const bool secret = line.starts_with("linkcpp://");
    if (!secret && more.empty()) { return {}; }
    std::vector<std::string> arguments;
    LINKCPP_TRY(const std::string all, read_file("/proc/self/cmdline"));
    for (std::size_t at = 0; at < all.size();) {
        const std::size_t end = std::min(all.find('\0', at), all.size());
        std::string argument = all.substr(at, end - at);
        if (secret && argument == line) { argument.clear(); }
        if (!secret || !argument.ends_with("=" + line)) { arguments.push_back(std::move(argument)); }
        at = end + 1;
    }
    if (secret) { ::setenv("LINKCPP_HUB", line.c_str(), 1); }
    for (const auto& [name, value] : more) { ::setenv(name.c_str(), value.c_str(), 1); }
    std::vector<char*> pointers;
    for (std::string& argument : arguments) { pointers.push_back(argument.data()); }
    pointers.push_back(nullptr);
    ::execv("/proc/self/exe", pointers.data());
    return fail_errno(errno, "starting anew");
}

std::map<std::string, std::string> short_spin() {
    if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) { return {}; }
    return {{"GOMP_SPINCOUNT", "2000"}};
}

}  // namespace linkcpp::cli
