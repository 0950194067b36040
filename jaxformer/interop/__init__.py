"""Models and weights of other libraries. `interop.huggingface` loads and saves checkpoints, `interop.flax` wraps modules,
`interop.export` writes the forward pass for programs that do not have this package."""

import importlib


def __getattr__(name: str):
    if name in ("export", "flax", "huggingface", "safetensors"):
        return importlib.import_module(f"jaxformer.interop.{name}")
    raise AttributeError(f"module 'jaxformer.interop' has no attribute {name!r}")
