"""Names of this library that moved: the experiment files of older runs import their old names.

`import_from` serves such imports, with a warning that says the new place. `first_name` gives the
first place of a name: descriptions use it, so a run keeps its name when the library moves a file.
"""

import functools
import importlib
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")

# old module: new module
MODULES = {
    "jaxformer.interop.huggingface": "jaxformer.families",
    "jaxformer.analysis": "jaxformer.tools.analysis",
    "jaxformer.planning": "jaxformer.tools.planning",
    "jaxformer.training.augment": "jaxformer.data.augment",
    "jaxformer.training.corruption": "jaxformer.objectives",
    "jaxformer.training.objectives": "jaxformer.objectives",
    "jaxformer.training.checkpoint": "jaxformer.runs.checkpoint",
    "jaxformer.training.compilation_cache": "jaxformer.runs.compilation_cache",
    "jaxformer.training.goodput": "jaxformer.runs.goodput",
    "jaxformer.training.initial": "jaxformer.runs.initial",
    "jaxformer.training.lock": "jaxformer.runs.lock",
    "jaxformer.training.loop": "jaxformer.runs.loop",
    "jaxformer.training.manifest": "jaxformer.runs.manifest",
    "jaxformer.training.memory": "jaxformer.runs.memory",
    "jaxformer.training.metrics": "jaxformer.runs.metrics",
    "jaxformer.training.names": "jaxformer.runs.names",
    "jaxformer.training.replicas": "jaxformer.runs.replicas",
    "jaxformer.training.reproduction": "jaxformer.runs.reproduction",
    "jaxformer.training.run": "jaxformer.runs.run",
    "jaxformer.training.run_folder": "jaxformer.runs.run_folder",
    "jaxformer.training.signals": "jaxformer.runs.signals",
    "jaxformer.training.silence": "jaxformer.runs.silence",
    "jaxformer.training.start": "jaxformer.runs.start",
    "jaxformer.training.trust": "jaxformer.runs.trust",
    "jaxformer.models.stacks.reversible": "jaxformer.zoo.reversible",
    "jaxformer.models.block": "jaxformer.models.feedforward",
    "jaxformer.ops.attention.rows": "jaxformer.ops.attention.query_blocked",
}

# single names that moved: old full name: new module
NAMES = {
    "jaxformer.models.block.DropoutKeys": "jaxformer.models.sublayers",
    "jaxformer.models.InAttention": "jaxformer.models.config",
    "jaxformer.models.config.InAttention": "jaxformer.models.config",
    "jaxformer.data.pairs.Packed": "jaxformer.data.packing",
    "jaxformer.data.pairs.Buckets": "jaxformer.data.packing",
    "jaxformer.data.pairs.Rows": "jaxformer.data.packing",
    "jaxformer.data.pairs.Batches": "jaxformer.data.packing",
    "jaxformer.data.pairs.Example": "jaxformer.data.packing",
    "jaxformer.data.tokenizers.BPE": "jaxformer.data.bpe",
    "jaxformer.models.embedding.Embedder": "jaxformer.models.layer",
    "jaxformer.models.embedding.as_it_is": "jaxformer.models.layer",
    "jaxformer.models.embedding.token_length": "jaxformer.models.layer",
    "jaxformer.models.embedding.patches": "jaxformer.models.patches",
    "jaxformer.runs.run.sample_text": "jaxformer.runs.questions",
    "jaxformer.runs.run.question_of_sample": "jaxformer.runs.questions",
    "jaxformer.models.embedding.norm": "jaxformer.models.norm",
    "jaxformer.models.embedding.norm_spec": "jaxformer.models.norm",
    "jaxformer.models.stacks.scan.unstacked": "jaxformer.models.stacks.layout",
    "jaxformer.models.stacks.scan.init_state": "jaxformer.models.stacks.layout",
    "jaxformer.models.stacks.scan.Row": "jaxformer.models.stacks.scan",
    "jaxformer.models.stacks.scan.rows_of_pattern": "jaxformer.models.stacks.scan",
    "jaxformer.models.stacks.layout.turns": "jaxformer.models.stacks.layout",
    "jaxformer.ops.dropout.kept": "jaxformer.ops.dropout",
    "jaxformer.ops.einsum.StoredWeight": "jaxformer.ops.stored_weight",
    "jaxformer.ops.einsum.to_int8": "jaxformer.ops.stored_weight",
    "jaxformer.ops.einsum.int8_weight": "jaxformer.ops.stored_weight",
    "jaxformer.ops.positions.Bias": "jaxformer.ops.bias",
    "jaxformer.ops.positions.bias_between": "jaxformer.ops.bias",
    "jaxformer.ops.positions.alibi": "jaxformer.ops.bias",
    "jaxformer.ops.positions.t5": "jaxformer.ops.bias",
    "jaxformer.ops.positions.t5_bucket": "jaxformer.ops.bias",
    "jaxformer.ops.positions.shaw": "jaxformer.ops.bias",
    "jaxformer.training.FromRun": "jaxformer.runs.initial",
    "jaxformer.training.HuggingFace": "jaxformer.families.initial",
    "jaxformer.training.initial.HuggingFace": "jaxformer.families.initial",
    "jaxformer.training.run.continues_text": "jaxformer.models.heads",
    "jaxformer.training.metrics.numbers": "jaxformer.evaluation.metric",
    "jaxformer.training.objectives.Batch": "jaxformer.objectives.objective",
    "jaxformer.training.objectives.model_inputs": "jaxformer.objectives.objective",
    "jaxformer.training.objectives.with_reports": "jaxformer.objectives.objective",
    "jaxformer.training.objectives.head_cross_entropy": "jaxformer.objectives.tokens",
    "jaxformer.training.objectives.best_spans": "jaxformer.objectives.spans",
    "jaxformer.training.objectives.is_in_passage": "jaxformer.objectives.spans",
    "jaxformer.training.corruption.hide_tokens": "jaxformer.objectives.masked",
    "jaxformer.training.corruption.corrupt_spans": "jaxformer.objectives.corruption",
    "jaxformer.training.corruption.span_counts": "jaxformer.objectives.corruption",
    "jaxformer.masks.mask.as_mask": "jaxformer.masks.builders",
    "jaxformer.masks.mask.bigbird": "jaxformer.masks.builders",
    "jaxformer.masks.mask.block_sparse": "jaxformer.masks.builders",
    "jaxformer.masks.mask.by_head": "jaxformer.masks.builders",
    "jaxformer.masks.mask.causal": "jaxformer.masks.builders",
    "jaxformer.masks.mask.chunked": "jaxformer.masks.builders",
    "jaxformer.masks.mask.columns": "jaxformer.masks.builders",
    "jaxformer.masks.mask.full": "jaxformer.masks.builders",
    "jaxformer.masks.mask.global_tokens": "jaxformer.masks.builders",
    "jaxformer.masks.mask.is_causal": "jaxformer.masks.builders",
    "jaxformer.masks.mask.lengths": "jaxformer.masks.builders",
    "jaxformer.masks.mask.longformer": "jaxformer.masks.builders",
    "jaxformer.masks.mask.prefix": "jaxformer.masks.builders",
    "jaxformer.masks.mask.random_blocks": "jaxformer.masks.builders",
    "jaxformer.masks.mask.reach": "jaxformer.masks.builders",
    "jaxformer.masks.mask.segments": "jaxformer.masks.builders",
    "jaxformer.masks.mask.shift_invariant": "jaxformer.masks.builders",
    "jaxformer.masks.mask.sparse_transformer_fixed": "jaxformer.masks.builders",
    "jaxformer.masks.mask.sparse_transformer_strided": "jaxformer.masks.builders",
    "jaxformer.masks.mask.strided": "jaxformer.masks.builders",
    "jaxformer.masks.mask.window": "jaxformer.masks.builders",
    "jaxformer.models.stacks.scan.partition": "jaxformer.models.stacks.trees",
    "jaxformer.models.stacks.scan.combine": "jaxformer.models.stacks.trees",
    "jaxformer.models.stacks.scan.joined": "jaxformer.models.stacks.trees",
    "jaxformer.ops.linear_attention": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.attention.linear.linear_attention": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.linear_attention_step": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.attention.linear.linear_attention_step": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.LinearState": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.attention.linear.LinearState": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.elu_plus_one": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.attention.linear.elu_plus_one": "jaxformer.zoo.linear_attention",
    "jaxformer.ops.efficient_attention": "jaxformer.zoo.efficient_attention",
    "jaxformer.ops.attention.linear.efficient_attention": "jaxformer.zoo.efficient_attention",
    "jaxformer.ops.favor_attention": "jaxformer.zoo.performer",
    "jaxformer.ops.attention.linear.favor_attention": "jaxformer.zoo.performer",
    "jaxformer.ops.favor_features": "jaxformer.zoo.performer",
    "jaxformer.ops.attention.linear.favor_features": "jaxformer.zoo.performer",
    "jaxformer.ops.favor_relu_features": "jaxformer.zoo.performer",
    "jaxformer.ops.attention.linear.favor_relu_features": "jaxformer.zoo.performer",
    "jaxformer.ops.orthogonal_projection": "jaxformer.zoo.performer",
    "jaxformer.ops.attention.linear.orthogonal_projection": "jaxformer.zoo.performer",
    "jaxformer.ops.linformer_attention": "jaxformer.zoo.linformer",
    "jaxformer.ops.attention.linear.linformer_attention": "jaxformer.zoo.linformer",
    "jaxformer.ops.lsh_attention": "jaxformer.zoo.reformer",
    "jaxformer.ops.attention.lsh.lsh_attention": "jaxformer.zoo.reformer",
    "jaxformer.ops.random_rotations": "jaxformer.zoo.hash_buckets",
    "jaxformer.ops.attention.lsh.random_rotations": "jaxformer.zoo.hash_buckets",
    "jaxformer.ops.attention.lsh.lsh_buckets": "jaxformer.zoo.hash_buckets",
    "jaxformer.ops.longformer_attention": "jaxformer.zoo.longformer",
    "jaxformer.ops.attention.sparse.longformer_attention": "jaxformer.zoo.longformer",
    "jaxformer.ops.bigbird_attention": "jaxformer.zoo.bigbird",
    "jaxformer.ops.attention.sparse.bigbird_attention": "jaxformer.zoo.bigbird",
    "jaxformer.ops.bigbird_layout": "jaxformer.zoo.bigbird",
    "jaxformer.ops.attention.sparse.bigbird_layout": "jaxformer.zoo.bigbird",
    "jaxformer.ops.bigbird_layout_zero": "jaxformer.zoo.bigbird",
    "jaxformer.ops.attention.sparse.bigbird_layout_zero": "jaxformer.zoo.bigbird",
    "jaxformer.ops.bigbird_layout_seeded": "jaxformer.zoo.bigbird",
    "jaxformer.ops.attention.sparse.bigbird_layout_seeded": "jaxformer.zoo.bigbird",
    "jaxformer.ops.attention.linear.View": "jaxformer.zoo.visible",
    "jaxformer.ops.attention.linear.visibility": "jaxformer.zoo.visible",
    "jaxformer.ops.attention.linear.FeatureMap": "jaxformer.zoo.linear_attention",
    "jaxformer.models.mixers.Longformer": "jaxformer.zoo.longformer",
    "jaxformer.models.mixers.efficient.Longformer": "jaxformer.zoo.longformer",
    "jaxformer.models.mixers.BigBird": "jaxformer.zoo.bigbird",
    "jaxformer.models.mixers.efficient.BigBird": "jaxformer.zoo.bigbird",
    "jaxformer.models.mixers.Linear": "jaxformer.zoo.linear_attention",
    "jaxformer.models.mixers.efficient.Linear": "jaxformer.zoo.linear_attention",
    "jaxformer.models.mixers.Efficient": "jaxformer.zoo.efficient_attention",
    "jaxformer.models.mixers.efficient.Efficient": "jaxformer.zoo.efficient_attention",
    "jaxformer.models.mixers.Performer": "jaxformer.zoo.performer",
    "jaxformer.models.mixers.efficient.Performer": "jaxformer.zoo.performer",
    "jaxformer.models.mixers.Linformer": "jaxformer.zoo.linformer",
    "jaxformer.models.mixers.efficient.Linformer": "jaxformer.zoo.linformer",
    "jaxformer.models.mixers.Reformer": "jaxformer.zoo.reformer",
    "jaxformer.models.mixers.efficient.Reformer": "jaxformer.zoo.reformer",
    "jaxformer.models.mixers.LocalChunks": "jaxformer.zoo.local_chunks",
    "jaxformer.models.mixers.efficient.LocalChunks": "jaxformer.zoo.local_chunks",
    "jaxformer.models.mixers.variants.qk_norm": "jaxformer.zoo.qk_norm",
    "jaxformer.models.mixers.variants.qk_norm_full": "jaxformer.zoo.qk_norm",
    "jaxformer.models.mixers.variants.normalize": "jaxformer.zoo.qk_norm",
    "jaxformer.models.mixers.variants.gated": "jaxformer.zoo.gated",
    "jaxformer.models.mixers.variants.gate": "jaxformer.zoo.gated",
    "jaxformer.models.mixers.variants.differential": "jaxformer.zoo.differential",
    "jaxformer.models.mixers.variants.sigmoid": "jaxformer.zoo.sigmoid",
    "jaxformer.models.mixers.variants.value_residual": "jaxformer.zoo.value_residual",
    "jaxformer.models.mixers.variants.temperature": "jaxformer.zoo.temperature",
    "jaxformer.models.mixers.variants.inverse_depth_scale": "jaxformer.zoo.temperature",
    "jaxformer.models.presets.longformer_base": "jaxformer.zoo.longformer",
    "jaxformer.models.presets.longformer_base_mlm": "jaxformer.zoo.longformer",
    "jaxformer.models.presets.longformer_large": "jaxformer.zoo.longformer",
    "jaxformer.models.presets.bigbird_base": "jaxformer.zoo.bigbird",
    "jaxformer.models.presets.bigbird_base_pretraining": "jaxformer.zoo.bigbird",
    "jaxformer.models.presets.bigbird_large": "jaxformer.zoo.bigbird",
    "jaxformer.models.presets.linformer_base": "jaxformer.zoo.linformer",
    "jaxformer.models.presets.performer_base": "jaxformer.zoo.performer",
    "jaxformer.models.presets.reformer_enwik8": "jaxformer.zoo.reformer",
}
# those that also got another name: old full name: new name
RENAMED = {
    "jaxformer.models.InAttention": "AttentionPositions",
    "jaxformer.models.config.InAttention": "AttentionPositions",
    "jaxformer.models.stacks.scan.Row": "LayerInputs",
    "jaxformer.models.stacks.scan.rows_of_pattern": "inputs_of_pattern",
    "jaxformer.models.stacks.layout.turns": "as_pattern",
    "jaxformer.ops.dropout.kept": "keep_mask",
    "jaxformer.training.metrics.numbers": "as_numbers",
    "jaxformer.ops.linear_attention": "attention",
    "jaxformer.ops.attention.linear.linear_attention": "attention",
    "jaxformer.ops.linear_attention_step": "step",
    "jaxformer.ops.attention.linear.linear_attention_step": "step",
    "jaxformer.ops.LinearState": "State",
    "jaxformer.ops.attention.linear.LinearState": "State",
    "jaxformer.ops.efficient_attention": "attention",
    "jaxformer.ops.attention.linear.efficient_attention": "attention",
    "jaxformer.ops.favor_attention": "attention",
    "jaxformer.ops.attention.linear.favor_attention": "attention",
    "jaxformer.ops.linformer_attention": "attention",
    "jaxformer.ops.attention.linear.linformer_attention": "attention",
    "jaxformer.ops.lsh_attention": "attention",
    "jaxformer.ops.attention.lsh.lsh_attention": "attention",
    "jaxformer.ops.longformer_attention": "attention",
    "jaxformer.ops.attention.sparse.longformer_attention": "attention",
    "jaxformer.ops.bigbird_attention": "attention",
    "jaxformer.ops.attention.sparse.bigbird_attention": "attention",
    "jaxformer.ops.bigbird_layout": "random_layout",
    "jaxformer.ops.attention.sparse.bigbird_layout": "random_layout",
    "jaxformer.ops.bigbird_layout_zero": "zero_layout",
    "jaxformer.ops.attention.sparse.bigbird_layout_zero": "zero_layout",
    "jaxformer.ops.bigbird_layout_seeded": "seeded_layout",
    "jaxformer.ops.attention.sparse.bigbird_layout_seeded": "seeded_layout",
}

# the words of `ModelConfig.norm_placement`, which `block` replaced: the block of each
PLACEMENTS = {"pre": "pre_norm", "post": "post_norm", "sandwich": "sandwich"}


def block_of_placement(placement: str) -> Any:
    """The block for the `norm_placement` of an older file, with a warning.

    Raises ConfigError for an unknown word.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(
            f"model.norm_placement={placement!r}: expected one of {', '.join(PLACEMENTS)}"
        )
    log.warning("model.norm_placement=%r is model.block=%s now", placement, PLACEMENTS[placement])
    return getattr(importlib.import_module("jaxformer.models.blocks"), PLACEMENTS[placement])


def option_of(option: str, text: str | None) -> tuple[str, str | None]:
    """The present name and value of an option, with a warning if it is one of an older run."""
    above, dot, name = option.rpartition(".")
    if not dot or name != "norm-placement" or text not in PLACEMENTS:
        return option, text
    log.warning("%s=%s is %s.block=%s now", option, text, above, PLACEMENTS[text])
    return f"{above}.block", PLACEMENTS[text]


def import_from(module: str, names: tuple[str, ...]) -> Any:
    """The module for `from module import names` if one of the names moved.

    None means that nothing moved, and the usual import works.
    """
    if not any(_now(module, name) or f"{module}.{name}" in _left() for name in names):
        return None
    return SimpleNamespace(**{name: _look_up(module, name) for name in names})


class _Module(ModuleType):
    """A module that names moved away from: it still finds them, as in `mixers.Performer`."""

    def __init__(self, name: str):
        super().__init__(name)
        try:
            self.__dict__["_module"] = importlib.import_module(name)
        except ModuleNotFoundError:  # all of its names moved away
            self.__dict__["_module"] = None

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_module"]
        if hasattr(module, name):
            return getattr(module, name)
        if _now(self.__name__, name) is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _look_up(self.__name__, name)
        self.__dict__[name] = value  # the warning comes once
        return value


def _look_up(module: str, name: str) -> Any:
    """The object of `from module import name`, with a warning if it moved."""
    full = f"{module}.{name}"
    now = _now(module, name)
    if now is None:
        return _Module(full) if full in _left() else _get(module, name)
    log.warning("%s is now %s.%s; change the import", full, *now)
    return _get(*now)


def first_name(module: str, name: str) -> tuple[str, str]:
    """(module, name) of this function or class before any move."""
    first_names = _first_names()
    if (module, name) in first_names:
        return first_names[module, name]
    first_module, _ = first_names.get((module, ""), (module, ""))
    return first_module, name


def _now(module: str, name: str) -> tuple[str, str] | None:
    """The present (module, name) of what was `module.name`; None if it did not move."""
    full = f"{module}.{name}"
    if full in NAMES:
        return NAMES[full], RENAMED.get(full, name)
    if full in MODULES:
        parent, _, last = MODULES[full].rpartition(".")
        return parent, last
    for old, new in MODULES.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old), name
    return None


def _get(module: str, name: str) -> Any:
    """The object of `from module import name`."""
    home = importlib.import_module(module)
    try:
        return getattr(home, name)
    except AttributeError:
        if hasattr(home, "__path__"):
            return importlib.import_module(f"{module}.{name}")
        raise ImportError(f"cannot import name {name!r} from {module!r}", name=module) from None


@functools.cache
def _left() -> set[str]:
    """The modules from which single names moved away."""
    return {full.rpartition(".")[0] for full in NAMES} - MODULES.keys()


@functools.cache
def _first_names() -> dict[tuple[str, str], tuple[str, str]]:
    """{new (module, name): old (module, name)}; the name is "" for a module that moved."""
    names = {(new, ""): (old, "") for old, new in MODULES.items()}
    for full, home in NAMES.items():
        module, _, name = full.rpartition(".")
        names[home, RENAMED.get(full, name)] = (module, name)
    return names
