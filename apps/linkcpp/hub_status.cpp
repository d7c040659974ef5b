#include "hub_status.h"

#include "store/https_client.h"

namespace linkcpp::cli {

Result<nlohmann::json> fetch_status(const net::JoinLine& hub) {
    static constexpr std::uint64_t kMaxStatusBytes = 64u << 20;
    store::HttpsClient client({hub.hub.host, hub.https_port}, hub.fingerprint, hub.token);
    LINKCPP_TRY(const Bytes bytes, client.get("/status", kMaxStatusBytes));
    nlohmann::json status = nlohmann::json::parse(as_text(bytes), nullptr, false);
    if (status.is_discarded()) { return fail(ErrorKind::corrupt, "hub at {}: its status is not JSON", hub.hub.text()); }
    return status;
}

}  // namespace linkcpp::cli
