"""Long documents at equal cost: full attention, a window, and an hourglass.

Nawrot et al. 2021, arXiv:2110.13711 (`zoo.hourglass`); Beltagy et al. 2020, arXiv:2004.05150 (the
window). A document is noise with four facts in it, such as "B is 5", each one token somewhere. At
its end stand four questions, such as "B?", each of 16 tokens; the second half of them has to be
answered. The answer is one of eight. So a model has to look as far back as the facts stand. The
models have no positions. They learn from short documents first: among 4,096 tokens the four that
matter are hard to find for a model that knows nothing yet. Widths and depths are chosen so that a
forward pass of 4,096 tokens has the same number of FLOPs of matrix products within 7 %. The window
has 64 tokens, in the hourglass's outer layers too; its middle layers see one vector for eight
tokens. Memory is what XLA plans for the arrays of one training step of two documents of 4,096
tokens, without the parameters; seconds are those of that step.

Expected (seed 0): right answers to documents of 4,096 tokens: full attention 100 %, the hourglass
32 %, the window 17 % (chance 12.5 %); of 512 tokens 100, 39 and 38 %. Megabytes 68, 249, 234;
seconds 1.6, 0.7, 0.9 beside other work. So at this size the narrow model that sees all finds a
single token, and wider ones that see a summary or a neighbourhood do not.
Time: 25 minutes on two CPU cores beside three other jobs.
Command: python -m experiments.theory.long_documents [--share 1.0] [--out long_documents.png]
"""

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from experiments.theory import small
from jaxformer import models
from jaxformer.masks import causal, window
from jaxformer.models import ModelConfig
from jaxformer.tools.planning import flops
from jaxformer.zoo.hourglass import Hourglass

NOISE, KEYS, ANSWERS = 32, 4, 8  # tokens of noise; facts of a document; answers to a question
QUESTIONS, LONG = 4, 16  # at the end of a document; tokens of a question
ASKED = QUESTIONS * LONG  # tokens of all questions
VOCABULARY = NOISE + KEYS * ANSWERS + KEYS  # noise, then facts, then questions
LENGTHS = 512, 1024, 2048, 4096  # tokens of a document, in tests
# tokens of a document in training, documents of a batch, steps, learning rate
STAGES = (96, 42, 400, 5e-3), (192, 21, 300, 5e-3), (512, 8, 150, 3e-3), (4096, 2, 60, 2e-3)
NEAR = causal() & window(64)


def model(layers: int, width: int, masks: tuple, stack: Any = None) -> ModelConfig:
    """Heads of 16 features, without positions."""
    return ModelConfig(
        VOCABULARY,
        layers,
        width,
        width // 16,
        context_length=LENGTHS[-1],
        positions=None,
        masks=masks,
        stack=stack,
        init_std=0.1,
    )


MODELS = {
    "full": model(2, 32, (causal(),)),
    "window": model(3, 80, (NEAR,)),
    "hourglass": model(4, 96, (NEAR, causal(), causal(), NEAR), Hourglass(8, 1, 1)),
}


def draw(key: Array, length: int, batch: int) -> small.Batch:
    """Documents; the labels in the second half of a question have a weight of 1, all others 0."""
    keys = jax.random.split(key, 4)
    text = length - ASKED
    noise = jax.random.randint(keys[0], (batch, text), 0, NOISE)
    values = jax.random.randint(keys[1], (batch, KEYS), 0, ANSWERS)
    facts = NOISE + jnp.arange(KEYS)[None] * ANSWERS + values
    places = jax.vmap(lambda key: jax.random.permutation(key, text)[:KEYS])(
        jax.random.split(keys[2], batch)
    )
    rows = jnp.arange(batch)[:, None]
    asked = jnp.repeat(jax.random.randint(keys[3], (batch, QUESTIONS), 0, KEYS), LONG, axis=1)
    questions = NOISE + KEYS * ANSWERS + asked
    tokens = jnp.concatenate([noise.at[rows, places].set(facts), questions], axis=1)
    labels = jnp.zeros_like(tokens).at[:, text:].set(jnp.take_along_axis(values, asked, 1))
    is_late = jnp.arange(ASKED) % LONG >= LONG // 2
    weights = jnp.zeros(tokens.shape).at[:, text:].set(is_late)
    return {"tokens": tokens, "labels": labels, "weights": weights}


class Cost(NamedTuple):
    """What documents of 4,096 tokens cost."""

    gflops: float  # of a forward pass of one document
    megabytes: float  # of the arrays of a training step of two
    seconds: float  # of that step


def cost(config: ModelConfig, params: Any) -> Cost:
    """FLOPs, memory and time of the longest documents."""
    batch = draw(jax.random.key(0), LENGTHS[-1], 2)

    def forward(params: Any, tokens: Array) -> Array:
        return models.apply(config, params, tokens).logits

    def loss(params: Any) -> Array:
        return small.cross_entropy(forward(params, batch["tokens"]), batch)

    count = flops.count(forward, params, batch["tokens"][:1]).flops
    step = jax.jit(jax.grad(loss)).lower(params).compile()
    jax.block_until_ready(step(params))
    start = time.perf_counter()
    jax.block_until_ready(step(params))
    seconds = time.perf_counter() - start
    planned = getattr(step.memory_analysis(), "temp_size_in_bytes", 0)
    return Cost(count / 1e9, planned / 1e6, seconds)


def tested(config: ModelConfig, params: Any, length: int, count: int = 256) -> float:
    """The share of right answers to `count` documents of that length."""
    apply = jax.jit(
        lambda tokens: models.apply(config, params, tokens).logits[:, -ASKED:, :ANSWERS]
    )
    part = 2 * LENGTHS[-1] // length
    right = []
    for start in range(0, count, part):
        batch = draw(jax.random.fold_in(jax.random.key(1), start), length, part)
        last = {name: values[:, -ASKED:] for name, values in batch.items()}
        right.append(small.accuracy(apply(batch["tokens"]), last))
    return float(jnp.stack(right).mean())


def study(name: str, share: float = 1.0, seed: int = 0) -> tuple[list[float], Cost]:
    """(accuracy at each length, cost) of a model after that share of each stage's steps."""
    config = MODELS[name]

    def forward(params: Any, tokens: Array) -> Array:
        return models.apply(config, params, tokens).logits

    params = models.init(config, jax.random.key(seed))
    for length, batch, whole, rate in STAGES:
        steps = max(round(share * whole), 2)
        documents = partial(draw, length=length, batch=batch)
        rates = optax.warmup_cosine_decay_schedule(0, rate, min(20, steps - 1), steps)
        optimizer = optax.adam(rates)
        params, [record] = small.train(
            forward, params, documents, optimizer, steps, steps, seed=seed
        )
        print(f"{name}, {length:,} tokens: loss {record['loss']:.3f}", flush=True)
    return [tested(config, params, length) for length in LENGTHS], cost(config, params)


def draw_figure(results: dict[str, tuple[list[float], Cost]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (name, (accuracies, price)) in zip(small.COLORS, results.items(), strict=False):
        left.plot(LENGTHS, accuracies, "o-", color=color, label=name)
        right.bar(name, price.megabytes, color=color)
        right.annotate(f"{price.seconds:.1f} s", (name, price.megabytes), ha="center", va="bottom")
    left.axhline(1 / ANSWERS, color="#888888", linestyle=":", linewidth=1, label="chance")
    left.set(xscale="log", ylim=(0, 1.05), xlabel="tokens of a document", ylabel="right answers")
    left.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    left.minorticks_off()
    left.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=8)
    right.set(ylabel="MB of a training step")
    right.set_title("two documents of 4,096 tokens", fontsize=10)
    right.margins(y=0.12)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0, help="of each stage's steps")
    parser.add_argument("--out", default="long_documents.png")
    options = parser.parse_args()
    results = {name: study(name, options.share) for name in MODELS}
    head = "".join(f"{length:>8,}" for length in LENGTHS)
    print(f"{'right answers at':<18}{head}   GFLOP      MB       s")
    for name, (accuracies, price) in results.items():
        cells = "".join(f"{accuracy:>8.1%}" for accuracy in accuracies)
        print(f"{name:<18}{cells}{price.gflops:>8.2f}{price.megabytes:>8.0f}{price.seconds:>8.2f}")
    small.save_figure(lambda: draw_figure(results), options.out)


if __name__ == "__main__":
    main()
