"""Folders that keep all experts of a layer in one tensor, as transformers 5 has them in memory.

`save_pretrained(folder, save_original_format=False)` writes them so. Published files have three
matrices for each expert.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxformer.interop import safetensors

FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)$")


class Names(NamedTuple):
    """The names in published files. {} stands for the expert."""

    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    router: str = "mlp.gate.weight"


# by model_type
NAMES = dict.fromkeys(("qwen2_moe", "qwen3_moe", "deepseek_v3"), Names())
NAMES["mixtral"] = Names(
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
    router="block_sparse_moe.gate.weight",
)


class Piece(NamedTuple):
    """A part of a tensor, with the interface of an open file."""

    file: Any  # the open file of the tensor
    tensor: str
    index: tuple  # of the part

    def get_tensor(self, name: str) -> np.ndarray:
        """Reads the part alone."""
        return self.file.get_slice(self.tensor)[self.index]


def split(file: safetensors.Files) -> safetensors.Files:
    """The folder as if each expert had its own tensors. Without fused ones, the folder itself."""
    of_type = NAMES.get(str(file.config.get("model_type")))
    if of_type is None or not any(map(FUSED.match, file.names)):
        return file
    names = {}
    opened: dict[str, Any] = {}
    for name, (shape, dtype) in file.names.items():
        fused = FUSED.match(name)
        if fused is None or len(shape) != 3:
            published = name.replace("mlp.gate.weight", of_type.router)
            names[published] = shape, dtype
            opened[published] = Piece(file.opened[name], name, (...,))
            continue
        E, outputs, inputs = shape
        parts = {of_type.down: slice(0, outputs)}
        if fused[2] == "gate_up_proj":
            half = outputs // 2
            parts = {of_type.gate: slice(0, half), of_type.up: slice(half, outputs)}
        for published, rows in parts.items():
            for expert in range(E):
                own = fused[1] + published.format(expert)
                names[own] = (rows.stop - rows.start, inputs), dtype
                opened[own] = Piece(file.opened[name], name, (expert, rows))
    return replace(file, names=names, opened=opened)
