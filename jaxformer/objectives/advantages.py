"""How the rewards of a prompt's G answers become advantages: (rewards [B, G]) -> [B, G]."""

from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError

EPSILON = 1e-4  # added to the deviation of a group's rewards


def group_relative(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """(r - mean) / (std + 1e-4) in each group: GRPO. The variance is divided by G - 1.

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    return group_centred(rewards) / (rewards.std(axis=1, keepdims=True, ddof=1) + EPSILON)


def group_centred(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """r - mean of its group: Dr. GRPO. Liu et al. 2025, arXiv:2503.20783, section 3.2."""
    if rewards.shape[1] < 2:
        raise ConfigError(
            "objective.advantages: each prompt has one answer, so there is none to compare it "
            "with; give two answers or more (data.group), or advantages of your own"
        )
    return rewards - rewards.mean(axis=1, keepdims=True)


def leave_one_out(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """r - mean of the other rewards of its group: RLOO. Ahmadian et al. 2024, arXiv:2402.14740."""
    G = rewards.shape[1]
    return group_centred(rewards) * (G / (G - 1))
