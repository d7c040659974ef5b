#include "hub_operator.h"

#include "hub_file.h"

namespace linkcpp::cli {

Result<HubOperator> find_operator(const std::string& hub) {
    LINKCPP_CHECK(hide_join_line(hub));
    HubOperator found;
    LINKCPP_TRY(found.hub, find_hub(hub));
    LINKCPP_TRY(std::string token, find_operator_token(found.hub));
    found.client = std::make_unique<store::HttpsClient>(net::Address{found.hub.hub.host, found.hub.https_port},
                                                        found.hub.fingerprint, std::move(token));
    return found;
}

Result<nlohmann::json> parse_answer(const std::string& text) {
    nlohmann::json answer = nlohmann::json::parse(text, nullptr, false);
    if (!answer.is_object()) { return fail(ErrorKind::corrupt, "the hub's answer is not what was asked for"); }
    return answer;
}

void add_operator_options(CLI::App* command, std::string& hub, bool& json) {
    command->add_option("--hub", hub,
                        "The hub's join line, or @FILE (default: $LINKCPP_HUB, or the hub on this machine)");
    command->add_flag("--json", json, "Machine-readable");
}

void add_worker_argument(CLI::App* command, std::string& worker) {
    command
        ->add_option("WORKER", worker, "Its name, its id, or at least six digits of its beginning (`linkcpp status`)")
        ->required();
}

}  // namespace linkcpp::cli
