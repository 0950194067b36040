"""Random settings that several families have, and random images."""

import numpy as np


def rope(r) -> dict:
    """Any of the documented kinds, within and beyond the context that it was made for."""
    original, factor = r.choice([4, 6, 16]), r.choice([1.0, 2.0, 3.5])
    pairs = 3 if r.random() < 0.8 else 2
    kinds = dict(
        default={},
        linear=dict(factor=factor),
        dynamic=dict(factor=factor),
        yarn=dict(factor=factor, original_max_position_embeddings=original)
        | pick(
            r,
            beta_fast=[8, 32],
            beta_slow=[1, 2],
            truncate=[False],
            attention_factor=[0.7],
            mscale=[0.5],
        )
        | pick(r, mscale_all_dim=[0.9]),
        longrope=dict(
            original_max_position_embeddings=original,
            factor=factor,
            short_factor=[r.uniform(1, 2) for _ in range(pairs)],
            long_factor=[r.uniform(1, 4) for _ in range(pairs)],
        )
        | pick(r, attention_factor=[1.3]),
        llama3=dict(
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    )
    kind = r.choice(list(kinds))
    more = pick(r, partial_rotary_factor=[0.5, 1.0]) if r.random() < 0.5 else {}
    return dict(rope_type=kind, rope_theta=r.choice([50.0, 10_000.0])) | kinds[kind] | more


def pick(r, **choices) -> dict:
    """Some of the choices."""
    return {name: r.choice(values) for name, values in choices.items() if r.random() < 0.4}


def image_sizes(r) -> dict:
    """Images in patches; pixels may be left over at the bottom and at the right."""
    patch = r.choice([2, 4])
    image = r.choice([patch * 3, patch * 2 + 1, [patch * r.randint(1, 3), patch * r.randint(1, 3)]])
    return dict(image_size=image, patch_size=patch, num_channels=r.choice([1, 3]))


def images(config, rng) -> np.ndarray:
    """Two images of the size that a model expects."""
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return rng.normal(size=(2, config.num_channels, height, width)).astype(np.float32)


def hidden_patches(config, rng) -> np.ndarray:
    """Flags [2, patches] of the patches that the mask token replaces."""
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    count = (height // config.patch_size) * (width // config.patch_size)
    return rng.random((2, count)) < 0.5
