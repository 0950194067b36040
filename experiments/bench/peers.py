"""The peers of the benchmarks, in torch. Each process prints one figure as a line of JSON.

Run it with the interpreter of .venv-bench. Each peer has its own recommended settings:
scaled_dot_product_attention, fused AdamW, autocast to bfloat16 for training, bfloat16 weights for
inference, and `compiled` (torch.compile) beside `eager`. Weights are random. The work equals that
of our run.

Command: .venv-bench/bin/python -m experiments.bench.peers train small eager float32
"""

import json
import sys
import time
from typing import Any

import torch  # pyrefly: ignore[missing-import]
import torch.nn.functional as F  # pyrefly: ignore[missing-import]
from torch import nn  # pyrefly: ignore[missing-import]

from experiments.bench.compare import SIZES, best_speed, measure, platform
from experiments.bench.shapes import ATTENTION, MODELS, find

DEVICE = {"cpu": "cpu", "gpu": "cuda"}[platform()]


def wait(result) -> None:
    """Waits for the GPU: a call there returns before its work is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ceiling(precision: str) -> float:
    """FLOP/s of a large product in torch: the best of five."""
    m, k, n = SIZES[platform()]
    a, b = (torch.randn(shape).to(getattr(torch, precision)) for shape in ((m, k), (k, n)))
    return best_speed(lambda: torch.mm(a, b), wait)


class Layer(nn.Module):
    """A layer of nanoGPT: pre-norm, one product for query, key and value, no biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x):
        rows, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """A decoder with one table for tokens and logits; (ids) -> the loss of predicting them."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.body, self.last = (
            nn.Sequential(*(Layer(width, heads) for _ in range(layers))),
            nn.LayerNorm(width, bias=False),
        )
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits = self.last(self.body(x)) @ self.tokens.weight.T
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


def make_step(model: nn.Module, loss_of, mode: str, precision: str, batch: tuple = ()):
    """A training step with clipping and fused AdamW.

    With mode "compiled" the forward and backward pass are compiled. `batch` has the arguments of
    `loss_of` for each micro-batch; the losses of all are averaged.
    """
    groups = [
        dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    loss_of = torch.compile(loss_of) if mode == "compiled" else loss_of

    def step():
        total = 0.0
        for arguments in batch or ((),):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = loss_of(*arguments) / max(1, len(batch))
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def decoder_step(shape: str, mode: str, precision: str):
    """The torch step that equals our train step."""
    size, parts = find(shape)
    model = Decoder(size.layers, size.width, size.heads, size.context, size.vocabulary)
    ids = torch.randint(0, size.vocabulary, (size.rows, size.context))
    return make_step(model, model, mode, precision, tuple((part,) for part in ids.chunk(parts)))


def gpt2_step(shape: str, mode: str, precision: str):
    """The same with the GPT-2 of transformers, which has biases."""
    import transformers  # pyrefly: ignore[missing-import]

    size, _ = find(shape)
    options = dict(
        vocab_size=size.vocabulary,
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        n_positions=size.context,
    )
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **dropout)).train()
    ids = torch.randint(0, size.vocabulary, (size.rows, size.context))
    return make_step(model, lambda: model(ids, labels=ids).loss, mode, precision)


def network(name: str):
    """(model of transformers, its inputs, its labels) for a row of `shapes.MODELS`; no dropout."""
    import transformers  # pyrefly: ignore[missing-import]

    rows, length = MODELS[name]
    ids = torch.randint(5, 30_000, (rows, length))
    if name == "bert":
        quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return (
            transformers.BertForMaskedLM(transformers.BertConfig(**quiet)),
            dict(input_ids=ids),
            ids,
        )
    if name == "vit":
        config = transformers.ViTConfig(num_labels=1000)
        images = torch.randn(rows, 3, 224, 224)
        return (
            transformers.ViTForImageClassification(config),
            dict(pixel_values=images),
            torch.randint(0, 1000, (rows,)),
        )
    config = transformers.T5Config(
        vocab_size=32_128,
        d_model=512,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return (
        transformers.T5ForConditionalGeneration(config),
        dict(input_ids=ids, decoder_input_ids=ids),
        ids,
    )


def model_train(name: str, mode: str, precision: str):
    model, inputs, labels = network(name)
    model.train()
    return make_step(model, lambda: model(**inputs, labels=labels).loss, mode, precision)


def model_forward(name: str, mode: str, precision: str):
    model, inputs, _ = network(name)
    dtype = getattr(torch, precision)
    model = model.eval().to(dtype)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    call = torch.compile(model) if mode == "compiled" else model

    @torch.inference_mode()
    def forward():
        return call(**inputs).logits

    return forward


def attention_call(case: str, mode: str, precision: str):
    """A forward and backward pass of attention with the heads of `shapes.ATTENTION`.

    `case` is KIND-LENGTH, `mode` the implementation.
    """
    kind, length = case.split("-")
    n, (rows, heads, width, window) = int(length), ATTENTION
    dtype = getattr(torch, precision)
    q, k, v = (
        torch.randn(rows, heads, n, width, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    g = torch.randn(rows, heads, n, width, dtype=dtype)
    if mode == "sdpa" and kind == "causal":
        call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif mode == "sdpa":
        places = torch.arange(n)
        distance = places[:, None] - places[None]
        mask = (distance >= 0) & (distance <= window)
        call = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    elif mode == "flex":
        from torch.nn.attention.flex_attention import (  # pyrefly: ignore[missing-import]
            create_block_mask,
            flex_attention,
        )

        rule = lambda b, h, i, j: (i >= j) & ((i - j <= window) | (kind == "causal"))
        mask, compiled = (
            create_block_mask(rule, None, None, n, n, device=DEVICE),
            torch.compile(flex_attention),
        )
        call = lambda: compiled(q, k, v, block_mask=mask)
    else:  # blocks of `window` tokens, each with the block before it: the package local-attention
        from local_attention import LocalAttention  # pyrefly: ignore[missing-import]

        options = dict(
            causal=True, look_backward=1, look_forward=0, autopad=True, exact_windowsize=True
        )
        local = LocalAttention(window_size=window, use_rotary_pos_emb=False, **options)
        call = lambda: local(q, k, v)

    def both():
        out = call()
        out.backward(g)
        q.grad = k.grad = v.grad = None

    return both


def first_step(mode: str) -> float:
    """Runs the first training step of a model of the quickstart's size; returns its loss."""
    return float(decoder_step("quickstart", mode, "bfloat16")())


class Windows(torch.utils.data.Dataset):
    """Windows of a text's tokens, each with the tokens that follow: (inputs, labels)."""

    def __init__(self, file: str, context: int):
        import numpy as np

        self.tokens, self.context = torch.from_numpy(np.load(file).astype("int32")), context

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        return self.tokens[start : start + self.context], self.tokens[
            start + 1 : start + self.context + 1
        ]


def loader(file: str, context: str, rows: str) -> dict[str, float]:
    """{"tokens": tokens a second over 200 batches}, the better of no worker and two workers."""
    found = []
    for workers in (0, 2):
        batches = torch.utils.data.DataLoader(
            Windows(file, int(context)), int(rows), shuffle=True, num_workers=workers
        )
        tokens, began = 0, time.perf_counter()
        for _, (inputs, _) in zip(range(200), batches, strict=False):
            tokens += inputs.numel()
        found.append(tokens / (time.perf_counter() - began))
    return dict(tokens=max(found))


WORKS = {
    "train": decoder_step,
    "gpt2": gpt2_step,
    "model-train": model_train,
    "model-forward": model_forward,
    "attention": attention_call,
}


def main() -> None:
    torch.manual_seed(0)
    work, shape, mode, precision = sys.argv[1:]
    if work == "loader":
        print(json.dumps(loader(shape, mode, precision)))
        return
    torch.set_default_device(DEVICE)
    if work == "first":
        began = time.perf_counter()
        first_step(mode)
        print(json.dumps(dict(ms=1e3 * (time.perf_counter() - began))))
        return
    call = WORKS[work](shape, mode, precision)
    first: Any = call()
    line = dict(loss=float(first)) if work in ("train", "gpt2", "model-train") else {}
    count = find(shape)[0].steps if work in ("train", "gpt2") else 5
    line |= measure(call, wait, count)
    line |= {"peak_bytes": torch.cuda.max_memory_allocated()} if DEVICE == "cuda" else {}
    del call  # and its arrays, before the ceiling is measured
    print(json.dumps(line | dict(ceiling=ceiling(precision))))


if __name__ == "__main__":
    main()
