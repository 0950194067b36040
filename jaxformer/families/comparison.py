"""How two models differ in what the same weights compute."""

from typing import Any

from flax.traverse_util import flatten_dict

from jaxformer import models
from jaxformer.families.settings import shortest_pattern
from jaxformer.families.weights import Config
from jaxformer.models.config import EncoderDecoder
from jaxformer.params import paths
from jaxformer.zoo.bigbird import BigBird
from jaxformer.zoo.longformer import Longformer


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The fields, by name, in which two models differ in what the same weights compute, or how many."""
    fields, others = fields_with_effect(one), fields_with_effect(other)
    pairs = {name: (fields.get(name), others.get(name)) for name in fields | others}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def fields_with_effect(config: Config) -> dict[str, Any]:
    """The fields that change what a trained model computes, equal for equal models; without what each call decides."""
    if isinstance(config, EncoderDecoder):
        sides = {"encoder": fields_with_effect(config.encoder), "decoder": fields_with_effect(config.decoder)}
        return flatten_dict(sides, sep=".") | {"share_embeddings": config.share_embeddings}
    biases = [path for path in paths(models.spec(config)) if path.endswith("/bias")]
    mixers = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    fields = vars(config) | {
        "num_kv_heads": config.kv_heads, "head_width": config.head_size, "d_ff": config.ff_width, "use_bias": biases,
        "tie_embeddings": config.tie_embeddings or not config.heads, "attention_scale": config.score_scale,
        "mup": config.tie_embeddings and isinstance(config.init_std, models.MuP),  # divides logits
        "mixer": shortest_pattern([_mixer_in_file(mixer) for mixer in mixers]),
    }  # fmt: skip
    ignored = ("remat", "unroll", "attention_implementation", "init_std", "dropout_rate", "attention_dropout_rate")
    return {name: value for name, value in fields.items() if name not in ignored}


def _mixer_in_file(mixer):
    """The mixer without what files do not say: global tokens and random blocks."""
    fields = {Longformer: ("window",), BigBird: ("block", "random")}.get(type(mixer))
    return mixer if fields is None else tuple(getattr(mixer, field) for field in fields)
