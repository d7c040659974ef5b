"""The command line explains itself, and what it prints for machines parses."""

import json
import re

import models
from case import SwarmTest, completion
from swarm import bin_dir


class Help(SwarmTest):
    def commands(self):
        text = self.assert_ran(self.swarm.linkcpp("--help")).out().decode()
        listed = text[text.index("Subcommands:"):]
        return re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE)

    def test_of_every_command_has_an_example(self):
        commands = self.commands()
        self.assertTrue({"serve", "join", "exec", "status", "devices", "inspect", "manifest", "slice", "backbone",
                         "synth"} <= set(commands), commands)
        for command in commands:
            with self.subTest(command=command):
                text = self.assert_ran(self.swarm.linkcpp(command, "--help")).out().decode()
                self.assertRegex(text, f"Example: .*linkcpp {command}")

    def test_is_pointed_to_by_an_unknown_command_option_or_none_at_all(self):
        for arguments in (("nonsense",), ("status", "--nonsense"), ("slice",), ("serve", "--port", "x", "-m", "y")):
            with self.subTest(arguments=arguments):
                process = self.swarm.linkcpp(*arguments)
                self.assertTrue(0 < process.poll() < 128)
                self.assertIn("--help", process.err())
        process = self.swarm.start("nothing", [bin_dir() / "linkcpp"])
        self.assertTrue(0 < process.wait() < 128)
        self.assertIn("--help", process.err() + process.out().decode())

    def test_of_the_worker_under_its_own_name_is_that_of_join(self):
        process = self.assert_ran(self.swarm.start("worker", [bin_dir() / "linkcpp-expert-worker", "--help"]))
        self.assertIn("Example: ", process.out().decode())


class Backend(SwarmTest):
    def test_that_ggml_does_not_load_is_refused(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.assert_refused(self.swarm.join("one", "--backend", models.path_of("Q8_0")), "ggml does not load it")

    def test_that_is_not_there_or_beside_a_device_is_refused(self):
        for arguments in (("--backend", "/none.so"), ("--backend", models.path_of("Q8_0"), "--device", "CPU")):
            with self.subTest(arguments=arguments):
                process = self.swarm.linkcpp("join", *arguments)
                self.assertTrue(0 < process.poll() < 128)
                self.assertIn("--backend", process.err())


class Environment(SwarmTest):
    def test_what_no_option_says_the_environment_says(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)

        def mode(*options, **variables):
            process = self.swarm.exec("llama-completion", *completion("Q8_0", 2), options=options, **variables)
            return re.search(r"mode (\w+)", self.assert_ran(process).err()).group(1)
        self.assertEqual(mode(), "exact")
        self.assertEqual(mode(LINKCPP_MODE="partial"), "partial")
        self.assertEqual(mode("--mode", "exact", LINKCPP_MODE="partial"), "exact")
        self.assertEqual(mode("--rows", "f16", LINKCPP_MODE="partial"), "partial")

    def test_a_variable_of_the_plugin_s_does_not_matter_to_other_commands(self):
        self.assert_ran(self.swarm.linkcpp("devices", LINKCPP_MODE="fast", LINKCPP_ROWS="f1"))

    def test_arguments_for_a_server_that_is_not_started_are_refused(self):
        process = self.swarm.linkcpp("serve", "-m", models.path_of("Q8_0"), "--hub-only", "--", "--port", 80)
        self.assert_refused(process, "--hub-only starts no llama-server")


class Json(SwarmTest):
    def parse(self, *arguments):
        return json.loads(self.assert_ran(self.swarm.linkcpp(*arguments, "--json")).out())

    def test_of_a_model_parses(self):
        model = models.path_of("Q8_0")
        shown = self.parse("inspect", model)
        self.assertEqual([layer["n_expert"] for layer in shown["layers"]], [16] * 6)
        self.assertTrue(self.parse("manifest", model))

    def test_of_the_devices_parses(self):
        self.assertTrue(self.parse("devices"))

    def test_of_the_status_parses_and_agrees_with_the_model(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        status = self.parse("status")
        self.assertEqual(status["model"]["slices"], 96)
        self.assertEqual(status["coverage"]["share"], 1)
        self.assertEqual(sum(w["slices"] for w in status["workers"]), 96)
        self.assertEqual(sum(w["bytes"] for w in status["workers"]), status["model"]["expert_bytes"])
