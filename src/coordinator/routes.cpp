#include "coordinator/routes.h"

#include <algorithm>

namespace linkcpp::coordinator {
namespace {

constexpr std::size_t kMaxWorkers = 4096;

}  // namespace

const Routes::Worker* Routes::find(std::string_view id) const {
    const auto found = std::ranges::find(workers, id, &Worker::id);
    return found == workers.end() ? nullptr : &*found;
}

std::size_t Routes::n_covered() const {
    std::size_t n = 0;
    for (const auto& layer : holders) {
        n += static_cast<std::size_t>(std::ranges::count_if(layer, [](const auto& some) { return !some.empty(); }));
    }
    return n;
}

Routes without_quarantined(Routes routes, const Routes& latest) {
    for (std::size_t i = 0; i < routes.workers.size(); ++i) {
        const Routes::Worker* now = latest.find(routes.workers[i].id);
        if (now == nullptr || !now->quarantined) { continue; }
        routes.workers[i].quarantined = true;
        for (auto& layer : routes.holders) {
            for (auto& holders : layer) { std::erase(holders, static_cast<std::uint16_t>(i)); }
        }
    }
    return routes;
}

Result<Routes> make_routes(const wire::fb::RoutesT& message, const model::MoeModel& model) {
    if (message.workers.size() > kMaxWorkers) {
        return fail(ErrorKind::corrupt, "routes: expected at most {} workers, got {}", kMaxWorkers,
                    message.workers.size());
    }
    Routes routes;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        routes.layer_index[model.layers[i].layer] = i;
        routes.holders.emplace_back(model.layers[i].n_expert);
    }
    for (const auto& route : message.workers) {
        const auto index = static_cast<std::uint16_t>(routes.workers.size());
        LINKCPP_TRY(const wire::SliceSet slices, wire::decode_slices(route->slices));
        routes.workers.push_back(
            {route->worker, route->name, route->epoch, wire::n_slices(slices), route->quarantined});
        for (const wire::LayerExperts& layer : slices) {
            const auto found = routes.layer_index.find(layer.layer);
            const bool known = found != routes.layer_index.end() &&
                               (layer.experts.empty() || layer.experts.back() < routes.holders[found->second].size());
            if (!known) { return fail(ErrorKind::corrupt, "routes: layer {} has no such experts", layer.layer); }
            for (const std::uint16_t expert : layer.experts) { routes.holders[found->second][expert].push_back(index); }
        }
    }
    return routes;
}

}  // namespace linkcpp::coordinator
