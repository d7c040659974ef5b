"""The base of the tests: a swarm for each test, its logs shown when the test fails."""

import os
import re
import sys
import unittest
from pathlib import Path

import models
from server import Server, free_port
from swarm import SAME_ARITHMETIC, Swarm

DATA = Path(__file__).resolve().parents[1] / "data"
PROMPT = "And the LORD said unto Moses,"
# Tokens that take long enough to do something in their midst. The thread sanitizer slows decoding more than the start
# of a command; they would take minutes.
N_LONG = 100 if os.environ.get("LINKCPP_SANITIZE") == "thread" else 400
SERVER_ARGUMENTS = ["-np", 2, "--no-warmup", *SAME_ARITHMETIC]


def completion(kind, n_tokens=200, sampling=("--temp", 0.7, "--seed", 3)):
    """Arguments of llama-completion whose text is the same whenever the logits are."""
    return ["-m", models.path_of(kind), "-p", PROMPT, "-n", n_tokens, *sampling, "--no-warmup", "-no-cnv",
            *SAME_ARITHMETIC]


class SwarmTest(unittest.TestCase):
    def setUp(self):
        self.swarm = Swarm()

    def run(self, result=None):
        before = len(result.failures) + len(result.errors)
        super().run(result)
        swarm = self.__dict__.pop("swarm", None)
        logs = swarm.close() if swarm else ""
        if swarm and swarm.reports:
            result.addFailure(self, (AssertionError, AssertionError(f"sanitizer:\n{swarm.reports}"), None))
        if len(result.failures) + len(result.errors) > before:
            print(f"\n=== what the processes of {self.id()} said\n{logs}===", file=sys.stderr)

    def two_workers(self, kind, *arguments):
        """A hub with two local workers, each with half of the experts."""
        self.swarm.serve(models.path_of(kind), *arguments, workers=2)

    def server_on_swarm(self, kind, options=("--no-local-experts",), **variables):
        """A llama-server that answers, its experts on the swarm."""
        port = free_port()
        return Server(port, self.swarm.start_exec("llama-server", "-m", models.path_of(kind), "--port", port,
                                                  *SERVER_ARGUMENTS, options=options, **variables)).wait_healthy()

    def server_alone(self, kind):
        """A llama-server that answers, without the plugin."""
        port = free_port()
        return Server(port, self.swarm.start_alone("llama-server", "-m", models.path_of(kind), "--port", port,
                                                   *SERVER_ARGUMENTS)).wait_healthy()

    def assert_ran(self, process):
        self.assertEqual(process.wait(), 0, f"{process.name} failed:\n{process.err()[-3000:]}")
        return process

    def assert_refused(self, process, *parts):
        """It ended by itself, not by a signal, and one line says why, with each of `parts` (regular expressions)."""
        status = process.wait()
        self.assertTrue(0 < status < 128, f"exit status {status} of {process.name}:\n{process.err()[-3000:]}")
        errors = [line for line in process.err().splitlines() if "error" in line]
        for part in parts:
            self.assertTrue(any(re.search(part, line) for line in errors),
                            f"no line with an error says {part!r}:\n{process.err()[-3000:]}")
        return errors
