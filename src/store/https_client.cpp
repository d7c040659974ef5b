#include "store/https_client.h"

#include <curl/curl.h>

#include "net/identity.h"

namespace linkcpp::store {
namespace {

long whole_seconds(Duration time) {
    return static_cast<long>(std::chrono::ceil<std::chrono::seconds>(time).count());
}

struct Sink {
    Bytes bytes;
    std::uint64_t limit = 0;
    const HttpsClient::OnBytes* on_bytes = nullptr;
    bool over_limit = false;
};

// The types are curl's. NOLINTNEXTLINE(readability-non-const-parameter)
std::size_t receive(char* data, std::size_t /*one*/, std::size_t n, void* context) {
    auto& sink = *static_cast<Sink*>(context);
    if (sink.bytes.size() + n > sink.limit) {
        sink.over_limit = true;
        return 0;
    }
    const auto* begin = reinterpret_cast<const std::byte*>(data);
    sink.bytes.insert(sink.bytes.end(), begin, begin + n);
    if (*sink.on_bytes && !(*sink.on_bytes)(sink.bytes.size())) { return 0; }
    return n;
}

std::unexpected<Error> transfer_error(CURLcode code, const std::string& url) {
    switch (code) {
        case CURLE_SSL_PINNEDPUBKEYNOTMATCH:
            return fail(ErrorKind::invalid, "{}: it has another key than the join line says", url);
        case CURLE_OPERATION_TIMEDOUT: return fail(ErrorKind::timeout, "{}: timed out", url);
        case CURLE_COULDNT_CONNECT:
        case CURLE_GOT_NOTHING:
        case CURLE_RECV_ERROR:
        case CURLE_SEND_ERROR:
        case CURLE_PARTIAL_FILE: return fail(ErrorKind::disconnected, "{}: {}", url, curl_easy_strerror(code));
        default: return fail(ErrorKind::failed, "{}: {}", url, curl_easy_strerror(code));
    }
}

std::unexpected<Error> status_error(long status, const std::string& url) {
    switch (status) {
        case 401:
        case 403: return fail(ErrorKind::invalid, "{}: the hub does not accept this token", url);
        case 404: return fail(ErrorKind::not_found, "{}: the hub does not have it", url);
        case 503: return fail(ErrorKind::overloaded, "{}: the hub is busy", url);
        default: return fail(ErrorKind::failed, "{}: HTTP status {}", url, status);
    }
}

}  // namespace

struct HttpsClient::Handle {
    CURL* curl = nullptr;
    curl_slist* headers = nullptr;
    ~Handle() {
        curl_easy_cleanup(curl);
        curl_slist_free_all(headers);
    }
};

HttpsClient::HttpsClient(net::Address address, const Digest& fingerprint, std::string token)
    : HttpsClient(std::move(address), fingerprint, std::move(token), Patience()) {}

HttpsClient::HttpsClient(net::Address address, const Digest& fingerprint, std::string token, const Patience& patience)
    : handle_(std::make_unique<Handle>()), address_(std::move(address)), token_(std::move(token)) {
    static const CURLcode once = curl_global_init(CURL_GLOBAL_DEFAULT);
    (void)once;
    CURL* curl = handle_->curl = curl_easy_init();
    handle_->headers = curl_slist_append(nullptr, ("Authorization: Bearer " + token_).c_str());
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, handle_->headers);
    curl_easy_setopt(curl, CURLOPT_PINNEDPUBLICKEY, net::to_pin(fingerprint).c_str());
    curl_easy_setopt(curl, CURLOPT_SSL_VERIFYPEER, 0L);  // self-signed: the pinned key decides
    curl_easy_setopt(curl, CURLOPT_SSL_VERIFYHOST, 0L);
    curl_easy_setopt(curl, CURLOPT_SSLVERSION, CURL_SSLVERSION_TLSv1_3);
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "https");
    curl_easy_setopt(curl, CURLOPT_PROXY, "");
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, whole_seconds(patience.connect));
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, whole_seconds(patience.stall));
    curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 512L << 10);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, receive);
}

HttpsClient::~HttpsClient() = default;

Result<HttpsClient::Answer> HttpsClient::request(const char* method, const std::string& path, std::uint64_t limit,
                                                 const OnBytes& on_bytes) {
    Answer answer{.status = 0, .url = fmt::format("https://{}{}", address_.text(), path), .body = {}};
    Sink sink{.limit = limit, .on_bytes = &on_bytes};
    if (std::string_view(method) == "PUT") {
        curl_easy_setopt(handle_->curl, CURLOPT_POSTFIELDS, "");  // an empty body has a length, too
    } else {
        curl_easy_setopt(handle_->curl, CURLOPT_HTTPGET, 1L);
    }
    curl_easy_setopt(handle_->curl, CURLOPT_CUSTOMREQUEST, method);
    curl_easy_setopt(handle_->curl, CURLOPT_URL, answer.url.c_str());
    curl_easy_setopt(handle_->curl, CURLOPT_WRITEDATA, &sink);
    const CURLcode code = curl_easy_perform(handle_->curl);
    curl_easy_getinfo(handle_->curl, CURLINFO_RESPONSE_CODE, &answer.status);
    if (sink.over_limit) { return fail(ErrorKind::corrupt, "{}: sent more than {} bytes", answer.url, limit); }
    if (code != CURLE_OK) { return transfer_error(code, answer.url); }
    answer.body = std::move(sink.bytes);
    return answer;
}

Result<Bytes> HttpsClient::get(const std::string& path, std::uint64_t limit, const OnBytes& on_bytes) {
    LINKCPP_TRY(Answer answer, request("GET", path, limit, on_bytes));
    if (answer.status != 200) { return status_error(answer.status, answer.url); }
    return std::move(answer.body);
}

Result<std::string> HttpsClient::put(const std::string& path, const Arguments& arguments) {
    return change("PUT", path, arguments);
}

Result<std::string> HttpsClient::remove(const std::string& path, const Arguments& arguments) {
    return change("DELETE", path, arguments);
}

Result<std::string> HttpsClient::change(const char* method, const std::string& path, const Arguments& arguments) {
    static constexpr std::uint64_t kMaxText = 4u << 20;
    std::string full = path;
    for (const auto& [name, value] : arguments) {
        char* escaped = curl_easy_escape(handle_->curl, value.c_str(), static_cast<int>(value.size()));
        full += fmt::format("{}{}={}", full.size() == path.size() ? '?' : '&', name, escaped != nullptr ? escaped : "");
        curl_free(escaped);
    }
    LINKCPP_TRY(const Answer answer, request(method, full, kMaxText, {}));
    std::string text(as_text(answer.body));
    if (answer.status == 200) { return text; }
    if (answer.status == 400 || answer.status == 404) { return fail(ErrorKind::invalid, "{}", text); }
    return status_error(answer.status, answer.url);
}

}  // namespace linkcpp::store
