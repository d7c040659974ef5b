#!/usr/bin/env python3
"""The main job on one machine: a hub, three workers, stock llama-completion; then the proof that it was they who
computed.

Run by scripts/demo. Exit status 0 only if every pair was computed by a worker, none of the workers idled, and the text
is that of the same model run in one process.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "integration"))
import swarm as harness  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
N_WORKERS = 3


class DemoFailure(Exception):
    """What went wrong, for a person."""


class Stopped(BaseException):
    """By the signal of that number."""


def stop(number, _):
    # Once: a second Ctrl-C must not keep us from ending what we have started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped(number)


class Screen:
    """Plain lines; colours only on a terminal that wants them."""

    def __init__(self):
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.bold, self.dim, self.green, self.red, self.end = (
            ("\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m") if coloured else ("",) * 5)

    def step(self, text):
        print(f"{self.bold}==> {text}{self.end}", flush=True)

    def verdict(self, good, text):
        mark = f"{self.green}ok  {self.end}" if good else f"{self.red}FAIL{self.end}"
        print(f"  {mark} {text}", flush=True)
        return good


def mib(n_bytes):
    return f"{n_bytes / 2**20:.2f} MiB"


def experts_used(swarm, model):
    """How many experts a token uses in each layer, as `linkcpp inspect` reads it from the model."""
    shown = swarm.linkcpp("inspect", str(model), "--json")
    if shown.poll() != 0:
        raise DemoFailure(shown.err())
    return json.loads(shown.out())["layers"][0]["n_expert_used"]


def stream(process):
    """Prints a process' output as it comes, until its end."""
    shown = 0
    while True:
        ended = process.poll() is not None
        text = process.out()
        if len(text) > shown:
            sys.stdout.write(text[shown:].decode(errors="replace"))
            sys.stdout.flush()
            shown = len(text)
        if ended:
            return text
        time.sleep(harness.POLL_S)


def counters(swarm):
    """What each worker has done so far, by name."""
    status = swarm.status()
    if status is None:
        raise DemoFailure("the hub does not answer")
    return status, {w["name"]: {key: w[key] for key in ("pairs", "rows", "busy_us")} for w in status["workers"]}


def run_on_swarm(swarm, arguments):
    """(process, its text, status, what each worker did for it)"""
    for _ in range(harness.N_TRIES):
        _, before = counters(swarm)
        process = swarm.start_exec("llama-completion", *arguments)
        text = stream(process)
        print("" if text.endswith(b"\n") else "\n")
        if harness.said_all("llama-completion", process):
            break
        print("  (llama-completion ended before all of it was printed, as it does on a busy machine: once more)\n")
    if process.poll() != 0:
        raise DemoFailure(f"llama-completion ended with status {process.poll()}:\n{process.err()}")
    status, after = counters(swarm)
    done = {name: {key: after[name][key] - before.get(name, {}).get(key, 0) for key in after[name]} for name in after}
    return process, text, status, done


def perf(log, what, unit):
    """(milliseconds, count) of one of llama.cpp's own lines of timings."""
    match = re.search(rf"(?<!prompt ){what} time = +([\d.]+) ms / +(\d+) {unit}", log)
    if not match:
        raise DemoFailure(f"llama-completion printed no line '{what} time'; it said:\n{log[-3000:]}")
    return float(match.group(1)), int(match.group(2))


def table(headings, rows):
    widths = [max(len(str(row[i])) for row in [headings, *rows]) for i in range(len(headings))]
    for n, row in enumerate([headings, *rows]):
        # Text to the left, numbers to the right.
        cells = [str(c).ljust(w) if i < 2 else str(c).rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        print("  " + "  ".join(cells).rstrip())
        if n == 0:
            print("  " + "  ".join("-" * w for w in widths))


def demo(options, swarm, screen):
    model = options.model.resolve()
    arguments = ["-m", model, "-p", options.prompt, "-n", options.tokens, "--temp", 0.7, "--seed", 3, "--no-warmup",
                 "-no-cnv", *harness.SAME_ARITHMETIC]

    screen.step(f"A hub and {N_WORKERS} workers, each with a third of the experts of {model.name}")
    start = time.monotonic()
    swarm.serve(model, workers=N_WORKERS)
    print(f"  they hold everything after {time.monotonic() - start:.1f} s\n")

    screen.step("Stock llama-completion with the plugin, none of the experts its own")
    process, text, status, done = run_on_swarm(swarm, arguments)
    prompt_ms, n_prompt = perf(process.err(), "prompt eval", "tokens")
    eval_ms, n_eval = perf(process.err(), "eval", "runs")

    workers = sorted(status["workers"], key=lambda w: w["name"])
    n_layers = status["model"]["moe_layers"]
    n_used = experts_used(swarm, model)
    pairs = {w["name"]: done[w["name"]]["pairs"] for w in workers}

    def tokens_per_second(name):
        busy_us = done[name]["busy_us"]
        return f"{done[name]['rows'] / n_layers / (busy_us / 1e6):,.0f}" if busy_us else "-"

    screen.step("Who computed it")
    table(["worker", "device", "slices held", "bytes held", "pairs computed", "tokens/s"],
          [[w["name"], w["device"], w["slices"], mib(w["bytes"]), f"{pairs[w['name']]:,}", tokens_per_second(w["name"])]
           for w in workers])
    print(f"  tokens/s is each worker's own speed while it computes; the swarm: prompt "
          f"{n_prompt / prompt_ms * 1e3:.0f}, generation {n_eval / eval_ms * 1e3:.0f} tokens/s\n")

    screen.step("The same model in one process")
    start = time.monotonic()
    alone = swarm.alone("llama-completion", *arguments)
    if alone.poll() != 0:
        raise DemoFailure(f"llama-completion without the plugin ended with status {alone.poll()}:\n{alone.err()}")
    alone_ms, n_alone = perf(alone.err(), "eval", "runs")
    print(f"  generation {n_alone / alone_ms * 1e3:.0f} tokens/s\n")

    screen.step("Checks")
    expected = n_used * (n_layers * (n_prompt + n_eval) - (n_prompt - 1))
    total = sum(pairs.values())
    third = status["model"]["slices"] / N_WORKERS
    good = [
        screen.verdict(len(workers) == N_WORKERS and all(w["slices"] == third for w in workers),
                       f"each of {len(workers)} workers holds a third of the {status['model']['slices']} slices"),
        screen.verdict(all(pairs.values()), "each worker computed pairs"),
        screen.verdict(total == expected,
                       f"all pairs were computed by workers: {total:,}, expected {n_used} experts x ({n_layers} layers "
                       f"x ({n_prompt} prompt + {n_eval} generated tokens) - {n_prompt - 1}) = {expected:,}\n"
                       f"       ({n_prompt - 1}: of a prompt's tokens llama.cpp takes only the last through the last "
                       "layer)"),
        screen.verdict(text == alone.out() and len(text) > len(options.prompt),
                       f"the text equals that of one process, {len(text)} bytes"),
    ]
    return all(good)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/kjv-moe-q8_0.gguf")
    parser.add_argument("--prompt", default="And the LORD said unto Moses,")
    parser.add_argument("--tokens", type=int, default=120, help="how many to generate")
    options = parser.parse_args()
    for variable in ("LINKCPP_BIN", "LINKCPP_LLAMA_BIN"):
        if variable not in os.environ:
            parser.error(f"{variable} is not set; run scripts/demo")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    screen = Screen()
    start = time.monotonic()
    try:
        with harness.Swarm() as swarm:
            good = demo(options, swarm, screen)
    except Stopped as signalled:
        print("\nstopped", file=sys.stderr)
        return 128 + signalled.args[0]
    except (DemoFailure, TimeoutError, RuntimeError, OSError) as error:
        print(f"\nscripts/demo: {error}", file=sys.stderr)
        return 1
    print(f"\n{'All good' if good else 'Something is wrong'}, after {time.monotonic() - start:.1f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
