// Join lines and addresses, as people paste them.
#include "net/join_line.h"
#include "base/units.h"
#include "net/socket.h"

using namespace linkcpp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    if (const auto line = net::parse_join_line(text)) {
        const auto again = net::parse_join_line(line->text());
        if (!again || again->text() != line->text()) { __builtin_trap(); }
        if (line->redacted().find(line->token) != std::string::npos && line->token.size() > 16) { __builtin_trap(); }
    }
    if (const auto address = net::parse_address(text)) { (void)address->text(); }
    (void)parse_bytes(text);
    (void)parse_share(text);
    (void)parse_seconds(text);
    (void)parse_ranges(text);
    return 0;
}
