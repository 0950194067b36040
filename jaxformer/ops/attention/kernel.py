"""The joint `Kernel`: an implementation of exact attention, one of ours or a user's own.

`attention(..., implementation=...)` and `ModelConfig.attention_implementation` take an
`Implementation`. Our own kernels are values of this class too (`KERNELS`).
`tools.kernel_check.check_kernel` compares a kernel with the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax import Array

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.call import Call

ALIASES = {"cuda": "gpu"}  # a GPU of NVIDIA has both names


@dataclass(frozen=True)
class Kernel:
    """An implementation of exact attention.

    It computes the same as `reference`, or says what it lacks.

    `attention(query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], call) -> [B, T, N, Hv]`,
    in the type of `value`; `call` is a `Call`. `refuses` takes the same arguments. It names the
    part of the call that the kernel cannot compute ("bias", "mask window(3)"), or returns None. It
    looks at shapes, types and the rule of the mask alone, because arrays are traced.
    """

    name: str  # in messages and in the log
    attention: Callable
    refuses: Callable
    # where a tuple of kernels may choose it, of "cpu", "gpu", "tpu"; (): everywhere
    platforms: tuple[str, ...] = ()

    def __post_init__(self):
        if not (isinstance(self.name, str) and self.name):
            raise ConfigError(f"Kernel.name={self.name!r}: expected a name, a text")
        for field in ("attention", "refuses"):
            if not callable(getattr(self, field)):
                expected = "expected a function (query, key, value, call)"
                raise ConfigError(f"Kernel({self.name!r}).{field}: {expected}")
        platforms = self.platforms
        if not (isinstance(platforms, tuple) and all(isinstance(each, str) for each in platforms)):
            expected = 'expected a tuple of texts, as ("tpu",)'
            raise ConfigError(f"Kernel({self.name!r}).platforms={platforms!r}: {expected}")

    def __call__(self, query: Array, key: Array, value: Array, call: Call) -> Array:
        """The output `[B, T, N, Hv]`.

        Raises ConfigError if the kernel gives another shape or type.
        """
        out = self.attention(query, key, value, call)
        expected = (*query.shape[:3], value.shape[3])
        if getattr(out, "shape", None) != expected or out.dtype != value.dtype:
            is_array = isinstance(out, Array)
            output = f"{out.dtype}{list(out.shape)}" if is_array else type(out).__name__
            wanted = f"{value.dtype}{list(expected)}"
            raise ConfigError(f"Kernel {self.name!r}: its output is {output}; expected {wanted}")
        return out

    def lacks(self, query: Array, key: Array, value: Array, call: Call) -> str | None:
        """The part of the call that the kernel cannot compute, in a few words; None: it can.

        Raises ConfigError if `refuses` returns neither a text nor None.
        """
        reason = self.refuses(query, key, value, call)
        if reason is not None and not (isinstance(reason, str) and reason):
            advice = "expected None, or in a few words what of the call it cannot compute"
            raise ConfigError(f"Kernel {self.name!r}: refuses(...) gave {reason!r}; {advice}")
        return reason

    def is_for(self, platform: str) -> bool:
        """Whether a tuple of kernels may choose it on this platform."""
        names = {ALIASES.get(each, each) for each in self.platforms}
        return not names or ALIASES.get(platform, platform) in names


# The name of a kernel of ours, a `Kernel`, or several in order of preference. None: the fastest of
# ours on the platform.
Implementation: TypeAlias = str | Kernel | tuple[str | Kernel, ...] | None


def as_tuple(implementation: Implementation) -> tuple[str | Kernel, ...]:
    """The names and kernels of an implementation; () for None."""
    if implementation is None:
        return ()
    return implementation if isinstance(implementation, tuple) else (implementation,)


def names_of(implementation: Implementation) -> tuple[str, ...]:
    """The names of the kernels that an implementation lists."""
    items = as_tuple(implementation)
    return tuple(each.name if isinstance(each, Kernel) else each for each in items)


def never_refuses(query: Any, key: Any, value: Any, call: Call) -> None:
    """`Kernel.refuses` of a kernel that computes every call."""
    return None
