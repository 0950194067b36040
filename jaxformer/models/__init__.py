"""Models as data and pure functions: `spec(config)`, `init(config, key)`, `apply(config, params, tokens)`."""

from jaxformer.models.config import Learned, ModelConfig, Sinusoidal
from jaxformer.models.presets import PRESETS
from jaxformer.models.transformer import Output, apply, encode, head, init, spec

__all__ = ["PRESETS", "Learned", "ModelConfig", "Output", "Sinusoidal", "apply", "encode", "head", "init", "spec"]
