"""Why scores are divided by sqrt(d): the variance of q . k grows with d, and the softmax that follows saturates.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1, footnote 4. Queries and keys are independent with mean 0 and variance 1,
as at the start of training; then q . k has variance d, and q . k / sqrt(d) has variance 1.

Expected (seed 0): variance within 5 % of d, and of 1. Of 128 keys the entropy is 4.37 nats at every d with the division, where
log 128 is 4.85; without it the entropy falls with d, and with it the slope of the softmax, mean a (1 - a).
Time: 10 seconds.
Command: python -m experiments.theory.dot_products [--out dot_products.png]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.tools.analysis import attention_maps, figures

KEYS, QUERIES = 128, 4096
WIDTHS = (4, 16, 64, 256, 1024)


def measure(d: int, scaled: bool) -> dict[str, float]:
    """Variance of the scores, entropy of the softmax in nats, and mean of its slope a (1 - a) times the number of keys."""
    query, key = (jax.random.normal(jax.random.key(i), (n, d)) for i, n in enumerate((QUERIES, KEYS)))
    scores = query @ key.T * (d**-0.5 if scaled else 1)
    weights = jax.nn.softmax(scores, axis=-1)
    entropy = attention_maps.entropy(weights[None, None]).mean()
    slope = KEYS * jnp.mean(weights * (1 - weights))
    return {"variance": float(scores.var()), "entropy": float(entropy), "slope": float(slope)}


def draw(found: dict[bool, list[dict[str, float]]]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("variance", "entropy", "slope"), strict=True):
        for scaled, rows in found.items():
            label = "q . k / sqrt(d)" if scaled else "q . k"
            axes.plot(WIDTHS, [row[name] for row in rows], "o-", color=figures.COLORS[not scaled], label=label)
        axes.set(xscale="log", xlabel="d", title={"entropy": "entropy (nats)", "slope": "slope, 128 a (1 - a)"}.get(name, name))
        axes.grid(alpha=0.25)
    figure.axes[0].set_yscale("log")
    figure.axes[0].legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="dot_products.png")
    options = parser.parse_args()
    found = {scaled: [measure(d, scaled) for d in WIDTHS] for scaled in (True, False)}
    print(f"{'d':>6}  {'':<16}{'variance':>10}{'entropy':>10}{'slope':>10}")
    for i, d in enumerate(WIDTHS):
        for scaled, rows in found.items():
            numbers = "".join(f"{rows[i][name]:>10.3f}" for name in ("variance", "entropy", "slope"))
            print(f"{d:>6}  {'q . k / sqrt(d)' if scaled else 'q . k':<16}{numbers}")
    print(f"figure: {figures.save(lambda: draw(found), options.out)}")
    assert np.isfinite([row["variance"] for rows in found.values() for row in rows]).all()


if __name__ == "__main__":
    main()
