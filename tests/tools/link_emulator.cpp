// A network link with a length: carries IP packets between two TUN devices, each in a network namespace of its own,
// with delay, jitter, loss and rate, so that TCP itself feels the round trip. For kernels without netem.
//
//   link_emulator --from NETNS,ADDRESS/BITS --to NETNS,ADDRESS/BITS [--delay MS] [--jitter MS] [--loss SHARE]
//                 [--rate MBIT] [--seed N]
//
// NETNS is a name of `ip netns`, or - for where this runs. Delay is one way, each way has it; jitter is added to it at
// random, from 0 up to that much, and never lets a packet overtake another. Prints "ready" when both devices are up,
// and runs until it is ended. Commands on its standard input, one a line, change it: "delay MS", "jitter MS", "loss
// SHARE", "rate MBIT" (0: none), "cut" (nothing passes), "cut-from" (nothing from --from's side passes: half-open),
// "join" (all passes again); each is answered with "ok" or a sentence.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using std::chrono::duration;
using std::chrono::duration_cast;

constexpr std::size_t kMaxPacket = 65536;
constexpr std::size_t kMaxQueued = 4096;  // packets a way: what a router would hold
constexpr int kMtu = 1500;                // bytes

[[noreturn]] void die(const std::string& what) {
    std::fprintf(stderr, "link_emulator: %s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(1);
}

struct Settings {
    double delay_ms = 0;
    double jitter_ms = 0;
    double loss = 0;
    double rate_mbit = 0;
    std::array<bool, 2> cut{};  // by the side that packets come from
};

struct Packet {
    Time due;
    std::vector<char> bytes;
};

struct End {
    int fd = -1;
    std::deque<Packet> queue;  // to be written here
    Time last_due{};
    Time line_free{};
};

// A TUN device in the namespace: the process itself is there only while it makes it.
int open_tun(const std::string& where) {
    const std::size_t comma = where.find(',');
    const std::size_t slash = where.find('/', comma);
    if (comma == std::string::npos || slash == std::string::npos) {
        std::fprintf(stderr, "link_emulator: expected NETNS,ADDRESS/BITS, got '%s'\n", where.c_str());
        std::exit(2);
    }
    const std::string name = where.substr(0, comma);
    const std::string address = where.substr(comma + 1, slash - comma - 1);
    const int bits = std::atoi(where.c_str() + slash + 1);
    const bool here = name == "-";
    const int home = ::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    const int there = here ? ::dup(home) : ::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
    if (home < 0 || there < 0 || ::setns(there, CLONE_NEWNET) != 0) { die("namespace " + name); }
    const int fd = ::open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    ifreq request{};
    std::strcpy(request.ifr_name, "link%d");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (fd < 0 || ::ioctl(fd, TUNSETIFF, &request) != 0) { die("/dev/net/tun"); }
    const int control = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_in ip{};
    ip.sin_family = AF_INET;
    const auto set = [&](unsigned long what, const char* name_of_it) {
        if (::ioctl(control, what, &request) != 0) { die(name_of_it); }
    };
    if (::inet_pton(AF_INET, address.c_str(), &ip.sin_addr) != 1) { die("address " + address); }
    std::memcpy(&request.ifr_addr, &ip, sizeof ip);
    set(SIOCSIFADDR, "address");
    ip.sin_addr.s_addr = htonl(bits == 0 ? 0 : ~0u << (32 - bits));
    std::memcpy(&request.ifr_netmask, &ip, sizeof ip);
    set(SIOCSIFNETMASK, "netmask");
    request.ifr_mtu = kMtu;
    set(SIOCSIFMTU, "mtu");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    set(SIOCSIFFLAGS, "up");
    ::close(control);
    if (::setns(home, CLONE_NEWNET) != 0) { die("the namespace it came from"); }
    ::close(there);
    ::close(home);
    return fd;
}

Time after(Time time, double ms) {
    return time + duration_cast<Clock::duration>(duration<double, std::milli>(ms));
}

class Link {
  public:
    Link(Settings settings, unsigned seed) : settings_(settings), random_(seed) {}

    void open(int side, const std::string& where) { ends_.at(static_cast<std::size_t>(side)).fd = open_tun(where); }

    void run() {
        while (true) {
            const Time now = Clock::now();
            deliver(now);
            std::array<pollfd, 3> entries{pollfd{ends_[0].fd, POLLIN, 0}, pollfd{ends_[1].fd, POLLIN, 0},
                                          pollfd{commands_open_ ? 0 : -1, POLLIN, 0}};
            timespec timeout = until_next(now);
            ::ppoll(entries.data(), entries.size(), &timeout, nullptr);
            for (std::size_t side = 0; side < 2; ++side) {
                if (entries.at(side).revents != 0) { take(side); }
            }
            if (entries[2].revents != 0) { command(); }
        }
    }

  private:
    double random() { return std::uniform_real_distribution<double>(0, 1)(random_); }

    void take(std::size_t side) {
        std::array<char, kMaxPacket> bytes{};
        End& to = ends_.at(1 - side);
        while (true) {
            const ssize_t n = ::read(ends_.at(side).fd, bytes.data(), bytes.size());
            if (n <= 0) { return; }
            const bool lost = settings_.cut.at(side) || random() < settings_.loss || to.queue.size() >= kMaxQueued;
            if (lost) { continue; }
            const Time now = Clock::now();
            Time due = now;
            if (settings_.rate_mbit > 0) {  // one packet after the other leaves onto the line
                to.line_free =
                    after(std::max(now, to.line_free), static_cast<double>(n) * 8 / settings_.rate_mbit / 1e3);
                due = to.line_free;
            }
            due = std::max(after(due, settings_.delay_ms + settings_.jitter_ms * random()), to.last_due);
            to.last_due = due;
            to.queue.push_back({due, {bytes.data(), bytes.data() + n}});
        }
    }

    void deliver(Time now) {
        for (End& end : ends_) {
            while (!end.queue.empty() && end.queue.front().due <= now) {
                const Packet& packet = end.queue.front();
                // What the device does not take now is lost, as on any full wire.
                (void)!::write(end.fd, packet.bytes.data(), packet.bytes.size());
                end.queue.pop_front();
            }
        }
    }

    timespec until_next(Time now) const {
        Time next = now + std::chrono::hours(1);
        for (const End& end : ends_) {
            if (!end.queue.empty()) { next = std::min(next, end.queue.front().due); }
        }
        const auto ns = std::max<std::int64_t>(0, duration_cast<std::chrono::nanoseconds>(next - now).count());
        return {ns / 1'000'000'000, ns % 1'000'000'000};
    }

    void command() {
        std::array<char, 4096> bytes{};
        const ssize_t n = ::read(0, bytes.data(), bytes.size());
        if (n <= 0) {
            commands_open_ = false;
            return;
        }
        typed_.append(bytes.data(), static_cast<std::size_t>(n));
        for (std::size_t end = 0; (end = typed_.find('\n')) != std::string::npos; typed_.erase(0, end + 1)) {
            std::printf("%s\n", obey(typed_.substr(0, end)) ? "ok" : "not understood");
            std::fflush(stdout);
        }
    }

    bool obey(const std::string& line) {
        std::istringstream words(line);
        std::string word;
        double number = 0;
        words >> word;
        if (word == "cut" || word == "cut-from" || word == "join") {
            settings_.cut = {word != "join", word == "cut"};
            return true;
        }
        double* const setting = word == "delay"    ? &settings_.delay_ms
                                : word == "jitter" ? &settings_.jitter_ms
                                : word == "loss"   ? &settings_.loss
                                : word == "rate"   ? &settings_.rate_mbit
                                                   : nullptr;
        if (setting == nullptr || !(words >> number) || !(number >= 0)) { return false; }
        *setting = number;
        return true;
    }

    Settings settings_;
    std::mt19937 random_;
    std::array<End, 2> ends_;
    bool commands_open_ = true;
    std::string typed_;
};

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    std::array<std::string, 2> where;
    unsigned seed = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        const char* value = argv[i + 1];
        if (option == "--from") {
            where[0] = value;
        } else if (option == "--to") {
            where[1] = value;
        } else if (option == "--delay") {
            settings.delay_ms = std::atof(value);
        } else if (option == "--jitter") {
            settings.jitter_ms = std::atof(value);
        } else if (option == "--loss") {
            settings.loss = std::atof(value);
        } else if (option == "--rate") {
            settings.rate_mbit = std::atof(value);
        } else if (option == "--seed") {
            seed = static_cast<unsigned>(std::atoi(value));
        } else {
            std::fprintf(stderr, "link_emulator: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    if (where[0].empty() || where[1].empty() || argc % 2 == 0) {
        std::fprintf(stderr,
                     "Usage: link_emulator --from NETNS,ADDRESS/BITS --to NETNS,ADDRESS/BITS [--delay MS] "
                     "[--jitter MS] [--loss SHARE] [--rate MBIT] [--seed N]\n");
        return 2;
    }
    Link link(settings, seed);
    link.open(0, where[0]);
    link.open(1, where[1]);
    std::printf("ready\n");
    std::fflush(stdout);
    link.run();
}
