"""How two models differ in what the same weights compute."""

from dataclasses import replace
from typing import Any

from flax.traverse_util import flatten_dict

from jaxformer import models
from jaxformer.families.qwen_moe import GatedShared
from jaxformer.families.settings import shortest_pattern
from jaxformer.families.tied_head import Config
from jaxformer.models.config import EncoderDecoder
from jaxformer.models.mixture import Mixture
from jaxformer.params import paths
from jaxformer.zoo.bigbird import BigBird
from jaxformer.zoo.clamped_mixture import ClampedMixture
from jaxformer.zoo.longformer import Longformer

# fields that do not change what a trained model computes, or that each call decides
WITHOUT_EFFECT = (
    "remat",
    "unroll",
    "attention_implementation",
    "init_std",
    "dropout_rate",
    "attention_dropout_rate",
)
# fields of `Mixture` that say how it is trained or executed
OF_TRAINING = (
    "balance_loss",
    "router_z_loss",
    "capacity",
    "device_capacity",
    "groups",
    "grouped_implementation",
)


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """{field: (its value in `one`, in `other`)}, for the fields that make two models different.

    Two models are different if the same weights compute different results in them, or if they have
    other weights.
    """
    fields, others = fields_with_effect(one), fields_with_effect(other)
    pairs = {name: (fields.get(name), others.get(name)) for name in fields | others}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def fields_with_effect(config: Config) -> dict[str, Any]:
    """The fields that change what a trained model computes. Equal models have equal fields.

    Options that each call decides are left out.
    """
    if isinstance(config, EncoderDecoder):
        sides = {
            "encoder": fields_with_effect(config.encoder),
            "decoder": fields_with_effect(config.decoder),
        }
        return flatten_dict(sides, sep=".") | {"share_embeddings": config.share_embeddings}
    biases = [path for path in paths(models.spec(config)) if path.endswith("/bias")]
    mixers = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    fields = vars(config) | {
        "num_kv_heads": config.kv_heads,
        "head_width": config.head_size,
        "d_ff": config.ff_width,
        "use_bias": biases,
        "tie_embeddings": config.tie_embeddings or not config.heads,
        "attention_scale": config.score_scale or config.head_size**-0.5,
        "mup": config.tie_embeddings and isinstance(config.init_std, models.MuP),  # divides logits
        "block": models.evaluation(config).block,  # without stochastic depth
        "mixer": shortest_pattern([_mixer_in_file(mixer) for mixer in mixers]),
        "feedforward": _without_training(config.feedforward),
    }
    return {name: value for name, value in fields.items() if name not in WITHOUT_EFFECT}


def _without_training(feedforward: Any) -> Any:
    """A feed-forward with the defaults of the fields that say how it is trained or executed."""
    if isinstance(feedforward, tuple):
        return tuple(map(_without_training, feedforward))
    if isinstance(feedforward, Mixture):
        defaults = {name: getattr(Mixture, name) for name in OF_TRAINING}
        # a lone weight that is 1 is refused without a balance loss
        return Mixture(**vars(feedforward) | defaults | {"balance_loss": 1.0})
    if isinstance(feedforward, GatedShared):
        return replace(feedforward, mixture=_without_training(feedforward.mixture))
    if isinstance(feedforward, ClampedMixture):
        return replace(feedforward, balance_loss=0.0)
    return feedforward


def _mixer_in_file(mixer):
    """The fields of a mixer that files have.

    They say nothing of global tokens, nor of the choice of random blocks.
    """
    fields = {Longformer: ("window",), BigBird: ("block", "random")}.get(type(mixer))
    return mixer if fields is None else tuple(getattr(mixer, field) for field in fields)
