"""Bad input gets one clear sentence and an exit status, and leaves nothing half-written behind."""

import os
import re
import resource
import socket
import struct
import subprocess
import time
from pathlib import Path

import models
from case import SwarmTest, completion
from server import free_port
from swarm import wait_for

COVERAGE_WAIT_S = 3


class BadModels(SwarmTest):
    def setUp(self):
        super().setUp()
        self.folder = self.swarm.home / "files"
        self.folder.mkdir()
        self.model = models.path_of("Q8_0")

    def refuse_to_cut(self, model, *parts):
        """serve, slice, backbone and manifest all refuse this model, and leave no file."""
        before = sorted(os.listdir(self.folder))
        out = self.folder / "out.gguf"
        for arguments in (("slice", model, "--layer", "0", "--experts", "0-3", "-o", out),
                          ("backbone", model, "-o", out), ("manifest", model, "-o", out),
                          ("serve", "-m", model, "--port", "0", "--hub-only")):
            with self.subTest(command=arguments[0]):
                errors = self.assert_refused(self.swarm.linkcpp(*arguments, timeout=20), *parts)
                self.assertEqual(len(errors), 1, errors)
                self.assertEqual(sorted(os.listdir(self.folder)), before)

    def cut_short(self, n_bytes):
        path = self.folder / "short.gguf"
        with open(self.model, "rb") as whole:
            path.write_bytes(whole.read(n_bytes))
        return path

    def test_a_model_whose_weights_are_cut_short_is_refused(self):
        self.refuse_to_cut(self.cut_short(self.model.stat().st_size // 2), r"short\.gguf")

    def test_a_model_whose_header_is_cut_short_is_refused(self):
        self.refuse_to_cut(self.cut_short(1000), r"short\.gguf")

    def test_an_empty_file_and_another_format_are_refused(self):
        empty = self.folder / "empty.gguf"
        empty.touch()
        self.refuse_to_cut(empty, r"empty\.gguf")
        text = self.folder / "text.gguf"
        text.write_text("And God said, Let there be light. " * 100)
        self.refuse_to_cut(text, r"text\.gguf.*GGUF")

    def test_a_model_that_is_not_there_is_named(self):
        self.refuse_to_cut(self.folder / "nowhere.gguf", r"nowhere\.gguf: no such file")

    def test_a_model_without_experts_is_refused(self):
        def text(s):
            return struct.pack("<Q", len(s)) + s.encode()
        header = struct.pack("<4sIQQ", b"GGUF", 3, 1, 2)  # version 3, one tensor, two keys
        header += text("general.architecture") + struct.pack("<I", 8) + text("llama")  # 8: a string
        header += text("llama.block_count") + struct.pack("<II", 4, 1)  # 4: u32
        header += text("output.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)  # one dimension of 32, f32, offset 0
        header += b"\0" * (-len(header) % 32)
        dense = self.folder / "dense.gguf"
        dense.write_bytes(header + b"\0" * 128)
        self.refuse_to_cut(dense, r"dense\.gguf.*expert")

    def test_an_unknown_layer_and_an_unknown_expert_are_refused(self):
        out = self.folder / "out.gguf"
        for layer, experts, part in ((6, "0-3", r"\(0-5\), got 6"), (0, "14-16", "0 to 15.*got 16"),
                                     (0, "3-1", "backwards"), (0, "x", "'x'"), (0, "", "expected")):
            with self.subTest(layer=layer, experts=experts):
                process = self.swarm.linkcpp("slice", self.model, "--layer", layer, "--experts", experts, "-o", out)
                status = process.poll()
                self.assertTrue(0 < status < 128, status)
                self.assertRegex(process.err() + process.out().decode(), part)
                self.assertEqual(os.listdir(self.folder), [])

    def test_another_model_than_the_workers_hold_is_refused(self):
        self.swarm.serve(self.model, workers=1)
        process = self.swarm.start_exec("llama-completion", *completion("F32", 20))
        self.assert_refused(process, "linkcpp: .*the hub serves q8_0.*loads f32.*linkcpp status")
        other = self.folder / "other.gguf"
        self.assert_ran(self.swarm.linkcpp("synth", other, "--layers", 2, "--experts", 8, "--used", 2, "--embd", 256,
                                           "--ff", 256, "--types", "q8_0"))
        process = self.swarm.start_exec("llama-bench", "-m", other, "-p", 8, "-n", 8)
        self.assert_refused(process, "linkcpp: .*the hub serves.*linkcpp status")

    def test_another_model_of_the_same_shape_is_refused_as_a_file_and_as_a_backbone(self):
        for seed in (1, 2):
            self.assert_ran(self.swarm.linkcpp("synth", self.folder / f"{seed}.gguf", "--layers", 2, "--experts", 8,
                                               "--used", 2, "--embd", 256, "--ff", 256, "--seed", seed))
            self.assert_ran(self.swarm.linkcpp("backbone", self.folder / f"{seed}.gguf", "-o",
                                               self.folder / f"backbone-{seed}.gguf"))
        self.swarm.serve(self.folder / "1.gguf", workers=1)
        for name in ("2.gguf", "backbone-2.gguf"):
            with self.subTest(model=name):
                process = self.swarm.start_exec("llama-bench", "-m", self.folder / name, "-p", 8, "-n", 8)
                self.assert_refused(process, "linkcpp: .*bytes are not those of the model that the hub serves.*status")
        for name in ("1.gguf", "backbone-1.gguf"):
            with self.subTest(model=name):
                self.assert_ran(self.swarm.exec("llama-bench", "-m", self.folder / name, "-p", 8, "-n", 8))


class TooLittleMemory(SwarmTest):
    def test_fails_the_load_within_the_stated_wait_and_says_what_to_do(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.swarm.join("small", "--memory", "1M")
        self.swarm.wait_status(lambda s: s["workers"] and s["workers"][0]["state"] == "ready", "the small worker")
        begin = time.monotonic()
        process = self.swarm.start_exec("llama-completion", *completion("Q8_0", 20),
                                        LINKCPP_COVERAGE_WAIT=COVERAGE_WAIT_S)
        self.assert_refused(process, rf"linkcpp: .*slices have no live holder after {COVERAGE_WAIT_S} s.*linkcpp join")
        self.assertLess(time.monotonic() - begin, COVERAGE_WAIT_S + 10)
        self.assertRegex(self.swarm.hub.err(), "slices find no place.*--memory")

    def test_a_worker_without_room_for_one_slice_says_so(self):
        self.swarm.serve(models.path_of("Q8_0"))
        tiny = self.swarm.join("tiny", "--memory", "1K")
        wait_for(lambda: re.search("slices find no place.*--memory", self.swarm.hub.err()), 10, "the hub's warning")
        self.assertRegex(tiny.err(), "1.00 KiB for slices, and the smallest of .* takes .*--memory")

    def test_memory_that_is_no_size_is_refused(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.assert_refused(self.swarm.join("odd", "--memory", "much"), "size: expected.*'much'")
        self.assert_refused(self.swarm.join("slip", "--memory", "4"), "at least 1.00 KiB such as 4G, got '4', which is 4 B")


class OptionsForNobody(SwarmTest):
    def test_what_a_hub_alone_could_not_do_it_does_not_take(self):
        serve = ("serve", "-m", models.path_of("Q8_0"), "--port", "0", "--hub-only")
        for option in (("--audit", "1"), ("--mode", "partial"), ("--rows", "f32"), ("--no-local-experts",)):
            self.assert_refused(self.swarm.linkcpp(*serve, *option), f"no llama-server that {option[0]} .*linkcpp exec")

    def test_a_share_in_the_environment_is_read_before_anything_starts(self):
        self.assert_refused(self.swarm.linkcpp("serve", "-m", models.path_of("Q8_0"), "--port", "0", LINKCPP_AUDIT="7"),
                            "LINKCPP_AUDIT: share: expected .*0.1%, got '7'")


class NoHub(SwarmTest):
    def test_commands_that_need_one_say_how_to_start_it(self):
        for arguments in (("status",), ("join",), ("exec", "--", "llama-bench")):
            with self.subTest(command=arguments[0]):
                errors = self.assert_refused(self.swarm.linkcpp(*arguments, timeout=20), "no hub.*linkcpp serve")
                self.assertEqual(len(errors), 1)

    def test_a_hub_that_is_gone_is_named(self):
        self.swarm.serve(models.path_of("Q8_0"))
        line, address = self.swarm.line, re.search("//([^/]+)/", self.swarm.line).group(1)
        self.swarm.hub.stop()
        # Its HTTPS port is asked first, so the host must do.
        self.assert_refused(self.swarm.linkcpp("status", LINKCPP_HUB=line), "127.0.0.1")
        process = self.swarm.start_exec("llama-completion", *completion("Q8_0", 20), LINKCPP_HUB=line,
                                        LINKCPP_WAIT=1)
        self.assert_refused(process, f"{re.escape(address)}.*linkcpp serve")
        worker = self.swarm.join("patient", line=line)
        wait_for(lambda: re.search(f"{re.escape(address)}.*trying again", worker.err()), 10, "the worker's warning")
        self.assertIsNone(worker.poll())

    def test_a_port_in_use_is_named_before_anything_is_done(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            serve = ("serve", "-m", models.path_of("Q8_0"), "--hub-only")
            process = self.swarm.linkcpp(*serve, "--port", port, timeout=20)
            errors = self.assert_refused(process, f"{port}.*(in use|taken)")
            self.assertEqual(len(errors), 1)
            process = self.swarm.linkcpp(*serve, "--port", free_port(), "--https-port", port, timeout=20)
            self.assert_refused(process, f"{port}.*(in use|taken)")


class FullDisk(SwarmTest):
    def setUp(self):
        super().setUp()
        if os.geteuid() != 0:
            self.skipTest("only root can mount a small file system")
        self.disk = self.swarm.home / "disk"
        self.disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", self.disk], capture_output=True,
                                 text=True)
        if mounted.returncode != 0:
            self.skipTest(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", "--lazy", self.disk], check=True)
        self.model = models.path_of("Q8_0")

    def files(self):
        return [name for _, _, names in os.walk(self.disk) for name in names]

    def test_fails_what_writes_there_and_leaves_no_file(self):
        out = self.disk / "out.gguf"
        for arguments in (("slice", self.model, "--layer", "0", "--experts", "0-15", "-o", out),
                          ("backbone", self.model, "-o", out), ("synth", out, "--preset", "bench")):
            with self.subTest(command=arguments[0]):
                errors = self.assert_refused(self.swarm.linkcpp(*arguments), r"out\.gguf.*(no space left|full)")
                self.assertEqual(len(errors), 1)
                self.assertEqual(self.files(), [])

    def test_fails_serve_when_it_cannot_keep_the_backbone(self):
        home = self.disk / "home"
        process = self.swarm.linkcpp("serve", "-m", self.model, "--port", "0", LINKCPP_HOME=home)
        self.assert_refused(process, "(?i)no space left|full")
        self.assertEqual([name for name in self.files() if "gguf" in name], [])

    def test_keeps_no_worker_from_serving_and_the_hub_can_say_what_is_wrong(self):
        self.swarm.serve(self.model)
        self.swarm.join("full", "--store", self.disk / "store")
        status = self.swarm.wait_covered()
        self.assertRegex(status["workers"][0]["error"], "not kept on disk.*([Nn]o space left|full)")
        self.assertIn("not kept on disk", self.swarm.linkcpp("status").out().decode())
        # Whole slices may stay, and what model they are of: they are good. Parts may not.
        self.assertEqual([name for name in self.files() if not re.fullmatch("[0-9a-f]{64}([.]json)?", name)], [])
        self.assertEqual(list((self.disk / "store" / "partial").iterdir()), [])


class Disk(SwarmTest):
    def test_what_stands_in_a_slices_place_keeps_no_worker_from_serving(self):
        self.swarm.serve(models.path_of("Q8_0"))
        store = self.swarm.home / "store"
        for number in range(256):
            (store / f"{number:02x}").mkdir(parents=True)
        manifest = self.swarm.home / "manifest.json"
        self.assert_ran(self.swarm.linkcpp("manifest", models.path_of("Q8_0"), "-o", manifest))
        hashes = re.findall("[0-9a-f]{64}", manifest.read_text())
        for kind, name in zip((Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/full")), hashes[5:8]):
            kind(store / name[:2] / name)
        self.swarm.join("odd", "--store", store)
        self.assertIn("not kept on disk", self.swarm.wait_covered()["workers"][0]["error"])

    def test_a_limit_on_files_is_an_error_that_names_the_file(self):
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        process = self.swarm.linkcpp("slice", models.path_of("Q8_0"), "--layer", 0, "--experts", 0, "-o", self.swarm.home / "out.gguf")
        self.assert_refused(process, "(?i)out.gguf: file too large")
        self.assertFalse((self.swarm.home / "out.gguf").exists())


class Strangers(SwarmTest):
    """Who has a wrong token or meets a wrong key is refused, and no secret is told."""

    def setUp(self):
        super().setUp()
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        self.token = re.search("/([^/?]+)(?:[?]|$)", self.swarm.line).group(1)
        self.wrong_token = "f" * len(self.token)
        fingerprint = re.search("/([0-9a-f]{64})/", self.swarm.line).group(1)
        self.with_wrong_token = self.swarm.line.replace(self.token, self.wrong_token)
        self.with_wrong_key = self.swarm.line.replace(fingerprint, "ab" * 32)

    def commands(self, line):
        yield "status", self.swarm.start("status", self.swarm.exec_arguments("x")[:1] + ["status"], LINKCPP_HUB=line)
        yield "join", self.swarm.join("stranger", line=line)
        yield "exec", self.swarm.start_exec("llama-completion", *completion("Q8_0", 20), LINKCPP_HUB=line)

    def test_with_a_wrong_token_are_refused_and_the_hub_logs_it(self):
        for name, process in self.commands(self.with_wrong_token):
            with self.subTest(command=name):
                self.assert_refused(process, "token")
        self.assertRegex(self.swarm.hub.err(), r"warning hub: 127\.0\.0\.1:\d+: refused: the token is not valid")
        self.assertEqual(len(self.swarm.status()["workers"]), 1)

    def test_that_meet_a_wrong_key_send_no_token_and_say_why(self):
        for name, process in self.commands(self.with_wrong_key):
            with self.subTest(command=name):
                self.assert_refused(process, "fingerprint|key|certificate")

    def test_find_the_token_in_no_log_and_no_command_line(self):
        process = self.swarm.start_exec("llama-completion", *completion("Q8_0", 400), LINKCPP_LOG="debug")
        self.swarm.join("another")
        list(self.commands(self.with_wrong_token))
        wait_for(lambda: process.out(), 30, "some text")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as line:
                    self.assertNotIn(self.token.encode(), line.read(), f"process {pid}")
            except (FileNotFoundError, ProcessLookupError):
                pass
        process.wait()
        for logged in self.swarm.processes:
            self.assertNotIn(self.token, logged.err(), logged.name)
            self.assertNotIn(self.wrong_token, logged.err(), logged.name)
            if logged is not self.swarm.hub:  # which prints the join line for its user
                self.assertNotIn(self.token.encode(), logged.out(), logged.name)
