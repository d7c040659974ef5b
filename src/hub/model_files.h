// What of a model can be fetched over HTTPS. Nothing is built for it, in memory or on disk: bytes are read from the
// model's files while they are sent. Every answer has a length and a strong ETag, and takes a byte range.
//
//   /manifest                          the manifest's bytes
//   /slice/SHA256                      one slice
//   /expert-shard?layer=L&experts=0-63 these experts of one layer as a GGUF, as `linkcpp slice` writes it
//   /backbone                          the front of the backbone, up to where its holes begin
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "base/error.h"
#include "base/sha256.h"
#include "model/composition.h"
#include "model/gguf_file.h"
#include "model/manifest.h"

namespace httplib {
class Server;
struct Request;
struct Response;
}  // namespace httplib

namespace linkcpp::hub {

class ModelFiles {
  public:
    // Both outlive it.
    ModelFiles(const model::GgufFile& file, const model::Manifest& manifest);

    // Its handlers run on the server's threads, and refer to this object.
    void serve(httplib::Server& server);

    // From any thread: slices that were asked for and found.
    std::uint64_t slices_sent() const { return slices_sent_; }
    // … and bytes of all that can be fetched.
    std::uint64_t bytes_sent() const { return bytes_sent_; }

  private:
    // Bytes that can be sent.
    struct Document {
        std::shared_ptr<const model::Composition> content;
        std::uint64_t n_bytes = 0;  // of the content's front
        Digest tag;                 // other bytes, another tag
        const char* type = "application/octet-stream";
    };
    void send_manifest(const httplib::Request& request, httplib::Response& response);
    void send_slice(const httplib::Request& request, httplib::Response& response);
    void send_shard(const httplib::Request& request, httplib::Response& response);
    void send_backbone(const httplib::Request& request, httplib::Response& response);
    void send(const Document& document, const httplib::Request& request, httplib::Response& response);
    static void answer(const Error& error, httplib::Response& response);
    Result<Document> shard(std::uint32_t layer, std::span<const std::uint32_t> experts) const;
    Result<Document> make_backbone() const;

    struct Place {
        const model::MoeLayer* layer;
        std::uint32_t expert;
    };
    const model::GgufFile& file_;
    const model::Manifest& manifest_;
    std::string manifest_json_;
    Digest model_id_;
    std::unordered_map<Digest, Place> places_;
    std::atomic<std::uint64_t> slices_sent_{0};
    std::atomic<std::uint64_t> bytes_sent_{0};

    std::mutex backbone_mutex_;  // guards the next
    std::shared_ptr<const Document> backbone_;
};

}  // namespace linkcpp::hub
