"""Who is let in, and how that changes while everything runs."""

import json
import os
import re
import stat
import subprocess
import time

import models
from case import N_LONG, PROMPT, SwarmTest, completion
from swarm import SLOWNESS, wait_for


class Access(SwarmTest):
    def run_json(self, *arguments):
        return json.loads(self.assert_ran(self.swarm.linkcpp(*arguments, "--json")).out())

    def http_status(self, line, path="/status", method="GET"):
        address, fingerprint, token = re.search("//([^/]+)/([^/]+)/([^/?]+)", line).groups()
        https = self.swarm.status()["https"]
        return int(subprocess.run(["curl", "-sk", "--pinnedpubkey", https["pinned_public_key"], "-o", "/dev/null", "-w", "%{http_code}",
                                   "-X", method, "-H", f"Authorization: Bearer {token}", https["url"] + path],
                                  capture_output=True, text=True, timeout=20 * SLOWNESS).stdout)

    def https_raw(self, request):
        """The first bytes of the answer."""
        with self.swarm.https() as connection:
            connection.sendall(request.encode())
            return connection.recv(1000)

    def test_a_token_is_rotated_and_nothing_stops(self):
        self.swarm.serve(models.path_of("Q8_0"))
        one = self.swarm.join("one")
        self.swarm.wait_covered()
        server = self.server_on_swarm("Q8_0")
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        old = self.swarm.line
        self.assertEqual(self.http_status(old), 200)
        new = self.run_json("token", "rotate", "workers")["line"]
        self.assertNotEqual(new, old)
        self.assertLess(request.n_arrived, N_LONG, "too late for this test")
        with self.subTest("the old line lets nobody in"):
            self.assert_refused(self.swarm.join("two", line=old), "the token is not valid; ask for a new join line")
            self.assertEqual(self.http_status(old), 401)
        with self.subTest("the new one does"):
            self.swarm.join("three", line=new)
            self.swarm.wait_status(lambda s: len(s["workers"]) == 2, "the newcomer")
            self.assertEqual(self.http_status(new), 200)
        text = request.finish()
        with self.subTest("who was in comes back by its key"):
            one.kill()
            self.swarm.wait_status(lambda s: any(w["state"] == "gone" for w in s["workers"]), "its end")
            self.swarm.join("one", line=old)
            self.swarm.wait_status(lambda s: [w["state"] for w in s["workers"]] == ["ready", "ready"], "it again")
            self.assertEqual(server.complete(PROMPT, N_LONG), text)
        with self.subTest("a hub that is started again knows"):
            self.swarm.hub.kill()
            self.swarm.serve(models.path_of("Q8_0"))
            ports = re.compile(r":[0-9]+/|[?]https=.*")
            self.assertEqual(ports.sub("", self.swarm.line), ports.sub("", new))

    def test_a_worker_is_shut_out_and_the_text_goes_on(self):
        self.swarm.serve(models.path_of("Q8_0"), "--replicas", 2)
        workers = {name: self.swarm.join(name) for name in ("one", "two")}
        self.swarm.wait_covered()
        server = self.server_on_swarm("Q8_0")
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        self.assertEqual(self.run_json("revoke", "one"), {"revoked": "one"})
        self.assertLess(request.n_arrived, N_LONG, "too late for this test")
        self.assert_refused(workers["one"], "this key was revoked by the hub's operator")
        self.assert_refused(self.swarm.join("one"), "this key was revoked")
        text = request.finish()
        self.assertEqual([w["name"] for w in self.swarm.status()["workers"]], ["two"])
        with self.subTest("and comes in again when it may"):
            self.assertEqual(self.run_json("revoke", "one", "--undo"), {"restored": "one"})
            self.swarm.join("one")
            self.swarm.wait_covered()
        self.assertEqual(server.complete(PROMPT, N_LONG), text)

    def test_a_program_is_shut_out_of_the_workers_too(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        program = self.swarm.start_exec("llama-completion", *completion("Q8_0", 4000), "--ignore-eos", "-c", 8192)
        name = self.swarm.wait_program(lambda p: p["layers"] > 50, "it")["process"]
        self.run_json("revoke", name)
        self.assertNotEqual(program.wait(30), 0)
        self.assertRegex(program.err(), "this key was revoked")
        self.assertEqual([w["state"] for w in self.swarm.status()["workers"]], ["ready"])

    def test_what_cannot_be_saved_is_said(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        file = next(self.swarm.home.rglob("access.json"))
        file.unlink()
        file.mkdir()
        (file / "x").touch()
        for arguments in (("token", "new", "a"), ("token", "rotate", "workers"), ("revoke", "local-1")):
            self.assert_refused(self.swarm.linkcpp(*arguments), "a hub that is started again will not know")

    def test_tokens_say_whom_they_let_in_and_end(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        run = ("llama-completion", *completion("Q8_0", 10))
        self.assert_refused(self.swarm.exec(*run, LINKCPP_HUB=self.swarm.line), "lets in workers, not programs.*token new --for programs")
        programs = self.swarm.line_for("programs")
        self.assert_ran(self.swarm.exec(*run, LINKCPP_HUB=programs))
        self.assert_refused(self.swarm.join("x", line=programs), "lets in programs, not workers")
        short = self.run_json("token", "new", "short", "--ends-in", f"{2 * SLOWNESS}s")["line"]
        self.assertEqual(self.http_status(short), 200)
        self.swarm.join("early", line=short)
        self.swarm.wait_status(lambda s: len(s["workers"]) == 2, "who came in time")
        wait_for(lambda: self.http_status(short) == 401, 10, "the token's end")
        self.assert_refused(self.swarm.join("late", line=short), "the token has ended")
        listed = {t["name"]: t for t in self.run_json("token", "list")["tokens"]}
        self.assertEqual((listed["short"]["members"], listed["short"]["ended"], listed["workers"]["ended"]), (1, True, False))
        self.assertNotIn("line", listed["short"])
        with self.subTest("with its members"):
            self.assertEqual(self.run_json("token", "revoke", "short", "--members"), {"name": "short", "revoked_members": 1})
            self.assertEqual([w["name"] for w in self.swarm.status()["workers"]], ["local-1"])
        for arguments in (("token", "rotate", "none"), ("token", "revoke", "none"), ("token", "new", "workers"), ("token", "new", "a b"),
                          ("token", "new", "x", "--ends-in", "soon"), ("token", "new", "x", "--ends-in", "100000d"), ("revoke", "nobody")):
            with self.subTest(arguments=arguments):
                self.assert_refused(self.swarm.linkcpp(*arguments))
        with self.subTest("a name that is used again"):
            again = self.run_json("token", "new", "again")["line"]
            self.swarm.join("of-the-first", line=again)
            self.swarm.wait_status(lambda s: len(s["workers"]) == 2, "it")
            self.run_json("token", "revoke", "again")
            self.assertEqual(self.run_json("token", "new", "again")["members"], 0)
            self.assertEqual(self.run_json("token", "revoke", "again", "--members"), {"name": "again", "revoked_members": 0})

    def test_only_the_operator_changes_anything_and_secrets_are_nobody_else_s(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        for method, path in (("PUT", "/tokens"), ("PUT", "/token?name=x&for=all"), ("PUT", "/token/secret?name=workers"),
                             ("DELETE", "/token?name=workers"), ("DELETE", "/member?member=local-1"), ("PUT", "/drain?worker=local-1")):
            with self.subTest(method=method, path=path):
                self.assertEqual(self.http_status(self.swarm.line, path, method), 403)
        with self.subTest("at once, without a body"):
            token = next(self.swarm.home.rglob("*.operator")).read_text().strip()
            start = time.monotonic()
            self.assertIn(b"200 OK", self.https_raw(f"PUT /drain?worker=local-1 HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n"))
            self.assertIn(b"404", self.https_raw(f"DELETE /member?member=x HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n"))
            self.assertLess(time.monotonic() - start, 2 * SLOWNESS)
        file = next(self.swarm.home.rglob("access.json"))
        self.assertEqual(stat.S_IMODE(os.stat(file).st_mode), 0o600)
        secrets = [t["secret"] for t in json.loads(file.read_text())["tokens"]]
        self.assertTrue(secrets)
        self.run_json("token", "rotate", "workers")
        secrets += [t["secret"] for t in json.loads(file.read_text())["tokens"]]
        time.sleep(0.2)
        said = json.dumps(self.swarm.status()) + self.swarm.hub.err()
        for secret in secrets:
            self.assertNotIn(secret, said)

    def test_a_hub_that_cannot_read_whom_it_let_in_does_not_start(self):
        self.swarm.serve(models.path_of("Q8_0"))
        self.swarm.hub.stop()
        next(self.swarm.home.rglob("access.json")).write_text("{")
        self.assert_refused(self.swarm.linkcpp("serve", "-m", models.path_of("Q8_0"), "--port", 0, "--hub-only"),
                            "access.json: it does not say who may come in")
