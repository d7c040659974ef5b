// Who is connected to the HTTPS side and has not shown a token: so many from one address, of more the one that has
// waited longest is cut off, and each only for a while. cpp-httplib tells nobody of its connections; OpenSSL does, when
// a handshake begins and when a connection's TLS state is freed, which is before its socket is closed.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
#include <string>

#include <openssl/types.h>

#include "base/clock.h"

namespace linkcpp::hub {

// Thread-safe. Outlives the connections.
class HttpsGuests {
  public:
    // `refused`: is told the name of the limit, and a line for the log.
    using Refused = std::function<void(const std::string& name, const std::string& text)>;
    HttpsGuests(std::size_t per_address, Duration hello_time, Refused refused);

    // From now on the connections of that context are counted.
    void watch(SSL_CTX* context);
    // It has shown a valid token.
    void let_in(const SSL* connection);
    // To be called now and then: who has had its time is cut off.
    void sweep(TimePoint now);

    // While this lives, whoever begins a handshake on this thread is turned away: all threads are taken, and so are the
    // places to wait for one.
    class TurningAway {
      public:
        TurningAway();
        ~TurningAway();
        TurningAway(const TurningAway&) = delete;
        TurningAway& operator=(const TurningAway&) = delete;
    };

  private:
    struct Guest {
        HttpsGuests* owner;
        std::string from;
        int fd;
        TimePoint since;
        bool let_in = false;
        bool cut = false;
        std::list<Guest>::iterator self{};
    };
    // OpenSSL's callbacks.
    static int ssl_index();
    static int context_index();
    static void on_info(const SSL* connection, int where, int result);
    static void on_free(void* parent, void* guest, CRYPTO_EX_DATA* data, int index, long argl, void* argp);

    void arrived(SSL* connection);
    void left(const Guest& guest);
    // With the mutex held.
    static void cut(Guest& guest);

    std::size_t per_address_;
    Duration hello_time_;
    Refused refused_;
    mutable std::mutex mutex_;  // guards guests_
    std::list<Guest> guests_;
};

}  // namespace linkcpp::hub
