"""Why scores are divided by sqrt(d): the variance of q . k grows with d and saturates the softmax.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1, footnote 4. Queries and keys are independent
with mean 0 and variance 1, as at the start of training. Then q . k has variance d, and
q . k / sqrt(d) has variance 1.

Expected (seed 0): the variance is within 5 % of d without the division, and of 1 with it. With the
division the entropy over 128 keys is 4.37 nats at every d (log 128 is 4.85). Without it the entropy
falls with d, and so does the slope of the softmax, the mean of a (1 - a).
Time: 10 seconds.
Command: python -m experiments.theory.dot_products [--out dot_products.png]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import small
from jaxformer.tools.analysis import attention_maps

KEYS, QUERIES = 128, 4096
WIDTHS = (4, 16, 64, 256, 1024)


def measure(d: int, scaled: bool) -> dict[str, float]:
    """Variance of the scores, entropy of the softmax in nats, and its slope.

    The slope is the mean of a (1 - a), times the number of keys.
    """
    query = jax.random.normal(jax.random.key(0), (QUERIES, d))
    key = jax.random.normal(jax.random.key(1), (KEYS, d))
    scores = query @ key.T * (d**-0.5 if scaled else 1)
    weights = jax.nn.softmax(scores, axis=-1)
    entropy = attention_maps.entropy(weights[None, None]).mean()
    slope = KEYS * jnp.mean(weights * (1 - weights))
    return {"variance": float(scores.var()), "entropy": float(entropy), "slope": float(slope)}


def draw(results: dict[bool, list[dict[str, float]]]):
    from matplotlib.figure import Figure

    labels = {
        "variance": "variance of a score",
        "entropy": "entropy of the weights (nats)",
        "slope": "slope of the softmax, 128 a (1 - a)",
    }
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, (name, ylabel) in zip(figure.subplots(1, 3), labels.items(), strict=True):
        for scaled, by_width in results.items():
            values = [measured[name] for measured in by_width]
            label = "q . k / sqrt(d)" if scaled else "q . k"
            axes.plot(WIDTHS, values, "o-", color=small.COLORS[not scaled], label=label)
        axes.set(xscale="log", xlabel="width d of a head (features)", ylabel=ylabel)
        axes.grid(alpha=0.25)
    figure.axes[0].set_yscale("log")
    figure.axes[1].set_ylim(0, None)
    figure.axes[2].set_ylim(0, None)
    figure.axes[0].legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="dot_products.png")
    options = parser.parse_args()
    results = {scaled: [measure(d, scaled) for d in WIDTHS] for scaled in (True, False)}
    print(f"{'d':>6}  {'':<16}{'variance':>10}{'entropy':>10}{'slope':>10}")
    for i, d in enumerate(WIDTHS):
        for scaled, by_width in results.items():
            numbers = "".join(f"{value:>10.3f}" for value in by_width[i].values())
            print(f"{d:>6}  {'q . k / sqrt(d)' if scaled else 'q . k':<16}{numbers}")
    small.save_figure(lambda: draw(results), options.out)
    for by_width in results.values():
        assert np.isfinite([measured["variance"] for measured in by_width]).all()


if __name__ == "__main__":
    main()
