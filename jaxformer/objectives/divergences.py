"""How far one distribution of the next token is from another.

Each divergence is a function `(teacher, student) -> [B, T]` of log-probabilities `[B, T, V]`.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError


def forward_kl(
    teacher: Float[Array, "B T V"], student: Float[Array, "B T V"]
) -> Float[Array, "B T"]:
    """KL(teacher || student) = sum p (log p - log q): the student covers all that p does."""
    return expected_difference(teacher, teacher, student)


def reverse_kl(
    teacher: Float[Array, "B T V"], student: Float[Array, "B T V"]
) -> Float[Array, "B T"]:
    """KL(student || teacher) = sum q (log q - log p): the student stays where p is large.

    Gu et al. 2023, arXiv:2306.08543.
    """
    return expected_difference(student, student, teacher)


@dataclass(frozen=True)
class JensenShannon:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q; p is the teacher's.

    Near 0 and 1 it tends to 0, so these are refused. Agarwal et al. 2023, arXiv:2306.13649, eq. 1.
    """

    beta: float = 0.5  # weight of the teacher in m

    def __post_init__(self):
        if not 0 < self.beta < 1:
            raise ConfigError(
                f"objective.divergence.beta={self.beta}: there the divergence is 0; expected a "
                "number between 0 and 1, or divergence=forward_kl or reverse_kl"
            )

    def __call__(
        self, teacher: Float[Array, "B T V"], student: Float[Array, "B T V"]
    ) -> Float[Array, "B T"]:
        # of two -inf, logaddexp has a gradient of NaN; such a class counts in neither term
        possible = jnp.maximum(teacher, student) > -jnp.inf
        p, q = (jnp.where(possible, logs, 0) for logs in (teacher, student))
        # the probabilities are mixed, not their logarithms
        mean = jnp.logaddexp(p + math.log(self.beta), q + math.log1p(-self.beta))
        of_teacher = expected_difference(teacher, teacher, mean)
        of_student = expected_difference(student, student, mean)
        return self.beta * of_teacher + (1 - self.beta) * of_student


def expected_difference(weights: Array, one: Array, other: Array) -> Array:
    """sum over classes of exp(weights) (one - other); a class without weight counts as 0."""
    probabilities = jnp.exp(weights)
    possible = probabilities > 0
    # -inf - -inf is NaN: select before anything is subtracted
    one, other = jnp.where(possible, one, 0), jnp.where(possible, other, 0)
    return jnp.sum(probabilities * (one - other), axis=-1)
