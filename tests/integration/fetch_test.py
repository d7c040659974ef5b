"""What a hub sends of its model: byte for byte, from anywhere on, to any HTTP client; and the model put together again from it."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import architectures
import models
from case import SwarmTest
from swarm import SLOWNESS, bin_dir, llama_dir, wait_for


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class FromTheHub(SwarmTest):
    def setUp(self):
        super().setUp()
        self.model = self.swarm.home / "model.gguf"
        shutil.copy(models.path_of("Q4_K_M"), self.model)

    def serve(self):
        self.swarm.serve(self.model)
        https = self.swarm.status()["https"]
        self.base = https["url"]
        self.curl_options = ["-sS", "-k", "--pinnedpubkey", https["pinned_public_key"], "-H",
                             f"Authorization: Bearer {self.swarm.line.split('/')[-1].split('?')[0]}"]

    def curl(self, path, *options, check=True):
        done = subprocess.run(["curl", *self.curl_options, *options, self.base + path], capture_output=True,
                              timeout=60 * SLOWNESS)
        if check:
            self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def head(self, path, *options):
        """Status and headers, their names in lower case."""
        lines = self.curl(path, "-o", "/dev/null", "-D", "-", *options).decode().strip().splitlines()
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in
                                          (line.split(":", 1) for line in lines[1:])}

    def test_experts_are_a_file_as_slice_writes_it_and_a_download_that_was_broken_off_goes_on(self):
        self.serve()
        n_expert = json.loads(self.curl("/manifest"))["layers"][1]["n_expert"]
        for experts in (f"0-{n_expert - 1}", "3", "1,5-7"):
            wanted, got = self.swarm.home / "wanted.gguf", self.swarm.home / "got.gguf"
            self.assert_ran(self.swarm.linkcpp("slice", self.model, "--layer", 1, "--experts", experts, "-o", wanted))
            path = f"/expert-shard?layer=1&experts={experts}"
            self.curl(path, "-o", got)
            self.assertEqual(sha256(got), sha256(wanted))
            for n in (1, wanted.stat().st_size // 3, wanted.stat().st_size - 1):
                got.write_bytes(wanted.read_bytes()[:n])
                self.curl(path, "-C", "-", "-o", got)
                self.assertEqual(sha256(got), sha256(wanted))

    def test_answers_have_tags_and_take_ranges_as_http_has_them(self):
        self.serve()
        slices = [s for layer in json.loads(self.curl("/manifest"))["layers"] for s in layer["slices"]]
        whole = self.curl(f"/slice/{slices[7]}")
        self.assertEqual(hashlib.sha256(whole).hexdigest(), slices[7])
        shard = self.curl("/expert-shard?layer=0&experts=0-3")
        for path, content in ((f"/slice/{slices[7]}", whole), ("/expert-shard?layer=0&experts=0-3", shard),
                              ("/manifest", self.curl("/manifest")), ("/backbone", self.curl("/backbone"))):
            with self.subTest(path=path):
                status, headers = self.head(path)
                self.assertEqual((status, int(headers["content-length"]), headers["accept-ranges"]), (200, len(content), "bytes"))
                tag = headers["etag"]
                self.assertRegex(tag, '^"[0-9a-f]{64}"$')
                self.assertEqual(self.head(path, "-I")[1]["etag"], tag)
                self.assertEqual(int(self.head(path, "-I")[1]["content-length"]), len(content))
                n = len(content)
                for asked, begin, end in (("0-9", 0, 10), ("5-", 5, n), ("-7", n - 7, n), (f"{n - 1}-", n - 1, n),
                                          (f"10-{n + 5000}", 10, n), (f"-{n + 99}", 0, n)):
                    self.assertEqual(self.curl(path, "-r", asked), content[begin:end], asked)
                    status, headers = self.head(path, "-r", asked)
                    self.assertEqual((status, headers["content-range"]), (206, f"bytes {begin}-{end - 1}/{n}"))
                for asked in (f"{n}-", f"{n + 10}-{n + 20}", "-0"):
                    status, headers = self.head(path, "-r", asked)
                    self.assertEqual((status, headers.get("content-range")), (416, f"bytes */{n}"), asked)
                self.assertEqual(self.head(path, "-H", f"If-None-Match: {tag}")[0], 304)
                self.assertEqual(self.head(path, "-H", 'If-None-Match: "another"')[0], 200)
                self.assertEqual(self.head(path, "-r", "5-", "-H", f"If-Range: {tag}")[0], 206)
                self.assertEqual(self.head(path, "-r", "5-", "-H", 'If-Range: "another"')[0], 200)
        self.assertNotEqual(self.head("/expert-shard?layer=0&experts=0-3")[1]["etag"],
                            self.head("/expert-shard?layer=0&experts=0-2")[1]["etag"])

    def test_wrong_questions_are_answered_in_words(self):
        self.serve()
        for path, status, said in (("/expert-shard", 400, "layer=0&experts=0-63"), ("/expert-shard?layer=0", 400, "layer=0"),
                                   ("/expert-shard?layer=x&experts=0", 400, "layer=0"),
                                   ("/expert-shard?layer=0&experts=9-3", 400, "layer=0"),
                                   ("/expert-shard?layer=99&experts=0", 404, "layer"),
                                   ("/expert-shard?layer=4294967296&experts=0", 400, "layer=0"),
                                   ("/expert-shard?layer=0&experts=100000", 404, "experts from 0 to"),
                                   ("/expert-shard?layer=0&experts=", 400, "layer=0"),
                                   (f"/slice/{'0' * 64}", 404, "no slice"), ("/slice/../../etc/passwd", 404, "")):
            with self.subTest(path=path):
                self.assertEqual(self.head(path, "--path-as-is")[0], status)
                self.assertIn(said, self.curl(path, "--path-as-is").decode())
        self.assertIsNone(self.swarm.hub.poll())

    def test_a_model_that_was_written_to_is_not_sent(self):
        self.serve()
        path = "/expert-shard?layer=0&experts=0-3"
        self.assertEqual(self.head(path)[0], 200)
        with open(self.model, "r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"x")
        self.assertEqual(self.head(path)[0], 500)
        self.assertIn("has been written to", self.curl(path).decode())

    def test_a_backbone_is_fetched_and_is_the_one_that_would_be_cut_here(self):
        self.serve()
        cut, fetched = self.swarm.home / "cut.gguf", self.swarm.home / "fetched.gguf"
        self.assert_ran(self.swarm.linkcpp("backbone", self.model, "-o", cut))
        done = self.assert_ran(self.swarm.linkcpp("backbone", "--hub", self.swarm.line, "--json", "-o", fetched))
        self.assertEqual(sha256(fetched), sha256(cut))
        report = json.loads(done.out())
        self.assertEqual(report["apparent_bytes"], cut.stat().st_size)
        self.assertLess(fetched.stat().st_blocks * 512, report["bytes"] + (2 << 20))
        # What is there already is not fetched again, and what does not belong there is.
        front = cut.read_bytes()[:report["bytes"]]
        part = self.swarm.home / "again.gguf.part"
        for begin in (front[:len(front) // 2], front[:-1], front, b"nothing of it" * 1000, front + b"more"):
            part.write_bytes(begin)
            self.assert_ran(self.swarm.linkcpp("backbone", "-o", self.swarm.home / "again.gguf"))
            self.assertEqual(sha256(self.swarm.home / "again.gguf"), sha256(cut))
            self.assertFalse(part.exists())
        # llama.cpp loads it, and its experts are on the swarm.
        self.swarm.join("worker")
        self.swarm.wait_covered()
        text = self.assert_ran(self.swarm.exec("llama-completion", "-m", fetched, "-p", "In the beginning", "-n", 20, "-no-cnv",
                                               "--temp", 0, "--no-warmup")).out()
        alone = self.assert_ran(self.swarm.alone("llama-completion", "-m", self.model, "-p", "In the beginning", "-n", 20,
                                                 "-no-cnv", "--temp", 0, "--no-warmup", "--no-repack")).out()
        self.assertEqual(text, alone)

    def test_what_was_fetched_is_the_model_once_it_is_put_together(self):
        self.serve()
        home = self.swarm.home
        manifest = home / "manifest.json"
        self.curl("/manifest", "-o", manifest)
        self.assert_ran(self.swarm.linkcpp("backbone", "-o", home / "backbone.gguf"))
        parts = []
        for layer in json.loads(manifest.read_text())["layers"]:
            for experts in ("0-6", f"7-{layer['n_expert'] - 1}"):
                parts.append(home / f"part-{len(parts)}.gguf")
                self.curl(f"/expert-shard?layer={layer['layer']}&experts={experts}", "-o", parts[-1])
        self.assert_ran(self.swarm.linkcpp("assemble", home / "backbone.gguf", *parts, "-o", home / "again.gguf"))
        self.assertEqual(sha256(home / "again.gguf"), sha256(self.model))
        # From a worker's store.
        self.swarm.join("worker")
        self.swarm.wait_covered()
        self.assert_ran(self.swarm.linkcpp("assemble", home / "backbone.gguf", "--manifest", manifest, "-o", home / "stored.gguf"))
        self.assertEqual(sha256(home / "stored.gguf"), sha256(self.model))
        # Something is missing, or is not what it says.
        again = self.swarm.linkcpp("assemble", home / "backbone.gguf", *parts[1:], "-o", home / "no.gguf")
        self.assertEqual(again.poll(), 1)
        self.assertIn("layer 0: 0-6", again.err())
        data = bytearray(parts[3].read_bytes())
        data[-5000] ^= 1
        parts[3].write_bytes(data)
        wrong = self.swarm.linkcpp("assemble", home / "backbone.gguf", *parts, "--manifest", manifest, "-o", home / "no.gguf")
        self.assertEqual(wrong.poll(), 1)
        self.assertIn("has other bytes than the model's", wrong.err())
        self.assertFalse((home / "no.gguf").exists())

    def test_a_fetch_that_is_killed_goes_on_where_it_was(self):
        """Of 20 kills none costs more than what was on its way."""
        self.model.unlink()
        self.assert_ran(self.swarm.linkcpp("synth", self.model, "--layers", 2, "--experts", 4, "--used", 2, "--embd", 2048,
                                           "--types", "q8_0"))
        self.serve()
        self.assert_ran(self.swarm.linkcpp("backbone", self.model, "-o", self.swarm.home / "cut.gguf"))
        out = self.swarm.home / "fetched.gguf"
        part = self.swarm.home / "fetched.gguf.part"
        n_bytes = int(self.head("/backbone", "-I")[1]["content-length"])
        places = random.Random(5)
        for kill in range(20):
            target = n_bytes * (kill + places.random()) / 21
            fetch = self.swarm.start("fetch", [bin_dir() / "linkcpp", "backbone", "-o", out])
            before = part.stat().st_size if part.exists() else 0
            wait_for(lambda: fetch.poll() is not None or (part.exists() and part.stat().st_size >= target), 30, "bytes", 0.0005)
            fetch.kill()
            self.assertTrue(part.exists(), "nothing was left to be killed")
            self.assertGreaterEqual(part.stat().st_size, before)
        self.assert_ran(self.swarm.linkcpp("backbone", "-o", out))
        self.assertEqual(sha256(out), sha256(self.swarm.home / "cut.gguf"))
        self.assertLessEqual(self.swarm.status()["hub"]["bytes_sent"], n_bytes + 20 * (4 << 20))


class Assembled(SwarmTest):
    """Backbone and slices of llama.cpp's own models, of each architecture and type, also split."""

    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="lcpp-assemble")))

    def assert_assembles(self, model):
        parts = []
        for layer in architectures.inspect(model)["layers"]:
            parts.append(self.folder / f"part-{len(parts)}.gguf")
            self.assert_ran(self.swarm.linkcpp("slice", model, "--layer", layer["layer"], "--experts",
                                               f"0-{layer['n_expert'] - 1}", "-o", parts[-1]))
        backbone = self.folder / "backbone.gguf"
        self.assert_ran(self.swarm.linkcpp("backbone", model, "-o", backbone))
        done = self.assert_ran(self.swarm.linkcpp("assemble", backbone, *parts, "--json", "-o", self.folder / "again.gguf"))
        again = [Path(file["path"]) for file in json.loads(done.out())["files"]]
        prefix = model.name.split("-00001-of-")[0]
        originals = sorted(model.parent.glob(f"{prefix}-*-of-*.gguf")) if "-00001-of-" in model.name else [model]
        self.assertEqual([sha256(path) for path in again], [sha256(path) for path in originals])
        for path in again:
            path.unlink()

    def test_models_of_every_architecture_are_the_same_again(self):
        for name, model in architectures.generate(self.folder / "models", 1).items():
            with self.subTest(architecture=name):
                self.assert_assembles(model)

    def test_models_of_many_types_are_the_same_again(self):
        model = architectures.generate(self.folder / "models", 1, "qwen3moe")["qwen3moe"]
        made = 0
        for kind in architectures.TYPES[::3]:  # src/model/assembly_test.cpp has all that `synth` makes
            path = self.folder / f"{kind}.gguf"
            if architectures.quantize(model, kind, 1, "qwen3moe", path):
                made += 1
                with self.subTest(type=kind):
                    self.assert_assembles(path)
        self.assertGreaterEqual(made, 7)

    def test_split_models_are_the_same_again(self):
        split = subprocess.run([llama_dir() / "llama-gguf-split", "--split", "--split-max-tensors", "9",
                                models.path_of("Q4_K_M"), self.folder / "kjv"], capture_output=True, timeout=60 * SLOWNESS)
        self.assertEqual(split.returncode, 0, split.stderr)
        first = next(self.folder.glob("kjv-00001-of-*.gguf"))
        self.assert_assembles(first)
