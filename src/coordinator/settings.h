// What the plugin is told through the environment.
#pragma once

#include <string>

#include "base/error.h"
#include "coordinator/dispatcher.h"
#include "coordinator/hub_client.h"

namespace linkcpp::coordinator {

struct Settings {
    bool active = false;  // LINKCPP_HUB is set
    // Once the hub's model is loaded, other models' experts are computed in this process: a draft model's.
    bool other_models_here = false;
    HubClientOptions hub;
    DispatchOptions dispatch;
    Duration wait = std::chrono::seconds(30);           // for the hub, at loading
    Duration coverage_wait = std::chrono::seconds(60);  // for workers that hold everything, at loading
};

// Errors: invalid, naming the variable.
Result<Settings> read_settings();

}  // namespace linkcpp::coordinator
