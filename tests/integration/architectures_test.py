"""Every architecture of llama.cpp with routed experts, one seed, in F32 (architectures.py does the same for more), and what no
architecture of the generator has."""

import array
import concurrent.futures
import math
import tempfile
from pathlib import Path
from random import Random

import architectures
from case import SwarmTest
from gguf import ARRAY, F32, FLOAT32, UINT32, Gguf


class Architectures(SwarmTest):
    def test_fuse_and_have_the_logits_of_one_process(self):
        with tempfile.TemporaryDirectory(prefix="lcpp-archs") as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
            models = architectures.generate(Path(folder), 1)
            self.assertGreaterEqual(len(models), 42)
            results = {name: pool.submit(architectures.check, model, name, "F32", 2, Path(folder))
                       for name, model in models.items()}
            for name, result in results.items():
                with self.subTest(architecture=name):
                    self.assertEqual(result.result()["faults"], [])


class OtherModels(SwarmTest):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="lcpp-archs")))

    def generate(self, architecture):
        return architectures.generate(self.folder, 2, architecture)[architecture]

    def test_layers_may_differ_in_how_many_experts_they_use(self):
        model = Gguf(self.generate("qwen3moe"))
        model.keys["qwen3moe.expert_used_count"] = (ARRAY, (UINT32, [2, 1]))
        path = self.folder / "used.gguf"
        model.write(path)
        self.assertEqual([layer["n_expert_used"] for layer in architectures.inspect(path)["layers"]], [2, 1])
        self.assertEqual(architectures.faults(architectures.evaluate(path), 2), [])

    def test_layers_may_differ_in_n_ff_and_work_on_a_latent(self):
        """Nemotron-H as its makers prune it: no gate, squared ReLU, two routed layers of other widths, rows narrower than n_embd."""
        architectures.run_generator(self.folder, 2, "nemotron_h_moe")
        model = Gguf(self.folder / "nemotron_h_moe-dense.gguf")
        n_embd, n_latent, n_shared, n_expert = 256, 64, 96, 4
        n_ff, n_used = {2: 96, 3: 32}, {2: 3, 3: 2}

        def set_key(name, kind, value):
            model.keys[f"nemotron_h_moe.{name}"] = (kind, value)

        set_key("block_count", UINT32, 4)
        set_key("feed_forward_length", ARRAY, (UINT32, [0, 0, 384, 384]))
        set_key("expert_feed_forward_length", ARRAY, (UINT32, [0, 0, n_ff[2], n_ff[3]]))
        set_key("expert_used_count", ARRAY, (UINT32, [1, 1, n_used[2], n_used[3]]))
        set_key("expert_count", UINT32, n_expert)
        set_key("moe_latent_size", UINT32, n_latent)
        set_key("expert_shared_feed_forward_length", UINT32, n_shared)
        set_key("expert_shared_count", UINT32, 1)
        set_key("expert_weights_scale", FLOAT32, 1.0)
        set_key("expert_gating_func", UINT32, 2)
        set_key("attention.head_count", ARRAY, (UINT32, [2, 0, 2, 2]))
        set_key("attention.head_count_kv", ARRAY, (UINT32, [2, 0, 2, 2]))
        set_key("attention.recurrent_layers", ARRAY, (UINT32, [0, 1, 0, 0]))
        for clamp in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
            set_key(clamp, ARRAY, (FLOAT32, [0.0] * 4))
        for name in [name for name in model.tensors if name.startswith("blk.2.ffn_")]:
            del model.tensors[name]
        random = Random(3)
        for layer in (2, 3):
            shapes = {"attn_norm.weight": [n_embd], "ffn_gate_inp.weight": [n_embd, n_expert], "exp_probs_b.bias": [n_expert],
                      "ffn_latent_down.weight": [n_embd, n_latent], "ffn_latent_up.weight": [n_latent, n_embd],
                      "ffn_up_exps.weight": [n_latent, n_ff[layer], n_expert],
                      "ffn_down_exps.weight": [n_ff[layer], n_latent, n_expert],
                      "ffn_up_shexp.weight": [n_embd, n_shared], "ffn_down_shexp.weight": [n_shared, n_embd]}
            for name, ne in shapes.items():
                numbers = array.array("f", (random.gauss(0, 0.1) for _ in range(math.prod(ne))))
                model.tensors[f"blk.{layer}.{name}"] = (ne, F32, numbers.tobytes())
        path = self.folder / "pruned.gguf"
        model.write(path)
        layers = architectures.inspect(path)["layers"]
        self.assertEqual([(n["layer"], n["n_embd"], n["n_ff"], n["n_expert_used"]) for n in layers],
                         [(i, n_latent, n_ff[i], n_used[i]) for i in (2, 3)])
        self.assertEqual(architectures.faults(architectures.evaluate(path), 2), [])

    def test_a_block_that_nobody_has_described_is_right_and_named(self):
        """The hub's file says another limit of the activation than the program's: no description fits what comes."""
        path = self.generate("deepseek4")
        model = Gguf(path)
        model.keys["deepseek4.swiglu_clamp_exp"] = (FLOAT32, 0.01)
        other = self.folder / "other.gguf"
        model.write(other)
        facts = architectures.evaluate(other, served=path)
        self.assertTrue(facts["exact"]["equal"])
        self.assertLess(facts["partial"]["nmse"], architectures.NMSE_LIMIT)
        n_blocks = len(architectures.inspect(path)["layers"]) * architectures.N_EVALUATIONS
        self.assertEqual((facts["exact"]["blocks"], facts["exact"]["products"]), (0, 3 * n_blocks))
        self.assertEqual([layer["layer"] for layer in facts["unknown_layers"]], [0, 1, 2, 3])
        self.assertIn("SWIGLU_CLAMP", facts["unknown_layers"][0]["nodes"])
        # And it is another block than the served model's own.
        self.assertEqual(architectures.faults(architectures.evaluate(path), 4), [])
