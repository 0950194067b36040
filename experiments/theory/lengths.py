"""Length extrapolation of positional encodings: trained at 64 tokens, tested at 64 to 512.

Press et al. 2022, arXiv:2108.12409 (ALiBi); Kazemnejad et al. 2023, arXiv:2305.19466 (no positions
against the others); Chen et al. 2023, arXiv:2306.15595, and Peng et al. 2023, arXiv:2309.00071
(rotary positions scaled without training). The task is to say the token before this one, which is
equally hard at every position and length. The last 32 tokens of a text are scored. Each encoding of
the library has the same model, batches and steps. Rotary positions are also scaled at the test, in
each way that the library has.

Not tested: LongRoPE, whose factors come from a search on a trained model, and the positions of
Transformer-XL, which are a mixer (`zoo.transformer_xl`).

Expected (seed 0; accuracy at 64, 128, 256 and 512 tokens in %): ALiBi and Shaw 100 everywhere. T5
bias 100, 66, 28, 18 (with max_distance=32: 100, 86, 49, 22). Rotary 100, 91, 23, 6; scaled at the
test, YaRN 100, 100, 98, 96; Llama 3 100, 100, 100, 91; NTK, dynamic or not, 100, 100, 90, 22;
linear 100, 16, 8, 6, because it moves neighbours together. Sinusoidal 100, 10, 7, 7. No positions
77, 37, 22, 14: it learns more slowly. Learned and axial positions are refused: "128 tokens do not
fit the 64 learned positions". The task asks for a near token, which suits ALiBi: it prefers near
keys.
Time: four minutes of CPU time.
Command: python -m experiments.theory.lengths [--steps 500] [--out lengths.png]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.nn.initializers import normal

from experiments.theory import small
from jaxformer import models, ops
from jaxformer.errors import ConfigError
from jaxformer.models import Alibi, Axial, Learned, ModelConfig, Relative, Sinusoidal
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.ops.positions import NTK, Linear, Llama3, Rope, YaRN
from jaxformer.params import Spec

TRAINED, LENGTHS = 64, (64, 128, 256, 512)
VOCABULARY, SCORED, BATCH = 16, 32, 16


def shaw(config: ModelConfig, reach: int = 16) -> Mixer:
    """Attention with relative keys in each layer (Shaw et al. 2018).

    All distances of `reach` or more share one key, in each direction.
    """

    def attend(params, context, query, key, value, **options):
        return ops.attention(
            query, key, value, **options, bias=ops.shaw(query, params["relative_keys"])
        )

    table = Spec((2 * reach + 1, config.head_size), (None, "head"), normal(config.init_std))
    return attention(config, extra={"relative_keys": table}, attend=attend)


BASE = ModelConfig(VOCABULARY, 2, 64, 4, context_length=TRAINED, positions=None, init_std=0.1)
ENCODINGS = {
    "none": BASE,
    "sinusoidal": replace(BASE, positions=Sinusoidal()),
    "learned": replace(BASE, positions=Learned()),
    "axial": replace(BASE, positions=Axial((8, 8), (32, 32))),
    "rotary": replace(BASE, positions=Rope()),
    "ALiBi": replace(BASE, positions=Alibi()),
    # the number in brackets: from this distance on, all distances share one value
    "T5 bias (128)": replace(BASE, positions=Relative(bidirectional=False)),
    "T5 bias (32)": replace(BASE, positions=Relative(max_distance=32, bidirectional=False)),
    "Shaw (16)": replace(BASE, mixer=shaw),
}
# {name: the scaling of rotary positions to `factor` times the trained length, without training}
SCALINGS: dict[str, Callable[[float], Any]] = {
    "linear": Linear,
    "NTK": NTK,
    "dynamic NTK": lambda factor: NTK(1.0, TRAINED),
    "YaRN": lambda factor: YaRN(factor, TRAINED),
    "Llama 3": lambda factor: Llama3(factor, TRAINED),
}


def rescaled(name: str, factor: float) -> ModelConfig:
    """The rotary model with that scaling."""
    return replace(BASE, positions=Rope(scaling=SCALINGS[name](factor)))


def draw(key: Array, length: int = TRAINED) -> small.Batch:
    return small.previous_tokens(key, VOCABULARY, BATCH, length)


def train(config: ModelConfig, steps: int, seed: int = 0) -> Any:
    """Parameters of a model that was trained on texts of `TRAINED` tokens."""
    forward = lambda params, tokens: models.apply(config, params, tokens).logits
    initial = models.init(config, jax.random.key(seed))
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    params, _ = small.train(forward, initial, draw, optimizer, steps, steps, seed=seed)
    return params


def tested(config: ModelConfig, params: Any, length: int) -> tuple[float, float]:
    """(accuracy, loss in nats) on the last `SCORED` tokens of texts of that length.

    Raises ConfigError if a table of positions is too short.
    """
    batch = draw(jax.random.key(1), length)
    batch["weights"] = batch["weights"] * (jnp.arange(length)[None] >= length - SCORED)
    logits = jax.jit(lambda params: models.apply(config, params, batch["tokens"]).logits)(params)
    return float(small.accuracy(logits, batch)), float(small.cross_entropy(logits, batch))


def study(
    name: str, steps: int, lengths: Sequence[int] = LENGTHS
) -> dict[str, list[tuple[float, float] | str]]:
    """{encoding: the result of `tested` at each length, or the message of its ConfigError}.

    Rotary positions are tested with every scaling, too.
    """
    config = ENCODINGS[name]
    params = train(config, steps)
    results = {}
    # {encoding: the config for `factor` times the trained length}
    encodings: dict[str, Callable[[float], ModelConfig]] = {name: lambda factor: config}
    if name == "rotary":
        encodings |= {f"rotary, {scaling}": partial(rescaled, scaling) for scaling in SCALINGS}
    for encoding, config_for in encodings.items():
        results[encoding] = []
        for length in lengths:
            try:
                results[encoding].append(tested(config_for(length / TRAINED), params, length))
            except ConfigError as refusal:
                results[encoding].append(str(refusal))
    return results


def draw_figure(results: dict[str, list], lengths: Sequence[int] = LENGTHS) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    groups = {
        "encodings": [name for name in results if name in ENCODINGS],
        "rotary positions, scaled at the test": [n for n in results if n.startswith("rotary")],
    }
    for axes, (title, names) in zip(panels, groups.items(), strict=True):
        for i, name in enumerate(names):
            values = [value[0] for value in results[name] if not isinstance(value, str)]
            label = name if len(values) == len(lengths) else f"{name}: refused beyond {TRAINED}"
            # markers get smaller, so that all can be seen where curves overlap
            style = dict(
                color=small.COLORS[i % 6], linestyle="-" if i < 6 else "--", markersize=11 - i
            )
            axes.plot(lengths[: len(values)], values, "osv^Dx*Ph"[i], label=label, **style)
        axes.axhline(1 / VOCABULARY, color="#888888", linestyle=":", linewidth=1, label="chance")
        axes.set(
            xscale="log",
            xticks=lengths,
            xticklabels=lengths,
            ylim=(0, 1.05),
            xlabel="tokens of the test",
            title=title,
        )
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[0].set_ylabel("accuracy, last 32 tokens")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", default="lengths.png")
    options = parser.parse_args()
    results, refusals = {}, {}
    print(f"{'accuracy (loss) at':<22}" + "".join(f"{length:>16}" for length in LENGTHS))
    for name in ENCODINGS:
        for encoding, values in study(name, options.steps).items():
            results[encoding] = values
            refusals[encoding] = next((value for value in values if isinstance(value, str)), None)
            cells = [
                "refused" if isinstance(value, str) else f"{value[0]:.1%} ({value[1]:.2f})"
                for value in values
            ]
            print(f"{encoding:<22}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    for encoding, message in refusals.items():
        if message:
            print(f"{encoding}: {message}")
    small.save_figure(lambda: draw_figure(results), options.out)


if __name__ == "__main__":
    main()
