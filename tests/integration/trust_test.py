"""Probe, compare and verify: what users do to find out whether a device computes what it should."""

import json
import signal
import unittest
from array import array
from pathlib import Path

from case import SwarmTest
from gguf import Gguf
from swarm import bin_dir, llama_dir, wait_for


def cpu_module():
    return next(p for p in sorted(llama_dir().glob("libggml-cpu*.so")))


class Probe(SwarmTest):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.swarm.home) / "probe"
        self.folder.mkdir()
        self.model = self.folder / "model.gguf"
        self.shard = self.folder / "part.gguf"
        self.run_linkcpp("synth", self.model, "--layers", 2, "--experts", 8, "--embd", 512, "--ff", 256)
        self.run_linkcpp("slice", self.model, "--layer", 1, "--experts", "0-5", "-o", self.shard)

    def run_linkcpp(self, *arguments, **variables):
        return self.assert_ran(self.swarm.linkcpp(*arguments, **variables)).out().decode()

    def probe(self, name, *arguments):
        out = self.folder / f"{name}.gguf"
        self.run_linkcpp("probe", "--shard", self.shard, "-o", out, *arguments)
        return out

    def verdicts(self, *records):
        compared = json.loads(self.run_linkcpp("compare", "--json", *records))
        return {(pair["a"], pair["b"]): pair for pair in compared["pairs"]}

    def test_the_same_device_twice_its_module_alone_and_the_two_references(self):
        records = [self.probe("once", "--device", "CPU"), self.probe("again", "--device", "cpu", "--threads", 1),
                   self.probe("module", "--backend", cpu_module()),
                   self.probe("plain", "--device", "reference"),
                   self.probe("rounded", "--device", "reference", "--rounding", "q8_k")]
        pairs = self.verdicts(*records)
        self.assertEqual(len(pairs), 10)
        for a, b in (("once", "again"), ("once", "module"), ("again", "module")):
            self.assertEqual(pairs[a, b]["verdict"], "bit-identical")
            self.assertEqual(pairs[a, b]["parts"]["sums"]["cosine"], 1)
        for name in ("once", "again", "module"):
            self.assertEqual(pairs[name, "plain"]["verdict"], "equivalent")
            self.assertGreaterEqual(pairs[name, "plain"]["parts"]["sums"]["cosine"], 0.9997)
            self.assertEqual(pairs[name, "rounded"]["verdict"], "equivalent")
            self.assertLess(pairs[name, "rounded"]["parts"]["gate"]["worst_row"]["relative_l2"], 1e-5)
        record = json.loads(self.run_linkcpp("compare", "--json", *records[:2]))["records"][0]
        self.assertEqual(record["roundings"]["batch"], ["q8_k", "q8_k"])
        self.assertTrue(record["ggml_version"])
        self.assertTrue(any("ggml-cpu" in library for library in record["driver"]), record["driver"])

    def test_tables_for_people_name_every_record(self):
        records = [self.probe("one", "--device", "CPU"), self.probe("two", "--device", "reference")]
        for option in ([], ["--markdown"]):
            text = self.run_linkcpp("compare", *option, *records)
            for word in ("one", "two", "equivalent", "double precision", "0.9"):
                self.assertIn(word, text)

    def test_a_whole_model_is_a_shard_and_another_seed_another_probe(self):
        whole = self.folder / "whole.gguf"
        self.run_linkcpp("probe", "--shard", self.model, "--layer", 1, "--device", "CPU", "-o", whole)
        other_seed = self.probe("seed", "--seed", 2, "--device", "CPU")
        one = self.probe("one", "--device", "CPU")
        self.assert_refused(self.swarm.linkcpp("compare", one, whole), "slices differ")
        self.assert_refused(self.swarm.linkcpp("compare", one, other_seed), "seeds 1 and 2")
        no_record = self.swarm.linkcpp("compare", one, self.shard)
        self.assert_refused(no_record, "expected what linkcpp probe writes")
        self.assertEqual(no_record.poll(), 2)  # 1 would say that they differ

    def test_bad_wishes_are_refused_and_leave_no_file(self):
        out = self.folder / "out.gguf"
        for arguments, why in ((["--device", "CUDA9"], "expected one of"), (["--backend", "/none.so"], "does not exist"), (["--backend", ""], "does not exist"),
                               (["--seed", -1], "--seed: expected a number"), (["--seed", 2**64], "--seed: expected a number"),
                               (["--backend", self.shard], "ggml does not load it"), (["--layer", 0], "expected layer 0"),
                               (["--device", "reference", "--rounding", "q4"], "--rounding"),
                               (["--tokens", 0], ""), (["--device", "CPU", "--backend", cpu_module()], "")):
            with self.subTest(arguments=arguments):
                process = self.swarm.linkcpp("probe", "--shard", self.shard, "-o", out, *arguments)
                self.assertTrue(0 < process.poll() < 128, process.err())
                self.assertIn(why, process.err())
                self.assertFalse(out.exists())
        self.assert_refused(self.swarm.linkcpp("probe", "--shard", self.folder / "none.gguf", "-o", out), "none.gguf")

    def test_an_output_in_the_place_of_the_shard_is_refused(self):
        before = self.shard.read_bytes()
        self.assert_refused(self.swarm.linkcpp("probe", "--shard", self.shard, "-o", self.shard), "shard itself")
        self.assertEqual(self.shard.read_bytes(), before)

    def test_a_changed_record_is_found(self):
        record = self.probe("honest", "--device", "CPU")
        self.run_linkcpp("verify", "--shard", self.shard, "--record", record)
        changed = Gguf(record)
        for part in ("gate", "up", "down", "batch", "single"):
            ne, kind, data = changed.tensors[part]
            rows = array("f", data[:4 * ne[0] * ne[1]])
            rms = sum(x * x for x in rows) ** 0.5 / len(rows) ** 0.5
            for name, change in (("one number of every row, by a third", lambda i, x: x + rms / 3 if i % ne[0] == 7 else x),
                                 ("longer by 2 %", lambda i, x: 1.02 * x), ("a sign", lambda i, x: -x if i == 9 else x)):
                with self.subTest(part=part, change=name):
                    if name == "a sign" and abs(rows[9]) < rms / 4:
                        continue  # a small number changes next to nothing
                    bad = Gguf(record)
                    bad.tensors[part] = (ne, kind, array("f", [change(i, x) for i, x in enumerate(rows)]).tobytes())
                    bad.write(self.folder / "bad.gguf")
                    refused = self.swarm.linkcpp("verify", "--shard", self.shard, "--record", self.folder / "bad.gguf")
                    self.assertEqual(refused.poll(), 1)
                    self.assertIn("MAY NOT SERVE", refused.out().decode())
        other = self.folder / "other.gguf"
        self.run_linkcpp("probe", "--shard", self.model, "--layer", 1, "--device", "CPU", "-o", other)
        # A slip of whoever calls, and no device's fault.
        self.assert_refused(self.swarm.linkcpp("verify", "--shard", self.shard, "--record", record, "--record", other),
                            "other.gguf: expected a record of this shard's slices")
        self.assert_refused(self.swarm.linkcpp("probe", "--shard", self.shard, "--device", "CPU", "--rounding", "q8_k",
                                               "-o", other), "--rounding is of the reference")
        different = self.swarm.linkcpp("compare", record, self.folder / "bad.gguf")
        self.assertEqual(different.poll(), 1)
        self.assertIn("1 of 1 pair different", different.err())

    def test_verify_that_is_stopped_leaves_nothing_behind(self):
        verify = self.swarm.start("verify", [bin_dir() / "linkcpp", "verify", "--shard", self.shard, "--tokens", 4096])
        wait_for(lambda: list(self.swarm.home.rglob("verify-*")), 20, "the folder of a verify")
        verify.popen.send_signal(signal.SIGTERM)
        self.assertNotEqual(verify.wait(), 0)
        self.assertEqual(list(self.swarm.home.rglob("verify-*")), [])

    def test_verify_says_who_may_serve(self):
        text = self.run_linkcpp("verify", "--shard", self.shard)
        self.assertIn("CPU: may serve", text)
        shown = json.loads(self.run_linkcpp("verify", "--shard", self.shard, "--backend", cpu_module(), "--json"))
        self.assertEqual([device["may_serve"] for device in shown], [True])
        self.assertEqual(shown[0]["parts"]["gate"]["rounding"][0], "q8_k")
        refused = self.swarm.linkcpp("verify", "--shard", self.shard, "--backend", self.shard)
        self.assertEqual(refused.poll(), 1)
        self.assertIn("COULD NOT BE PROBED", refused.out().decode())
        self.assertIn("1 of 1 device may not serve", refused.err())


if __name__ == "__main__":
    unittest.main()
