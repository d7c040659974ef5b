"""The workers compute, and losing them costs what it should."""

import json
import os
import signal
import time
from pathlib import Path

import models
from case import N_LONG, PROMPT, SwarmTest
from server import RequestFailed, free_port
from swarm import wait_for

FAILURE_S = 2  # within which a request must fail that nobody can compute


class LosingWorkers(SwarmTest):
    def hub_and_workers(self, *names, replicas=1, of_first=()):
        self.swarm.serve(models.path_of("Q8_0"), "--replicas", replicas)
        self.workers = [self.swarm.join(name, *(of_first if name == names[0] else ())) for name in names]
        self.swarm.wait_covered()

    def test_a_request_that_nobody_can_compute_fails_soon_and_clearly_and_the_next_works(self):
        self.hub_and_workers("one", "two")
        server = self.server_on_swarm("Q8_0")
        before = server.complete(PROMPT, 20)
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        for worker in self.workers:
            worker.kill()
        killed = time.monotonic()
        with self.subTest("the request in flight"):
            with self.assertRaises(RequestFailed) as failed:
                request.finish()
            self.assertLess(request.ended - killed, FAILURE_S)
            self.assertRegex(str(failed.exception), "(?i)error")

        with self.subTest("a request after that"):
            begin = time.monotonic()
            with self.assertRaises(RequestFailed) as failed:
                server.complete(PROMPT, 20)
            self.assertLess(time.monotonic() - begin, FAILURE_S)
            self.assertRegex(str(failed.exception), "(?i)error")
        self.assertIsNone(server.process.poll(), "llama-server died")
        self.assertRegex(server.process.err(), "error linkcpp: .*no (live )?(holder|worker)")

        self.swarm.join("three")
        self.swarm.join("four")
        self.swarm.wait_covered()

        def answer():  # the hub knows of a holder a moment before its data link is there
            try:
                return server.complete(PROMPT, 20)
            except RequestFailed:
                return None
        self.assertEqual(wait_for(answer, 5, "an answer from the new workers"), before)

    def check_text_while(self, disturb, *of_first):
        self.hub_and_workers("one", "two", replicas=2, of_first=of_first)
        server = self.server_on_swarm("Q8_0")
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        disturb(self.workers[0])
        self.assertLess(request.n_arrived, N_LONG / 2, "too late for this test")
        text = request.finish()
        server.process.stop()
        self.assertEqual(text, self.server_alone("Q8_0").complete(PROMPT, N_LONG))

    def test_one_of_two_replicas_killed_while_decoding_leaves_the_text_as_it_is(self):
        self.check_text_while(lambda worker: worker.kill())
        event = next(e for e in self.swarm.status()["events"] if "gone" in e["text"])
        self.assertEqual((event["worker"], event["by"]), ("one", "hub"))
        self.assertRegex(self.swarm.linkcpp("status").out().decode(), "events\n(.*\n)* +.*Z  one: gone")

    def test_one_of_two_replicas_that_hangs_while_decoding_leaves_the_text_as_it_is(self):
        def stop(worker):
            os.kill(worker.pid, signal.SIGSTOP)
            self.addCleanup(os.kill, worker.pid, signal.SIGCONT)  # or it could not be ended politely
        self.check_text_while(stop)

    def test_a_worker_whose_files_are_cut_short_goes_on_and_loads_anew_when_it_is_started_again(self):
        store = self.swarm.home / "store-of-one"

        def cut(worker):
            for path in filter(Path.is_file, store.rglob("*")):
                os.chmod(path, 0o644)
                os.truncate(path, 0)
        self.check_text_while(cut, "--store", store)
        self.assertIsNone(self.workers[0].poll())
        self.workers[0].stop()
        self.swarm.join("one-again", "--store", store)
        self.swarm.wait_covered()
        self.assertTrue(all(path.stat().st_size for path in store.rglob("*") if path.is_file()))


class Moving(SwarmTest):
    def test_a_worker_is_drained_while_decoding_and_nobody_notices(self):
        self.swarm.serve(models.path_of("Q8_0"))
        one, _ = [self.swarm.join(name) for name in ("one", "two")]
        self.swarm.wait_covered()
        server = self.server_on_swarm("Q8_0")
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        drained = self.assert_ran(self.swarm.linkcpp("drain", "one"))
        self.assertIn("one holds nothing any more and can be stopped", drained.out().decode())
        self.assertLess(request.n_arrived, N_LONG, "too late for this test")
        one.stop()
        text = request.finish()
        status = self.swarm.status()
        self.assertEqual(status["coordinators"][0]["failures"], 0)
        self.assertEqual([w["name"] for w in status["workers"]], ["two"])
        with self.subTest("the last one keeps what nobody else has"):
            self.assert_ran(self.swarm.linkcpp("drain", "two", "--no-wait"))
            self.assertTrue(text.startswith(server.complete(PROMPT, 20)))
            self.assertEqual(self.swarm.status()["workers"][0]["state"], "draining")
            self.assert_ran(self.swarm.linkcpp("drain", "two", "--no-wait"))  # again: the same
            self.assert_refused(self.swarm.linkcpp("drain", "two", timeout=5), "no other worker has room for")
            three = self.swarm.join("three")
            self.swarm.wait_status(lambda s: [w["state"] for w in s["workers"]] == ["ready", "drained"], "three")
            self.assertTrue(text.startswith(server.complete(PROMPT, 20)))
        with self.subTest("and back"):
            self.assertEqual(json.loads(self.assert_ran(self.swarm.linkcpp("drain", "two", "--back", "--json")).out()),
                             {"worker": "two", "state": "filled"})
            self.swarm.wait_status(lambda s: all(0 < w["slices"] < 96 for w in s["workers"])
                                   and sum(w["slices"] for w in s["workers"]) == 96, "both")
        self.assert_refused(self.swarm.linkcpp("drain", "nobody"), "no worker 'nobody' has joined")
        self.assertIsNone(three.poll())
        server.process.stop()
        self.assertEqual(text, self.server_alone("Q8_0").complete(PROMPT, N_LONG))


class MissingExperts(SwarmTest):
    def test_are_computed_by_the_coordinator_from_the_model_file(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.swarm.join("small", "--memory", "5M")
        small = self.swarm.wait_status(lambda s: s["workers"] and s["workers"][0]["state"] == "ready", "the worker")
        self.assertTrue(0 < small["workers"][0]["slices"] < small["model"]["slices"])
        server = self.server_on_swarm("Q8_0", options=())
        text = server.complete(PROMPT, 100)
        status = self.swarm.status()
        coordinator = status["coordinators"][0]
        self.assertTrue(0 < coordinator["local_pairs"] < coordinator["pairs"], coordinator)
        self.assertGreater(status["workers"][0]["pairs"], 0)
        self.assertRegex(server.process.err(), "expert slices have no live holder: this program computes them itself")
        self.assertEqual(text, self.server_alone("Q8_0").complete(PROMPT, 100))

    def test_that_are_there_are_not_said_to_be_missing(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        for _ in range(5):  # whoever is quicker, the check or the workers that dial
            process = self.assert_ran(self.swarm.exec("llama-bench", "-m", models.path_of("Q8_0"), "-p", 8, "-n", 4, options=()))
            self.assertNotIn("no live holder", process.err())


class LosingTheHub(SwarmTest):
    def test_while_decoding_leaves_the_text_as_it_is_and_workers_come_back_to_a_new_one(self):
        hub, https = free_port(), free_port()
        ports = ("--port", hub, "--https-port", https)
        self.swarm.serve(models.path_of("Q8_0"), *ports)
        workers = [self.swarm.join(name) for name in ("one", "two")]
        self.swarm.wait_covered()
        line = self.swarm.line
        server = self.server_on_swarm("Q8_0")
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        self.swarm.hub.kill()
        self.assertLess(request.n_arrived, N_LONG / 2, "too late for this test")
        text = request.finish()
        self.assertTrue(text.startswith(server.complete(PROMPT, 20)))

        # It comes back while a request is under way, too; until it has probed the workers they go on as before.
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(10)
        self.swarm.serve(models.path_of("Q8_0"), *ports)
        self.assertEqual(self.swarm.line, line)  # key and token are kept
        self.assertEqual(request.finish(), text)
        status = self.swarm.wait_covered()
        self.assertEqual(status["hub"]["slices_sent"], 0, "slices were fetched again, or moved")
        self.assertEqual(self.swarm.wait_program(lambda _: True, "the program to be back")["failures"], 0)
        self.assertEqual([worker.poll() for worker in workers], [None, None])
        with self.subTest("a program that was running all the time"):
            self.assertEqual(server.complete(PROMPT, N_LONG), text)
        with self.subTest("a new program"):
            server.process.stop()
            self.assertEqual(self.server_on_swarm("Q8_0").complete(PROMPT, N_LONG), text)
        self.assertEqual(self.server_alone("Q8_0").complete(PROMPT, N_LONG), text)
