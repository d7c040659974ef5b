"""Measures linkcpp: every figure a ratio taken in one run, beside the limit it has to keep. Run by scripts/bench.

Runs of the two sides alternate, and medians are compared: the machine's speed drifts.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "integration"))

import fetching  # beside this file

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


def bench_model(bin_path, folder):
    """A random model of 0.55 GB, made once."""
    model = folder / "bench.gguf"
    if not model.exists():
        run([bin_path / "linkcpp", "synth", model, "--preset", "bench"])
    return model


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

    def __init__(self, model, replicas, *arguments):
        from swarm import Swarm

        self.swarm = Swarm()
        self.swarm.serve(model, "--replicas", str(replicas), *arguments, workers=2)
        self.model = model

    def bench(self, *options, local_experts=False):
        options = options if local_experts else ["--no-local-experts", *options]
        process = self.swarm.exec("llama-bench", *llama_bench(self.model, 2), options=options)
        if process.poll() != 0:
            raise RuntimeError(process.err()[-2000:])
        return bench_rows(process.out())

    def busy_us(self):
        return [w["busy_us"] for w in self.swarm.status()["workers"]]

    def close(self):
        self.swarm.close()


def rpc_devices(port):
    """What releases of llama.cpp have called the device of an RPC server."""
    return f"RPC0[127.0.0.1:{port}]", "RPC0", f"RPC[127.0.0.1:{port}]"


def rpc_bench(llama, model, server_threads, client_threads):
    port = 50052
    server = subprocess.Popen([str(llama / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", str(server_threads)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        for name in rpc_devices(port):
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
    model = bench_model(bin_path, folder)

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


# ---- audit and probes ---------------------------------------------------------------------------------------------------

MORE = 50  # times the default's work: what that costs stands out of the machine's noise


def trust(bin_path, folder):
    """What audits and probes at their default rates take of decoding, from 50 times as many of them. The hub, the workers and
    llama.cpp share two cores here: whatever one of them does, the others wait for."""
    model = bench_model(bin_path, folder)

    def slower(swarm_of, bench_without, bench_with):
        """By how much of its time a token takes longer, median of rounds; (without, with, without) in each."""
        shares = []
        for _ in range(ROUNDS):
            before, more, after = bench_without(), bench_with(), bench_without()
            shares.append((before + after) / 2 / more - 1)
        swarm_of.close()
        return statistics.median(shares)

    def audited(replicas, local_experts):
        swarm = Swarmed(model, replicas, "--probe-every", 1e5)

        def decode_at(share):
            return swarm.bench("--audit", share, local_experts=local_experts)[1]
        decode_at(0)  # warm
        return slower(swarm, lambda: decode_at(0), lambda: decode_at(MORE / 1000))

    def probed():
        swarms = [Swarmed(model, 1, "--probe-every", seconds) for seconds in (1e5, 120 / MORE)]

        def decode_on(swarm):
            return swarm.bench("--audit", 0)[1]
        share = slower(swarms[0], lambda: decode_on(swarms[0]), lambda: decode_on(swarms[1]))
        swarms[1].close()
        return share

    print(f"\naudits and probes, {MORE} times the default's, and what follows for the default:")
    results = []
    total = 0
    for what, share in (("audits by another holder", audited(2, False)), ("audits by the coordinator", audited(1, True)),
                        ("probes of two workers", probed())):
        at_default = max(0.0, share) / MORE
        results.append(row(f"  {what}: {share:.1%} slower, {at_default:.3%} at the default", at_default / 0.01, 1.0, at_most=True,
                           slower=share, at_default=at_default))
        total = max(total, at_default) if what.startswith("audits") else total + at_default
    results.append(row(f"  together: {total:.3%} of decode time", total / 0.01, 1.0, at_most=True, share=total))
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


# ---- bytes on the wire -------------------------------------------------------------------------------------------------


def wire(bin_path, folder):
    """What decoding one token costs a worker's link, by the workers' own counters: two runs, their difference."""
    from swarm import Swarm

    model = bench_model(bin_path, folder)
    n_embd = 1024
    results = []
    print("\nbytes on the wire, one token, one layer, one worker")
    for name, options, width in (("exact, f32", (), 4), ("partial, f16", ("--mode", "partial", "--rows", "f16"), 2)):
        swarm = Swarm()
        try:
            swarm.serve(model, workers=2)
            totals = []
            for n in (2, 42):
                before = [swarm.status()["workers"][i] for i in (0, 1)]
                process = swarm.exec("llama-completion", "-m", model, "-p", "a", "-n", n, "--temp", 0, "--no-warmup", "-no-cnv",
                                     "--ignore-eos", "-t", 2, options=["--no-local-experts", *options])
                if process.poll() != 0:
                    raise RuntimeError(process.err()[-2000:])
                time.sleep(0.5)  # the workers' counters are a heartbeat old at most when the hub asks for them
                after = [swarm.status()["workers"][i] for i in (0, 1)]
                totals.append({key: sum(a[key] - b[key] for a, b in zip(after, before))
                               for key in ("requests", "pairs", "bytes_in", "bytes_out")})
            more = {key: totals[1][key] - totals[0][key] for key in totals[0]}
            out = more["bytes_in"] / more["requests"]
            limit_out = width * n_embd + 128
            results.append(row(f"  {name}: {out:.0f} bytes out", out / limit_out, 1.0, at_most=True, bytes=out, limit_bytes=limit_out))
            rows = more["requests"] if width == 2 else more["pairs"]
            back = more["bytes_out"] / rows
            # In exact mode a row a pair and one header a frame; in partial mode one row a frame.
            limit_back = width * n_embd + (128 if width == 2 else 128 * more["requests"] / more["pairs"])
            results.append(row(f"  {name}: {back:.0f} bytes back for each {'frame' if width == 2 else 'pair'}", back / limit_back, 1.0,
                               at_most=True, bytes=back, limit_bytes=limit_back))
        finally:
            swarm.close()
    return results


# ---- memory and loading ------------------------------------------------------------------------------------------------


def process_figures(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    io = Path(f"/proc/{pid}/io").read_text()
    kib = lambda name: int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024
    return {"resident": kib("RssAnon") + kib("RssFile"), "peak": kib("VmHWM"),
            "read": int(re.search(r"^read_bytes: (\d+)", io, re.MULTILINE)[1])}


def fill_seconds(n_bytes):
    """How long two processes take to write to that much fresh memory each: what loading two shards cannot beat."""
    program = ("import mmap, sys; n = int(sys.argv[1]); m = mmap.mmap(-1, n); m.madvise(mmap.MADV_HUGEPAGE); z = bytes(2**21); "
               "[m.__setitem__(slice(i, i + 2**21), z) for i in range(0, n - 2**21, 2**21)]")
    begin = time.monotonic()
    both = [subprocess.Popen([sys.executable, "-c", program, str(n_bytes)]) for _ in range(2)]
    for process in both:
        process.wait()
    return time.monotonic() - begin


def loading(bin_path, folder):
    """A model with more than 3 GB of experts: the coordinator's memory, what it reads, and how long the second start takes."""
    from server import Server, free_port
    from swarm import Swarm, wait_for

    model = folder / "load.gguf"
    run([bin_path / "linkcpp", "synth", model, "--layers", 10, "--experts", 64, "--used", 8, "--embd", 2048, "--ff", 1536])
    facts = json.loads(run([bin_path / "linkcpp", "inspect", model, "--json"]))
    starts = []
    swarm = Swarm()
    try:
        for _ in range(3):
            port = free_port()
            begin = time.monotonic()
            swarm.serve(model, "--local-workers", 2, "--", "--port", port, "-c", 512, "-np", 1, "-t", 2, hub_only=False)
            server = Server(port, swarm.hub)
            wait_for(server.healthy, 600, "llama-server")  # the first start hashes and copies every slice
            starts.append(time.monotonic() - begin)
            server.complete("a", 1)
            pid = next(p for p, line in swarm.running().items() if "llama-server" in line.split(" ")[0])
            figures = process_figures(pid)
            swarm.hub.stop()
            if len(starts) == 2:  # the last start reads from the disk what it needs
                subprocess.run(["sync"], check=True)
                Path("/proc/sys/vm/drop_caches").write_text("3")
    finally:
        swarm.close()
    backbone = facts["backbone_bytes"]
    limit = 1.1 * backbone + 64 * 2**20
    print(f"\nloading: {facts['expert_bytes'] / 1e9:.2f} GB of experts, a backbone of {backbone / 1e6:.0f} MB; first start {starts[0]:.1f} s, "
          f"second {starts[1]:.2f} s, third, with an empty page cache, {starts[2]:.2f} s; peak while loading "
          f"{figures['peak'] / 1e6:.0f} MB; filling as much fresh memory takes {fill_seconds(facts['expert_bytes'] // 2):.2f} s")
    return [row(f"  coordinator's memory: {figures['resident'] / 1e6:.0f} MB", figures["resident"] / limit, 1.0, at_most=True,
                backbone_bytes=backbone, limit_bytes=limit, **figures),
            row(f"  bytes read from the disk at load: {figures['read'] / 1e6:.0f} MB", figures["read"] / limit, 1.0, at_most=True),
            row(f"  second start of everything: {starts[1]:.2f} s", starts[1] / 3, 1.0, at_most=True, starts_s=starts)]


# ---- losing a worker ---------------------------------------------------------------------------------------------------


def losing(_bin_path, _folder):
    """kill -9 and SIGSTOP of a worker while it decodes, each slice held twice: how much longer the token in flight takes."""
    import signal

    from server import Server, free_port
    from swarm import Swarm

    model = ROOT / "models/kjv-moe-q8_0.gguf"  # trained: what a random one writes is no text that the server would stream
    prompt = "And the LORD said unto Moses,"
    delays = {"kill": [], "stop": []}
    for how, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        for _ in range(ROUNDS):
            swarm = Swarm()
            try:
                swarm.serve(model, "--replicas", "2")
                workers = [swarm.join(f"worker-{i}") for i in (1, 2)]
                swarm.wait_covered()
                port = free_port()
                server = Server(port, swarm.start_exec("llama-server", "-m", model, "--port", port, "-np", 1, "--no-warmup", "-t", 2,
                                                       options=["--no-local-experts"])).wait_healthy()
                server.complete(prompt, 20)
                completion = server.start_completion(prompt, 150)
                completion.wait_arrived(50)
                moment = time.monotonic()
                os.kill(workers[0].pid, number)
                completion.finish()
                times = completion.arrivals
                if len(times) < 150:
                    raise RuntimeError("tokens are missing")
                gaps = [(b, b - a) for a, b in zip(times, times[1:])]
                longest = max(gap for end, gap in gaps if end > moment)
                delays[how].append(longest - statistics.median(gap for _, gap in gaps))
                if how == "stop":
                    os.kill(workers[0].pid, signal.SIGCONT)
            finally:
                swarm.close()
    rpc = {how: losing_rpc(model, prompt, number) for how, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP))}
    print("\nlosing a worker in the midst of decoding, each slice held by two")
    results = []
    for how, name, limit in (("kill", "kill -9", 0.1), ("stop", "SIGSTOP", 1.05)):
        worst = max(delays[how])
        results.append(row(f"  {name}: the token in flight takes {1000 * worst:.0f} ms longer", worst / limit, 1.0, at_most=True,
                           seconds=delays[how], limit_s=limit, rpc=rpc[how]))
        print(f"    llama.cpp's RPC in the same place: {rpc[how]}")
    return results


RPC_PATIENCE_S = 20


def losing_rpc(model, prompt, number):
    """What becomes of a llama-server whose experts are on llama.cpp's own RPC server when that gets the signal while decoding."""
    from server import RequestFailed, Server, free_port
    from swarm import Process, llama_dir as bin_of_llama

    folder = Path(tempfile.mkdtemp(prefix="linkcpp-bench-rpc-"))
    rpc_port, port = free_port(), free_port()
    processes = []
    try:
        worker = Process("rpc-server", [bin_of_llama() / "ggml-rpc-server", "-H", "127.0.0.1", "-p", rpc_port], dict(os.environ), folder)
        processes.append(worker)
        time.sleep(1)
        for n, device in enumerate(rpc_devices(rpc_port)):
            client = Process(f"llama-server-{n}", [bin_of_llama() / "llama-server", "-m", model, "--port", port, "-np", 1, "--no-warmup",
                                                   "-t", 2, "--rpc", f"127.0.0.1:{rpc_port}", "-ngl", 0, "-ot",
                                                   f"_exps\\.weight={device}"], dict(os.environ), folder)
            processes.append(client)
            server = Server(port, client)
            try:
                server.wait_healthy()
                break
            except RuntimeError as error:
                last = error
        else:
            raise last
        completion = server.start_completion(prompt, 150)
        completion.wait_arrived(50)
        os.kill(worker.pid, number)
        completion.join(RPC_PATIENCE_S)
        if client.poll() is not None:
            return f"llama-server ended with signal {-client.poll()}" if client.poll() < 0 else f"llama-server ended with status {client.poll()}"
        if completion.ended is None:
            return f"no token for {RPC_PATIENCE_S} s, and none to come"
        try:
            completion.finish()
            return "the request was completed"
        except (RequestFailed, OSError) as error:
            time.sleep(1)
            return f"the request failed ({error}), llama-server {'lives' if client.poll() is None else 'ended'}"
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parts = {"dispatch": dispatch, "decode": decode, "slicing": slicing, "wire": wire, "loading": loading, "losing": losing, "trust": trust,
             "fetching": lambda bin_path, folder: fetching.fetching(bin_path, folder, row),
             "sharing": lambda bin_path, folder: fetching.sharing(bin_path, folder, row)}
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
