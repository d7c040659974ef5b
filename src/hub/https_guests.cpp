#include "hub/https_guests.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include "net/socket.h"

namespace linkcpp::hub {

namespace {

thread_local bool turning_away = false;

}  // namespace

HttpsGuests::TurningAway::TurningAway() {
    turning_away = true;
}

HttpsGuests::TurningAway::~TurningAway() {
    turning_away = false;
}

HttpsGuests::HttpsGuests(std::size_t per_address, Duration hello_time, Refused refused)
    : per_address_(per_address), hello_time_(hello_time), refused_(std::move(refused)) {}

int HttpsGuests::ssl_index() {
    static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, on_free);
    return index;
}

int HttpsGuests::context_index() {
    static const int index = SSL_CTX_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
    return index;
}

void HttpsGuests::watch(SSL_CTX* context) {
    ssl_index();
    SSL_CTX_set_ex_data(context, context_index(), this);
    SSL_CTX_set_info_callback(context, on_info);
}

void HttpsGuests::on_info(const SSL* connection, int where, int /*result*/) {
    if ((where & SSL_CB_HANDSHAKE_START) == 0 || SSL_get_ex_data(connection, ssl_index()) != nullptr) { return; }
    auto* guests = static_cast<HttpsGuests*>(SSL_CTX_get_ex_data(SSL_get_SSL_CTX(connection), context_index()));
    guests->arrived(const_cast<SSL*>(connection));
}

void HttpsGuests::on_free(void* /*parent*/, void* guest, CRYPTO_EX_DATA* /*data*/, int /*index*/, long /*argl*/,
                          void* /*argp*/) {
    if (guest == nullptr) { return; }  // of another context
    const auto& left = *static_cast<Guest*>(guest);
    left.owner->left(left);
}

void HttpsGuests::arrived(SSL* connection) {
    const int fd = SSL_get_fd(connection);
    const std::string name = net::peer_name(fd);
    if (turning_away) {
        ::shutdown(fd, SHUT_RDWR);  // its handshake reads an end
        refused_("HTTPS: too many wait",
                 fmt::format("HTTPS: {}: turned away, too many wait (serve --https-requests)", name));
        return;
    }
    const std::string from(net::host_of(name));
    bool too_many = false;
    {
        const std::lock_guard lock(mutex_);
        const auto waits = [&](const Guest& guest) { return !guest.let_in && !guest.cut && guest.from == from; };
        if (static_cast<std::size_t>(std::ranges::count_if(guests_, waits)) >= per_address_) {
            cut(*std::ranges::find_if(guests_, waits));  // the first has waited longest
            too_many = true;
        }
        Guest& guest = guests_.emplace_back(Guest{this, from, fd, steady_now()});
        guest.self = std::prev(guests_.end());
        SSL_set_ex_data(connection, ssl_index(), &guest);
    }
    if (!too_many) { return; }
    refused_("HTTPS: too many from one address",
             fmt::format("HTTPS: {}: {} from there have shown no token yet, the one that has waited longest is cut off "
                         "(serve --https-per-address)",
                         from, per_address_));
}

void HttpsGuests::sweep(TimePoint now) {
    std::vector<std::string> gone;
    {
        const std::lock_guard lock(mutex_);
        for (Guest& guest : guests_) {
            if (guest.let_in || guest.cut || now - guest.since <= hello_time_) { continue; }
            cut(guest);
            gone.push_back(guest.from);
        }
    }
    for (const std::string& from : gone) {
        refused_("HTTPS: no token in time", fmt::format("HTTPS: {}: has shown no token in time", from));
    }
}

void HttpsGuests::cut(Guest& guest) {
    ::shutdown(guest.fd, SHUT_RDWR);
    guest.cut = true;
}

void HttpsGuests::left(const Guest& guest) {
    const std::lock_guard lock(mutex_);
    guests_.erase(guest.self);
}

void HttpsGuests::let_in(const SSL* connection) {
    auto* guest = static_cast<Guest*>(SSL_get_ex_data(connection, ssl_index()));
    const std::lock_guard lock(mutex_);
    if (guest != nullptr) { guest->let_in = true; }
}

}  // namespace linkcpp::hub
