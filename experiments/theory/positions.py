"""Every positional encoding of the library, and its relative-shift property: which scores depend on key - query alone.

Sinusoidal (Vaswani et al. 2017), learned, axial (Kitaev et al. 2020), rotary (Su et al. 2021), ALiBi (Press et al. 2022),
relative tables of T5 (Raffel et al. 2020) and of Shaw et al. 2018, here with random tables.

Expected (seed 0): along a diagonal of the scores nothing changes (less than 1e-4 of the largest score) for all but learned and
axial positions.
Time: 15 seconds.
Command: python -m experiments.theory.positions [--out positions.png]
"""

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer import models
from jaxformer.analysis import encodings, figures
from jaxformer.models import ModelConfig, Sinusoidal
from jaxformer.models.config import Alibi, Axial, Learned, Relative
from jaxformer.ops.positions import Rope, shaw

LENGTH, WIDTH, HEADS = 64, 64, 8


def relative_keys(config: ModelConfig):
    """The bias of Shaw et al. for queries that are all alike."""
    query = jax.random.normal(jax.random.key(1), (1, 1, HEADS, config.head_size))
    table = jax.random.normal(jax.random.key(2), (2 * 16 + 1, config.head_size))
    return shaw(jnp.broadcast_to(query, (1, LENGTH, *query.shape[2:])), table)


KINDS = {
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "axial": Axial((8, LENGTH // 8), (WIDTH // 2, WIDTH // 2)),
    "rotary": Rope(),
    "ALiBi": Alibi(),
    "T5": Relative(max_distance=32),
    "Shaw": relative_keys,
}


def measure() -> dict[str, encodings.Encoding]:
    """The encoding of each kind."""
    found = {}
    for name, positions in KINDS.items():
        config = replace(ModelConfig(1, 1, WIDTH, HEADS, LENGTH), positions=positions)
        found[name] = encodings.encoding(config, models.init(config, jax.random.key(0)), LENGTH)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="positions.png")
    options = parser.parse_args()
    found = measure()
    for name, encoding in found.items():
        print(f"{name:<12} largest change along a diagonal: {encoding.shift_error():.1e} of the largest score")
    print(f"figure: {figures.save(lambda: figures.positions(found), options.out)}")


if __name__ == "__main__":
    main()
