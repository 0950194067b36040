"""Golden models: small ones of other people's classes, as files they wrote, beside what they
answered and their gradients.

Every folder of tests/fixtures/golden holds what transformers' `save_pretrained` wrote
(`config.json`, `model.safetensors`: float32, under the names that files have),
`gradients.safetensors` (of the loss, under the same names) and `witness.npz`:

    inputs/NAME   what the model was called with, by its own argument names
    outputs/NAME  what it answered: those float32 weights evaluated in float64; 0 where an
                  attention mask is 0
    loss          sum over NAME of (loss/NAME * outputs/NAME); its weights are 0 where an
                  attention mask is 0
    loss/NAME
    generated     [B, 64] where a model generates: greedily, from `prompt` under
                  `prompt_mask`, and never stopping
    rotations     [N, H, rounds, buckets / 2] what Reformer hashed with

Published files, which older versions wrote, hold the same under other names, which tests make from
these folders: LLaMA's `rope_theta`, `rope_scaling` with `type` and `torch_dtype`; BERT's
`LayerNorm.gamma` and `beta`; no `bert.` or `transformer.`. `python -m tests.golden [NAME ...]`
writes them anew and needs torch and transformers; `make parity` does so and compares.
"""

import json
from pathlib import Path

import numpy as np

from tests.golden.cases import cases
from tests.golden.families import CASES as FIRST

FIXTURES = Path(__file__).parents[1] / "fixtures" / "golden"
LATER = cases()
CASES = FIRST | LATER
NAMES = sorted(CASES)


def folder(name: str) -> Path:
    """Where the golden model NAME is kept."""
    return FIXTURES / name


def config(name: str) -> dict:
    """What its config.json says."""
    return json.loads((folder(name) / "config.json").read_text())


def witness(name: str) -> dict[str, np.ndarray]:
    """The arrays of its witness.npz."""
    with np.load(folder(name) / "witness.npz") as arrays:
        return dict(arrays)


def gradients(name: str) -> dict[str, np.ndarray]:
    """The gradient of its loss by every tensor of its model.safetensors, under that tensor's
    name."""
    from safetensors.numpy import load_file

    return load_file(folder(name) / "gradients.safetensors")
