"""Slices on workers' disks: fetched once, gone on with, shared, kept within a limit, and looked after by `linkcpp store`."""

import json
import random
import signal
from pathlib import Path

import models
from case import PROMPT, SwarmTest
from swarm import SAME_ARITHMETIC, wait_for


class Fetching(SwarmTest):
    def bytes_sent(self):
        return self.swarm.status()["hub"]["bytes_sent"]

    def test_a_worker_that_is_killed_while_it_fetches_goes_on_where_it_was(self):
        """20 times, at any point: none costs more than 4 MiB."""
        model = self.swarm.home / "large.gguf"
        self.assert_ran(self.swarm.linkcpp("synth", model, "--layers", 2, "--experts", 16, "--used", 4, "--embd", 1024,
                                           "--ff", 2048, "--types", "q8_0"))
        self.swarm.serve(model)
        expert_bytes = self.swarm.status()["model"]["expert_bytes"]
        store = self.swarm.home / "store"
        places = random.Random(9)

        def fetched():
            return sum(path.stat().st_size for path in store.rglob("*") if path.is_file() and path.suffix != ".json")

        started = self.bytes_sent()
        for kill in range(20):
            target = expert_bytes * (kill + places.random()) / 21
            worker = self.swarm.join("worker", "--store", store)
            before = fetched()

            def reached():
                try:
                    return fetched() >= target
                except FileNotFoundError:  # renamed meanwhile
                    return False
            wait_for(reached, 30, "bytes", 0.0005)
            worker.kill()
            self.assertGreaterEqual(fetched(), before)
        self.swarm.join("worker", "--store", store)
        self.swarm.wait_covered()
        # The manifest goes over the control link.
        self.assertLessEqual(self.bytes_sent() - started, expert_bytes + 20 * (4 << 20))

    def test_workers_that_share_a_store_fetch_each_slice_once(self):
        self.swarm.serve(models.path_of("Q8_0"), "--replicas", 2, "--expect-workers", 2)
        store = self.swarm.home / "store"
        for name in ("one", "two"):
            self.swarm.join(name, "--store", store)
        status = self.swarm.wait_covered()
        self.assertEqual(status["hub"]["bytes_sent"], status["model"]["expert_bytes"])

    def test_a_change_of_placement_moves_the_difference_alone(self):
        self.swarm.serve(models.path_of("Q8_0"), "--expect-workers", 1)
        expert_bytes = self.swarm.status()["model"]["expert_bytes"]
        stores = {name: self.swarm.home / name for name in ("one", "two")}
        self.swarm.join("one", "--store", stores["one"])
        self.swarm.wait_covered()
        self.assertEqual(self.bytes_sent(), expert_bytes)
        two = self.swarm.join("two", "--store", stores["two"])

        def shared(status):
            ready = [w for w in status["workers"] if w["state"] == "ready"]
            return len(ready) == 2 and sum(w["slices"] for w in ready) == status["model"]["slices"]
        status = self.swarm.wait_status(shared, "the slices to be shared out")
        moved = next(w for w in status["workers"] if w["name"] == "two")["bytes"]
        self.assertEqual(self.bytes_sent(), expert_bytes + moved)
        two.popen.send_signal(signal.SIGTERM)
        two.wait()
        self.swarm.wait_covered()
        self.assertEqual(self.bytes_sent(), expert_bytes + moved)

    def test_without_a_store_the_difference_is_all_that_moves_too(self):
        """A worker moves what it holds in its memory."""
        self.swarm.serve(models.path_of("Q8_0"), "--expect-workers", 1)
        expert_bytes = self.swarm.status()["model"]["expert_bytes"]
        full = self.swarm.home / "full"
        full.mkdir()
        # A store that takes nothing: its folders are files.
        for name in ["partial", "manifests", *(f"{i:02x}" for i in range(256))]:
            (full / name).touch()
        self.swarm.join("one", "--store", full)
        status = self.swarm.wait_covered()
        self.assertIn("slices are not kept on disk", status["workers"][0]["error"])
        self.assertEqual(self.bytes_sent(), expert_bytes)
        two = self.swarm.join("two", "--store", self.swarm.home / "two")
        status = self.swarm.wait_status(lambda s: len([w for w in s["workers"] if w["state"] == "ready"]) == 2
                                        and sum(w["slices"] for w in s["workers"]) == s["model"]["slices"], "two workers")
        moved = next(w for w in status["workers"] if w["name"] == "two")["bytes"]
        self.assertEqual(self.bytes_sent(), expert_bytes + moved)
        two.popen.send_signal(signal.SIGTERM)
        two.wait()
        self.swarm.wait_covered()
        self.assertEqual(self.bytes_sent(), expert_bytes + 2 * moved)

    def test_slices_that_are_mapped_give_the_same_text_and_take_no_memory(self):
        """Also those that the disk does not take, and after a change of placement."""
        self.swarm.serve(models.path_of("Q4_K_M"), "--expect-workers", 1)
        arguments = ("llama-completion", "-m", models.path_of("Q4_K_M"), "-p", PROMPT, "-n", 30, "-no-cnv", "--temp", 0, "--no-warmup",
                     *SAME_ARITHMETIC)
        alone = self.assert_ran(self.swarm.alone(*arguments)).out()
        stores = [self.swarm.home / "one", self.swarm.home / "two"]
        one = self.swarm.join("one", "--mmap", "--store", stores[0])
        self.swarm.wait_covered()
        self.assertEqual(self.assert_ran(self.swarm.exec(*arguments)).out(), alone)
        mapped = [line.split()[-1] for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines() if str(stores[0]) in line]
        self.assertEqual(len(set(mapped)), self.swarm.status()["model"]["slices"])
        self.swarm.join("two", "--mmap", "--store", stores[1], "--store-limit", "500K")
        self.swarm.wait_status(lambda s: len([w for w in s["workers"] if w["state"] == "ready"]) == 2
                               and sum(w["slices"] for w in s["workers"]) == s["model"]["slices"], "two workers")
        self.assertEqual(self.assert_ran(self.swarm.exec(*arguments)).out(), alone)

    def test_a_store_that_is_too_small_holds_what_fits_and_its_worker_serves(self):
        self.swarm.serve(models.path_of("Q8_0"))
        store = self.swarm.home / "store"
        self.swarm.join("worker", "--store", store, "--store-limit", "1M")
        status = self.swarm.wait_covered()
        self.assertIn("--store-limit", status["workers"][0]["error"])
        self.assertLessEqual(sum(path.stat().st_size for path in store.glob("??/*")), 1 << 20)
        self.assertGreater(sum(path.stat().st_size for path in store.glob("??/*")), 1 << 19)
        text = self.assert_ran(self.swarm.exec("llama-completion", "-m", models.path_of("Q8_0"), "-p", PROMPT, "-n", 10,
                                               "-no-cnv", "--temp", 0, "--no-warmup")).out()
        self.assertIn(PROMPT.encode(), text)


class Neighbours(SwarmTest):
    def join_with_store(self, name, *arguments):
        return self.swarm.join(name, "--store", self.swarm.home / name, *arguments)

    def large_model(self):
        model = self.swarm.home / "large.gguf"
        self.assert_ran(self.swarm.linkcpp("synth", model, "--layers", 4, "--experts", 32, "--used", 4, "--embd", 512,
                                           "--ff", 1024, "--types", "q8_0"))
        return model

    def test_newcomers_fetch_from_each_other_what_the_hub_has_sent_once(self):
        self.swarm.serve(self.large_model(), "--replicas", 4, "--expect-workers", 4)
        for name in ("one", "two", "three", "four"):
            self.join_with_store(name, "--listen", "127.0.0.1")
        status = self.swarm.wait_covered()
        expert_bytes = status["model"]["expert_bytes"]
        self.assertLess(status["hub"]["bytes_sent"], 3 * expert_bytes)
        served = sum(w["slices_out"] for w in self.swarm.status()["workers"])
        self.assertGreater(served, expert_bytes)

    def test_one_that_nobody_can_reach_only_takes(self):
        self.swarm.serve(models.path_of("Q8_0"), "--replicas", 3, "--expect-workers", 1)
        self.join_with_store("one", "--listen", "127.0.0.1")
        status = self.swarm.wait_status(lambda s: s["coverage"]["missing_slices"] == 0, "one worker that holds all")
        before = status["hub"]["bytes_sent"]
        self.join_with_store("two")
        status = self.swarm.wait_status(lambda s: sum(w["slices"] for w in s["workers"]) == 2 * s["model"]["slices"], "two")
        sent = {w["name"]: w["slices_out"] for w in self.swarm.status()["workers"]}
        self.assertEqual(sent["two"], 0)
        self.assertEqual(status["hub"]["bytes_sent"] - before + sent["one"], status["model"]["expert_bytes"])

    def test_wrong_bytes_of_a_neighbour_are_noticed_and_fetched_from_the_hub(self):
        self.swarm.serve(self.large_model(), "--replicas", 2, "--expect-workers", 1, "--https-requests", 4, "--https-per-address", 3)
        self.join_with_store("liar", "--listen", "127.0.0.1")
        self.swarm.wait_status(lambda s: s["coverage"]["missing_slices"] == 0, "one worker that holds all")
        for path in (self.swarm.home / "liar").glob("??/*"):
            path.chmod(0o644)
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"another")
        # For a while the hub is busy with readers who do not read: all that is to be had is the liar's.
        token = self.swarm.line.split("/")[-1].split("?")[0]
        readers = [self.swarm.https() for _ in range(4)]
        for reader in readers:
            self.addCleanup(reader.close)
            reader.sendall(f"GET /expert-shard?layer=0&experts=0-31 HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        honest = self.join_with_store("honest")
        wait_for(lambda: "another hash" in honest.err(), 30, "the lie to be noticed")
        self.swarm.wait_covered()
        self.assertEqual(self.run_store("honest")["damaged"], [])

    def run_store(self, name):
        return json.loads(self.assert_ran(self.swarm.linkcpp("store", "verify", "--store", self.swarm.home / name, "--json")).out())


class Commands(SwarmTest):
    def setUp(self):
        super().setUp()
        self.swarm.serve(models.path_of("Q8_0"))
        self.store = self.swarm.home / "store"
        self.worker = self.swarm.join("worker", "--store", self.store)
        self.model = self.swarm.wait_covered()["model"]

    def run_json(self, *arguments, status=0):
        done = self.swarm.linkcpp("store", *arguments, "--store", self.store, "--json")
        self.assertEqual(done.poll(), status, done.err())
        return json.loads(done.out())

    def test_list_verify_and_collect(self):
        listed = self.run_json("ls")
        self.assertEqual([(m["id"], m["slices"], m["bytes"]) for m in listed["models"]],
                         [(self.model["id"], self.model["slices"], self.model["expert_bytes"])])
        self.assertEqual((listed["unknown"]["slices"], listed["begun"]["slices"]), (0, 0))
        self.assertEqual(self.run_json("verify"), {"slices": self.model["slices"], "bytes": self.model["expert_bytes"], "damaged": []})
        self.assertIn(f"{self.model['slices']} of {self.model['slices']}",
                      self.assert_ran(self.swarm.linkcpp("store", "ls", "--store", self.store)).out().decode())

        damaged = sorted(self.store.glob("??/*"))[3]
        damaged.chmod(0o644)
        with open(damaged, "r+b") as file:
            file.seek(100)
            file.write(b"x")
        self.assertEqual(self.run_json("verify", status=1)["damaged"], [damaged.name])
        self.assertFalse(damaged.exists())
        self.assertEqual(self.run_json("verify")["slices"], self.model["slices"] - 1)

        stray = self.store / "00" / ("00" + "1" * 62)
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"of no model")
        begun = self.store / "partial" / ("22" * 32)
        begun.write_bytes(b"half of")
        note = self.store / "notes.txt"
        note.write_text("mine")
        self.assertEqual(self.run_json("ls")["unknown"]["slices"], 1)
        self.assertEqual(self.run_json("gc", "--dry-run")["deleted"]["slices"], 1)
        self.assertTrue(stray.exists())
        collected = self.run_json("gc")
        self.assertEqual((collected["deleted"]["slices"], collected["begun"]["slices"]), (1, 1))
        self.assertFalse(stray.exists() or begun.exists())
        self.assertTrue(note.exists())

        limit = self.model["expert_bytes"] // 2
        self.assertLessEqual(self.run_json("gc", "--limit", limit)["left_bytes"], limit)
        self.assertLessEqual(self.run_json("ls")["all"]["bytes"], limit)
        self.assertEqual(self.run_json("gc", "--keep", self.model["id"][:8])["deleted"]["slices"], 0)

        # What its worker misses it fetches again.
        self.worker.kill()
        self.swarm.join("worker", "--store", self.store)
        self.swarm.wait_covered()
        self.assertEqual(self.run_json("ls")["models"][0]["slices"], self.model["slices"])

    def test_wrong_names_are_answered_in_words(self):
        for arguments, said in ((("ls", "--store", self.swarm.home / "none"), "there is no store"),
                                (("gc", "--store", self.store, "--keep", "nobody"), "no such model"),
                                (("gc", "--store", self.store, "--limit", "many"), "size"), (("eat",), "see --help")):
            done = self.swarm.linkcpp("store", *arguments)
            self.assertNotEqual(done.poll(), 0)
            self.assertIn(said, done.err())
        self.assertFalse((self.swarm.home / "none").exists())
