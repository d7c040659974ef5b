"""The workers compute, and losing them costs what it should."""

import os
import signal
import threading
import time

import models
from case import PROMPT, SwarmTest, completion
from server import RequestFailed, Server, free_port
from swarm import SAME_ARITHMETIC, wait_for

FAILURE_S = 2  # within which a request must fail that nobody can compute
N_LONG = 400  # tokens that take long enough to do something in their midst


class LosingWorkers(SwarmTest):
    def hub_and_workers(self, *names, replicas=1):
        self.swarm.serve(models.path_of("Q8_0"), "--replicas", replicas)
        self.workers = [self.swarm.join(name) for name in names]
        self.swarm.wait_covered()

    def start_server(self, *arguments):
        port = free_port()
        process = self.swarm.start_exec("llama-server", "-m", models.path_of("Q8_0"), "--port", port, "-np", 1,
                                        "--no-warmup", *SAME_ARITHMETIC, *arguments)
        return Server(port, process).wait_healthy()

    def test_a_request_that_nobody_can_compute_fails_soon_and_clearly_and_the_next_works(self):
        self.hub_and_workers("one", "two")
        server = self.start_server()
        before = server.complete(PROMPT, 20)
        outcome, started = [], threading.Event()

        def request():
            try:
                outcome.append(server.complete(PROMPT, N_LONG, on_token=started.set))
            except (RequestFailed, OSError) as error:
                outcome.append(error)
            outcome.append(time.monotonic())

        thread = threading.Thread(target=request)
        thread.start()
        self.assertTrue(started.wait(30))
        for worker in self.workers:
            worker.kill()
        killed = time.monotonic()
        thread.join(30)
        self.assertEqual(len(outcome), 2, "the request neither failed nor ended")
        with self.subTest("the request in flight"):
            self.assertIsInstance(outcome[0], RequestFailed)
            self.assertLess(outcome[1] - killed, FAILURE_S)
            self.assertRegex(str(outcome[0]), "(?i)error")

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

    def check_text_while(self, disturb):
        self.hub_and_workers("one", "two", replicas=2)
        arguments = completion("Q8_0", N_LONG)
        alone = self.assert_ran(self.swarm.alone("llama-completion", *arguments))
        process = self.swarm.start_exec("llama-completion", *arguments)
        wait_for(lambda: len(process.out()) > 150, 60, "some text")
        disturb(self.workers[0])
        self.assertIsNone(process.poll(), "it ended too early for this test")
        self.assertLess(len(process.out()), len(alone.out()) / 2)
        self.assert_ran(process)
        self.assertEqual(process.out().decode(), alone.out().decode())
        return process

    def test_one_of_two_replicas_killed_while_decoding_leaves_the_text_as_it_is(self):
        self.check_text_while(lambda worker: worker.kill())

    def test_one_of_two_replicas_that_hangs_while_decoding_leaves_the_text_as_it_is(self):
        def stop(worker):
            os.kill(worker.pid, signal.SIGSTOP)
            self.addCleanup(os.kill, worker.pid, signal.SIGCONT)  # or it could not be ended politely
        self.check_text_while(stop)


class MissingExperts(SwarmTest):
    def test_are_computed_by_the_coordinator_from_the_model_file(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.swarm.join("small", "--memory", "5M")
        small = self.swarm.wait_status(lambda s: s["workers"] and s["workers"][0]["state"] == "ready", "the small worker")
        self.assertTrue(0 < small["workers"][0]["slices"] < small["model"]["slices"])
        arguments = completion("Q8_0", N_LONG)
        alone = self.assert_ran(self.swarm.alone("llama-completion", *arguments))
        process = self.swarm.start_exec("llama-completion", *arguments, options=())
        status = self.swarm.wait_status(lambda s: any(c["local_pairs"] for c in s["coordinators"]), "local pairs")
        self.assertLess(status["coordinators"][0]["local_pairs"], status["coordinators"][0]["pairs"])
        self.assert_ran(process)
        self.assertEqual(process.out().decode(), alone.out().decode())
        self.assertGreater(self.swarm.status()["workers"][0]["pairs"], 0)


class LosingTheHub(SwarmTest):
    def test_while_decoding_leaves_the_text_as_it_is_and_workers_come_back_to_a_new_one(self):
        hub, https = free_port(), free_port()
        ports = ("--port", hub, "--https-port", https)
        self.swarm.serve(models.path_of("Q8_0"), *ports)
        workers = [self.swarm.join(name) for name in ("one", "two")]
        self.swarm.wait_covered()
        line = self.swarm.line
        arguments = completion("Q8_0", N_LONG)
        alone = self.assert_ran(self.swarm.alone("llama-completion", *arguments))
        process = self.swarm.start_exec("llama-completion", *arguments)
        wait_for(lambda: len(process.out()) > 150, 60, "some text")
        self.swarm.hub.kill()
        self.assertIsNone(process.poll(), "it ended too early for this test")
        self.assert_ran(process)
        self.assertEqual(process.out().decode(), alone.out().decode())

        self.swarm.serve(models.path_of("Q8_0"), *ports)
        self.assertEqual(self.swarm.line, line)  # key and token are kept
        self.swarm.wait_covered()
        self.assertEqual([worker.poll() for worker in workers], [None, None])
        self.assertEqual(self.assert_ran(self.swarm.exec("llama-completion", *arguments)).out(), alone.out())
