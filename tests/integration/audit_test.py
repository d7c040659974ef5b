"""Workers that compute wrong are found, before they serve or while they do, and what they said is not used."""

import json
import re
import subprocess

import models
from case import DATA, PROMPT, SAME_ARITHMETIC, SwarmTest, completion
from server import free_port
from swarm import SLOWNESS, Swarm, bin_dir, wait_for

N_TOKENS = 400  # enough for a worker that lies in one of 200 answers to lie a dozen times
N_HONEST = 300  # answers before its first lie: its part of 50 tokens
TEXT = completion("Q8_0", N_TOKENS, sampling=("--temp", 0))


def start_liar(swarm, name="liar", *how):
    """A worker whose numbers are wrong now and then, or ("broken") all of them."""
    return swarm.start(name, [bin_dir() / "lying_worker", name, *(how or (N_HONEST,))], LINKCPP_HUB=swarm.line)


def start_honest_and_liar(swarm, *arguments, lies_in=200):
    swarm.serve(models.path_of("Q8_0"), *arguments)
    swarm.join("honest")
    liar = start_liar(swarm, "liar", N_HONEST, 1 / lies_in)
    swarm.wait_status(lambda s: sum(w["state"] == "ready" and w["slices"] > 0 for w in s["workers"]) == 2, "two workers")
    swarm.wait_covered()
    return liar


def in_quarantine(swarm, name, timeout=20):
    """What the hub says of that worker once it is in quarantine."""
    def found(status):
        return next((w for w in status["quarantine"] if w["name"] == name), None)
    return found(swarm.wait_status(found, f"{name} in quarantine", timeout))


def clear(swarm, *arguments, **variables):
    return subprocess.run([bin_dir() / "linkcpp", "clear", *arguments], env={**swarm.environment, **variables},
                          capture_output=True, text=True, timeout=20 * SLOWNESS)


def state_of(status, name):
    return next((w["state"] for w in status["workers"] if w["name"] == name), None)


class Admission(SwarmTest):
    def test_a_broken_worker_is_given_nothing_to_compute_and_others_get_its_slices(self):
        self.swarm.serve(models.path_of("Q8_0"))
        start_liar(self.swarm, "broken", "broken")
        found = in_quarantine(self.swarm, "broken")
        self.assertRegex(found["why"], r"a probe of layer \d+: .*wrong.*expert \d+")
        self.assertIsNone(found["in_doubt_since"], "nothing of it was ever used")
        self.swarm.join("honest")
        status = self.swarm.wait_covered()
        self.assertEqual(state_of(status, "broken"), "quarantined")
        trust = next(w["trust"] for w in status["workers"] if w["name"] == "honest")
        self.assertEqual((trust["state"], trust["rounding"]), ("admitted", "q8_0"))
        self.assertGreater(trust["probes"], 0)
        self.assertGreater(trust["probed_slices"], 0)
        self.assertTrue(trust["driver"])
        self.assertLess(trust["worst_row"]["relative_l2"], trust["worst_row"]["tolerance"])

    def test_a_worker_that_breaks_later_is_found_by_the_next_probe(self):
        """Also when no program runs: nobody needs to have used it."""
        self.swarm.serve(models.path_of("Q8_0"), "--probe-every", 0.3)
        broken = start_liar(self.swarm, "broken", "broken", 40)
        self.swarm.wait_covered()
        found = in_quarantine(self.swarm, "broken")
        # Whoever runs it is told, too.
        wait_for(lambda: re.search("the hub says: this worker is in quarantine.*a probe of layer", broken.err()), 10,
                 "a word in the worker's own log")
        self.assertRegex(found["why"], "a probe of layer")
        self.assertIsNotNone(found["in_doubt_since"])
        self.assertGreater(self.swarm.status()["coverage"]["missing_slices"], 0)

    def test_probes_go_on_until_every_slice_was_looked_at(self):
        self.swarm.serve(models.path_of("Q8_0"), "--probe-every", 0.3)
        self.swarm.join("honest")
        status = self.swarm.wait_covered()
        before = status["workers"][0]["trust"]["probes"]
        more = self.swarm.wait_status(lambda s: s["workers"][0]["trust"]["probes"] > before + 6, "more probes")
        self.assertEqual(more["workers"][0]["trust"]["probed_slices"], more["model"]["slices"])

    def test_quarantine_outlives_the_worker_and_the_hub_until_the_operator_clears_it(self):
        ports = ("--port", free_port(), "--https-port", free_port())
        hub = self.swarm.serve(models.path_of("Q8_0"), *ports)
        broken = start_liar(self.swarm, "broken", "broken")
        first = in_quarantine(self.swarm, "broken")
        with self.subTest("the worker comes back"):
            broken.kill()
            broken = start_liar(self.swarm, "broken", "broken")
            self.swarm.wait_status(lambda s: state_of(s, "broken") == "quarantined", "the worker, back")
        with self.subTest("the hub comes back"):
            hub.kill()
            self.swarm.serve(models.path_of("Q8_0"), *ports)
            again = in_quarantine(self.swarm, "broken")
            self.assertEqual((again["why"], again["since"], again["name"]), (first["why"], first["since"], "broken"))
            self.swarm.wait_status(lambda s: state_of(s, "broken") == "quarantined", "the worker, back")
        with self.subTest("who may not clear"):
            elsewhere = clear(self.swarm, "broken", LINKCPP_HOME=str(self.swarm.home / "other"), LINKCPP_HUB=self.swarm.line)
            self.assertEqual(elsewhere.returncode, 1)
            self.assertIn("does not run on this machine under this user", elsewhere.stderr)
            token = self.swarm.line.rsplit("/", 1)[1].split("?")[0]
            https = self.swarm.status()["https"]
            request = ["curl", "-sk", "--pinnedpubkey", https["pinned_public_key"], "-o", "/dev/null", "-w", "%{http_code}",
                       "-H", f"Authorization: Bearer {token}", "-X", "DELETE", f"{https['url']}/quarantine?worker=broken"]
            self.assertEqual(subprocess.run(request, capture_output=True, text=True).stdout, "403")
        with self.subTest("whom"):
            nobody = clear(self.swarm, "nobody")
            self.assertEqual(nobody.returncode, 1)
            self.assertIn("no worker 'nobody' is in quarantine", nobody.stderr)
        with self.subTest("the operator"):
            broken.kill()
            done = clear(self.swarm, "broken", "--json")
            self.assertEqual(json.loads(done.stdout), {"cleared": "broken"}, done.stderr)
            self.assertEqual(self.swarm.status()["quarantine"], [])
            start_liar(self.swarm, "broken", 10**9)  # mended
            self.assertEqual(state_of(self.swarm.wait_covered(), "broken"), "ready")

    def test_a_hub_that_cannot_read_whom_to_distrust_does_not_start(self):
        state = self.swarm.home / "state"
        process = self.swarm.start("hub", [bin_dir() / "linkcpp", "serve", "-m", models.path_of("Q8_0"), "--port", 0, "--hub-only"])
        self.swarm.wait_status(lambda s: True, "the hub")
        process.stop()
        file = next(self.swarm.home.rglob("access.json")).parent / "trust.json"
        for text in ("", "{", "{}", '[{"worker": 3}]', '[{"worker": "a"}]'):
            file.write_text(text)
            self.assert_refused(self.swarm.linkcpp("serve", "-m", models.path_of("Q8_0"), "--port", 0, "--hub-only"),
                                "trust.json: it does not say who is in quarantine")


class Liar(SwarmTest):
    def check_every_pair(self, serve=(), options=(), lies_in=200):
        """--audit 1: the first lie is the last, and the text is the honest one to the end."""
        liar = start_honest_and_liar(self.swarm, *serve, lies_in=lies_in)
        honest = self.assert_ran(self.swarm.alone("llama-completion", *TEXT)).out()
        for _ in range(10):  # of two holders one may get nothing to answer in a run
            process = self.assert_ran(self.swarm.exec("llama-completion", *TEXT, options=("--audit", 1, *options)))
            self.assertEqual(process.out(), honest)
            if liar.out():
                break
        found = in_quarantine(self.swarm, "liar")
        self.assertRegex(found["why"], r"an audit of layer \d+, expert \d+: off by")
        self.assertRegex(found["in_doubt_since"], r"^\d{4}-\d\d-\d\dT")
        lies = liar.out().decode().splitlines()
        self.assertTrue(lies, "it has never lied: this test shows nothing")
        layer, expert = lies[0].split()[1:]
        self.assertIn(f"layer {layer}, expert {expert}:", found["why"])
        return process

    def test_checked_by_the_coordinator_the_text_is_the_honest_one(self):
        process = self.check_every_pair()
        self.assertRegex(process.err(), "worker liar computes wrong .*computed again")

    def test_held_by_two_and_checked_by_the_coordinator_the_text_is_the_honest_one(self):
        # Of two holders one may get little to answer: it lies more often.
        self.check_every_pair(serve=("--replicas", 2), lies_in=20)

    def test_checked_by_another_holder_the_hub_rules_and_the_text_is_the_honest_one(self):
        self.check_every_pair(serve=("--replicas", 2), options=("--no-local-experts",), lies_in=20)

    def test_of_what_nobody_else_can_check_the_hub_rules_first(self):
        start_honest_and_liar(self.swarm)
        honest = self.assert_ran(self.swarm.alone("llama-completion", *TEXT)).out()
        with self.subTest("until it is found the text is honest; without it nobody holds its experts"):
            process = self.swarm.exec("llama-completion", *TEXT, options=("--audit", 1, "--no-local-experts"))
            self.assertIn(process.wait(), range(0, 128), "it must not die by a signal")
            in_quarantine(self.swarm, "liar")
            # What llama.cpp prints behind the text when it ends early is not text.
            text = process.out().decode(errors="replace").rstrip()
            same = next((i for i, (a, b) in enumerate(zip(text, honest.decode())) if a != b), len(text))
            self.assertGreater(same, len(PROMPT), "not even the prompt")
            self.assertLess(len(text) - same, 20, f"{text[same - 20:]!r}")
        self.swarm.wait_covered()
        again = self.assert_ran(self.swarm.exec("llama-completion", *TEXT, options=("--audit", 1, "--no-local-experts")))
        self.assertEqual(again.out(), honest)

    def test_partial_sums_are_checked_as_well(self):
        liar = start_honest_and_liar(self.swarm)
        for rows in ("f32", "f16"):
            with self.subTest(rows):
                options = ("--mode", "partial", "--rows", rows)
                checked = self.assert_ran(self.swarm.exec("llama-completion", *TEXT, options=("--audit", 1, *options)))
                found = in_quarantine(self.swarm, "liar")
                self.assertRegex(found["why"], r"an audit of layer \d+, expert \d+: off by")
                self.assertTrue(liar.out())
                self.swarm.wait_covered()
                honest = self.assert_ran(self.swarm.exec("llama-completion", *TEXT, options=("--audit", 0, *options)))
                audits = {w["name"]: w["audits"] for w in self.swarm.status()["workers"]}
                self.assertEqual(audits["honest"]["wrong"], 0)
                self.assertGreater(audits["honest"]["pairs"], N_TOKENS)
                again = self.assert_ran(self.swarm.exec("llama-completion", *TEXT, options=("--audit", 1, *options)))
                self.assertEqual(again.out(), honest.out(), "to check is not to change")
                if rows == "f32":
                    # Two workers' sums are not added as one's are: rounding parts the texts in the end, f16's at once.
                    self.assertEqual(checked.out()[:200], honest.out()[:200])
                liar.kill()
                clear(self.swarm, "liar")
                liar = start_liar(self.swarm)
                self.swarm.wait_status(lambda s: state_of(s, "liar") == "ready" and s["coverage"]["missing_slices"] == 0, "the liar")

    def test_after_the_quarantine_the_next_request_is_honest(self):
        """A share of the pairs is checked; the server goes on with whoever is left."""
        start_honest_and_liar(self.swarm)
        server = self.server_on_swarm("Q8_0", options=("--audit", "1/20"))
        for _ in range(40):
            server.complete(PROMPT, N_TOKENS)
            if self.swarm.status()["quarantine"]:
                break
        found = in_quarantine(self.swarm, "liar")
        self.assertRegex(found["why"], "an audit of layer")
        text = server.complete(PROMPT, N_TOKENS)
        audits = {w["name"]: w["audits"] for w in self.swarm.status()["workers"]}
        self.assertEqual(audits["liar"]["wrong"], 1)
        self.assertEqual(audits["honest"]["wrong"], 0)
        server.process.stop()
        self.assertEqual(text, self.server_alone("Q8_0").complete(PROMPT, N_TOKENS))

    def test_no_share_is_no_audit_and_what_is_no_share_is_refused(self):
        self.swarm.serve(models.path_of("Q8_0"), workers=1)
        server = self.server_on_swarm("Q8_0", options=("--audit", 0))
        server.complete(PROMPT, 50)
        self.assertEqual(self.swarm.status()["coordinators"][0]["audits"], {"pairs": 0, "unchecked": 0})
        for options, why in ((("--audit", "2"), "--audit: share: expected a number from 0 to 1"),
                             (("--audit", "half"), "--audit: share: expected a number from 0 to 1")):
            self.assert_refused(self.swarm.exec("llama-completion", *TEXT, options=options), why)


class Honest(SwarmTest):
    """Devices that round otherwise than each other are no liars: not one of their pairs is found wrong."""

    def check(self, kind, options):
        self.swarm.serve(models.path_of(kind), "--replicas", 3)
        for name, rounding in (("cpu", None), ("unrounded", "none"), ("halves", "f16")):
            device = ("--backend", bin_dir() / "libggml-rounding.so") if rounding else ("--device", "CPU")
            self.swarm.join(name, *device, LINKCPP_TEST_ROUNDING=rounding)
        self.swarm.wait_covered()
        share = 1 if SLOWNESS == 1 else 10  # sanitizers make the judge's double precision very slow
        text = (DATA / "genesis-1.txt").read_text()[:1500 // share]
        process = self.assert_ran(self.swarm.exec("llama-completion", "-m", models.path_of(kind), "-p", text, "-n", 100 // share, "--temp",
                                                  0, "--no-warmup", "-no-cnv", *SAME_ARITHMETIC, options=options))
        status = self.swarm.status()
        self.assertEqual(status["quarantine"], [], process.err()[-2000:])
        audits = {w["name"]: w["audits"] for w in status["workers"]}
        self.assertEqual({name: a["wrong"] for name, a in audits.items()}, {"cpu": 0, "unrounded": 0, "halves": 0})
        self.assertGreater(sum(a["pairs"] for a in audits.values()), 2000 // share)

    def test_checked_by_each_other(self):
        for kind in ("Q8_0", "Q4_K_M", "F32"):
            with self.subTest(kind):
                self.check(kind, ("--audit", 1, "--no-local-experts"))
                self.swarm.close()
                self.assertEqual(self.swarm.reports, "")
                self.swarm = Swarm()

    def test_checked_by_the_coordinator_as_sums(self):
        self.check("Q4_K_M", ("--audit", 1, "--mode", "partial"))
