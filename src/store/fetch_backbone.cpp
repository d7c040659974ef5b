#include "store/fetch_backbone.h"

#include <thread>

#include "base/backoff.h"
#include "base/log.h"
#include "base/progress.h"
#include "model/manifest.h"
#include "store/partial_file.h"
#include "store/transfer.h"

namespace linkcpp::store {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr const char* kPath = "/backbone";
constexpr int kMaxAttempts = 6;  // in a row that bring nothing

// Goes on for as long as that brings anything.
Status fetch_all(HttpsClient& hub, const HttpsClient::Head& whole, const Digest& hash, PartialFile& file) {
    Progress progress("fetching the backbone", whole.n_bytes);
    const auto fetch_rest = [&](std::uint64_t from, const Take& take) { return hub.fetch(kPath, from, whole, take); };
    Backoff backoff(200ms, 5s);
    while (true) {
        bool moved = false;
        const Status status = transfer(fetch_rest, whole.n_bytes, hash, file, [&](std::uint64_t) -> Status {
            moved = true;
            progress.set(file.n_bytes());
            return {};
        });
        if (moved) { backoff.reset(); }
        if (status || !may_pass(status.error().kind) || backoff.n_failures() + 1 == kMaxAttempts) { return status; }
        log_warn("{}; going on in a moment", status.error().message);
        std::this_thread::sleep_for(backoff.next());
    }
}

}  // namespace

Result<model::BackboneSize> fetch_backbone(HttpsClient& hub, const fs::path& out) {
    LINKCPP_CHECK(check_replaceable(out));
    LINKCPP_TRY(const Bytes json, hub.get("/manifest", model::kMaxManifestBytes));
    LINKCPP_TRY(const model::Manifest manifest, model::Manifest::from_json(as_text(json)));
    LINKCPP_TRY(const HttpsClient::Head whole, hub.head(kPath));
    const auto hash = Digest::from_hex(whole.tag);
    if (!hash) { return fail(ErrorKind::corrupt, "the hub does not say which backbone it has"); }
    const fs::path partial = out.string() + ".part";
    LINKCPP_TRY(PartialFile file, PartialFile::open(partial));

    if (const Status fetched = fetch_all(hub, whole, *hash, file); !fetched) {
        if (file.n_bytes() == 0) { file.discard(); }
        return std::unexpected(fetched.error());
    }
    LINKCPP_CHECK(model::complete_backbone(file.fd(), partial.string(), whole.n_bytes, manifest));
    LINKCPP_CHECK(file.commit(out));
    std::error_code error;
    return model::BackboneSize{.apparent_bytes = fs::file_size(out, error), .bytes = whole.n_bytes};
}

}  // namespace linkcpp::store
