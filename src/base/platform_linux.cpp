#include "base/platform.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/file.h"

namespace linkcpp {
namespace {

namespace fs = std::filesystem;

// The number behind "Name:" in a /proc file of "Name:   123 kB" lines, in bytes; 0 when it is not there.
std::uint64_t proc_kib_field(const char* file, std::string_view name) {
    std::ifstream in(file);
    std::string line;
    while (std::getline(in, line)) {
        if (!line.starts_with(name)) { continue; }
        const std::size_t digits = line.find_first_of("0123456789");
        if (digits == std::string::npos) { return 0; }
        std::uint64_t kib = 0;
        std::from_chars(line.data() + digits, line.data() + line.size(), kib);
        return kib * 1024;
    }
    return 0;
}

// The build id among an ELF file's notes: each is three numbers (length of the name, length of the rest, type), the
// name, and the rest, both padded to four bytes.
std::string build_id_in(ByteView notes) {
    constexpr std::size_t kHeader = 12;
    const auto padded = [](std::size_t n) { return (n + 3) / 4 * 4; };
    while (notes.size() >= kHeader) {
        const auto n_name = load_le<std::uint32_t>(notes.data());
        const auto n_rest = load_le<std::uint32_t>(notes.data() + 4);
        const auto type = load_le<std::uint32_t>(notes.data() + 8);
        const std::size_t n_bytes = kHeader + padded(n_name) + padded(n_rest);
        if (n_bytes > notes.size()) { return {}; }
        if (type == NT_GNU_BUILD_ID && as_text(notes.subspan(kHeader, n_name)) == std::string_view("GNU\0", 4)) {
            return to_hex(notes.subspan(kHeader + padded(n_name), n_rest));
        }
        notes = notes.subspan(n_bytes);
    }
    return {};
}

Result<fs::path> made(const fs::path& path) {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) { return fail_errno(error.value(), path.string()); }
    ::chmod(path.c_str(), 0700);
    return path;
}

Result<fs::path> user_dir(const char* variable, std::string_view under_home, std::string_view under_one_home) {
    if (const char* one = std::getenv("LINKCPP_HOME"); one != nullptr && *one != '\0') {
        return made(fs::path(one) / under_one_home);
    }
    if (const char* dir = std::getenv(variable); dir != nullptr && *dir != '\0') {
        return made(fs::path(dir) / "linkcpp");
    }
    const char* home = std::getenv("HOME");
    if (home == nullptr || *home == '\0') {
        return fail(ErrorKind::invalid, "neither LINKCPP_HOME nor {} nor HOME is set; set one of them", variable);
    }
    return made(fs::path(home) / under_home / "linkcpp");
}

}  // namespace

std::string boot_id() {
    std::ifstream in("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(in, id);
    return id;
}

std::string host_name() {
    std::array<char, 256> name{};
    if (::gethostname(name.data(), name.size() - 1) != 0) { return "unknown"; }
    return name.data();
}

std::string process_name() {
    return program_invocation_short_name;
}

std::vector<std::string> command_line() {
    std::ifstream in("/proc/self/cmdline", std::ios::binary);
    std::vector<std::string> arguments;
    for (std::string argument; std::getline(in, argument, '\0');) { arguments.push_back(argument); }
    return arguments;
}

std::uint64_t available_memory_bytes() {
    return proc_kib_field("/proc/meminfo", "MemAvailable:");
}

std::uint64_t resident_bytes() {
    return proc_kib_field("/proc/self/status", "RssAnon:") + proc_kib_field("/proc/self/status", "RssFile:");
}

unsigned n_processors() {
    return std::max(1u, std::thread::hardware_concurrency());
}

Result<fs::path> cache_dir() {
    return user_dir("XDG_CACHE_HOME", ".cache", "cache");
}

Result<fs::path> state_dir() {
    return user_dir("XDG_STATE_HOME", ".local/state", "state");
}

Result<fs::path> runtime_dir() {
    // Without a runtime folder (a login without systemd) the state folder serves as well.
    if (std::getenv("LINKCPP_HOME") == nullptr && std::getenv("XDG_RUNTIME_DIR") == nullptr) {
        LINKCPP_TRY(const fs::path state, state_dir());
        return made(state / "run");
    }
    return user_dir("XDG_RUNTIME_DIR", ".local/state", "run");
}

std::size_t page_bytes() {
    return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

Result<AddressSpace> AddressSpace::reserve(std::size_t n_bytes) {
    // Without access nothing is promised: such addresses count nowhere as memory.
    void* base = ::mmap(nullptr, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) { return fail(ErrorKind::overloaded, "no room for {} bytes of addresses", n_bytes); }
    return AddressSpace(static_cast<std::byte*>(base), n_bytes);
}

AddressSpace::~AddressSpace() {
    if (base_ != nullptr) { ::munmap(base_, n_bytes_); }
}

Status map_file(int fd, std::span<std::byte> at) {
    if (::mmap(at.data(), at.size(), PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED) { return {}; }
    return fail(ErrorKind::overloaded, "a file of {} bytes cannot be mapped: {}", at.size(), std::strerror(errno));
}

Status map_memory(std::span<std::byte> at) {
    if (::mmap(at.data(), at.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
        MAP_FAILED) {
        return {};
    }
    return fail(ErrorKind::overloaded, "no room for {} bytes of memory: {}", at.size(), std::strerror(errno));
}

void prefer_large_pages(void* address, std::size_t n_bytes) {
    const std::uintptr_t page = page_bytes();
    const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(address) + page - 1) / page * page;
    const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(address) + n_bytes) / page * page;
    if (begin < end) { ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE); }
}

std::optional<std::uint32_t> peer_uid(int socket_fd) {
    ucred credentials{};
    socklen_t size = sizeof credentials;
    if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) { return std::nullopt; }
    return credentials.uid;
}

Status copy_range(int from, std::uint64_t from_offset, int to, std::uint64_t to_offset, std::uint64_t length,
                  std::string_view from_name, std::string_view to_name) {
    auto in = static_cast<off_t>(from_offset);
    auto out = static_cast<off_t>(to_offset);
    std::vector<std::byte> buffer;
    while (length > 0) {
        if (buffer.empty()) {
            const ssize_t n = ::copy_file_range(from, &in, to, &out, length, 0);
            if (n > 0) {
                length -= static_cast<std::uint64_t>(n);
                continue;
            }
            if (n < 0 && errno == EINTR) { continue; }
            if (n < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EIO)) {
                return fail_errno(errno, errno == EIO ? from_name : to_name);
            }
            if (n == 0) {
                return fail(ErrorKind::corrupt, "{}: the source ends {} bytes too early", from_name, length);
            }
            buffer.resize(1u << 20);  // the two file systems cannot do it among themselves
        }
        const std::size_t n = std::min<std::uint64_t>(buffer.size(), length);
        const std::span<std::byte> part(buffer.data(), n);
        LINKCPP_CHECK(read_at(from, part, static_cast<std::uint64_t>(in), from_name));
        LINKCPP_CHECK(write_at(to, part, static_cast<std::uint64_t>(out), to_name));
        in += static_cast<off_t>(n);
        out += static_cast<off_t>(n);
        length -= n;
    }
    return {};
}

void open_standard_streams() {
    for (int fd = 0; fd <= 2; ++fd) {
        if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) { continue; }
        const int opened = ::open("/dev/null", O_RDWR);  // the lowest number that is free: fd
        if (opened > 2) { ::close(opened); }
    }
}

void set_thread_stack(std::size_t n_bytes) {
    pthread_attr_t attributes;
    if (::pthread_attr_init(&attributes) != 0) { return; }
    ::pthread_attr_setstacksize(&attributes, n_bytes);
    ::pthread_setattr_default_np(&attributes);
    ::pthread_attr_destroy(&attributes);
}

void release_unused_stack() {
    constexpr std::uintptr_t kPage = 4096;
    constexpr std::uintptr_t kKept = 64u << 10;  // below this frame: those of the calls that follow
    pthread_attr_t attributes;
    if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) { return; }
    void* lowest = nullptr;
    std::size_t size = 0;
    ::pthread_attr_getstack(&attributes, &lowest, &size);
    ::pthread_attr_destroy(&attributes);
    const auto begin = (reinterpret_cast<std::uintptr_t>(lowest) + kPage - 1) / kPage * kPage;
    const auto end = (reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0)) - kKept) / kPage * kPage;
    if (begin < end && end < begin + size) { ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED); }
}

void die_with_parent(bool at_once) {
    ::prctl(PR_SET_PDEATHSIG, at_once ? SIGKILL : SIGTERM);
}

fs::path executable_dir() {
    std::error_code error;
    const fs::path self = fs::read_symlink("/proc/self/exe", error);
    return error ? fs::path(".") : self.parent_path();
}

std::vector<LoadedLibrary> loaded_libraries() {
    std::vector<LoadedLibrary> libraries;
    const auto add = [](dl_phdr_info* info, std::size_t, void* to) {
        if (info->dlpi_name == nullptr || info->dlpi_name[0] == '\0') { return 0; }  // the program itself
        std::error_code error;
        const fs::path path = fs::canonical(info->dlpi_name, error);
        LoadedLibrary library{error ? info->dlpi_name : path.filename().string(), {}};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const ElfW(Phdr)& header = info->dlpi_phdr[i];
            if (header.p_type != PT_NOTE) { continue; }
            const auto* notes = reinterpret_cast<const std::byte*>(info->dlpi_addr + header.p_vaddr);
            if (library.build_id.empty()) { library.build_id = build_id_in({notes, header.p_memsz}); }
        }
        static_cast<std::vector<LoadedLibrary>*>(to)->push_back(std::move(library));
        return 0;
    };
    ::dl_iterate_phdr(add, &libraries);
    return libraries;
}

std::string machine_name() {
    utsname names{};
    return ::uname(&names) == 0 ? names.machine : "unknown";
}

std::string random_hex(std::size_t n_bytes) {
    Bytes bytes(n_bytes);
    std::size_t done = 0;
    while (done < n_bytes) {
        const ssize_t n = ::getrandom(bytes.data() + done, n_bytes - done, 0);
        if (n > 0) { done += static_cast<std::size_t>(n); }
    }
    return to_hex(bytes);
}

}  // namespace linkcpp
