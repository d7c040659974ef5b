"""What other processes, files and signals do to ours: nothing that their users would notice as more than a line of log."""

import http.client
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import time

import models
from case import PROMPT, SERVER_ARGUMENTS, SwarmTest, completion
from server import Server, free_port
from swarm import SLOWNESS, bin_dir, resident, wait_for


class Files(SwarmTest):
    def test_a_model_with_numbers_that_are_none_is_served_and_status_says_so(self):
        model = self.swarm.home / "nan.gguf"
        data = bytearray(models.path_of("Q8_0").read_bytes())
        places = random.Random(3)
        for _ in range(4000):
            at = places.randrange(len(data) // 8, len(data) - 100)
            data[at:at + 2] = b"\x00\x7e"  # where it meets a block's scale: NaN
        model.write_bytes(data)
        self.swarm.serve(model, workers=2)
        status = self.assert_ran(self.swarm.linkcpp("status"))
        self.assertIn("is no number", status.out().decode())

    def test_a_model_that_is_cut_short_or_changed_while_it_is_served_ends_nothing(self):
        model = self.swarm.home / "live.gguf"
        shutil.copy(models.path_of("Q8_0"), model)
        port = free_port()
        self.swarm.serve(model, "--port", 0, "--", "--port", port, "--no-warmup", hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        text = server.complete(PROMPT, 20)  # no worker: llama-server computes what it needs itself
        size = model.stat().st_size
        with open(model, "r+b") as file:
            file.seek(size // 4)
            file.write(os.urandom(size // 2))
        self.assertEqual(server.complete(PROMPT, 20), text)  # verified before: not read again
        os.truncate(model, size // 4)
        try:
            server.complete("A word that needs other experts: ", 50)
        except Exception as error:  # pylint: disable=broad-except
            self.assertRegex(str(error), "(?i)error")
        self.assertIsNone(self.swarm.hub.poll(), "serve or llama-server died")
        self.assertTrue(server.healthy())

    def test_a_damaged_backbone_in_the_cache_is_made_again(self):
        def serve():
            port = free_port()
            self.swarm.serve(models.path_of("Q8_0"), "--port", 0, "--", "--port", port, "--no-warmup", hub_only=False)
            text = Server(port, self.swarm.hub).wait_healthy().complete(PROMPT, 10)
            self.swarm.hub.stop()
            return text
        text = serve()
        backbone, = (self.swarm.home / "cache" / "backbones").glob("*.gguf")
        os.truncate(backbone, 1000)
        self.assertEqual(serve(), text)

    def test_a_slice_file_that_was_emptied_is_fetched_again(self):
        self.swarm.serve(models.path_of("Q8_0"))
        store = self.swarm.home / "store"
        worker = self.swarm.join("one", "--store", store)
        self.swarm.wait_covered()
        worker.stop()
        for file in list(store.glob("*/*"))[:3]:
            os.truncate(file, 0)
        self.swarm.join("one", "--store", store)
        self.swarm.wait_covered()

    def test_no_device_pipe_or_folder_is_replaced_by_an_output(self):
        model = models.path_of("Q8_0")
        pipe, folder = self.swarm.home / "pipe", self.swarm.home / "folder"
        os.mkfifo(pipe)
        folder.mkdir()
        for out in (pipe, folder):
            process = self.swarm.linkcpp("backbone", model, "-o", out, timeout=20)
            self.assert_refused(process, "expected a name for a file")
        self.assertTrue(stat.S_ISFIFO(pipe.stat().st_mode))

    def test_a_command_that_is_killed_leaves_no_file(self):
        folder = self.swarm.home / "files"
        folder.mkdir()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            process = self.swarm.start("synth", [bin_dir() / "linkcpp", "synth", folder / "big.gguf",  # 1.6 GB
                                                 "--preset", "qwen3.5-122b-a10b-layer"])
            time.sleep(0.15)
            os.kill(process.pid, signal.SIGSTOP)  # or it might end between the next two lines
            self.assertIsNone(process.poll(), "too quick for this test")
            os.kill(process.pid, number)
            os.kill(process.pid, signal.SIGCONT)
            process.wait(10)
            self.assertEqual(os.listdir(folder), [])

    def test_a_join_line_comes_from_a_pipe_but_not_for_ever(self):
        self.swarm.serve(models.path_of("Q8_0"))
        status = subprocess.run([bin_dir() / "linkcpp", "status", "@/dev/stdin"], input=self.swarm.line, text=True,
                                capture_output=True, env=self.swarm.environment, timeout=20 * SLOWNESS)
        self.assertEqual(status.returncode, 0, status.stderr)
        pipe = self.swarm.home / "pipe"
        os.mkfifo(pipe)
        self.assert_refused(self.swarm.linkcpp("status", f"@{pipe}", timeout=20), "nothing came")


class Names(SwarmTest):
    def test_that_are_no_text_do_not_end_the_hub(self):
        model = self.swarm.home / os.fsdecode(b"bad\xff\x1b[2J\n.gguf")
        shutil.copy(models.path_of("Q8_0"), model)
        self.swarm.serve(model, workers=1)
        self.assertIsNotNone(self.swarm.status())
        self.assertIsNone(self.swarm.hub.poll())
        self.assertNotIn("\x1b[2J", self.swarm.hub.err())

    def test_of_programs_that_are_no_text_do_not_end_the_hub(self):
        from swarm import llama_dir
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        program = self.swarm.home / os.fsdecode(b"x\xff")
        program.symlink_to(llama_dir() / "llama-completion")
        process = self.swarm.start_exec(program, *completion("Q8_0", 4000), "--ignore-eos", "-c", 8192)
        self.swarm.wait_status(lambda s: s["coordinators"], "the program")
        self.assertIsNone(self.swarm.hub.poll())
        process.stop()


class Processes(SwarmTest):
    def test_the_token_in_an_argument_is_in_no_command_line_for_long(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        line = self.swarm.line_for("all")
        token = re.search("/([^/?]+)(?:[?]|$)", line).group(1)
        linkcpp = bin_dir() / "linkcpp"
        started = [
            self.swarm.start("argument", [linkcpp, "join", line, "--name", "argument"]),
            self.swarm.start("worker", [bin_dir() / "linkcpp-expert-worker", line, "--name", "other"]),
            self.swarm.start("exec", [linkcpp, "exec", "--hub", line, "--", "llama-completion",
                                      *completion("Q8_0", 4000), "--ignore-eos", "-c", 8192]),
            self.swarm.start("equals", [linkcpp, "exec", f"--hub={line}", "--", "llama-completion",
                                        *completion("Q8_0", 4000), "--ignore-eos", "-c", 8192]),
        ]
        self.swarm.wait_status(lambda s: len(s["workers"]) == 3 and len(s["coordinators"]) == 2, "all of them")
        for pid, line in self.swarm.running().items():
            self.assertNotIn(token, line, pid)
        for process in started:
            self.assertIsNone(process.poll(), process.err()[-2000:])

    def test_a_second_hub_of_one_user_does_not_hide_the_first_nor_one_that_was_killed_the_next(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        second = self.swarm.linkcpp("serve", "-m", models.path_of("Q4_K_M"), "--hub-only", "--port", 0)
        self.assert_refused(second, "another hub is running.*LINKCPP_HOME")
        other = self.swarm.start("other", [bin_dir() / "linkcpp", "serve", "-m", models.path_of("Q4_K_M"), "--hub-only", "--port", 0],
                                 LINKCPP_HOME=self.swarm.home / "other")
        wait_for(lambda: "linkcpp join" in other.out().decode(), 30, "a hub with a home of its own")
        self.assertEqual(len(self.swarm.status()["workers"]), 1)
        other.stop()
        os.kill(next(pid for pid, command in self.swarm.running().items() if " serve --hub-only" in command), signal.SIGSTOP)
        self.swarm.hub.kill()  # and the hub with it: its file is left behind
        self.assert_refused(self.swarm.linkcpp("status", timeout=20), "no hub.*linkcpp serve")

    def test_programs_without_standard_streams_run(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        command = " ".join(f"'{a}'" for a in self.swarm.exec_arguments("llama-completion", *completion("Q8_0", 10)))
        for redirected in ("2>&-", "<&- >&-", "<&- >&- 2>&-"):
            with self.subTest(redirected=redirected):
                done = subprocess.run(["sh", "-c", f"{command} {redirected}"], env=self.swarm.environment,
                                      capture_output=True, timeout=60 * SLOWNESS)
                self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        done = subprocess.run(["sh", "-c", f"'{bin_dir() / 'linkcpp'}' inspect /nonexistent 2>&-"], timeout=20 * SLOWNESS)
        self.assertEqual(done.returncode, 1)

    def test_output_that_cannot_be_written_is_an_error(self):
        done = subprocess.run(["sh", "-c", f"'{bin_dir() / 'linkcpp'}' inspect '{models.path_of('Q8_0')}' > /dev/full"],
                              capture_output=True, text=True, timeout=20 * SLOWNESS)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "could not be written")

    def test_exec_passes_a_signal_on_once_and_the_program_ends_in_order(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        server = self.server_on_swarm("Q8_0")
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20 * SLOWNESS)
        client.request("POST", "/completion", json.dumps({"prompt": PROMPT, "n_predict": 4000, "stream": True}),
                       {"Content-Type": "application/json"})
        client.getresponse().readline()
        server.process.popen.terminate()
        time.sleep(0.5)  # exec looks ten times a second: more than once in this time would be too often
        client.close()  # llama-server waits for its clients
        self.assertEqual(server.process.wait(20), 0)
        self.assertNotIn("second interrupt", server.process.err())

    def test_nothing_is_left_in_the_runtime_folder(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        self.assert_ran(self.swarm.exec("llama-bench", "-m", models.path_of("Q8_0"), "-p", 8, "-n", 4))
        killed = self.swarm.start_exec("llama-completion", *completion("Q8_0", 4000), "--ignore-eos", "-c", 8192)
        self.swarm.wait_status(lambda s: s["coordinators"], "the program")
        killed.stop()
        wait_for(lambda: not self.swarm.status()["coordinators"], 10, "its end")
        self.assert_ran(self.swarm.exec("llama-bench", "-m", models.path_of("Q8_0"), "-p", 8, "-n", 4))
        sockets = [p.name for p in (self.swarm.home / "run").rglob("coordinator-*")]
        self.assertEqual(sockets, [])

    def test_serve_starts_the_server_also_when_its_workers_have_no_room_for_all(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--port", 0, "--worker-memory", "4M", "--local-workers", 1, "--",
                         "--port", port, "--no-warmup", hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        self.assertTrue(server.complete(PROMPT, 10))
        self.assertRegex(self.swarm.hub.err(), "no room for every expert")

    def test_serve_outlives_local_workers_that_die_again_and_again(self):
        port = free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--port", 0, "--local-workers", 1, "--", "--port", port, "--no-warmup",
                         hub_only=False)
        server = Server(port, self.swarm.hub).wait_healthy()
        text = server.complete(PROMPT, 10)

        def worker():
            return next((pid for pid, line in self.swarm.running().items() if " join " in line), None)
        for _ in range(4):
            os.kill(wait_for(worker, 20, "the local worker"), signal.SIGKILL)
            time.sleep(0.2)
            self.assertEqual(server.complete(PROMPT, 10), text)
        self.assertIsNone(self.swarm.hub.poll())


class Loading(SwarmTest):
    def test_a_worker_that_cannot_load_costs_its_own_slices_no_longer_than_others_need(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.swarm.join("small", "--backend", bin_dir() / "libggml-rounding.so", LINKCPP_TEST_NO_ROOM=1)
        status = self.swarm.wait_status(lambda s: any(w["state"] == "failed" for w in s["workers"]), "the failure")
        self.assertRegex(status["workers"][0]["error"], "(?i)memory|room|bytes|MiB")
        self.swarm.join("good")
        self.swarm.wait_covered()


class Strangers(SwarmTest):
    def test_who_hold_connections_open_do_not_lock_a_worker_out(self):
        self.swarm.serve(models.path_of("Q8_0"))
        idle = [socket.create_connection(self.swarm.hub_address()) for _ in range(300)]
        self.addCleanup(lambda: [s.close() for s in idle])
        self.swarm.join("legitimate")
        status = self.swarm.wait_covered()
        self.assertGreaterEqual(status["refused"]["too many strangers from one address"], 300 - 32)

    def test_are_counted_by_what_they_were_refused_for(self):
        self.swarm.serve(models.path_of("Q8_0"), "--max-per-address", 3, "--max-strangers", 2, "--hello-time", 0.3)
        wrong = re.sub("/[^/?]+([?]|$)", r"/ffff\1", self.swarm.line)
        self.assert_refused(self.swarm.join("stranger", line=wrong), "token")
        idle = [socket.create_connection(self.swarm.hub_address()) for _ in range(2)]
        self.addCleanup(lambda: [s.close() for s in idle])
        idle[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        refused = self.swarm.wait_status(lambda s: s["refused"].get("no hello in time"), "the silent one to be given up")["refused"]
        self.assertEqual((refused["credentials"], refused["broken message"]), (1, 1), refused)
        workers = [self.swarm.join(f"worker-{n}") for n in range(3)]
        self.swarm.wait_status(lambda s: len(s["workers"]) == 3, "three workers")
        self.swarm.join("one-too-many")
        refused = self.swarm.wait_status(lambda s: s["refused"].get("too many from one address"), "the fourth")
        self.assertEqual(len(refused["workers"]), 3)
        self.assertIn("too many from one address", self.swarm.linkcpp("status").out().decode())
        self.assertEqual([w.poll() for w in workers], [None] * 3)

    def https(self):
        connection = self.swarm.https()
        self.addCleanup(connection.close)
        return connection

    def test_on_the_https_side_are_limited_in_number_and_time(self):
        self.swarm.serve(models.path_of("Q8_0"), "--https-per-address", 4, "--hello-time", 3)
        token = self.swarm.line.split("/")[-1].split("?")[0]
        strangers = [self.https() for _ in range(4)]
        for connection in strangers:  # never silent for long, and never done
            connection.sendall(b"GET /status HTTP/1.1\r\nX-A: ")
        with self.https() as another:  # the one that has waited longest gives way
            another.sendall(f"GET /status HTTP/1.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n".encode())
            self.assertIn(b"200 OK", another.recv(100))
        self.assertEqual(strangers[0].recv(100), b"")
        open_ones, start = strangers[1:], time.monotonic()
        while open_ones:
            self.assertLess(time.monotonic() - start, 15 * SLOWNESS)
            time.sleep(0.3)
            for connection in list(open_ones):
                try:
                    connection.sendall(b"a")
                except OSError:
                    open_ones.remove(connection)
        member = http.client.HTTPConnection("hub")
        member.sock = self.https()
        begin = time.monotonic()
        while time.monotonic() - begin < 5:  # longer than a stranger may stay
            member.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
            answer = member.getresponse()
            answer.read()
            self.assertEqual(answer.status, 200)
            time.sleep(0.3)
        refused = self.swarm.status()["refused"]
        self.assertEqual((refused["HTTPS: too many from one address"], refused["HTTPS: no token in time"]), (1, 3))
        self.assertRegex(self.swarm.hub.err(), "HTTPS: 127.0.0.1: 4 .*--https-per-address")

    def test_on_the_https_side_do_not_take_all_places(self):
        self.swarm.serve(models.path_of("Q8_0"), "--https-requests", 4, "--https-per-address", 3, "--hello-time", 2)
        crowd = [socket.create_connection(self.swarm.https_address()) for _ in range(200)]
        self.addCleanup(lambda: [s.close() for s in crowd])
        wait_for(self.swarm.status, 10, "a place")
        refused = self.swarm.status()["refused"]
        self.assertGreater(refused["HTTPS: too many from one address"] + refused.get("HTTPS: too many wait", 0), 100)

    def test_cannot_end_it_where_stacks_are_small(self):
        self.addCleanup(resource.setrlimit, resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        self.swarm.serve(models.path_of("Q8_0"))
        before = resident(self.swarm.hub.pid)
        for ranges in ("1" * 8000 + "-", "-" + ",-" * 4000, "1-1" + ", 1-1" * 1600):
            for _ in range(5):
                with self.https() as stranger:
                    stranger.sendall(f"GET / HTTP/1.1\r\nRange: bytes={ranges}\r\nConnection: close\r\n\r\n".encode())
                    self.assertRegex(stranger.recv(100), rb"HTTP/1.1 4\d\d")
        # A sanitizer's own memory goes with it.
        self.assertLess(resident(self.swarm.hub.pid), before + (64 << 20) * min(SLOWNESS, 4))

    def test_whose_orders_are_broken_off_are_not_obeyed(self):
        self.swarm.serve(models.path_of("Q8_0"))
        port = self.swarm.hub_address()[1]
        token = (self.swarm.home / "run" / "hubs" / f"{port}.operator").read_text().strip()
        for header, body in (("Transfer-Encoding: chunked", "zz\r\n"), ("Content-Length: 100", "abc")):
            with self.https() as operator:
                operator.sendall(f"PUT /token?name=ghost&for=all&seconds=0 HTTP/1.1\r\nAuthorization: Bearer {token}\r\n{header}\r\n"
                                 f"Connection: close\r\n\r\n{body}".encode())
                operator.settimeout(20 * SLOWNESS)
                self.assertRegex(operator.recv(100), rb"HTTP/1.1 4\d\d")
        self.assertNotIn("ghost", self.swarm.linkcpp("token", "list").out().decode())

    def test_cannot_multiply_an_answer_by_asking_for_many_ranges_of_it(self):
        self.swarm.serve(models.path_of("Q8_0"))
        token = self.swarm.line.split("/")[-1].split("?")[0]

        def get(ranges):
            member = http.client.HTTPConnection("hub")
            member.sock = self.https()
            member.request("GET", "/manifest", headers={"Authorization": f"Bearer {token}", "Range": ranges})
            answer = member.getresponse()
            return answer.status, answer.read()

        status, begin = get("bytes=0-7")
        self.assertEqual((status, len(begin)), (206, 8))
        self.assertEqual(get("bytes=" + ",".join(["0-"] * 2500)), (416, b""))
        self.assertEqual(self.swarm.status()["refused"]["HTTPS: several ranges"], 1)

    def test_cannot_fill_the_log(self):
        self.swarm.serve(models.path_of("Q8_0"))
        before = len(self.swarm.hub.err())
        for _ in range(300):
            with socket.create_connection(self.swarm.hub_address()) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(50):
            with self.https() as stranger:
                stranger.sendall(b"GET /status HTTP/1.1\r\nConnection: close\r\n\r\n")
                self.assertIn(b"401", stranger.recv(1000))
        refused = self.swarm.status()["refused"]
        self.assertEqual(refused["HTTPS: no valid token"], 50)
        self.assertGreater(refused["broken message"], 20)  # the others gave way before they were read
        self.assertLess(len(self.swarm.hub.err()) - before, 2000)

    def test_at_a_program_are_counted_too(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        port, data = free_port(), free_port()
        self.swarm.start_exec("llama-server", "-m", models.path_of("Q8_0"), "--port", port, *SERVER_ARGUMENTS,
                              options=("--listen", f"127.0.0.1:{data}"), LINKCPP_MAX_CALLERS=2, LINKCPP_HELLO_TIME=0.5)
        self.swarm.wait_program(lambda p: any(link["condition"] == "good" for link in p["links"]), "the program and its worker")
        idle = [socket.create_connection(("127.0.0.1", data)) for _ in range(6)]
        self.addCleanup(lambda: [s.close() for s in idle])
        self.swarm.wait_program(lambda p: p["turned_away"] == {"too many strangers": 4, "no hello in time": 2},
                                "the silent ones")
        self.assertIn("too many strangers", self.swarm.linkcpp("status").out().decode())

    def test_programs_beyond_what_a_worker_serves_are_not_served(self):
        self.swarm.serve(models.path_of("Q8_0"))
        worker = self.swarm.join("small", "--max-programs", 1)
        self.swarm.wait_covered()
        first = self.server_on_swarm("Q8_0")
        other = self.swarm.start_exec("llama-completion", *completion("Q8_0", n_tokens=4), LINKCPP_COVERAGE_WAIT=2)
        self.assert_refused(other, "(have no|no worker|lack).*")
        self.assertRegex(worker.err(), "not served, 1 are already .join --max-programs.")
        self.assertEqual(self.swarm.status()["workers"][0]["turned_away"], {"too many programs": 1})
        first.complete("And", 4)
