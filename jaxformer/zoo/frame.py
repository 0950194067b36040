"""What all approximations share: projections, rotations, and the refusal of unsupported options."""

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
    system,
    config: ModelConfig,
    mix: Callable,
    spec: Tree = None,
    has_weights: bool = True,
    **rest: Any,
) -> Mixer:
    """A mixer that projects x, rotates queries and keys, calls `mix`, and projects back.

    `mix(params, context, **heads)` gives the output of the heads, or (output, state). Raises
    ConfigError for options of attention that an approximation does not have.
    """
    name = type(system).__name__
    spec = spec or attention_spec(config)
    positions = config.positions
    biased = isinstance(positions, (Alibi, AttentionPositions, Relative)) or callable(positions)
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
            raise NotImplementedError(
                f"{name} keeps no attention maps; models.mixers.attention (mixer=None) does"
            )
        maps = {name: params[name] for name in spec if name.endswith(("query", "key", "value"))}
        heads = linear_maps("btd,dnh->btnh", x, maps)
        if isinstance(positions, Rope):
            for projection, head in heads.items():
                if not projection.endswith("value"):
                    rotated = rope(head, context.positions, positions, context.text_lengths)
                    heads[projection] = rotated
        out = mix(params, context, **heads)
        out, state = out if isinstance(out, tuple) else (out, None)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state)

    return Mixer(spec, apply, **rest)


def options(config: ModelConfig, context: Context) -> dict[str, Any]:
    """The mask and the dropout of a layer, as keyword arguments of an attention function."""
    return dict(
        mask=context.mask,
        dropout_rate=config.attention_dropout_rate,
        dropout_key=context.dropout_key,
    )


def zero_padding(context: Context, out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """`out` with zeros where a token is padding.

    The mask may let padding see tokens, for heads that pool `position_0`.
    """
    if context.padding_mask is None:
        return out
    return jnp.where(context.padding_mask[:, :, None, None], out, 0)


def refuse_packed(context: Context, out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """`out` with NaN in rows of several segments.

    Blocks and numbered global tokens belong to the row, not to each of its segments.
    """
    if context.padding_mask is None:
        return out
    T = out.shape[1]
    return visibility(context.mask, T, T, "").refuse_several(out)


def by_layer(seed: int, layers: int, draw: Callable) -> Tree:
    """draw(key) for each layer, `[L, ...]`.

    It is computed once, at trace time, because it is the same in every step.
    """
    # "allow": the loop forbids transfers while a step is traced
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        key = random_key(seed, "seed of a mixer")
        keys = jax.vmap(partial(random.fold_in, key))(jnp.arange(layers))
        return jax.vmap(draw)(keys)
