"""Models of other libraries: `flax` wraps modules, `export` writes the forward pass for programs without this package.

`safetensors` reads and writes files of tensors. Hugging Face checkpoints are in `families`.
"""

import importlib


def __getattr__(name: str):
    if name in ("export", "flax", "safetensors"):
        return importlib.import_module(f"jaxformer.interop.{name}")
    raise AttributeError(f"module 'jaxformer.interop' has no attribute {name!r}")
