#include "hub/model_files.h"

#include <algorithm>
#include <array>
#include <vector>

#include <httplib.h>

#include "base/log.h"
#include "base/text.h"
#include "base/units.h"
#include "model/slicer.h"

namespace linkcpp::hub {
namespace {

// Read from disk, and sent, at once.
constexpr std::size_t kPieceBytes = 256u << 10;

std::string quoted(const Digest& tag) {
    return fmt::format("\"{}\"", tag.hex());
}

// Whether a header that lists tags names that one. ("*" names any.)
bool names(const std::string& list, const std::string& tag) {
    return list.find(tag) != std::string::npos || list == "*";
}

// Makes the one range that was asked for one that lies inside `n_bytes`, as HTTP has it; false where none of it does.
// httplib takes what it is given, also beyond the end.
bool clamp_range(httplib::Ranges& ranges, std::uint64_t n_bytes) {
    if (ranges.empty()) { return true; }
    auto& [first, last] = ranges.front();
    const auto end = static_cast<ssize_t>(n_bytes);
    if (first < 0) {  // the last so many bytes
        if (last <= 0) { return false; }
        first = std::max<ssize_t>(0, end - last);
        last = end - 1;
        return end > 0;
    }
    if (first >= end) { return false; }
    last = last < 0 ? end - 1 : std::min(last, end - 1);
    return first <= last;
}

}  // namespace

ModelFiles::ModelFiles(const model::GgufFile& file, const model::Manifest& manifest)
    : file_(file), manifest_(manifest), manifest_json_(manifest.to_json()), model_id_(manifest.id()) {
    for (std::size_t i = 0; i < manifest.slices.size(); ++i) {
        for (std::uint32_t e = 0; e < manifest.slices[i].size(); ++e) {
            places_.emplace(manifest.slices[i][e], Place{&manifest.model.layers[i], e});
        }
    }
}

void ModelFiles::serve(httplib::Server& server) {
    server.Get("/manifest", [this](const httplib::Request& request, httplib::Response& response) {
        send_manifest(request, response);
    });
    server.Get("/slice/([0-9a-f]{64})",
               [this](const httplib::Request& request, httplib::Response& response) { send_slice(request, response); });
    server.Get("/expert-shard",
               [this](const httplib::Request& request, httplib::Response& response) { send_shard(request, response); });
    server.Get("/backbone", [this](const httplib::Request& request, httplib::Response& response) {
        send_backbone(request, response);
    });
}

void ModelFiles::send_manifest(const httplib::Request& request, httplib::Response& response) {
    auto content = std::make_shared<model::Composition>(file_);
    const ByteView bytes = as_bytes(manifest_json_);
    content->add(Bytes(bytes.begin(), bytes.end()));
    send({.content = content, .n_bytes = content->n_bytes(), .tag = model_id_, .type = "application/json"}, request,
         response);
}

void ModelFiles::send_slice(const httplib::Request& request, httplib::Response& response) {
    const auto hash = Digest::from_hex(request.matches[1].str());
    const auto found = hash ? places_.find(*hash) : places_.end();
    if (found == places_.end()) {
        response.status = 404;
        response.set_content("no slice of this model has that hash\n", "text/plain");
        return;
    }
    auto content =
        std::make_shared<model::Composition>(model::compose_slice(file_, *found->second.layer, found->second.expert));
    send({.content = content, .n_bytes = content->n_bytes(), .tag = *hash}, request, response);
    ++slices_sent_;
}

void ModelFiles::send_shard(const httplib::Request& request, httplib::Response& response) {
    const auto layer = parse_number<std::uint32_t>(request.get_param_value("layer"));
    auto experts = parse_ranges(request.get_param_value("experts"));
    if (!layer || !experts) {
        return answer({ErrorKind::invalid, "say which: /expert-shard?layer=0&experts=0-63"}, response);
    }
    const auto document = shard(*layer, *experts);
    if (!document) { return answer(document.error(), response); }
    send(*document, request, response);
    response.set_header("Content-Disposition", fmt::format("attachment; filename=\"layer-{}-experts-{}.gguf\"", *layer,
                                                           one_line(request.get_param_value("experts"))));
    slices_sent_ += experts->size();
}

Result<ModelFiles::Document> ModelFiles::shard(std::uint32_t layer, std::span<const std::uint32_t> experts) const {
    LINKCPP_TRY(model::Composition content, model::compose_slices(file_, manifest_.model, layer, experts));
    // The header and the slices say all: what of a slice stands where follows from the header.
    Sha256 tag;
    tag.add(content.own_bytes());
    for (const std::uint32_t expert : experts) { tag.add(manifest_.slice(layer, expert)->bytes); }
    const std::uint64_t n_bytes = content.n_bytes();
    return Document{
        .content = std::make_shared<model::Composition>(std::move(content)), .n_bytes = n_bytes, .tag = tag.finish()};
}

void ModelFiles::send_backbone(const httplib::Request& request, httplib::Response& response) {
    std::shared_ptr<const Document> document;
    {
        // Hashed once; whoever else wants it meanwhile waits for that.
        const std::lock_guard lock(backbone_mutex_);
        if (!backbone_) {
            auto made = make_backbone();
            if (!made) { return answer(made.error(), response); }
            backbone_ = std::make_shared<Document>(*std::move(made));
        }
        document = backbone_;
    }
    send(*document, request, response);
}

Result<ModelFiles::Document> ModelFiles::make_backbone() const {
    LINKCPP_TRY(model::Backbone backbone, model::compose_backbone(file_));
    LINKCPP_TRY(const Digest tag, model::load_or_make_front_hash(file_, backbone));
    return Document{.content = std::make_shared<model::Composition>(std::move(backbone.content)),
                    .n_bytes = backbone.front_bytes,
                    .tag = tag};
}

void ModelFiles::answer(const Error& error, httplib::Response& response) {
    const bool asked_wrongly = error.kind == ErrorKind::invalid;
    response.status = asked_wrongly ? 400 : error.kind == ErrorKind::not_found ? 404 : 500;
    if (response.status == 500) { log_error("HTTPS: {}", error.message); }
    response.set_content(error.message + "\n", "text/plain");
}

void ModelFiles::send(const Document& document, const httplib::Request& request, httplib::Response& response) {
    if (const Status same = file_.check_unchanged(); !same) { return answer(same.error(), response); }
    const std::string tag = quoted(document.tag);
    response.set_header("ETag", tag);
    response.set_header("Accept-Ranges", "bytes");
    // The request is httplib's own object, which it reads again when it sends the answer.
    auto& ranges = const_cast<httplib::Request&>(request).ranges;  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    if (names(request.get_header_value("If-None-Match"), tag)) {
        ranges.clear();
        response.status = 304;
        return;
    }
    // Part of something else would be useless: then all of it.
    if (request.has_header("If-Range") && request.get_header_value("If-Range") != tag) { ranges.clear(); }
    if (!clamp_range(ranges, document.n_bytes)) {
        ranges.clear();
        response.status = 416;
        response.set_header("Content-Range", fmt::format("bytes */{}", document.n_bytes));
        response.set_content(fmt::format("this has {} bytes\n", document.n_bytes), "text/plain");
        return;
    }
    response.set_content_provider(document.n_bytes, document.type,
                                  [this, content = document.content, buffer = std::vector<std::byte>()](
                                      std::size_t offset, std::size_t n_bytes, httplib::DataSink& sink) mutable {
                                      buffer.resize(std::min(n_bytes, kPieceBytes));
                                      Status read = file_.check_unchanged();
                                      if (read) { read = content->read(offset, buffer); }
                                      if (!read) {  // whoever waits for the rest sees the connection end
                                          log_error("HTTPS: {}", read.error().message);
                                          return false;
                                      }
                                      const bool sent =
                                          sink.write(reinterpret_cast<const char*>(buffer.data()), buffer.size());
                                      if (sent) { bytes_sent_ += buffer.size(); }
                                      return sent;
                                  });
}

}  // namespace linkcpp::hub
