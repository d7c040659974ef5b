"""Stock programs and a real client on a swarm."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import models
from case import N_LONG, PROMPT, SERVER_ARGUMENTS, SwarmTest
from server import Server, free_port
from swarm import SAME_ARITHMETIC, SLOWNESS, wait_for

QUESTIONS = ("Who made the heaven and the earth?", "What said the LORD unto Moses in the wilderness?")
N_TOKENS = 60


class Chat(SwarmTest):
    def ask_all(self, server):
        """The answers to both questions, asked at the same time."""
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            return list(pool.map(lambda question: server.chat(question, N_TOKENS), QUESTIONS))

    def test_streams_to_two_clients_at_once_are_those_of_one_process(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--no-local-experts", "--", "--port", port, *SERVER_ARGUMENTS,
                         workers=2, hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        one_by_one = [server.chat(question, N_TOKENS) for question in QUESTIONS]
        at_once = self.ask_all(server)
        again = self.ask_all(server)
        for text, n_events in at_once:
            self.assertGreater(len(text), 50)
            self.assertGreater(n_events, N_TOKENS / 2)  # it was streamed
        self.assertEqual(at_once, again)
        self.assertTrue(all(w["pairs"] > 0 for w in self.swarm.status()["workers"]))
        self.swarm.hub.stop()

        alone = self.server_alone("Q8_0")
        self.assertEqual(one_by_one, [alone.chat(question, N_TOKENS) for question in QUESTIONS])
        self.assertEqual(at_once, self.ask_all(alone))


class Serve(SwarmTest):
    def kill_local_worker(self):
        """One of two, and waits until another serves in its place."""
        def of_it():
            return {pid for pid, line in self.swarm.running().items() if "--name local-1" in line}
        before = of_it()
        os.kill(next(iter(before)), signal.SIGKILL)
        wait_for(lambda: of_it() - before, 20, "a new worker")
        def serves(status):
            joined = [e for e in status["events"] if e["worker"] == "local-1" and e["text"] == "joined"]
            return len(joined) > 1 and [w["state"] for w in status["workers"]] == ["ready", "ready"]
        self.swarm.wait_status(serves, "it to serve")

    def test_ends_its_workers_and_its_server_when_it_ends(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--", "--port", port, *SERVER_ARGUMENTS, workers=2, hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        self.assertEqual(len(self.swarm.running()), 5)
        self.swarm.hub.popen.terminate()
        self.assertEqual(self.swarm.hub.wait(10), 0)
        self.assertEqual(self.swarm.running(), {})
        self.assertFalse(server.healthy())

    def test_leaves_no_process_behind_when_it_is_killed(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--", "--port", port, *SERVER_ARGUMENTS, workers=2, hub_only=False)
        Server(port, self.swarm.hub).wait_healthy()
        self.swarm.hub.kill()
        wait_for(lambda: not self.swarm.running(), 10, "the end of what serve had started")

    def test_restarts_a_local_worker_that_dies(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        # One that ends within two seconds of its start is taken for a worker that cannot run here.
        self.swarm.wait_status(lambda s: s["hub"]["uptime_s"] > 4, "an old enough hub")
        self.kill_local_worker()

    def test_restarts_a_server_that_crashes_while_the_workers_keep_what_they_hold(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--", "--port", port, *SERVER_ARGUMENTS, workers=2, hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        before = server.complete(PROMPT, 30)
        # As the hub has heard that it computes.
        self.swarm.wait_program(lambda p: p["layers"] > 0, "its figures")
        sent = self.swarm.status()["hub"]["slices_sent"]
        os.kill(next(pid for pid, line in self.swarm.running().items() if "llama-server" in line and "serve" not in
                     line.split()[1:2]), signal.SIGKILL)
        wait_for(lambda: not server.healthy(), 10, "its end")
        self.assertEqual(server.wait_healthy().complete(PROMPT, 30), before)
        self.assertRegex(self.swarm.hub.err(), "llama-server ended with status 137; starting it again")
        self.assertEqual(self.swarm.status()["hub"]["slices_sent"], sent)

    def test_goes_on_decoding_while_its_hub_crashes_and_comes_back(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--no-local-experts", "--", "--port", port, *SERVER_ARGUMENTS,
                         workers=2, hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        before = server.complete(PROMPT, N_LONG)
        status = self.swarm.status()
        family = set(self.swarm.running())
        hub = next(pid for pid, line in self.swarm.running().items() if " serve --hub-only" in line)
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(server.complete, PROMPT, N_LONG)
            time.sleep(0.1)
            os.kill(hub, signal.SIGKILL)
            self.assertFalse(text.done())
            self.assertEqual(text.result(), before)
        after = self.swarm.wait_status(lambda s: s["coverage"]["missing_slices"] == 0 and s["coordinators"],
                                       "a new hub that knows them all", 30)
        self.assertEqual(after["hub"]["slices_sent"], 0)
        self.assertEqual(after["hub"]["address"], status["hub"]["address"])
        self.assertEqual([w["id"] for w in after["workers"]], [w["id"] for w in status["workers"]])
        self.assertEqual(len(self.swarm.running().keys() & family), len(family) - 1)
        self.assertRegex(self.swarm.hub.err(), "the hub ended with status 137; starting it again")
        self.assertEqual(self.swarm.hub.out().decode().count("linkcpp join"), 1)
        self.assertEqual(server.complete(PROMPT, N_LONG), before)
        # A worker that dies now is started again by what the new hub lets in.
        self.kill_local_worker()
        self.assertEqual(server.complete(PROMPT, N_LONG), before)

    def test_ends_as_its_hub_does_that_cannot_start(self):
        process = self.swarm.linkcpp("serve", "-m", "/dev/null", "--local-workers", "1")
        self.assert_refused(process, "/dev/null")
        self.assertEqual(process.err().count("error:"), 1)

    def test_ends_with_an_error_when_its_server_cannot_start(self):
        self.swarm.serve(models.path_of("Q8_0"), "--", "--nonsense", workers=1, hub_only=False)
        self.assert_refused(self.swarm.hub, "llama-server ended with status 1")

    def test_answers_a_second_client_of_the_same_hub(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--", "--port", port, *SERVER_ARGUMENTS, workers=2, hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        before = server.complete(PROMPT, 30)
        process = self.swarm.exec("llama-completion", "-m", models.path_of("Q8_0"), "-p", PROMPT, "-n", 30,
                                        "--temp", 0, "--no-warmup", "-no-cnv", *SAME_ARITHMETIC)
        self.assertEqual(server.complete(PROMPT, 30), before)
        self.assert_ran(process)
        self.assertEqual(process.out().decode().strip(), (PROMPT + before).strip())


    def serve_two(self, port):
        self.swarm.serve(models.path_of("Q8_0"), "--port", port, workers=2)

    def pid_of(self, what):
        return next(pid for pid, line in self.swarm.running().items() if what in line)

    def test_gives_nothing_away_when_its_hub_is_back_and_who_holds_what_changes_at_once(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--no-local-experts", "--", "--port", port, *SERVER_ARGUMENTS,
                         workers=2, hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        before = server.complete(PROMPT, 30)
        texts, stop = [], threading.Event()

        def ask():
            while not stop.is_set():
                texts.append(server.complete(PROMPT, 30))

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                os.kill(self.pid_of(" serve --hub-only"), signal.SIGKILL)
                fresh = self.swarm.join("fresh")
                wait_for(lambda: " joined " in fresh.err(), 20, "the hub to be back", 0.001)
                os.kill(fresh.pid, signal.SIGSTOP)  # it takes its time to load
                wait_for(lambda: self.swarm.linkcpp("drain", "local-1", "--no-wait").poll() == 0, 30, "the hub's answer")
                time.sleep(2)
                os.kill(fresh.pid, signal.SIGCONT)
                self.swarm.wait_status(lambda s: s["coverage"]["settled"] and [w["state"] for w in s["workers"]] ==
                                       ["ready", "drained", "ready"], "all slices to have moved", 60)
            finally:
                stop.set()
            asking.result()
        self.assertEqual(set(texts), {before})

    def test_outlives_a_local_worker_that_dies_again_and_again(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        self.swarm.wait_status(lambda s: s["hub"]["uptime_s"] > 7, "workers that have lived")
        for _ in range(5):
            os.kill(wait_for(lambda: next((pid for pid, line in self.swarm.running().items() if "--name local-1" in line), None),
                             30, "a new worker"), signal.SIGKILL)
        self.swarm.wait_status(lambda s: [w["state"] for w in s["workers"]] == ["ready", "ready"], "both to serve", 60)

    def test_goes_on_without_a_local_worker_that_was_revoked(self):
        hub_port = free_port()
        self.serve_two(hub_port)
        self.assertEqual(self.swarm.linkcpp("revoke", "local-1").poll(), 0)
        wait_for(lambda: "revoke --undo local-1" in self.swarm.hub.err(), 20, "the reason")
        self.swarm.wait_status(lambda s: s["coverage"]["missing_slices"] == 0 and len(s["workers"]) == 1, "the other to hold all", 40)
        self.swarm.hub.stop()
        self.serve_two(hub_port)  # as it was revoked before
        self.assertEqual(self.swarm.linkcpp("revoke", "--undo", "local-1").poll(), 0)
        self.swarm.wait_status(lambda s: [w["state"] for w in s["workers"]] == ["ready", "ready"], "both to serve", 60)

    def test_does_not_wait_for_workers_that_it_does_not_start_any_more(self):
        hub_port = free_port()
        self.serve_two(hub_port)
        self.swarm.hub.kill()  # nobody says goodbye
        wait_for(lambda: not self.swarm.running(), 10, "the end of what serve had started")
        begin = time.monotonic()
        self.swarm.serve(models.path_of("Q8_0"), "--port", hub_port, workers=1)
        self.assertLess(time.monotonic() - begin, 15 * SLOWNESS)


class StockPrograms(SwarmTest):
    def test_llama_bench_runs_unmodified(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=2)
        process = self.assert_ran(self.swarm.exec("llama-bench", "-m", models.path_of("Q8_0"), "-p", 32, "-n", 16,
                                                  "-r", 1))
        rows = re.findall(r"\| +(pp32|tg16) \| +([\d.]+)", process.out().decode())
        self.assertEqual([row[0] for row in rows], ["pp32", "tg16"])
        self.assertTrue(all(float(row[1]) > 0 for row in rows))
        self.assertTrue(all(w["pairs"] > 0 for w in self.swarm.status()["workers"]))
