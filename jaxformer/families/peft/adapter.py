"""An adapter as a value, and what a folder of PEFT calls its parts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxformer import params as parameters
from jaxformer.errors import ConfigError
from jaxformer.families.family import Family
from jaxformer.families.folder import Checkpoint
from jaxformer.families.known import FAMILIES, is_unknown
from jaxformer.interop import safetensors
from jaxformer.models import adaptation
from jaxformer.params import Spec, Tree, paths

CONFIG, WEIGHTS = safetensors.ADAPTER, "adapter_model.safetensors"
PREFIX = "base_model.model."  # of tensor names
MAP_FACTORS = ("lora_A.weight", "lora_B.weight")
TABLE_FACTORS = ("lora_embedding_A", "lora_embedding_B")
TABLE = "embedding/tokens"  # the end of the path of an embedding's table
# settings that have no counterpart here, with the values that change nothing
PLAIN: dict[str, Any] = dict(
    peft_type="LORA", bias="none", use_dora=False, lora_bias=False, use_qalora=False,
    layer_replication=None, trainable_token_indices=None, target_parameters=None,
    alora_invocation_tokens=None,
)  # fmt: skip


class Trained(NamedTuple):
    """New values of a part of a leaf."""

    path: str
    index: tuple[int, ...]  # of the part in the leaf; (): all of it
    value: Any


@dataclass(frozen=True)
class Adapter:
    """W + (alpha / rank) a b for some matrices, and new values for some parameters."""

    rank: int
    alpha: float
    factors: dict[str, dict[str, Any]]  # {path: {"a", "b"}}: see `models.adaptation.lora`
    trained: tuple[Trained, ...] = ()

    def merged(self, params: Tree) -> Tree:
        """The parameters of the adapted model, in the shapes and dtypes of `params`."""
        leaves = dict(paths(params))
        for path, index, value in self.trained:
            leaves[path] = jnp.asarray(leaves[path]).at[index].set(value)
        params = parameters.map_with_name(lambda path, leaf: leaves[path], params)
        return adaptation.merge(params, self.factors, self.alpha / self.rank)


class Pair(NamedTuple):
    """The two factors of one module of theirs: A `[rank, in]` and B `[out, rank]`."""

    a: np.ndarray
    b: np.ndarray
    is_table: bool  # of an embedding: A is `[rank, V]`, B is `[D, rank]`


def family_of(checkpoint: Checkpoint, own: Family | None) -> Family:
    """`own`, or the family that the checkpoint names. Raises ConfigError without one."""
    if own is not None:
        return own
    if checkpoint.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type={checkpoint.model_type!r} of the model "
            f"{is_unknown(checkpoint.model_type)}, or give its family"
        )
    return FAMILIES[checkpoint.model_type]


def inputs_first(leaf: Spec) -> bool:
    """Whether the axes of the inputs stand before those of the outputs."""
    return leaf.axes[-1] not in leaf.contracts
