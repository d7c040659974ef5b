"""Trains the sample model: a small Mixture-of-Experts language model (architecture qwen3moe) on the King James Bible.

Writes it as a GGUF of F32 weights. Needs the Debian packages python3-torch, python3-numpy, libopenblas0-pthread,
bible-kjv and bible-kjv-text, and llama.cpp's gguf-py on PYTHONPATH.

usage: OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 train_sample_moe.py OUT.gguf MINUTES 1

The last number is torch's threads: with two, training was ten times slower than with one, because torch's and OpenBLAS'
thread pools fight. MINUTES 0 makes the vocabulary and stops.
"""

import collections
import math
import re
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

OUT, MINUTES = sys.argv[1], float(sys.argv[2])
torch.manual_seed(1)
torch.set_num_threads(int(sys.argv[3]) if len(sys.argv) > 3 else 2)
N_EMBD, N_FF, N_EXPERT, N_USED, N_LAYER, N_HEAD, N_KV, HD, N_VOCAB, CTX = 256, 256, 16, 4, 6, 4, 2, 64, 4096, 192

# ---- text -----------------------------------------------------------------------------------------------------------

raw = subprocess.run(["bible", "gen1:1-rev22:21"], capture_output=True, text=True, errors="replace").stdout
verses = []
for line in raw.splitlines():
    line = line.strip()
    if not line or re.fullmatch(r"[1-3]?\s?[A-Za-z ]+ \d+", line):  # blank, "Genesis 1"
        continue
    m = re.match(r"\d+ (.*)", line)
    if m:
        verses.append(m.group(1))
    elif verses:
        verses[-1] += " " + line
text = "\n".join(v for v in verses if v)
print(len(text), "chars", len(verses), "verses;", text[:200].replace("\n", " | "))

# ---- byte-level BPE, GPT-2's alphabet -------------------------------------------------------------------------------


def byte_alphabet():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    chars, extra = dict((b, chr(b)) for b in keep), 0
    for b in range(256):
        if b not in chars:
            chars[b] = chr(256 + extra)
            extra += 1
    return chars


B2C = byte_alphabet()
SPLIT = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
words = collections.Counter(SPLIT.findall(text))
seqs = {w: [B2C[b] for b in w.encode()] for w in words}
vocab = [B2C[b] for b in range(256)]
merges = []
while len(vocab) < N_VOCAB - 1:
    pairs = collections.Counter()
    for w, s in seqs.items():
        c = words[w]
        for a, b in zip(s, s[1:]):
            pairs[a, b] += c
    if not pairs:
        break
    (a, b), n = pairs.most_common(1)[0]
    if n < 2:
        break
    merges.append((a, b))
    vocab.append(a + b)
    ab = a + b
    for w, s in seqs.items():
        if a in s:
            out, i = [], 0
            while i < len(s):
                if i + 1 < len(s) and s[i] == a and s[i + 1] == b:
                    out.append(ab)
                    i += 2
                else:
                    out.append(s[i])
                    i += 1
            seqs[w] = out
EOT = len(vocab)
vocab.append("<|endoftext|>")
N_VOCAB = len(vocab)
tok_id = {t: i for i, t in enumerate(vocab)}
enc = {w: [tok_id[t] for t in s] for w, s in seqs.items()}
ids = np.array([t for w in SPLIT.findall(text) for t in enc[w]], dtype=np.int64)
n_val = len(ids) // 50
train, val = torch.from_numpy(ids[:-n_val]), torch.from_numpy(ids[-n_val:])
print("vocab", N_VOCAB, "tokens", len(ids), "chars/token %.2f" % (len(text) / len(ids)), flush=True)
if MINUTES == 0:
    sys.exit()

# ---- model (qwen3moe) -----------------------------------------------------------------------------------------------


def rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


inv = 10000.0 ** (-torch.arange(0, HD, 2).float() / HD)
ang = torch.arange(CTX)[:, None] * inv[None]
COS, SIN = ang.cos()[None, None], ang.sin()[None, None]


def rope(x):  # NeoX pairing, [B, H, T, HD]
    a, b = x[..., :HD // 2], x[..., HD // 2:]
    c, s = COS[:, :, :x.shape[2]], SIN[:, :, :x.shape[2]]
    return torch.cat([a * c - b * s, a * s + b * c], -1)


P = {}


def par(name, *shape, std=0.02, one=False):
    P[name] = torch.nn.Parameter(torch.ones(shape) if one else torch.randn(shape) * std)


par("token_embd.weight", N_VOCAB, N_EMBD)
par("output_norm.weight", N_EMBD, one=True)
par("output.weight", N_VOCAB, N_EMBD)
for l in range(N_LAYER):
    p = f"blk.{l}."
    par(p + "attn_norm.weight", N_EMBD, one=True)
    par(p + "ffn_norm.weight", N_EMBD, one=True)
    par(p + "attn_q.weight", N_HEAD * HD, N_EMBD)
    par(p + "attn_k.weight", N_KV * HD, N_EMBD)
    par(p + "attn_v.weight", N_KV * HD, N_EMBD)
    par(p + "attn_output.weight", N_EMBD, N_HEAD * HD, std=0.02 / math.sqrt(2 * N_LAYER))
    par(p + "attn_q_norm.weight", HD, one=True)
    par(p + "attn_k_norm.weight", HD, one=True)
    par(p + "ffn_gate_inp.weight", N_EXPERT, N_EMBD)
    par(p + "ffn_gate_exps.weight", N_EXPERT, N_FF, N_EMBD)
    par(p + "ffn_up_exps.weight", N_EXPERT, N_FF, N_EMBD)
    par(p + "ffn_down_exps.weight", N_EXPERT, N_EMBD, N_FF, std=0.02 / math.sqrt(2 * N_LAYER))
MASK = torch.full((CTX, CTX), float("-inf")).triu(1)


def moe(x, p):
    probs = F.softmax(x @ P[p + "ffn_gate_inp.weight"].t(), -1)
    w, sel = probs.topk(N_USED, -1)
    w = w / w.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    frac = []
    gate, up, down = (P[p + n].unbind(0) for n in ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"))
    for e in range(N_EXPERT):
        row, slot = (sel == e).nonzero(as_tuple=True)
        frac.append(row.numel())
        if row.numel() == 0:
            continue
        h = x.index_select(0, row)
        g, u = h @ gate[e].t(), h @ up[e].t()
        out = out.index_add(0, row, (F.silu(g) * u) @ down[e].t() * w[row, slot][:, None])
    load = torch.tensor(frac, dtype=torch.float32) / sel.numel()
    return out, N_EXPERT * (load * probs.mean(0)).sum()


def forward(t):
    B, T = t.shape
    x, aux = F.embedding(t, P["token_embd.weight"]), 0.0
    for l in range(N_LAYER):
        p = f"blk.{l}."
        h = rms(x, P[p + "attn_norm.weight"])
        q = (h @ P[p + "attn_q.weight"].t()).view(B, T, N_HEAD, HD)
        k = (h @ P[p + "attn_k.weight"].t()).view(B, T, N_KV, HD)
        v = (h @ P[p + "attn_v.weight"].t()).view(B, T, N_KV, HD).transpose(1, 2)
        q = rope(rms(q, P[p + "attn_q_norm.weight"]).transpose(1, 2))
        k = rope(rms(k, P[p + "attn_k_norm.weight"]).transpose(1, 2))
        k, v = k.repeat_interleave(N_HEAD // N_KV, 1), v.repeat_interleave(N_HEAD // N_KV, 1)
        a = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(HD) + MASK[:T, :T], -1) @ v
        x = x + a.transpose(1, 2).reshape(B, T, -1) @ P[p + "attn_output.weight"].t()
        y, bal = moe(rms(x, P[p + "ffn_norm.weight"]).view(B * T, N_EMBD), p)
        x, aux = x + y.view(B, T, N_EMBD), aux + bal
    return rms(x, P["output_norm.weight"]) @ P["output.weight"].t(), aux / N_LAYER


decay = [p for p in P.values() if p.ndim > 1]
rest = [p for p in P.values() if p.ndim == 1]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                        lr=2e-3, betas=(0.9, 0.95))
BATCH, t0, step = 10, time.time(), 0


def batch(src):
    i = torch.randint(len(src) - CTX - 1, (BATCH,))
    return torch.stack([src[j:j + CTX] for j in i]), torch.stack([src[j + 1:j + CTX + 1] for j in i])


while True:
    done = (time.time() - t0) / (MINUTES * 60)
    if done >= 1:
        break
    lr = 2e-3 * min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
    for g in opt.param_groups:
        g["lr"] = lr
    x, y = batch(train)
    logits, aux = forward(x)
    loss = F.cross_entropy(logits.view(-1, N_VOCAB), y.view(-1))
    opt.zero_grad(set_to_none=True)
    (loss + 0.01 * aux).backward()
    torch.nn.utils.clip_grad_norm_(P.values(), 1.0)
    opt.step()
    step += 1
    if step % 50 == 0:
        with torch.no_grad():
            x, y = batch(val)
            v, _ = forward(x)
            vl = F.cross_entropy(v.view(-1, N_VOCAB), y.view(-1))
        print(f"step {step} {(time.time()-t0)/step:.2f} s/step done {done:.2f} loss {loss:.3f} val {vl:.3f} balance {aux:.2f}",
              flush=True)

# ---- GGUF -----------------------------------------------------------------------------------------------------------

import gguf

w = gguf.GGUFWriter(OUT, "qwen3moe")
w.add_name("kjv-moe 6x16 top-4")
w.add_description("Small MoE language model trained on the King James Bible for demonstrations and tests")
w.add_context_length(2048)
w.add_embedding_length(N_EMBD)
w.add_block_count(N_LAYER)
w.add_feed_forward_length(N_FF)
w.add_head_count(N_HEAD)
w.add_head_count_kv(N_KV)
w.add_key_length(HD)
w.add_value_length(HD)
w.add_layer_norm_rms_eps(1e-6)
w.add_rope_freq_base(10000.0)
w.add_expert_count(N_EXPERT)
w.add_expert_used_count(N_USED)
w.add_expert_feed_forward_length(N_FF)
w.add_tokenizer_model("gpt2")
w.add_tokenizer_pre("qwen2")
w.add_token_list(vocab)
w.add_token_types([gguf.TokenType.NORMAL] * EOT + [gguf.TokenType.CONTROL])
w.add_token_merges([a + " " + b for a, b in merges])
w.add_bos_token_id(EOT)
w.add_eos_token_id(EOT)
w.add_add_bos_token(False)
for n, p in P.items():
    w.add_tensor(n, p.detach().numpy().astype(np.float32))
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
print("wrote", OUT)
