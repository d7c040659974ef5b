#!/usr/bin/env python3
"""Every architecture of llama.cpp with routed experts, on the swarm against one process.

    architectures.py [--seeds 1,2,3] [--types F32,Q8_0|all] [--only NAME...] [--results FILE] [--table docs/models.md]

llama.cpp's own generator (test-llama-archs) writes a small random model of each architecture it implements, in which a token
uses one of two experts; llama-quantize makes the types, and files in which it uses both. Each is evaluated on a batch of 17
tokens and on 8 single ones: in one process; through two workers in exact mode, where logits must be equal to the bit; and
in partial mode, where they must be within an NMSE of 1e-7 up to the first token for which a router chose other experts (a
difference in the last bit tips near ties). Each layer must be one block, and cost a worker at most one frame.

Results are kept in FILE, so that a run that was stopped goes on where it was. The table is made from them.
"""

import argparse
import array
import concurrent.futures
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from gguf import Gguf
from swarm import SLOWNESS, Swarm, bin_dir, llama_dir

N_BATCH, N_SINGLES = 17, 8
N_EVALUATIONS = 1 + N_SINGLES
NMSE_LIMIT = 1e-7
SEEDS = (1, 2, 3)
# Each type that llama-quantize gives experts; its S, M and L are mixtures of these.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_NL",
         "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0", "Q2_0", "Q1_0",
         "MXFP4_MOE")


# ---- models ----------------------------------------------------------------------------------------------------------


def run_generator(folder, seed, architecture=None):
    """Writes the models of all architectures, or of one, to `folder`: ARCHITECTURE-moe.gguf or -dense.gguf."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "LD_PRELOAD": str(bin_dir() / "libload_backends.so")}
    done = subprocess.run([llama_dir() / "test-llama-archs", "-o", folder, "-s", str(seed),
                           *(["-a", architecture] if architecture else [])], env=environment,
                          capture_output=True, text=True, timeout=300 * SLOWNESS)
    if done.returncode != 0:
        raise RuntimeError(f"test-llama-archs failed:\n{done.stderr[-3000:]}")


def generate(folder, seed, architecture=None):
    """The Mixture-of-Experts models among them, by architecture."""
    run_generator(folder, seed, architecture)
    models = {}
    for path in sorted(folder.glob("*.gguf")):
        inspected = inspect(path)
        if inspected:
            models[inspected["architecture"]] = path
        else:
            path.unlink()
    return models


def inspect(path):
    """`linkcpp inspect --json`; None of a model without routed experts."""
    done = subprocess.run([bin_dir() / "linkcpp", "inspect", path, "--json"], capture_output=True, text=True, timeout=60 * SLOWNESS)
    if done.returncode == 0:
        return json.loads(done.stdout)
    if "without routed experts" in done.stderr:
        return None
    raise RuntimeError(done.stderr)


def write_importance(model, path):
    """An importance matrix in which everything is as important as everything else: some types ask for one."""
    shapes = {name: (ne[0], ne[2] if len(ne) > 2 else 1) for name, (ne, _, _) in Gguf(model).tensors.items()
              if name.endswith(".weight")}
    with open(path, "wb") as out:
        out.write(struct.pack("<i", len(shapes)))
        for name, (columns, matrices) in shapes.items():
            n = columns * matrices
            out.write(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, n))
            array.array("f", [1.0] * n).tofile(out)
        out.write(struct.pack("<i", 1))


def quantize(model, kind, n_used, architecture, out):
    """Whether llama-quantize made it."""
    importance = out.with_suffix(".imatrix")
    arguments = ["--override-kv", f"{architecture}.expert_used_count=int:{n_used}"]
    if kind.startswith(("IQ1", "IQ2", "IQ3", "Q2_K_S", "Q1_0")):
        write_importance(model, importance)
        arguments += ["--imatrix", importance]
    done = subprocess.run([llama_dir() / "llama-quantize", *arguments, model, out, "COPY" if kind == "F32" else kind],
                          capture_output=True, text=True, timeout=300 * SLOWNESS)
    importance.unlink(missing_ok=True)
    return done.returncode == 0 and out.exists()


# ---- runs ------------------------------------------------------------------------------------------------------------


class Run:
    """What one evaluation gave: logits by token, and what each router chose for each token."""

    def __init__(self, folder, name):
        data = array.array("f", (folder / f"{name}.logits").read_bytes())
        self.bytes = data.tobytes()
        n = N_BATCH + N_SINGLES
        width = len(data) // n
        self.logits = [data[i * width:(i + 1) * width] for i in range(n)]
        lines = [json.loads(line) for line in (folder / f"{name}.routes").read_text().splitlines()]
        per_evaluation = len(lines) // N_EVALUATIONS
        self.chosen = [{} for _ in range(n)]
        for i, line in enumerate(lines):
            evaluation = i // per_evaluation
            tokens = line["tokens"]
            # A last layer may route only the tokens whose output is asked for; here that is all of them.
            first = 0 if evaluation == 0 else N_BATCH + evaluation - 1
            for t, token in enumerate(tokens):
                self.chosen[first + t][(line["layer"], i % per_evaluation)] = token


def nmse(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b)) / max(sum(x * x for x in a), 1e-30)


def compare(alone, other):
    """Partial mode: the largest NMSE up to the first flip, the flips and their margins."""
    flips = []
    worst = 0.0
    compared = 0
    for token, (a, b) in enumerate(zip(alone.chosen, other.chosen)):
        flips += [{"token": token, "margin": a[key]["margin"]} for key in a
                  if a[key]["experts"] != b[key]["experts"]]
        if not flips:
            worst = max(worst, nmse(alone.logits[token], other.logits[token]))
            compared += 1
    return {"nmse": worst, "compared": compared, "flips": flips}


def counters(process):
    """What the plugin said at its end."""
    found = re.findall(r"(\d+) expert blocks in (\d+) requests, (\d+) products", process.err())
    return {"blocks": int(found[-1][0]), "requests": int(found[-1][1]), "products": int(found[-1][2])}


def evaluate(model, served=None):
    """The facts of one model: what exact and partial mode gave. `served`: the file that the hub has, if another."""
    with Swarm() as swarm:
        tokens = "tokens:7"

        def files(name):
            return [model, tokens, swarm.home / f"{name}.logits", swarm.home / f"{name}.routes"]

        alone = swarm.start("alone", [bin_dir() / "dump_logits", *files("alone")])
        swarm.serve(served or model, workers=2)
        if alone.wait() != 0:
            raise RuntimeError(f"{model.name} in one process:\n{alone.err()[-2000:]}")
        expected = Run(swarm.home, "alone")
        facts = {"routed": any(expected.chosen)}
        before = [0, 0]
        n_requests = 0
        for mode in ("exact", "partial"):
            process = swarm.exec(bin_dir() / "dump_logits", *files(mode),
                                 options=["--no-local-experts", "--mode", mode], LINKCPP_LOG="debug")
            if process.poll() != 0:
                raise RuntimeError(f"{model.name}, {mode}:\n{process.err()[-2000:]}")
            facts[mode] = counters(process)
            n_requests += facts[mode]["requests"]
            # A busy worker may answer the hub's question too late, with the figures of a moment ago.
            status = swarm.wait_status(lambda s: sum(w["requests"] for w in s["workers"]) == n_requests,
                                       f"{n_requests} frames at the workers")
            frames = [w["requests"] for w in status["workers"]]
            facts[mode]["frames"] = [now - then for now, then in zip(frames, before)]
            before = frames
            got = Run(swarm.home, mode)
            if mode == "exact":
                facts[mode]["equal"] = got.bytes == expected.bytes
            else:
                facts[mode].update(compare(expected, got))
        facts["unknown_layers"] = swarm.status()["unknown_layers"]
        return facts


def faults(facts, n_blocks):
    """What is wrong with them."""
    found = []
    if not facts["exact"]["equal"]:
        found.append("exact mode: the logits differ")
    if facts["partial"]["nmse"] > NMSE_LIMIT:
        found.append(f"partial mode: NMSE {facts['partial']['nmse']:.1e}")
    if facts["unknown_layers"]:
        found.append(f"not fused: {facts['unknown_layers'][0]}")
    for mode in ("exact", "partial"):
        figures = facts[mode]
        if figures["products"] or figures["blocks"] != n_blocks * N_EVALUATIONS:
            found.append(f"{mode} mode: {figures['blocks']} blocks and {figures['products']} products, expected "
                         f"{n_blocks * N_EVALUATIONS} blocks")
        if any(n > figures["blocks"] for n in figures["frames"]):
            found.append(f"{mode} mode: {figures['frames']} frames for {figures['blocks']} blocks")
    return found


def check(model, architecture, kind, n_used, folder):
    """Facts and faults of one variant; None where llama-quantize makes no such file."""
    path = folder / f"{architecture}-{kind}-{n_used}.gguf"
    try:
        if not quantize(model, kind, n_used, architecture, path):
            return None
        inspected = inspect(path)
        facts = evaluate(path)
        facts["variants"] = sorted(inspected["variants"])
        facts["types"] = sorted({t for types in inspected["types"].values() for t in types})
        # A file may hold experts that its architecture's graph has no router for (refact).
        facts["n_blocks"] = len(inspected["layers"]) if facts["routed"] else 0
        facts["faults"] = faults(facts, facts["n_blocks"])
        return facts
    finally:
        path.unlink(missing_ok=True)


# ---- the table -------------------------------------------------------------------------------------------------------

HEAD = """# Models

Every architecture with routed experts that llama.cpp v0.4.0's own generator of test models writes, through two workers against
one process. Made by `python3 tests/integration/architectures.py`; do not edit.

*Variant*: how the expert block is made, as `linkcpp inspect` says. *Files*: how many were compared, each seed in each type with both experts
used, in F32 also with one. *Exact*: in how many the logits were equal to the bit. *Partial*: the largest NMSE of a token's logits up to
the first token for which a router chose other experts; *flips*: how often one did, and by the largest margin that was ahead. In every file
each layer was one block, and cost a worker at most one frame.

The generator's models have two experts a layer. A sum of two rows is the same in any order, so zeros under *partial* say that the right rows
came with the right weights, not that partial sums never round differently: with four experts used they do (in the sample model by an NMSE
below 1e-9, tests/integration/same_numbers_test.py). One architecture (refact) has expert tensors in its file and no router in its graph, and is left out.

"""


def write_table(results, path):
    by_architecture = {}
    for key, facts in results.items():
        architecture = key.split(" ")[0]
        by_architecture.setdefault(architecture, []).append((key, facts))
    lines = ["| architecture | variant | files | exact | partial, largest NMSE | flips |", "|---|---|---|---|---|---|"]
    kinds, seeds, refused = set(), set(), {}
    for architecture, entries in sorted(by_architecture.items()):
        made = [(key, facts) for key, facts in entries if facts and facts["n_blocks"]]
        for key, facts in entries:
            _, seed, kind, _ = key.split(" ")
            if facts:
                kinds.add(kind)
                seeds.add(seed)
            else:
                refused.setdefault(kind, set()).add(architecture)
        if not made:
            continue
        variants = sorted({v for _, facts in made for v in facts["variants"]})
        flips = [flip for _, facts in made for flip in facts["partial"]["flips"]]
        flip_text = f"{len(flips)}, {max(f['margin'] for f in flips):.1e}" if flips else "0"
        equal = sum(facts["exact"]["equal"] for _, facts in made)
        worst = max(facts["partial"]["nmse"] for _, facts in made)
        lines.append(f"| {architecture} | {'; '.join(variants)} | {len(made)} | {equal} | {worst:.1e} | {flip_text} |")
    kinds_text = ", ".join(k for k in TYPES if k in kinds)
    notes = [f"Seeds: {', '.join(sorted(seeds))}. Types: {kinds_text}."]
    notes += [f"llama-quantize makes no {kind} of {', '.join(sorted(names))}." for kind, names in sorted(refused.items())]
    path.write_text(HEAD + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n")


# ---- the whole -------------------------------------------------------------------------------------------------------


def variants(seeds, kinds, only):
    """(architecture, seed, type, experts used) to check, each architecture's models made as they are needed."""
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="lcpp-archs"))
        try:
            for architecture, model in generate(folder, seed).items():
                if only and architecture not in only:
                    continue
                for kind in kinds:
                    for n_used in (1, 2) if kind == "F32" else (2,):
                        yield folder, model, architecture, seed, kind, n_used
            yield None  # all of this seed: its models go when the next is asked for
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--types", default="F32")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    kinds = TYPES if options.types == "all" else options.types.split(",")
    results = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    n_faults = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        def one(folder, model, architecture, seed, kind, n_used):
            return f"{architecture} {seed} {kind} {n_used}", check(model, architecture, kind, n_used, folder)

        waiting = set()

        def collect(n_left):
            nonlocal n_faults
            while len(waiting) > n_left:
                done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    waiting.remove(future)
                    key, facts = future.result()
                    results[key] = facts
                    text = "not made" if facts is None else "; ".join(facts["faults"]) or "good"
                    n_faults += bool(facts and facts["faults"])
                    print(f"{key}: {text}", flush=True)
                if options.results:
                    part = options.results.with_suffix(".part")
                    part.write_text(json.dumps(results, indent=1, sort_keys=True))
                    part.rename(options.results)

        for work in variants(seeds, kinds, options.only):
            if work is None:
                collect(0)
            elif " ".join(map(str, work[2:])) not in results:
                waiting.add(pool.submit(one, *work))
                collect(options.jobs)
    if options.table:
        write_table(results, options.table)
    print(f"{len(results)} variants, {n_faults} with faults")
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
