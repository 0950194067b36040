"""A whole GPT in one file: its parameters, forward pass, data, step, loop and sampling.

Read this file first. The library is this file, made open, fast and safe: `jaxformer.models` has the
model, `data` the batches, `training` the step, `runs` the loop, `decoding` the sampling. From the
library this file takes only single functions (`ops`, `masks`, `params`); it also uses optax.
tests/experiments/test_one_file.py shows that logits, loss and gradients are those of
`jaxformer.models` for the same parameters.

Shapes: B batch, T length, D model width, N heads, H head width, F feed-forward width, V vocabulary,
L layers.
Expected: a validation loss of about 2.1 nats a byte, and a sample with the shape of Python.
Time: about two minutes on two CPU cores.
Command: python experiments/one_file.py
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from jax.nn.initializers import normal, ones, zeros

from jaxformer import masks, ops, params
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.params import Spec


@dataclass(frozen=True)
class GPT:
    """The sizes of a model. GPT-2 small is GPT(50257, 12, 768, 12, 1024)."""

    vocab_size: int = 256  # bytes
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    context_length: int = 128


# Parameters ---------------------------------------------------------------------------------------


def spec(config: GPT):
    """Every parameter, declared once: a shape, a name for each axis, initial values."""
    V, L, D, N = config.vocab_size, config.num_layers, config.d_model, config.num_heads
    H = D // N
    F = 4 * D
    start = normal(0.02)
    residual = normal(0.02 / (2 * L) ** 0.5)  # what is added to the stream 2 L times keeps its size
    norm = {
        "scale": Spec((D,), ("embed",), ones),
        "bias": Spec((D,), ("embed",), zeros),
    }
    heads = params.linear((D, N, H), ("embed", "heads", "head"), ("embed",), start)
    attention = {
        "query": heads,
        "key": heads,
        "value": heads,
        "out": params.linear((N, H, D), ("heads", "head", "embed"), ("heads", "head"), residual),
    }
    feedforward = {
        "up": params.linear((D, F), ("embed", "mlp"), ("embed",), start),
        "down": params.linear((F, D), ("mlp", "embed"), ("mlp",), residual),
    }
    layer = {
        "attention_norm": norm,
        "attention": attention,
        "feedforward_norm": norm,
        "feedforward": feedforward,
    }
    return {
        "embedding": {
            "tokens": Spec((V, D), ("vocab", "embed"), start),
            "positions": Spec((config.context_length, D), ("length", "embed"), start),
        },
        "layers": params.stack(layer, L),  # one array [L, ...] for each parameter of a layer
        "final_norm": norm,
    }


# The forward pass ---------------------------------------------------------------------------------


def forward(config: GPT, weights, tokens):
    """Logits [B, T, V] of tokens [B, T]: those of position t are about token t + 1."""
    table = weights["embedding"]["tokens"]
    places = weights["embedding"]["positions"]
    x = table[tokens] + places[None, : tokens.shape[1]]

    def next_layer(x, layer_weights):
        return layer(x, layer_weights), None

    x, _ = jax.lax.scan(next_layer, x, weights["layers"])
    x = norm(x, weights["final_norm"])
    return ops.einsum("btd,vd->btv", x, table)  # the output matrix is the table of tokens


def layer(x, weights):
    """x + attention(norm(x)), and then x + feedforward(norm(x))."""
    x = x + attention(norm(x, weights["attention_norm"]), weights["attention"])
    return x + feedforward(norm(x, weights["feedforward_norm"]), weights["feedforward"])


def norm(x, weights):
    """(x - mean) / sqrt(variance + eps) * scale + bias, over the features of each token."""
    return ops.layer_norm(x, weights["scale"], weights["bias"])


def attention(x, weights):
    """softmax(Q K^T / sqrt(H)) V in each head: a token sees itself and the tokens before it."""
    query = linear("btd,dnh->btnh", x, weights["query"])
    key = linear("btd,dnh->btnh", x, weights["key"])
    value = linear("btd,dnh->btnh", x, weights["value"])
    out = ops.attention(query, key, value, mask=masks.causal())
    return linear("btnh,nhd->btd", out, weights["out"])


def feedforward(x, weights):
    """gelu(x W_up + b_up) W_down + b_down."""
    hidden = ACTIVATIONS["gelu_tanh"](linear("btd,df->btf", x, weights["up"]))
    return linear("btf,fd->btd", hidden, weights["down"])


def linear(product, x, weights):
    """x W + b."""
    return ops.einsum(product, x, weights["kernel"]) + weights["bias"][None, None]


def loss(config: GPT, weights, tokens, labels):
    """Mean cross entropy in nats a token."""
    sums = ops.cross_entropy(forward(config, weights, tokens), labels)
    return sums.loss / sums.weight


# Data ---------------------------------------------------------------------------------------------


def read_text() -> np.ndarray:
    """The source text of Python's own standard library, as bytes: nothing to download."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.concatenate([np.frombuffer(file.read_bytes(), np.uint8) for file in files])


def draw_batch(text: np.ndarray, rows: int, length: int, seed: int, step: int):
    """(tokens, labels), both [rows, length].

    They are a function of (seed, step), so a run can go on from any step.
    """
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, len(text) - length, rows)
    windows = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


# One step -----------------------------------------------------------------------------------------


def make_optimizer(config: GPT, steps: int):
    """AdamW with a warm-up and a cosine. Only the matrices of products decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps, 1e-4)
    decay = params.mask(spec(config), "kernel$")
    adam = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(config: GPT, optimizer, weights, state, tokens, labels):
    """(weights, optimizer state, loss) after one step.

    The old arrays give their memory to the new ones.
    """
    value, gradients = jax.value_and_grad(partial(loss, config))(weights, tokens, labels)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


# The loop -----------------------------------------------------------------------------------------


def train(config: GPT, text: np.ndarray, steps: int = 600, rows: int = 8, seed: int = 0):
    """The trained weights. The last tenth of the text is for validation."""
    split = len(text) * 9 // 10
    training, validation = text[:split], text[split:]
    weights = params.init(spec(config), jax.random.key(seed))
    optimizer = make_optimizer(config, steps)
    state = optimizer.init(weights)
    print(f"{params.count(weights):,} parameters, {len(training):,} bytes of text")
    for step in range(steps):
        tokens, labels = draw_batch(training, rows, config.context_length, seed, step)
        weights, state, value = train_step(config, optimizer, weights, state, tokens, labels)
        if (step + 1) % 100 == 0:
            validation_loss = evaluate(config, weights, validation)
            print(f"step {step + 1}/{steps} loss {value:.3f} validation {validation_loss:.3f}")
    return weights


def evaluate(config: GPT, weights, text: np.ndarray, batches: int = 8, rows: int = 16) -> float:
    """Mean loss of some windows, always the same ones."""
    score = jax.jit(partial(loss, config))
    drawn = [draw_batch(text, rows, config.context_length, 0, number) for number in range(batches)]
    return float(np.mean([score(weights, tokens, labels) for tokens, labels in drawn]))


# Sampling -----------------------------------------------------------------------------------------


def generate(
    config: GPT, weights, prompt: bytes, count: int, seed: int = 0, temperature: float = 0.8
) -> bytes:
    """`count` more bytes, one after the other.

    Each step reads the whole window again; `decoding` keeps keys and values instead.
    """

    @jax.jit
    def draw_next(window, length, key):
        logits = forward(config, weights, window)[0, length - 1]
        return jax.random.categorical(key, logits / temperature)

    written = list(prompt)
    for step in range(count):
        seen = written[-config.context_length :]
        # the zeros behind `seen` are never read
        window = np.zeros((1, config.context_length), np.int32)
        window[0, : len(seen)] = seen
        key = jax.random.fold_in(jax.random.key(seed), step)
        written.append(int(draw_next(window, len(seen), key)))
    return bytes(written)


if __name__ == "__main__":
    model = GPT()
    trained = train(model, read_text())
    print(generate(model, trained, b"def ", 300).decode(errors="replace"))
