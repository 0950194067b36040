"""What all mixers of approximations share: projections, rotations, and the refusal of what an approximation cannot do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.models.config import Alibi, AttentionPositions, ModelConfig, Relative
from jaxformer.models.layer import Context, Mixer, MixerOutput, linear, linear_maps
from jaxformer.models.mixers.attention import attention_spec
from jaxformer.ops.positions import Rope, rope
from jaxformer.params import Tree, random_key
from jaxformer.zoo.visible import visibility


def approximation(
    system, config: ModelConfig, mix: Callable, spec: Tree = None, has_weights: bool = True, **rest: Any
) -> Mixer:
    """The frame of all: project x, rotate queries and keys, `mix(params, context, **heads)`, project back."""
    name, spec = type(system).__name__, spec or attention_spec(config)
    biased = isinstance(config.positions, (Alibi, AttentionPositions, Relative)) or callable(config.positions)
    none = "has none; models.mixers.attention does"
    no_weights = "has no weights to drop; set it to 0 (model.dropout_rate acts on outputs)"
    for field, other, expected in (
        ("attention_softcap", config.attention_softcap is not None, none),
        ("attention_scale", config.score_scale is not None, none),
        ("positions", biased, none),
        ("attention_dropout_rate", config.attention_dropout_rate and not has_weights, no_weights),
    ):
        if other:
            raise ConfigError(f"model.{field}={getattr(config, field)}: {name} {expected}")

    def apply(params, x, context: Context) -> MixerOutput:
        if context.tap.asks("weights"):
            raise NotImplementedError(f"{name} keeps no attention maps; models.mixers.attention (mixer=None) does")
        maps = {name: params[name] for name in spec if name.endswith(("query", "key", "value"))}
        heads = linear_maps("btd,dnh->btnh", x, maps)
        for projection in heads:
            if isinstance(config.positions, Rope) and not projection.endswith("value"):
                turned = rope(heads[projection], context.positions, config.positions, context.text_lengths)
                heads[projection] = turned
        out = mix(params, context, **heads)
        out, state = out if isinstance(out, tuple) else (out, None)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state)

    return Mixer(spec, apply, **rest)


def options(config: ModelConfig, context: Context) -> dict[str, Any]:
    return dict(mask=context.mask, dropout_rate=config.attention_dropout_rate, dropout_key=context.dropout_key)


def zero_padding(context: Context, out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Zeros where a token is padding, also where the mask lets padding see something (heads that pool `position_0`)."""
    return out if context.padding_mask is None else jnp.where(context.padding_mask[:, :, None, None], out, 0)


def refuse_packed(context: Context, out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """NaN in a row of several segments: blocks and numbered global tokens belong to the row, not to each of its segments."""
    T = out.shape[1]
    return out if context.padding_mask is None else visibility(context.mask, T, T, "").refuse_several(out)


def by_layer(seed: int, layers: int, draw: Callable) -> Tree:
    """draw(key) for each layer, `[L, ...]`, once while tracing: a step does not draw anew what is always the same."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # the loop forbids transfers while a step is traced
        keys = jax.vmap(partial(random.fold_in, random_key(seed, "seed of a mixer")))(jnp.arange(layers))
        return jax.vmap(draw)(keys)
