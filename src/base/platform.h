// The platform file: every call that differs between operating systems, behind a portable name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace linkcpp {

// The same for two processes exactly when they run under one kernel since its last start.
std::string boot_id();
std::string host_name();
// "llama-server"
std::string process_name();
// This process's arguments, the program first; empty where the system does not tell.
std::vector<std::string> command_line();
// Bytes that could be used without swapping, 0 when not known.
std::uint64_t available_memory_bytes();
// Resident memory of this process, anonymous and file-backed.
std::uint64_t resident_bytes();
unsigned n_processors();

// $XDG_CACHE_HOME, $XDG_STATE_HOME and $XDG_RUNTIME_DIR (or their defaults) + "/linkcpp", made if needed with mode
// 0700. LINKCPP_HOME puts all three under one folder.
Result<std::filesystem::path> cache_dir();
Result<std::filesystem::path> state_dir();
Result<std::filesystem::path> runtime_dir();

// The user at the other end of a connected Unix socket; nothing when the system will not tell.
std::optional<std::uint32_t> peer_uid(int socket_fd);

// Asks for large pages behind memory that will be filled soon and read often: far fewer faults and translations. A
// wish.
void prefer_large_pages(void* address, std::size_t n_bytes);

std::size_t page_bytes();

// Addresses that belong to nobody else, with nothing behind them until something is put there; whole pages. Freed, with
// all that was put there, at its end.
class AddressSpace {
  public:
    // Errors: overloaded (no room for so many addresses).
    static Result<AddressSpace> reserve(std::size_t n_bytes);
    AddressSpace(AddressSpace&& other) noexcept
        : base_(std::exchange(other.base_, nullptr)), n_bytes_(std::exchange(other.n_bytes_, 0)) {}
    AddressSpace& operator=(AddressSpace&&) = delete;
    ~AddressSpace();
    std::byte* base() const { return base_; }

  private:
    AddressSpace(std::byte* base, std::size_t n_bytes) : base_(base), n_bytes_(n_bytes) {}
    std::byte* base_;
    std::size_t n_bytes_;
};
// At addresses of such a space, `at` beginning with a page. A file: read-only, and its bytes as they are on disk; who
// cuts it short ends this process. Memory: zeros that can be written. Errors: overloaded.
Status map_file(int fd, std::span<std::byte> at);
Status map_memory(std::span<std::byte> at);

// Copies `length` bytes between files at the same or different offsets, inside the kernel where it can.
Status copy_range(int from, std::uint64_t from_offset, int to, std::uint64_t to_offset, std::uint64_t length,
                  std::string_view from_name, std::string_view to_name);

// The stack of threads that are started from now on.
void set_thread_stack(std::size_t n_bytes);
// Gives back the memory of the calling thread's stack that nothing lies on any more; not for the first thread.
void release_unused_stack();

// Opens /dev/null in the place of whichever of standard input, output and error are closed.
void open_standard_streams();

// Asks the kernel to end this process when its parent ends, by SIGTERM or, at once, by SIGKILL.
void die_with_parent(bool at_once = false);

// The folder of the running executable.
std::filesystem::path executable_dir();

// A shared library in this process.
struct LoadedLibrary {
    std::string name;      // the file's, links followed: "libcuda.so.570.86.10"
    std::string build_id;  // hexadecimal; empty where the file has none

    bool operator==(const LoadedLibrary&) const = default;
};
std::vector<LoadedLibrary> loaded_libraries();
// "x86_64", "aarch64"
std::string machine_name();

// n bytes from the system's random source, as hexadecimal text.
std::string random_hex(std::size_t n_bytes);

}  // namespace linkcpp
