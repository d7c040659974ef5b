"""What the plugin does where there is no swarm."""

import shutil
import time

import models
from case import SwarmTest, completion
from server import free_port
from swarm import bin_dir

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
