"""Every program of llama.cpp, with its experts on the swarm, says what it says in one process."""

import http.client
import json
import re

import models
from case import DATA, PROMPT, SwarmTest
from server import Server, free_port
from swarm import SAME_ARITHMETIC, SLOWNESS, llama_dir

MODEL = "Q8_0"
DRAFT = "Q4_K_M"


class Programs(SwarmTest):
    def both(self, program, *arguments, model=MODEL):
        """What a program printed in one process and on the swarm."""
        self.swarm.serve(models.path_of(model), workers=2)
        arguments = ["-m", models.path_of(model), *arguments]
        alone = self.assert_ran(self.swarm.alone(program, *arguments))
        swarm = self.assert_ran(self.swarm.exec(program, *arguments))
        self.assertTrue(all(w["pairs"] > 0 for w in self.swarm.status()["workers"]))
        return alone.out().decode(), swarm.out().decode()

    def test_llama_cli(self):
        def answer(out):
            return out[out.index("> "):].split("[ Prompt:")[0]

        alone, swarm = self.both("llama-cli", "-p", PROMPT, "-n", 40, "-st", "--simple-io", "--no-warmup", "--temp", 0,
                                 *SAME_ARITHMETIC)
        self.assertGreater(len(answer(alone)), len(PROMPT) + 40)
        self.assertEqual(answer(swarm), answer(alone))

    def test_llama_completion_with_context_shift(self):
        alone, swarm = self.both("llama-completion", "-p", PROMPT, "-n", 200, "-c", 64, "--context-shift", "--temp", 0,
                                 "--no-warmup", "-no-cnv", *SAME_ARITHMETIC)
        self.assertGreater(len(alone.split()), 100)
        self.assertEqual(swarm, alone)

    def test_llama_completion_with_a_grammar(self):
        alone, swarm = self.both("llama-completion", "-p", PROMPT, "-n", 40, "--grammar", 'root ::= [a-z ]+ "."',
                                 "--temp", 0.8, "--seed", 5, "--no-warmup", "-no-cnv", *SAME_ARITHMETIC)
        self.assertRegex(alone.split("Moses,")[1], r"^\s*[a-z ]+")
        self.assertEqual(swarm, alone)

    def test_llama_embedding(self):
        alone, swarm = self.both("llama-embedding", "-p", PROMPT, "--pooling", "mean", "--embd-output-format", "array",
                                 *SAME_ARITHMETIC)
        self.assertGreater(len(json.loads(alone)[0]), 100)
        self.assertEqual(swarm, alone)

    def test_llama_batched_bench(self):
        def rows(out):
            return re.findall(r"^\| +(\d+) \| +(\d+) \| +(\d+) \| +(\d+) \|", out, re.MULTILINE)

        alone, swarm = self.both("llama-batched-bench", "-c", 512, "-npp", "16,32", "-ntg", 8, "-npl", "1,4",
                                 *SAME_ARITHMETIC)
        self.assertEqual(len(rows(alone)), 4)
        self.assertEqual(rows(swarm), rows(alone))

    def test_llama_imatrix_which_looks_at_every_node(self):
        out = self.swarm.home / "matrix.gguf"
        self.swarm.serve(models.path_of(MODEL), workers=2)
        arguments = ["-m", models.path_of(MODEL), "-f", DATA / "genesis-1.txt", "-c", 128, "-o", out, *SAME_ARITHMETIC]
        matrices = []
        for run in (self.swarm.alone, self.swarm.exec):
            process = self.assert_ran(run("llama-imatrix", *arguments))
            matrices.append((out.read_bytes(), re.findall(r"Final estimate: PPL = \S+", process.err() + process.out().decode())))
            out.unlink()
        self.assertIn(b"ffn_down_exps.weight.in_sum2", matrices[0][0])
        self.assertEqual(len(matrices[0][1]), 1)
        self.assertTrue(matrices[0] == matrices[1], "other matrices")
        # Its blocks came in pieces, which is nothing that anybody has to be taught.
        self.assertEqual(self.swarm.status()["unknown_layers"], [])

    def test_llama_perplexity_of_several_sequences_at_once(self):
        def estimate(out):
            return re.findall(r"\[\d+\][\d.]+", out)

        alone, swarm = self.both("llama-perplexity", "-f", DATA / "genesis-1.txt", "-c", 64, "-b", 256, "-ub", 128,
                                 *SAME_ARITHMETIC)
        self.assertGreater(len(estimate(alone)), 3)
        self.assertEqual(estimate(swarm), estimate(alone))


class ServerFeatures(SwarmTest):
    """The same requests to a llama-server in one process and to one on the swarm."""

    def ask(self, server, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60 * SLOWNESS)
        connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        self.assertEqual(response.status, 200, answer)
        return answer

    def servers(self, *arguments, options=("--no-local-experts",)):
        """First the one alone, then, when that has been asked everything, the one on the swarm."""
        self.swarm.serve(models.path_of(MODEL), workers=2)
        for start in (self.swarm.start_alone, lambda *a: self.swarm.start_exec(*a, options=options)):
            port = free_port()
            process = start("llama-server", "-m", models.path_of(MODEL), "--port", port, "-np", 2, "--no-warmup",
                            *SAME_ARITHMETIC, *arguments)
            yield Server(port, process).wait_healthy()
            process.stop()

    def complete(self, server, prompt, slot, n=30, **more):
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "id_slot": slot, "cache_prompt": True, **more}
        return self.ask(server, "POST", "/completion", body)

    def test_slots_saved_and_restored(self):
        folder = self.swarm.home / "slots"
        folder.mkdir()
        said = []
        for server in self.servers("--slot-save-path", folder, "-c", 512):
            first = self.complete(server, PROMPT, 0)
            saved = self.ask(server, "POST", "/slots/0?action=save", {"filename": "moses.bin"})
            other = self.complete(server, "In the beginning", 0)
            restored = self.ask(server, "POST", "/slots/1?action=restore", {"filename": "moses.bin"})
            again = self.complete(server, PROMPT + first["content"], 1)
            self.assertEqual(restored["n_restored"], saved["n_saved"])
            self.assertGreater(again["tokens_cached"], again["tokens_evaluated"] // 2)
            said.append((first["content"], other["content"], again["content"], saved["n_saved"]))
        self.assertGreater(len(said[0][2]), 40)
        self.assertEqual(said[1], said[0])

    def test_context_shift_grammar_and_log_probabilities(self):
        said = []
        for server in self.servers("-c", 256, "--context-shift"):
            long = self.complete(server, PROMPT, 0, n=250)
            letters = self.complete(server, PROMPT, 1, grammar="root ::= [a-z ]+", n_probs=3)
            tops = [[(t["token"], t["logprob"]) for t in p["top_logprobs"]] for p in letters["completion_probabilities"]]
            said.append((long["content"], long["truncated"], letters["content"], tops))
        self.assertTrue(said[0][1])
        self.assertEqual(said[1], said[0])

    def test_embeddings(self):
        said = []
        for server in self.servers("--embeddings", "--pooling", "mean"):
            said.append(self.ask(server, "POST", "/v1/embeddings", {"input": [PROMPT, "In the beginning"]})["data"])
        self.assertEqual(len(said[0]), 2)
        self.assertEqual(said[1], said[0])

    def test_speculative_decoding_takes_fewer_round_trips(self):
        plain, drafted = {}, {}
        n_layers = 6
        for draft, found in ((False, plain), (True, drafted)):
            self.swarm.close()
            self.setUp()
            arguments = ["-md", models.path_of(DRAFT), "--spec-type", "draft-simple", "--spec-draft-n-max", 8]
            options = ("--no-local-experts", "--other-models", "here")
            texts = []
            for server in self.servers(*(arguments if draft else ()), options=options):
                answer = self.complete(server, PROMPT, 0, n=100)
                texts.append(answer["content"])
                found["tokens"] = answer["tokens_predicted"]
            self.assertEqual(texts[1], texts[0])
            found["text"] = texts[1]
            # The draft's own experts are computed in the program: the blocks are the target's.
            found["blocks"] = sum(w["requests"] for w in self.swarm.status()["workers"]) / 2
        self.assertEqual(drafted["text"], plain["text"])
        self.assertEqual(drafted["tokens"], plain["tokens"])
        print(f"blocks for {plain['tokens']} tokens in {n_layers} layers: {plain['blocks']:.0f} without a draft, "
              f"{drafted['blocks']:.0f} with one")
        self.assertLess(drafted["blocks"], 0.5 * plain["blocks"])

    def test_a_second_model_is_refused_unless_it_is_wanted(self):
        self.swarm.serve(models.path_of(MODEL), workers=2)
        process = self.swarm.start_exec("llama-server", "-m", models.path_of(MODEL), "--port", free_port(), "-md",
                                        models.path_of(DRAFT), "--spec-type", "draft-simple", "--no-warmup")
        self.assert_refused(process, "another model or another quantisation.*--other-models here")

    def test_a_draft_that_shares_some_experts_with_the_target_is_refused_and_never_mixed_up_with_it(self):
        draft = self.swarm.home / "draft.gguf"
        done = self.swarm.start("quantize", [llama_dir() / "llama-quantize", "--allow-requantize", "--tensor-type",
                                             "ffn_down_exps=q4_0", models.path_of(MODEL), draft, MODEL])
        self.assertEqual(done.wait(), 0, done.err())
        self.swarm.serve(models.path_of(MODEL), workers=2)
        process = self.swarm.start_exec("llama-server", "-m", models.path_of(MODEL), "--port", free_port(), "-md", draft,
                                        "--spec-type", "draft-simple", "--no-warmup",
                                        options=("--other-models", "here"))
        self.assert_refused(process, "some experts like those of the model that the hub serves")
