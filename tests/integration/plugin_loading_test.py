"""What the plugin does where there is no swarm."""

import os
import re
import shutil
import time
import unittest
from pathlib import Path

import models
from case import SwarmTest, completion
from server import free_port
from swarm import bin_dir

EXPERTS = r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\.(weight|bias|scale)$=Swarm"

# Builds that are not made for the tests; see CONTRIBUTING.md.
STATIC = os.environ.get("LINKCPP_TEST_STATIC")
GPU_BIN = os.environ.get("LINKCPP_TEST_GPU_BIN")

FINGERPRINT = "ab" * 32
TOKEN = "0123456789abcdef"


class WithoutAHub(SwarmTest):
    def run_with_plugin(self, *arguments, **variables):
        return self.swarm.alone("llama-completion", *arguments, **variables,
                                GGML_BACKEND_PATH=bin_dir() / "libggml-swarm.so")

    def test_the_plugin_stays_inert_and_says_so_in_one_line(self):
        arguments = completion("Q8_0", 60)
        alone = self.assert_ran(self.swarm.alone("llama-completion", *arguments))
        process = self.assert_ran(self.run_with_plugin(*arguments))
        self.assertEqual(process.out(), alone.out())
        said = [line for line in process.err().splitlines() if " linkcpp: " in line]
        self.assertEqual(len(said), 1, said)
        self.assertIn("LINKCPP_HUB is not set", said[0])
        self.assertNotIn("error", said[0])

    def test_a_hub_that_does_not_answer_fails_the_load_after_the_stated_wait(self):
        hub = f"127.0.0.1:{free_port()}"
        begin = time.monotonic()
        process = self.run_with_plugin(*completion("Q8_0", 60), LINKCPP_WAIT=3,
                                       LINKCPP_HUB=f"linkcpp://{hub}/{FINGERPRINT}/{TOKEN}")
        self.assertGreater(time.monotonic() - begin, 3)
        self.assertLess(time.monotonic() - begin, 15)
        self.assert_refused(process, f"{hub}: no answer within 3 s.*linkcpp serve")
        self.assertRegex(process.err(), "waiting for the hub .*of 3 s")
        self.assertNotIn(TOKEN, process.err())

    def test_settings_that_cannot_be_read_fail_the_load_and_name_the_variable(self):
        line = f"linkcpp://127.0.0.1:1/{FINGERPRINT}/{TOKEN}"
        for variable, value in (("LINKCPP_HUB", "nonsense"), ("LINKCPP_MODE", "fast"), ("LINKCPP_WAIT", "soon")):
            with self.subTest(variable=variable):
                process = self.run_with_plugin(*completion("Q8_0", 60), **{"LINKCPP_HUB": line, variable: value})
                self.assert_refused(process, "join line" if variable == "LINKCPP_HUB" else variable)


class WaysToThePlugin(SwarmTest):
    """Whatever llama.cpp is told about experts, they come to the plugin, and the text is that of one process."""

    def check(self, *arguments, program="llama-completion", **variables):
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        alone = self.assert_ran(self.swarm.alone("llama-completion", *completion("Q8_0", 40)))
        variables = {"GGML_BACKEND_PATH": bin_dir() / "libggml-swarm.so", "LINKCPP_HUB": self.swarm.line_for("programs"),
                     "LINKCPP_LOCAL_EXPERTS": "off", **variables}
        process = self.assert_ran(self.swarm.alone(program, *completion("Q8_0", 40), *arguments, **variables))
        self.assertEqual(process.out(), alone.out())
        workers = self.swarm.status()["workers"]
        self.assertTrue(all(w["pairs"] > 100 for w in workers), workers)

    def test_the_environment_alone(self):
        self.check()

    def test_cpu_moe(self):
        self.check("--cpu-moe")

    def test_n_cpu_moe(self):
        self.check("--n-cpu-moe", 3)

    def test_override_tensor(self):
        self.check("-ot", EXPERTS)

    def test_without_mmap(self):
        self.check("--load-mode", "none")

    # Built for the same CPU features as ours, or other kernels give other bits.
    @unittest.skipUnless(STATIC, "LINKCPP_TEST_STATIC names no llama-completion with ggml built in")
    def test_a_build_with_ggml_inside(self):
        self.check("-ot", EXPERTS, program=STATIC)

    @unittest.skipUnless(STATIC, "LINKCPP_TEST_STATIC names no llama-completion with ggml built in")
    def test_a_build_with_ggml_inside_that_computes_experts_itself(self):
        self.swarm.serve(models.path_of("Q8_0"))
        alone = self.assert_ran(self.swarm.alone("llama-completion", *completion("Q8_0", 40)))
        process = self.assert_ran(self.swarm.exec(STATIC, *completion("Q8_0", 40), options=()))
        self.assertEqual(process.out(), alone.out())

    @unittest.skipUnless(GPU_BIN, "LINKCPP_TEST_GPU_BIN names no folder of llama.cpp's programs with a GPU's module")
    def test_layers_on_a_gpu(self):
        """Not the same bits as on the CPU: the experts must be asked for all the same, and the text begin alike."""
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        arguments = completion("Q8_0", 12, ("--temp", 0))
        alone = self.assert_ran(self.swarm.alone("llama-completion", *arguments))
        process = self.assert_ran(self.swarm.exec(Path(GPU_BIN) / "llama-completion", *arguments, "-ngl", 99, timeout=1500))
        self.assertEqual(process.out(), alone.out())
        n_pairs = sum(w["pairs"] for w in self.swarm.status()["workers"])
        self.assertGreaterEqual(n_pairs, 6 * 4 * 11)


class OptionsThatCannotBe(SwarmTest):
    """llama.cpp aborts where a layer is put on a device that has no room for layers."""

    def setUp(self):
        super().setUp()
        self.swarm.serve(models.path_of("Q8_0"), workers=1)

    def check(self, program, *arguments):
        model = ["-m", models.path_of("Q8_0"), *arguments]
        by_hand = {"GGML_BACKEND_PATH": bin_dir() / "libggml-swarm.so"}
        alone = self.swarm.alone(program, *model)
        self.assertEqual(alone.poll(), 1, alone.err()[-1000:])
        for process in (self.swarm.alone(program, *model, **by_hand),
                        self.swarm.alone(program, *model, **by_hand, LINKCPP_HUB=self.swarm.line_for("programs")),
                        self.swarm.exec(program, *model)):
            self.assertEqual(process.poll(), 1, process.err()[-1000:])

    def test_the_plugin_s_device_for_layers(self):
        self.check("llama-completion", "--device", "Swarm")

    def test_the_plugin_s_device_for_layers_by_the_name_that_it_is_listed_under(self):
        listed = self.assert_ran(self.swarm.exec("llama-completion", "--list-devices"))
        name = re.search(r"^  (Swarm.*?): ", listed.out().decode(), re.MULTILINE).group(1)
        self.check("llama-completion", "--device", name)

    def test_tensors_split_over_devices(self):
        self.check("llama-completion", "-sm", "tensor")

    def test_tensors_split_over_devices_in_llama_bench(self):
        self.check("llama-bench", "-sm", "tensor")


class ForAnotherGgml(SwarmTest):
    def test_the_plugin_is_refused_and_exec_stops_the_program_with_a_sentence_that_says_so(self):
        folder = self.swarm.home / "other"
        folder.mkdir()
        # linkcpp takes the plugin that lies beside it.
        shutil.copy2(bin_dir() / "linkcpp", folder)
        shutil.copy2(bin_dir() / "other-api/libggml-swarm.so", folder)
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        process = self.swarm.start("exec", [folder / "linkcpp", "exec", "--", "llama-completion",
                                            *completion("Q8_0", 2000)])
        self.assert_refused(process, "linkcpp: error: .*has not loaded the swarm plugin")
        self.assertRegex(process.err(), r"(?i)libggml-swarm\.so.*version|version.*libggml-swarm\.so")
        # The program that it started is gone.
        self.assertEqual([line for line in self.swarm.running().values() if "llama-completion" in line], [])


class AnotherProgram(SwarmTest):
    def test_that_never_loads_the_plugin_is_stopped(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        self.assert_refused(self.swarm.start_exec("sleep", "60"), "sleep has not loaded the swarm plugin")

    def test_that_does_not_exist_is_named(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        self.assert_refused(self.swarm.start_exec("llama-nonsense"), "llama-nonsense: no such file")
