"""Exchange with other libraries: `flax`, `export` and `safetensors`.

`flax` turns our models into Flax modules, and Flax layers into parts of our models. `export`
writes the forward pass for programs that run without this package. `safetensors` reads and writes
files of tensors. Hugging Face checkpoints are in `jaxformer.families`.
"""

import importlib


def __getattr__(name: str):
    if name in ("export", "flax", "safetensors"):
        return importlib.import_module(f"jaxformer.interop.{name}")
    raise AttributeError(f"module 'jaxformer.interop' has no attribute {name!r}")
