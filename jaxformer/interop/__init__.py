"""Models and weights of other libraries. `interop.huggingface` loads and saves checkpoints, `interop.flax` wraps modules."""

import importlib


def __getattr__(name: str):
    if name in ("flax", "huggingface", "safetensors"):
        return importlib.import_module(f"jaxformer.interop.{name}")
    raise AttributeError(f"module 'jaxformer.interop' has no attribute {name!r}")
