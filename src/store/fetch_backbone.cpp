#include "store/fetch_backbone.h"

#include <thread>

#include "base/backoff.h"
#include "base/log.h"
#include "base/progress.h"
#include "model/manifest.h"
#include "model/slicer.h"
#include "store/partial_file.h"

namespace linkcpp::store {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr const char* kPath = "/backbone";
constexpr int kMaxAttempts = 6;  // in a row that bring nothing

bool may_pass(ErrorKind kind) {
    return kind == ErrorKind::disconnected || kind == ErrorKind::timeout || kind == ErrorKind::overloaded;
}

// Fetches what `file` lacks.
Status fetch_rest(HttpsClient& hub, const HttpsClient::Head& whole, PartialFile& file, std::uint64_t& fetched) {
    Progress progress("fetching the backbone", whole.n_bytes);
    progress.set(file.n_bytes());
    Backoff backoff(200ms, 5s);
    for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
        const std::uint64_t before = file.n_bytes();
        const Status status = hub.fetch(kPath, before, whole, [&](ByteView piece) -> Status {
            LINKCPP_CHECK(file.add(piece));
            progress.set(file.n_bytes());
            return {};
        });
        fetched += file.n_bytes() - before;
        if (status) { return {}; }
        if (!may_pass(status.error().kind) || attempt + 1 == kMaxAttempts) { return status; }
        if (file.n_bytes() > before) {
            attempt = -1;
            backoff.reset();
        }
        log_warn("{}; going on in a moment", status.error().message);
        std::this_thread::sleep_for(backoff.next());
    }
    return {};
}

}  // namespace

Result<FetchedBackbone> fetch_backbone(HttpsClient& hub, const fs::path& out) {
    LINKCPP_TRY(const Bytes json, hub.get("/manifest", model::kMaxManifestBytes));
    LINKCPP_TRY(const model::Manifest manifest, model::Manifest::from_json(as_text(json)));
    LINKCPP_TRY(const HttpsClient::Head whole, hub.head(kPath));
    const auto hash = Digest::from_hex(whole.tag);
    if (!hash) { return fail(ErrorKind::corrupt, "the hub does not say which backbone it has"); }
    const fs::path partial = out.string() + ".part";
    LINKCPP_TRY(PartialFile file, PartialFile::open(partial));

    FetchedBackbone done;
    for (bool resumed = file.n_bytes() > 0;; resumed = false) {
        if (file.n_bytes() > whole.n_bytes) { LINKCPP_CHECK(file.clear()); }
        LINKCPP_CHECK(fetch_rest(hub, whole, file, done.fetched));
        LINKCPP_TRY(const Digest found, file.hash());
        if (found == *hash) { break; }
        LINKCPP_CHECK(file.clear());
        if (!resumed) {
            file.discard();
            return fail(ErrorKind::corrupt, "the backbone that the hub has sent does not have its hash");
        }
        log_warn("{}: the beginning of another file; fetched anew", partial.string());
    }
    LINKCPP_CHECK(model::complete_backbone(file.fd(), partial.string(), whole.n_bytes, manifest));
    LINKCPP_CHECK(file.commit(out));
    std::error_code error;
    done.apparent_bytes = fs::file_size(out, error);
    done.bytes = whole.n_bytes;
    return done;
}

}  // namespace linkcpp::store
