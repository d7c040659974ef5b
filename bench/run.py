"""Measures linkcpp: every figure a ratio taken in one run, beside the limit it has to keep. Run by scripts/bench.

Runs of the two sides alternate, and medians are compared: the machine's speed drifts.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "integration"))

PROMPT, GENERATE = 512, 64
ROUNDS = 5


def llama_dir(bin_path):
    """Where the build keeps llama.cpp's programs, from its CMake cache."""
    cache = (bin_path.parent / "CMakeCache.txt").read_text()
    return next(line.split("=", 1)[1] for line in cache.splitlines() if line.startswith("LINKCPP_LLAMA_BIN:"))


def bench_rows(output):
    """(prefill, decode) tokens/s of llama-bench -o json."""
    rows = json.loads(output)
    return (next(r["avg_ts"] for r in rows if r["n_prompt"] > 0), next(r["avg_ts"] for r in rows if r["n_gen"] > 0))


def llama_bench(model, threads, *more):
    return ["-m", model, "-p", PROMPT, "-n", GENERATE, "-t", threads, "-r", 3, "-o", "json", *more]


def run(command, **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr[-2000:]}")
    return done.stdout


def row(what, ratio, limit, at_most=False, **figures):
    held = ratio <= limit if at_most else ratio >= limit
    print(f"{what:<58} {ratio:6.2f} ×   {'at most' if at_most else 'at least'} {limit:.2f}   {'held' if held else 'MISSED'}")
    return {"what": what, "ratio": ratio, "limit": limit, "at_most": at_most, "held": held, **figures}


# ---- dispatch ----------------------------------------------------------------------------------------------------------


def dispatch(bin_path, _folder):
    """One token to one worker over loopback, n_embd 3072, against a blocking TCP echo of the same bytes."""
    results = []
    for pairs in (1, 8):
        runs = [json.loads(run([bin_path / "bench_dispatch", 3072, pairs, 4000], LINKCPP_LOG="error")) for _ in range(ROUNDS)]
        echo = statistics.median(r["tcp_echo_us"] for r in runs)
        print(f"\ndispatch, {pairs} pair(s): {runs[0]['bytes_out']} bytes out, {runs[0]['bytes_back']} back, TCP echo {echo:.1f} µs")
        for kind, limit in (("unix", 1.5), ("tcp", 1.5), ("tls", 2.0)):
            us = statistics.median(r[kind]["us"] for r in runs)
            ratio = statistics.median(r[kind]["ratio"] for r in runs)
            results.append(row(f"  over {kind}: {us:.1f} µs", ratio, limit, at_most=True, us=us, pairs=pairs, echo_us=echo))
    return results


# ---- decode and prefill ------------------------------------------------------------------------------------------------


class Swarmed:
    """A swarm of two local workers of one thread, and llama-bench on it with two threads."""

    def __init__(self, model, replicas):
        from swarm import Swarm

        self.swarm = Swarm()
        self.swarm.serve(model, "--replicas", str(replicas), workers=2)
        self.model = model

    def bench(self, *options):
        process = self.swarm.exec("llama-bench", *llama_bench(self.model, 2), options=["--no-local-experts", *options])
        if process.poll() != 0:
            raise RuntimeError(process.err()[-2000:])
        return bench_rows(process.out())

    def busy_us(self):
        return [w["busy_us"] for w in self.swarm.status()["workers"]]

    def close(self):
        self.swarm.close()


def rpc_bench(llama, model, server_threads, client_threads):
    port = 50052
    server = subprocess.Popen([str(llama / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", str(server_threads)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        device = f"RPC0[127.0.0.1:{port}]"
        for name in (device, "RPC0", f"RPC[127.0.0.1:{port}]"):
            try:
                return bench_rows(run([llama / "llama-bench", *llama_bench(model, client_threads, "--rpc", f"127.0.0.1:{port}",
                                                                           "-ngl", 0, "-ot", f"_exps\\.weight={name}")]))
            except RuntimeError as error:
                last = error
        raise last
    finally:
        server.kill()
        server.wait()


RPC_THREADS = ((1, 1), (2, 1), (1, 2), (2, 2))  # of the server and of the client


def decode(bin_path, folder):
    """Two local workers of one thread against one process of two threads and against RPC, on the same two cores."""
    llama = Path(os.environ["LINKCPP_LLAMA_BIN"])
    model = folder / "bench.gguf"
    run([bin_path / "linkcpp", "synth", model, "--preset", "bench"])

    def alone():
        return bench_rows(run([llama / "llama-bench", *llama_bench(model, 2)]))

    def swarmed(replicas, after_each):
        """[(one process, swarm)], in turns; `after_each` is called in every round."""
        rounds = []
        swarm = Swarmed(model, replicas)
        try:
            swarm.bench()  # warm
            for _ in range(ROUNDS):
                before = alone()
                here = swarm.bench()
                after = alone()
                rounds.append(([(a + b) / 2 for a, b in zip(before, after)], here))
                after_each()
        finally:
            swarm.close()
        return rounds

    rpc = {threads: [] for threads in RPC_THREADS}

    def rpc_round():
        for threads in RPC_THREADS:
            rpc[threads].append(rpc_bench(llama, model, *threads))

    shared_rounds = swarmed(2, rpc_round)
    halved_rounds = swarmed(1, lambda: None)

    def median(runs):
        return [statistics.median(r[i] for r in runs) for i in (0, 1)]

    def ratio(rounds, i):
        return statistics.median(here[i] / one[i] for one, here in rounds)

    one = median([r[0] for r in shared_rounds + halved_rounds])
    shared, halved = median([r[1] for r in shared_rounds]), median([r[1] for r in halved_rounds])
    rpc_medians = {threads: median(runs) for threads, runs in rpc.items()}
    best = [max(RPC_THREADS, key=lambda threads: rpc_medians[threads][i]) for i in (0, 1)]
    best_rpc = [rpc_medians[best[i]][i] for i in (0, 1)]
    print(f"\ntokens/s, prefill of {PROMPT} / decode: one process {one[0]:.0f} / {one[1]:.0f}, both workers hold all "
          f"{shared[0]:.0f} / {shared[1]:.0f}, half each {halved[0]:.0f} / {halved[1]:.0f}, RPC at its best "
          f"{best_rpc[0]:.0f} / {best_rpc[1]:.0f}")
    results = []
    for i, name in ((1, "decode"), (0, "prefill")):
        results.append(row(f"  {name}, both hold all, against one process", ratio(shared_rounds, i), 0.85))
    # With half of the experts each, the slower one has 5.02 of 8 pairs on average: even a perfect swarm would take that
    # much longer for the experts' part. That part is at most the whole, so the limit is at least this:
    limit = ratio(shared_rounds, 1) * 4 / 5.02
    results.append(row("  decode, half each, against both hold all × 4 / 5.02", ratio(halved_rounds, 1) / limit, 0.9))
    for i, name, least in ((1, "decode", 1.3), (0, "prefill", 1.0)):
        ratios = [here[i] / rpc[best[i]][n][i] for n, (_, here) in enumerate(shared_rounds)]
        results.append(row(f"  {name}, both hold all, against RPC", statistics.median(ratios), least))
    results[-1].update(one=one, shared=shared, halved=halved, rpc={str(k): v for k, v in rpc_medians.items()})
    return results


# ---- slicing -----------------------------------------------------------------------------------------------------------


def slicing(bin_path, folder):
    """Cutting a layer of the real shape (1.57 GB) against copying the same bytes."""
    layer = folder / "layer.gguf"
    run([bin_path / "linkcpp", "synth", layer, "--preset", "qwen3.5-122b-a10b-layer"])
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for command in (["cp", "--reflink=never", layer, folder / "copy"],
                        [bin_path / "linkcpp", "slice", layer, "--layer", 0, "--experts", "0-255", "-o", folder / "slices"]):
            start = time.monotonic()
            run(command)
            times.append(time.monotonic() - start)
            os.unlink(command[-1])
        ratios.append(times[0] / times[1])
    print("\nslicing a layer of 1.57 GB")
    return [row("  speed against cp of the same bytes", statistics.median(ratios), 0.8)]


def main():
    parts = {"dispatch": dispatch, "decode": decode, "slicing": slicing}
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"unknown part {unknown.pop()}; there are {', '.join(parts)}")
    bin_path = arguments.bin.resolve()
    os.environ.update(LINKCPP_BIN=str(bin_path), LINKCPP_LLAMA_BIN=llama_dir(bin_path))
    folder = Path(tempfile.mkdtemp(prefix="linkcpp-bench-"))
    try:
        results = {name: parts[name](bin_path, folder) for name in arguments.parts or parts}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
