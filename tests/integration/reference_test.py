"""Regrouping one sum: two worker processes and a combine in double precision, on the real layer shape."""

import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from case import SwarmTest
from swarm import SLOWNESS, bin_dir

# Of the published dispatch and combine against one process, in reference arithmetic.
LARGEST_DIFFERENCE = 3.6e-12
N_TOKENS, N_USED, SEED = 12, 8, 7


class Reference(SwarmTest):
    def setUp(self):  # no swarm: two plain processes that exchange files
        self.folder = tempfile.TemporaryDirectory(prefix="linkcpp-reference-")
        self.path = Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def tearDown(self):
        pass

    def run_tool(self, *arguments):
        done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, timeout=120 * SLOWNESS)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_two_workers_and_a_combine_give_the_sum_of_one_process(self):
        tools = bin_dir()
        model = self.path / "layer.gguf"
        self.run_tool(tools / "linkcpp", "synth", model, "--preset", "qwen3.5-122b-a10b-layer")
        rows = []
        for experts in ("0-127", "128-255"):
            slices = self.path / f"{experts}.gguf"
            rows.append(self.path / f"{experts}.f64")
            self.run_tool(tools / "linkcpp", "slice", model, "--layer", 0, "--experts", experts, "-o", slices)
            self.run_tool(tools / "reference", "rows", slices, SEED, N_TOKENS, N_USED, rows[-1])
            slices.unlink()
        line = self.run_tool(tools / "reference", "combine", model, SEED, N_TOKENS, N_USED, *rows)
        print(line, end="")
        figures = re.fullmatch(r"values (\d+) pairs (\d+) of (\d+) rms (\S+) max_abs_difference (\S+)\n", line)
        self.assertIsNotNone(figures, line)
        values, pairs, all_pairs, rms, difference = figures.groups()
        self.assertEqual(int(values), N_TOKENS * 3072)
        self.assertEqual((int(pairs), int(all_pairs)), (N_TOKENS * N_USED, N_TOKENS * N_USED))
        self.assertTrue(0.2 < float(rms) < 5, "outputs are not of unit scale")
        self.assertLessEqual(float(difference), LARGEST_DIFFERENCE)


if __name__ == "__main__":
    unittest.main()
