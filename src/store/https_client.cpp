#include "store/https_client.h"

#include <algorithm>
#include <cctype>
#include <optional>

#include <curl/curl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/text.h"
#include "base/units.h"
#include "net/identity.h"

namespace linkcpp::store {
namespace {

long whole_seconds(Duration time) {
    return static_cast<long>(std::chrono::ceil<std::chrono::seconds>(time).count());
}

// What curl asks now and then: another number than 0 ends the transfer.
int is_stopped(void* stop, curl_off_t /*to_come*/, curl_off_t /*came*/, curl_off_t /*to_go*/, curl_off_t /*went*/) {
    return static_cast<std::stop_token*>(stop)->stop_requested() ? 1 : 0;
}

// A receiver that is ended loses what it has not read: at most so much. (Linux would let 6 MB wait.)
int limit_window(void* /*context*/, curl_socket_t socket, curlsocktype /*purpose*/) {
    constexpr int kWindow = 1 << 20;
    ::setsockopt(socket, IPPROTO_TCP, TCP_WINDOW_CLAMP, &kWindow, sizeof kWindow);
    return CURL_SOCKOPT_OK;
}

std::unexpected<Error> transfer_error(CURLcode code, const std::string& url) {
    switch (code) {
        case CURLE_SSL_PINNEDPUBKEYNOTMATCH:
            return fail(ErrorKind::invalid, "{}: it has another key than the join line says", url);
        case CURLE_ABORTED_BY_CALLBACK: return fail(ErrorKind::failed, "{}: not wanted any more", url);
        case CURLE_OPERATION_TIMEDOUT: return fail(ErrorKind::timeout, "{}: timed out", url);
        case CURLE_COULDNT_CONNECT:
        case CURLE_GOT_NOTHING:
        case CURLE_RECV_ERROR:
        case CURLE_SEND_ERROR:
        case CURLE_PARTIAL_FILE: return fail(ErrorKind::disconnected, "{}: {}", url, curl_easy_strerror(code));
        default: return fail(ErrorKind::failed, "{}: {}", url, curl_easy_strerror(code));
    }
}

std::unexpected<Error> status_error(long status, const std::string& url, std::string_view said) {
    const std::string why = one_line(said.substr(0, said.find('\n')));
    const auto error = [&](ErrorKind kind, std::string_view otherwise) {
        return fail(kind, "{}: {}", url, why.empty() ? otherwise : std::string_view(why));
    };
    switch (status) {
        case 401:
        case 403: return fail(ErrorKind::invalid, "{}: the hub does not accept this token", url);
        case 404: return error(ErrorKind::not_found, "the hub does not have it");
        case 503: return error(ErrorKind::overloaded, "the hub is busy");
        default: return fail(ErrorKind::failed, "{}: HTTP status {}{}{}", url, status, why.empty() ? "" : ": ", why);
    }
}

// The value of a header line of that name, without white space around it; nothing for another line.
std::optional<std::string_view> header_value(std::string_view line, std::string_view name) {
    if (line.size() <= name.size() || line[name.size()] != ':' ||
        !std::ranges::equal(
            line.substr(0, name.size()), name, {}, [](unsigned char c) { return std::tolower(c); },
            [](unsigned char c) { return std::tolower(c); })) {
        return std::nullopt;
    }
    line.remove_prefix(name.size() + 1);
    static constexpr std::string_view kSpace = " \t\r\n";
    const std::size_t begin = std::min(line.find_first_not_of(kSpace), line.size());
    line.remove_prefix(begin);
    return line.substr(0, line.find_last_not_of(kSpace) + 1);
}

}  // namespace

struct HttpsClient::Request {
    const char* method = "GET";
    std::string path;
    std::uint64_t from = 0;
    std::string if_range;  // with `from`: the tag of what part is wanted of
    std::uint64_t limit = 0;
    const Take& take;  // is given what a status of 200 or 206 comes with
};

struct HttpsClient::Answer {
    CURL* curl = nullptr;
    const Request* request = nullptr;
    long status = 0;
    std::string url;
    Head head;
    std::optional<std::uint64_t> range_begin;  // of a part
    std::uint64_t n_taken = 0;
    std::string said;  // with another status: the beginning of what came
    Status taking;

    bool is_good() const { return status == 200 || status == 206; }

    // The types are curl's. NOLINTNEXTLINE(readability-non-const-parameter)
    static std::size_t on_header(char* data, std::size_t /*one*/, std::size_t n, void* context) {
        static_cast<Answer*>(context)->read_header({data, n});
        return n;
    }
    // NOLINTNEXTLINE(readability-non-const-parameter)
    static std::size_t on_bytes(char* data, std::size_t /*one*/, std::size_t n, void* context) {
        return static_cast<Answer*>(context)->take({reinterpret_cast<const std::byte*>(data), n}) ? n : 0;
    }

  private:
    void read_header(std::string_view line) {
        if (const auto length = header_value(line, "content-length")) {
            head.n_bytes = parse_number<std::uint64_t>(*length).value_or(0);
        } else if (const auto tag = header_value(line, "etag")) {
            head.tag = *tag;
            std::erase(head.tag, '"');
        } else if (const auto range = header_value(line, "content-range")) {  // "bytes 5-9/10"
            const std::size_t dash = range->find('-');
            const std::size_t slash = range->find('/');
            if (!range->starts_with("bytes ") || dash == range->npos || slash == range->npos) { return; }
            range_begin = parse_number<std::uint64_t>(range->substr(6, dash - 6));
            head.n_bytes = parse_number<std::uint64_t>(range->substr(slash + 1)).value_or(0);
        }
    }

    bool take(ByteView bytes) {
        static constexpr std::size_t kMaxSaid = 4u << 10;
        if (status == 0) { curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status); }
        if (!is_good()) {
            said += as_text(bytes).substr(0, kMaxSaid - std::min(kMaxSaid, said.size()));
            return true;
        }
        n_taken += bytes.size();
        if (n_taken > request->limit) {
            taking = fail(ErrorKind::corrupt, "{}: sent more than {} bytes", url, request->limit);
        } else if (status == 206 ? range_begin != request->from : request->from > 0) {
            taking = fail(ErrorKind::corrupt, "{}: has changed meanwhile", url);
        } else {
            taking = request->take(bytes);
        }
        return taking.has_value();
    }
};

struct HttpsClient::Handle {
    CURL* curl = nullptr;
    ~Handle() { curl_easy_cleanup(curl); }
};

HttpsClient::HttpsClient(net::Address address, const Digest& fingerprint, std::string token)
    : HttpsClient(std::move(address), fingerprint, std::move(token), Patience()) {}

HttpsClient::HttpsClient(net::Address address, const Digest& fingerprint, std::string token, const Patience& patience)
    : handle_(std::make_unique<Handle>()), address_(std::move(address)), token_(std::move(token)) {
    static const CURLcode once = curl_global_init(CURL_GLOBAL_DEFAULT);
    (void)once;
    CURL* curl = handle_->curl = curl_easy_init();
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
    curl_easy_setopt(curl, CURLOPT_SOCKOPTFUNCTION, &limit_window);
}

HttpsClient::~HttpsClient() = default;

Result<HttpsClient::Answer> HttpsClient::perform(const Request& request) {
    CURL* curl = handle_->curl;
    Answer answer{.curl = curl,
                  .request = &request,
                  .url = fmt::format("https://{}{}", address_.text(), request.path),
                  .head = {},
                  .range_begin = {},
                  .said = {},
                  .taking = {}};
    const std::string_view method = request.method;
    curl_easy_setopt(curl, CURLOPT_NOBODY, 0L);
    if (method == "PUT") {
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, "");  // an empty body has a length, too
    } else if (method == "HEAD") {
        curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
    } else {
        curl_easy_setopt(curl, CURLOPT_HTTPGET, 1L);
    }
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, method == "HEAD" ? nullptr : request.method);
    curl_easy_setopt(curl, CURLOPT_URL, answer.url.c_str());
    curl_slist* headers = nullptr;
    headers = curl_slist_append(headers, ("Authorization: Bearer " + token_).c_str());
    if (request.from > 0) {
        headers = curl_slist_append(headers, fmt::format("Range: bytes={}-", request.from).c_str());
        headers = curl_slist_append(headers, fmt::format("If-Range: \"{}\"", request.if_range).c_str());
    }
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, &Answer::on_header);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, &answer);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, &Answer::on_bytes);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &stop_);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, &is_stopped);
    const CURLcode code = curl_easy_perform(curl);
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &answer.status);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, nullptr);
    curl_slist_free_all(headers);
    if (!answer.taking) { return std::unexpected(answer.taking.error()); }
    if (code != CURLE_OK) { return transfer_error(code, answer.url); }
    return answer;
}

Result<Bytes> HttpsClient::get(const std::string& path, std::uint64_t limit) {
    Bytes bytes;
    const Take take = [&](ByteView piece) -> Status {
        bytes.insert(bytes.end(), piece.begin(), piece.end());
        return {};
    };
    LINKCPP_TRY(const Answer answer, perform({.path = path, .if_range = {}, .limit = limit, .take = take}));
    if (answer.status != 200) { return status_error(answer.status, answer.url, answer.said); }
    return bytes;
}

Result<HttpsClient::Head> HttpsClient::head(const std::string& path) {
    const Take take = [](ByteView) -> Status { return {}; };
    LINKCPP_TRY(Answer answer, perform({.method = "HEAD", .path = path, .if_range = {}, .take = take}));
    if (answer.status != 200) { return status_error(answer.status, answer.url, answer.said); }
    return std::move(answer.head);
}

Status HttpsClient::fetch(const std::string& path, std::uint64_t from, const Head& expected, const Take& take) {
    if (from >= expected.n_bytes) { return {}; }
    LINKCPP_TRY(
        const Answer answer,
        perform(
            {.path = path, .from = from, .if_range = expected.tag, .limit = expected.n_bytes - from, .take = take}));
    if (!answer.is_good()) { return status_error(answer.status, answer.url, answer.said); }
    if (answer.head.n_bytes != expected.n_bytes || answer.n_taken != expected.n_bytes - from) {
        return fail(ErrorKind::corrupt, "{}: expected {} bytes, got {}", answer.url, expected.n_bytes - from,
                    answer.n_taken);
    }
    return {};
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
    std::string text;
    const Take take = [&](ByteView piece) -> Status {
        text += as_text(piece);
        return {};
    };
    LINKCPP_TRY(const Answer answer,
                perform({.method = method, .path = full, .if_range = {}, .limit = kMaxText, .take = take}));
    if (answer.status == 200) { return text; }
    if (answer.status == 400 || answer.status == 404) { return fail(ErrorKind::invalid, "{}", answer.said); }
    return status_error(answer.status, answer.url, answer.said);
}

}  // namespace linkcpp::store
