// The judge: compares what workers have computed with double precision, from the hub's own model file. One thread of
// its own, the judge thread; results are fetched by whoever owns it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/error.h"
#include "hub/admission.h"
#include "model/gguf_file.h"
#include "model/manifest.h"
#include "net/wakeup.h"
#include "trust/ruling.h"
#include "wire/control.h"

namespace linkcpp::hub {

struct JudgedProbe {
    std::string worker;
    std::uint64_t sequence = 0;
    Result<trust::Findings> findings;
};
struct JudgedDispute {
    std::string coordinator;
    wire::fb::DisputeT dispute;
    Result<std::vector<trust::RowFit>> fits;  // of each claim
};
using Judgement = std::variant<JudgedProbe, JudgedDispute>;

class Judge {
  public:
    // Both outlive it.
    Judge(const model::GgufFile& file, const model::Manifest& manifest);
    ~Judge();

    void judge(ProbeAnswer answer);
    // False when too many wait.
    bool judge(const std::string& coordinator, const wire::fb::DisputeT& dispute);

    // What is done. From the thread that waits on on_done().
    std::vector<Judgement> take();
    // Signalled when there is something.
    const net::Wakeup& on_done() const { return done_; }

  private:
    using Case = std::variant<ProbeAnswer, JudgedDispute>;

    void run(const std::stop_token& stop);
    Judgement decide(const ProbeAnswer& answer) const;
    Judgement decide(JudgedDispute dispute) const;
    Result<std::vector<trust::RowFit>> rule(const wire::fb::DisputeT& dispute) const;

    const model::GgufFile& file_;
    const model::Manifest& manifest_;
    net::Wakeup done_;
    std::mutex mutex_;  // guards cases_ and results_
    std::condition_variable_any more_;
    std::deque<Case> cases_;
    std::vector<Judgement> results_;
    std::jthread thread_;  // last
};

}  // namespace linkcpp::hub
