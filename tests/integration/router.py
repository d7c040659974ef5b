"""What a coordinator decides while workers of several kinds compute, against one process without the plugin.

Experts and tokens are chosen in one place, by the coordinator. But what it chooses from has gone through experts that
were computed elsewhere: devices that round otherwise move it a little, and a decision that was near a tie may fall the
other way. measure() decodes the same tokens in one process and on a swarm (tests/tools/router_trace.cpp), and counts.
"""

import array
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from swarm import Swarm, bin_dir

RUN_S = 600  # of one run, workers under an emulator


@dataclass
class Kind:
    """A way to compute: `linkcpp` as it is started, arguments of `join`, its environment."""
    command: list = field(default_factory=lambda: [bin_dir() / "linkcpp"])
    arguments: list = field(default_factory=list)
    environment: dict = field(default_factory=dict)


class Trace:
    """What one run wrote: rows by step and layer."""

    def __init__(self, folder):
        shape = json.loads((folder / "shape.json").read_text())
        self.n_layers, self.n_used = shape["n_layers"], shape["n_used"]

        def read(name):
            return array.array(name[-3], (folder / name).read_bytes())  # "f32", "i32": array's own letters
        self.tokens = read("tokens.i32")
        self.n_steps = len(self.tokens)
        self.inputs, self.scores, self.order, self.blocks = (
            self._rows(read(name), self.n_steps * self.n_layers)
            for name in ("inputs.f32", "scores.f32", "order.i32", "blocks.f32"))
        self.logits = self._rows(read("logits.f32"), self.n_steps)

    @staticmethod
    def _rows(values, n):
        width = len(values) // n
        return [values[i * width:(i + 1) * width] for i in range(n)]

    def chosen(self, i):
        return set(self.order[i][:self.n_used])

    def router_margin(self, i):
        """By how much the last expert that was chosen is ahead of the first that was not."""
        order, scores = self.order[i], self.scores[i]
        return scores[order[self.n_used - 1]] - scores[order[self.n_used]]


def largest_difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b))


def cosine(a, b):
    dot = math.fsum(x * y for x, y in zip(a, b))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def compare_decisions(margins, differences, differ):
    """`margins`: by how much each decision of the one process was taken. `differences`: how far at most what it was taken
    from has moved; two candidates move apart by at most twice that, so one with a larger margin cannot fall the other way.
    `differ`: those that did."""
    return {"decisions": len(margins), "differ": sum(differ),
            "could_differ": sum(m <= 2 * d for m, d in zip(margins, differences)),
            "largest_margin_overturned": max((m for m, other in zip(margins, differ) if other), default=0.0),
            "smallest_margin": min(margins), "largest_difference": max(differences)}


def compare_experts(alone, other):
    routed = range(alone.n_steps * alone.n_layers)
    return compare_decisions([alone.router_margin(i) for i in routed],
                             [largest_difference(alone.scores[i], other.scores[i]) for i in routed],
                             [alone.chosen(i) != other.chosen(i) for i in routed])


def compare_tokens(alone, other):
    best_two = [sorted(row)[-2:] for row in alone.logits]
    return compare_decisions([best - second for second, best in best_two],
                             [largest_difference(a, b) for a, b in zip(alone.logits, other.logits)],
                             [a.index(max(a)) != b.index(max(b)) for a, b in zip(alone.logits, other.logits)])


def compare_blocks(alone, other):
    """By layer: how many rows that went in are equal to the bit, the cosine of all that came out, and of the worst row."""
    layers = []
    for layer in range(alone.n_layers):
        at = range(layer, alone.n_steps * alone.n_layers, alone.n_layers)
        layers.append({"same_inputs": sum(alone.inputs[i] == other.inputs[i] for i in at),
                       "cosine": cosine([x for i in at for x in alone.blocks[i]], [x for i in at for x in other.blocks[i]]),
                       "worst_row": min(cosine(alone.blocks[i], other.blocks[i]) for i in at)})
    return layers


def compare(alone, other):
    """The figures of two traces of the same tokens."""
    if alone.tokens != other.tokens or (alone.n_layers, alone.n_used) != (other.n_layers, other.n_used):
        raise ValueError("these traces are not of the same tokens and model")
    return {"experts": compare_experts(alone, other), "tokens": compare_tokens(alone, other),
            "blocks": compare_blocks(alone, other)}


def measure(model, text, n_tokens, kinds, placed_s=120, **variables):
    """Decodes `n_tokens` tokens, those of `text` first, on one worker of each of `kinds` (by name).

    `decoded`: the swarm computes by itself, what its blocks are off by goes into the next ones. `anew`: each block starts
    from what it started from in the one process, so that `blocks` shows each by itself. `variables` are the
    coordinator's environment.
    """
    program = bin_dir() / "router_trace"
    with Swarm() as swarm:
        def trace(name, start, *arguments):
            process = start(program, model, swarm.home / "text", n_tokens, swarm.home / name, *arguments)
            if process.wait(RUN_S) != 0:
                raise RuntimeError(f"{Path(model).name}, {name}:\n{process.err()[-3000:]}\n{swarm.close()}")
            return process, Trace(swarm.home / name)

        (swarm.home / "text").write_text(text)
        swarm.serve(model)
        workers = [swarm.start(name, [*kind.command, "join", "--name", name, "--threads", 1, *kind.arguments],
                               LINKCPP_HUB=swarm.line, **kind.environment) for name, kind in kinds.items()]

        def placed(status):
            if any(worker.poll() is not None for worker in workers):
                raise RuntimeError(f"a worker has ended:\n{swarm.close()}")
            # All of them first: then each is given its share.
            return (len(status["workers"]) == len(kinds) and status["coverage"]["missing_slices"] == 0
                    and all(w["state"] == "ready" and w["slices"] == w["assigned_slices"] > 0 for w in status["workers"]))
        swarm.wait_status(placed, "workers that all hold experts", placed_s)
        _, alone = trace("alone", lambda *command: swarm.start("alone", command))
        found = {"model": Path(model).name, "n_tokens": n_tokens}
        for run, arguments in (("decoded", ()), ("anew", ("anew",))):
            process, other = trace(run, lambda *command: swarm.start_exec(*command, LINKCPP_LOG="debug", **variables),
                                   swarm.home / "alone", *arguments)
            said = re.findall(r"(\d+) expert blocks in (\d+) requests, (\d+) products", process.err())
            found[run] = {"expert_blocks": int(said[-1][0]), "products": int(said[-1][2]), **compare(alone, other)}
        n_pairs = 2 * n_tokens * alone.n_layers * alone.n_used
        # What workers tell the hub is a moment late.
        status = swarm.wait_status(lambda s: sum(w["pairs"] for w in s["workers"]) >= n_pairs, f"{n_pairs} pairs at the workers")
        found["workers"] = {w["name"]: {key: w[key] for key in ("device", "backend", "slices", "pairs")} for w in status["workers"]}
        return found
