"""Every architecture of llama.cpp with routed experts, one seed, in F32: architectures.py does the same for more."""

import concurrent.futures
import tempfile
from pathlib import Path

import architectures
from case import SwarmTest


class Architectures(SwarmTest):
    def test_fuse_and_have_the_logits_of_one_process(self):
        with tempfile.TemporaryDirectory(prefix="lcpp-archs") as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
            models = architectures.generate(Path(folder), 1)
            self.assertGreaterEqual(len(models), 42)
            results = {name: pool.submit(architectures.check, model, name, "F32", 2, Path(folder))
                       for name, model in models.items()}
            for name, result in results.items():
                with self.subTest(architecture=name):
                    self.assertEqual(result.result()["faults"], [])
