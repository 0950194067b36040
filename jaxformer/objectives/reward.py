"""Reward models: a number for a whole text, learned from preferences."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.reports import with_own
from jaxformer.objectives.objective import Batch, StepContext, in_both_forms
from jaxformer.objectives.preference import pair_sums
from jaxformer.ops.einsum import in_float32
from jaxformer.ops.losses import LossSums


@dataclass(frozen=True)
class RewardModel:
    """-log sigmoid(r(chosen) - r(rejected)) + centre (r(chosen) + r(rejected))^2.

    The batch is that of `objectives.preference`. The model's first head gives the reward:
    `Classification(1, pool="last", pooler=None)`. Bradley & Terry 1952; Ouyang et al. 2022,
    arXiv:2203.02155, equation 1; the second term: Eisenstein et al. 2023, arXiv:2312.09244.
    """

    centre: float = 0.0  # weight of the square of the rewards' sum, which keeps them near 0

    def __post_init__(self):
        check_numbers("objective.", self, centre=0)

    def evaluation(self) -> "RewardModel":
        return RewardModel()

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        rewards, output = text_rewards(model, params, batch, context)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -jax.nn.log_sigmoid(margins) + self.centre * jnp.square(rewards.sum(axis=1))
        return with_own(pair_sums(losses, rewards, batch["weights"], {}), output)


def text_rewards(
    model: Any, params: Any, batch: Batch, context: StepContext
) -> tuple[Float[Array, "B 2"], Any]:
    """(the rewards of the two texts of each pair, the model's output).

    Raises ConfigError for a head of another shape.

    A text has its last token, unless it is one token longer than the context.
    """
    B, two, T = batch["tokens"].shape
    texts = jnp.concatenate([batch["tokens"][..., :1], batch["labels"]], axis=-1)[..., :T]
    lengths = last_places(batch["answers"]) + 2  # the label of a place is the token after it
    is_text = jnp.arange(T)[None, None] < lengths[..., None]
    output = models.apply(
        model,
        params,
        texts.reshape(B * two, T),
        segment_ids=is_text.reshape(B * two, T).astype(jnp.int32),  # 0 is padding
        dropout_key=context.key,
        dtype=context.dtype,
    )
    rewards = output.logits
    if rewards is None or rewards.shape != (B * two, 1):
        shape = None if rewards is None else list(rewards.shape)
        raise ConfigError(
            f"RewardModel: the model's first head gives {shape}; expected [{B * two}, 1]: "
            'heads=(Classification(1, pool="last", pooler=None),)'
        )
    return in_float32(rewards).reshape(B, two), output


def last_places(flags: Float[Array, "B 2 T"]) -> Array:
    """The last place of each row that has a flag."""
    T = flags.shape[-1]
    return T - 1 - jnp.argmax(flags[..., ::-1] > 0, axis=-1)
