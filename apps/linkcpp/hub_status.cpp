#include "hub_status.h"

namespace linkcpp::cli {

Result<nlohmann::json> fetch_status(const net::JoinLine& hub) {
    store::HttpsClient client({hub.hub.host, hub.https_port}, hub.fingerprint, hub.token);
    return fetch_status(client);
}

Result<nlohmann::json> fetch_status(store::HttpsClient& hub) {
    static constexpr std::uint64_t kMaxStatusBytes = 64u << 20;
    LINKCPP_TRY(const Bytes bytes, hub.get("/status", kMaxStatusBytes));
    nlohmann::json status = nlohmann::json::parse(as_text(bytes), nullptr, false);
    if (status.is_discarded()) { return fail(ErrorKind::corrupt, "the hub's status is not JSON"); }
    return status;
}

}  // namespace linkcpp::cli
