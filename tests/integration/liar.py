#!/usr/bin/env python3
"""How soon audits at the default share find a worker that lies in one of 200 answers: liar.py [--runs N] [--json FILE]

An answer is what a worker sends for one request: a layer's pairs that it holds. The liar (tests/tools/lying_worker.cpp)
flips one sign in one pair's row, so an audit of one of its pairs finds it with a probability of 1 / (200 × its pairs an
answer), and with 95 % within log(0.05) / log(1 - that) audits. Fails when more of the runs than one in four take more
audits than that, when the hub names another worker, or when the text after the quarantine is not the honest one.
"""

import argparse
import json
import math
import os
import sys
import time

import models
from case import completion
from swarm import N_THREADS, Swarm, bin_dir

LIES_IN = 200
N_HONEST = 2000  # answers before the first lie: the swarm has settled by then
MOST_S = 900
TEXT = 200  # tokens of the text afterwards


def wait_for_quarantine(swarm, program):
    begin = time.monotonic()
    while time.monotonic() - begin < MOST_S:
        status = swarm.status()
        if status and status["quarantine"]:
            return status, time.monotonic() - begin
        if program.poll() is not None:
            raise RuntimeError(f"the program ended:\n{program.err()[-2000:]}")
        time.sleep(0.2)
    raise TimeoutError(f"not found within {MOST_S} s")


def one_run(model):
    with Swarm() as swarm:
        swarm.serve(model)
        swarm.join("honest")
        liar = swarm.start("liar", [bin_dir() / "lying_worker", "liar", N_HONEST, 1 / LIES_IN], LINKCPP_HUB=swarm.line)
        swarm.wait_status(lambda s: sum(w["state"] == "ready" and w["slices"] > 0 for w in s["workers"]) == 2, "two workers")
        # Decodes one token after the other for as long as it takes; the default share of its pairs is audited.
        program = swarm.start_exec("llama-bench", "-m", model, "-p", 0, "-n", 1000, "-r", 1000, "-t", N_THREADS, options=())
        found, seconds = wait_for_quarantine(swarm, program)
        program.kill()
        worker = next(w for w in found["workers"] if w["name"] == "liar")
        status = swarm.wait_covered()
        text = completion("Q8_0", TEXT, sampling=("--temp", 0))
        after = swarm.exec("llama-completion", *text, options=())
        alone = swarm.alone("llama-completion", *text)
        pairs_an_answer = worker["pairs"] / worker["requests"]
        chance = 1 / (LIES_IN * pairs_an_answer)
        return {"quarantined": [w["name"] for w in found["quarantine"]], "why": found["quarantine"][0]["why"],
                "in_doubt_since": found["quarantine"][0]["in_doubt_since"], "seconds": round(seconds, 1),
                "answers": worker["requests"], "pairs_an_answer": round(pairs_an_answer, 2),
                "lies": len(liar.out().decode().splitlines()), "audits": worker["audits"]["pairs"],
                "audits_95": math.ceil(math.log(0.05) / math.log(1 - chance)),
                "honest_afterwards": after.out() == alone.out() and after.poll() == 0,
                "others_wrong": sum(w["audits"]["wrong"] for w in status["workers"] if w["name"] != "liar")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    runs = []
    for _ in range(options.runs):
        runs.append(one_run(models.path_of("Q8_0")))
        print(json.dumps(runs[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(runs, file, indent=2)
    late = sum(run["audits"] > run["audits_95"] for run in runs)
    right = all(run["quarantined"] == ["liar"] and run["honest_afterwards"] and run["others_wrong"] == 0 for run in runs)
    print(f"{len(runs) - late} of {len(runs)} runs within the audits that 95 % need")
    sys.exit(0 if right and late <= math.ceil(len(runs) / 4) else 1)


if __name__ == "__main__":
    main()
