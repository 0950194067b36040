"""What the experiments of this folder share: a short training loop, and how a figure is written.

`train` trains any function from tokens to logits. A batch is a dictionary of `tokens`, `labels` and
`weights` [B, T]. It is drawn from a key, so the same (seed, step) gives the same batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxformer.tools.analysis import figures

# Okabe & Ito 2008: readers with every kind of colour vision tell these colours apart
COLORS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
LEAST_FONT_SIZE = 10  # points; the book shows a figure at about half its size
MOST_TICKS = 6  # of an axis

Batch = dict[str, Array]
Forward = Callable[[Any, Array], Array]  # (params, tokens [B, T]) -> logits [B, T, V]


def cross_entropy(logits: Array, batch: Batch) -> Array:
    """sum w (-log p(label)) / sum w, in nats, with the weights w of the batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def accuracy(logits: Array, batch: Batch) -> Array:
    """The share of labels that are the likeliest token, with the weights of the batch."""
    is_right = logits.argmax(axis=-1) == batch["labels"]
    return (is_right * batch["weights"]).sum() / batch["weights"].sum()


def copies(tree: Any, count: int) -> Any:
    """The tree with each leaf repeated, [count, ...]: models that `jax.vmap` trains side by side.

    Their loss is the mean over models. Adam divides by the size of gradients, so each model trains
    as it would alone.
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def previous_tokens(key: Array, vocabulary: int, batch: int, length: int) -> Batch:
    """Random tokens. The label of a token is the token before it; the first one has no weight."""
    tokens = jax.random.randint(key, (batch, length), 0, vocabulary)
    weights = jnp.broadcast_to(jnp.arange(length)[None] > 0, tokens.shape).astype(jnp.float32)
    return {"tokens": tokens, "labels": jnp.roll(tokens, 1, axis=1), "weights": weights}


def train(
    forward: Forward,
    params: Any,
    draw: Callable[[Array], Batch],
    optimizer: optax.GradientTransformation,
    steps: int,
    every: int,
    measure: Callable[[Any], dict[str, Array]] | None = None,
    seed: int = 0,
) -> tuple[Any, list[dict]]:
    """Trains for `steps` steps; returns (parameters, records), a record each `every` steps.

    A record holds the step, the mean training loss since the last record, and the numbers of
    `measure(params)`.
    """
    key = jax.random.key(seed)
    state = optimizer.init(params)
    measured = jax.jit(measure) if measure else lambda params: {}

    def loss_of(params, batch):
        return cross_entropy(forward(params, batch["tokens"]), batch)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, step):
        batch = draw(jax.random.fold_in(key, step))
        loss, gradient = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    records = []
    losses = []
    params = jax.tree.map(jnp.array, params)  # a copy: `update` donates its arguments
    for step in range(1, steps + 1):
        params, state, loss = update(params, state, step)
        losses.append(loss)
        if step % every == 0:
            numbers = {name: jax.device_get(value) for name, value in measured(params).items()}
            records.append({"step": step, "loss": float(jnp.stack(losses).mean()), **numbers})
            losses = []
    return params, records


def save_figure(draw: Callable[[], Any], path: str, colors: int = 128) -> None:
    """Writes the figure that `draw` returns into a PNG file, and prints where it is.

    A file of that many colours is a quarter as large as one of all colours.
    """
    from PIL import Image  # matplotlib writes with it

    written = figures.save(lambda: readable(draw()), path)
    with Image.open(written) as image:
        few = image.convert("RGB").quantize(colors, dither=Image.Dither.NONE)
    few.save(written, optimize=True)
    print(f"figure: {written}")


def readable(figure: Any) -> Any:
    """The figure with few ticks and no small letters."""
    from matplotlib.text import Text
    from matplotlib.ticker import LogLocator, MaxNLocator

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            locator = axis.get_major_locator()
            if isinstance(locator, MaxNLocator):
                locator.set_params(nbins=MOST_TICKS - 1)
            elif isinstance(locator, LogLocator):
                locator.set_params(numticks=MOST_TICKS)
        axes.tick_params(labelsize=LEAST_FONT_SIZE)
    for text in figure.findobj(Text):
        text.set_fontsize(max(text.get_fontsize(), LEAST_FONT_SIZE))
    return figure
