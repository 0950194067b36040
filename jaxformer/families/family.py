"""A Hugging Face family as a value: it reads and writes config.json, and has rules for modules.

`load(folder, family=mine)` takes one of your own. `tensors.plan` makes a family's rules into the
names and shapes of the tensors in its files.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.families.settings import Json

# The layout of their module:
#     linear          [out, in] as in torch, and norms
#     conv1d          [in, out] as in GPT-2
#     patches         a convolution
#     leaf1, leaf2    1 or 2 axes of length 1 in front
#     lines           an axis of length 1 after the first
#     by_head         our modules side by side within each key head, as in torch: GPT-NeoX, Falcon
#     unread          a number for each row of our leaf, which their model never uses
# A rule for a leaf of ours (not a module) keeps the order of its axes.
Kind = Literal["linear", "conv1d", "patches", "by_head", "leaf1", "leaf2", "lines", "unread"]


class Rule(NamedTuple):
    """Maps our module or leaf to theirs; several of ours if they store them as one tensor.

    In `theirs`, the first `{}` stands for the layer and the second for the expert. A rule for one
    layer may write its number out. A name that ends with `_` is completed without a dot:
    `in_proj_` has `in_proj_weight`.
    """

    ours: str | tuple[str, ...]
    theirs: str
    kind: Kind = "linear"
    # the layers that the rule is for; None: all that have the parameter
    layers: tuple[int, ...] | None = None


def rules(ours: str, theirs: str, names: Mapping[Any, str], kind: Kind = "linear") -> list[Rule]:
    """One rule for each {our name: their name}, with the prefixes `ours` and `theirs`.

    A tuple of our names is one tensor of theirs.
    """

    def with_prefix(name: Any) -> Any:
        return tuple(map(with_prefix, name)) if isinstance(name, tuple) else ours + name

    return [
        Rule(with_prefix(our_name), theirs + their_name, kind)
        for our_name, their_name in names.items()
    ]


class Family(NamedTuple):
    """How the checkpoints of one `model_type` are read and written.

    `read` raises ConfigError for an unsupported setting that changes numbers. `write` is its
    inverse.
    """

    # (config.json, names of the tensors) -> our config
    read: Callable[[Json, Collection[str]], Any]
    write: Callable[[Any], Json]  # our config -> config.json
    rules: Callable[[Any], list[Rule]]  # our config -> the rules of its parameters
    prefix: str = ""  # of tensor names; files of base models leave it out
    # a pattern for the names of buffers
    ignored: str = r"position_ids$|(^|\.)rotary_emb\.inv_freq$"
    # a pattern for the modules of heads: a file may have more heads than its class
    heads: str = r"^(lm_head|score|classifier|qa_outputs)\."
    # {second name of a tied tensor: its first name}
    aliases: dict[str, str] = {}  # noqa: RUF012 (never written to)
    # {pattern in the names of other writers: what this family's files have there}
    renamed: dict[str, str] = {}  # noqa: RUF012 (never written to)
    # {another name of an entry of config.json: the name that `read` asks for}. As in transformers,
    # the other name goes first where a file has both.
    other_names: dict[str, str] = {}  # noqa: RUF012 (never written to)
    # a file without a head is tied, whatever its config.json says (T5 of transformers 5)
    tied_without_head: bool = False
    needs_start: bool = False  # `save` needs the token that targets begin with
    # our config -> {name: array} of the tables that `ignored` names: their files have them
    computed: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}
    # the same, of tables that a file may have: `load` refuses one with other numbers
    fixed: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}
