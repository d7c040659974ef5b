// Who holds what, as the hub said last. Immutable once made; shared between the control thread and dispatch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/moe.h"
#include "wire/control.h"

namespace linkcpp::coordinator {

struct Routes {
    struct Worker {
        std::string id;
        std::string name;
        std::uint32_t epoch = 0;
        std::size_t n_slices = 0;
        bool quarantined = false;
    };
    std::vector<Worker> workers;
    // holders[i][e]: indices into `workers` of those who hold expert e of model.layers[i].
    std::vector<std::vector<std::vector<std::uint16_t>>> holders;
    std::map<std::uint32_t, std::size_t> layer_index;  // layer number → i

    const Worker* find(std::string_view id) const;
    std::size_t n_covered() const;  // experts that somebody holds
};

// Errors: corrupt (a slice that the model does not have, too many workers).
Result<Routes> make_routes(const wire::fb::RoutesT& message, const model::MoeModel& model);

// `routes` without what the workers hold that are in quarantine by `latest`.
Routes without_quarantined(Routes routes, const Routes& latest);

}  // namespace linkcpp::coordinator
