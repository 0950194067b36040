"""Mistakes that a model or its loader might make, each tried on the golden models: the tests must
see every one.

`python -m tests.golden.mutations [NAME ...]` prints how far each carries the outputs from the
witness, and ends with 1 if one stays within the tolerance of tests/families/test_huggingface.py. A
mistake is a function of a loaded (config, params) or of a family's rules. What no output can show
(a key bias: softmax does not see what it adds to all keys) must be seen in the file that `save`
writes of it; what cannot be loaded at all is seen, too.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer import families, masks, models, zoo
from jaxformer.errors import ConfigError
from jaxformer.families.tied_head import names_in_file
from jaxformer.interop import safetensors
from jaxformer.masks import causal, full, window
from jaxformer.models import (
    AttentionPositions,
    Classification,
    Embedding,
    EncoderDecoder,
    LanguageModel,
    Learned,
    ModelConfig,
    Relative,
    Sinusoidal,
    blocks,
)
from jaxformer.models.mixture import Mixture
from jaxformer.ops.positions import Rope
from jaxformer.params import paths
from jaxformer.zoo.clip import TextFeatures
from tests import golden
from tests.families import golden_runs as runs

TOLERANCE = 2e-5  # that of the tests
NAMES = [
    "bert_pretraining",
    "bert_sequence",
    "bert_qa",
    "bigbird_mlm",
    "gpt2",
    "gpt2_untied",
    "llama_gqa",
    "llama_mha",
    "llama_yarn",
    "longformer_mlm",
    "marian",
    "mistral",
    "mixtral",
    "qwen2",
    "reformer",
    "roberta_mlm",
    "t5",
    "t5_v11",
    "vit",
    "vit_pooled",
]


class Outcome(NamedTuple):
    """What became of a mistake: how far the outputs are off, and what saw it (None: nothing)."""

    name: str
    mistake: str
    far: float
    caught: str | None


# Mistakes in the config: (name, config -> config), of one stack

OTHER = {
    "gelu": "gelu_tanh",
    "gelu_tanh": "gelu",
    "relu": "gelu",
    "swiglu": "geglu",
    "geglu": "swiglu",
    "geglu_tanh": "geglu",
    "silu": "gelu",
    "quick_gelu": "gelu",
}


def of_config(config: ModelConfig, heads: tuple) -> Iterator[tuple[str, ModelConfig]]:
    """Every mistake that applies to the stack and to those `heads` of it that the witness knows."""
    yield "another eps", replace(config, norm_eps=1e-5 if config.norm_eps > 1e-3 else 1e-12)
    if config.norm_eps > 1e-3:  # Marian's, which its config.json does not hold, is too small for it
        yield "eps 1 % off", replace(config, norm_eps=config.norm_eps * 1.01)
    if isinstance(config.feedforward, str):
        yield "another activation", replace(config, feedforward=OTHER[config.feedforward])
    yield (
        "another kind of norm",
        replace(config, norm="rms_norm" if config.norm == "layer_norm" else "layer_norm"),
    )
    if config.stack is None or isinstance(config.stack, zoo.Repeated):
        yield (
            "norms in another place",
            replace(config, block=None if config.block else blocks.post_norm),
        )
    is_exact = config.mixer is None or isinstance(config.mixer, zoo.Disentangled)
    if is_exact or isinstance(config.mixer, tuple):
        scale = 1.0 if config.attention_scale is None else None
        if is_exact:
            yield "scores scaled otherwise", replace(config, attention_scale=scale)
            yield (
                "scores scaled by the model's width",
                replace(config, attention_scale=config.d_model**-0.5),
            )
        yield "other keys visible", replace(config, masks=tuple(map(other_mask, config.masks)))
    for step in (-1, 1):
        moved = tuple(widened(mask, step) for mask in config.masks)
        if moved != config.masks:
            yield f"window {step:+d}", replace(config, masks=moved)
    if len(config.masks) > 1 and config.mixer is None:
        yield "masks of layers shifted", replace(config, masks=config.masks[1:] + config.masks[:1])
    if isinstance(config.stack, zoo.Repeated):
        first, *rest = config.stack.times
        for name, times in {
            "the first group once more": (first + 1, *rest),
            "groups exchanged": tuple(reversed(config.stack.times)),
            "every group once": (1,) * len(config.stack.times),
        }.items():
            if times != config.stack.times:
                yield name, replace(config, stack=zoo.Repeated(times))
    if isinstance(config.embedding, Embedding):
        other = config.d_model**0.5 if config.embedding.scale == 1 else 1.0
        yield (
            "embedding scaled otherwise",
            replace(config, embedding=replace(config.embedding, scale=other)),
        )
    yield from (
        (name, replace(config, positions=other))
        for name, other in other_positions(config.positions)
    )
    yield from ((name, replace(config, mixer=other)) for name, other in other_mixers(config.mixer))
    if isinstance(config.embedding, zoo.FeatureMap):
        for name, backbone in other_backbones(config.embedding.backbone):
            yield name, replace(config, embedding=zoo.FeatureMap(backbone))
    if isinstance(moe := config.feedforward, Mixture):
        for name, change in {
            "one expert a token": dict(top_k=1, normalise=False),
            "one expert more": dict(top_k=moe.top_k + 1),
            "weights of experts not normalised": dict(normalise=False),
            "experts with another gate": dict(activation="geglu"),
        }.items():
            yield name, replace(config, feedforward=replace(moe, **change))
    if isinstance(moe, zoo.GroupedExperts):
        for name, change in {
            "one expert fewer": dict(top_k=moe.top_k - 1),
            "one group more": dict(top_groups=moe.top_groups + 1),
            "weights of experts not normalised": dict(normalise=not moe.normalise),
            "weights of experts not scaled": dict(scale=1.0),
            "experts with another gate": dict(activation="geglu"),
        }.items():
            yield name, replace(config, feedforward=replace(moe, **change))
    for head in heads:
        for name, other in other_heads(config, head):
            yield (
                name,
                replace(config, heads=tuple(other if one is head else one for one in config.heads)),
            )
    if heads and isinstance(heads[0], LanguageModel):
        yield "logits capped", replace(config, logit_softcap=30.0)


def other_backbones(backbone: zoo.ResNet) -> Iterator[tuple[str, zoo.ResNet]]:
    strides = {
        zoo.resnet.bottleneck: zoo.resnet.early_bottleneck,
        zoo.resnet.early_bottleneck: zoo.resnet.bottleneck,
    }
    if backbone.block in strides:
        yield "the stride in another convolution", replace(backbone, block=strides[backbone.block])
    yield "the stride of the first stage", replace(backbone, first_stride=3 - backbone.first_stride)
    other = OTHER[backbone.activation]
    yield "another activation of the backbone", replace(backbone, activation=other)


def other_mask(mask: masks.Mask) -> masks.Mask:
    return causal() if str(mask) == str(full()) else full()


def widened(mask: masks.Mask, step: int) -> masks.Mask:
    from jaxformer.families.decoder import left_window

    width = left_window(mask)
    sides = next((part.args for part in mask.conjuncts() if part.args), None)
    if width is None and sides and mask == window(*sides):
        return window(*(side + step for side in sides))
    return mask if width is None else causal() & window(width - 1 + step)


def other_positions(positions) -> Iterator[tuple[str, Any]]:
    match positions:
        case Sinusoidal():
            yield "sines and cosines take turns", replace(positions, layout="interleaved")
            yield "sinusoids of tensor2tensor", replace(positions, spacing="tensor2tensor")
        case Relative():
            yield (
                "signs of distances",
                replace(positions, bidirectional=not positions.bidirectional),
            )
            yield "largest distance", replace(positions, max_distance=128)
            yield (
                "largest distance + 1",
                replace(positions, max_distance=positions.max_distance + 1),
            )
        case Rope():
            other = "half" if positions.layout == "interleaved" else "interleaved"
            yield "RoPE pairs other features", replace(positions, layout=other)
            other = 10_000.0 if positions.theta != 10_000.0 else 100.0
            yield "RoPE of another base", replace(positions, theta=other)
            if positions.scaling is not None:
                yield "RoPE not scaled", replace(positions, scaling=None)
                named = vars(positions.scaling)
                for field in named.keys() & {"factor", "original_length"}:
                    changed = replace(
                        positions.scaling, **{field: getattr(positions.scaling, field) * 2}
                    )
                    yield f"RoPE: {field} doubled", replace(positions, scaling=changed)
            yield "no RoPE", None
        case AttentionPositions():
            yield "no positions in attention", None
            yield "positions at the first states alone", Sinusoidal()
        case tuple():
            yield "rotations of layers exchanged", positions[::-1]
            yield "one rotation for all layers", positions[:1]


def other_mixers(mixer) -> Iterator[tuple[str, Any]]:
    match mixer:
        case zoo.Disentangled():
            others = tuple(term for term in mixer.terms if term != mixer.terms[0])
            for name, change in {
                "a term of positions fewer": dict(terms=others),
                "maps of the table": dict(own_maps=not mixer.own_maps),
                "norm of the table": dict(norm=not mixer.norm),
                "distances without the logarithm": dict(max_distance=None),
                "largest distance + 1": dict(max_distance=(mixer.max_distance or 0) + 1),
            }.items():
                is_other = mixer.max_distance is not None or "distance" not in name
                if is_other and change != dict(terms=()):
                    yield name, replace(mixer, **change)
            yield "no positions in attention", None
        case zoo.LatentAttention():
            yield "latents with another eps", replace(mixer, norm_eps=1e-3)
        case zoo.Longformer():
            for step in (-2, 2):
                yield f"window {step:+d}", replace(mixer, window=mixer.window + step)
            yield "full attention", None
        case zoo.BigBird():
            yield "other random blocks", replace(mixer, layout="random")
            yield "a random block fewer", replace(mixer, random=mixer.random - 1)
            yield "full attention", None
        case tuple():
            for name, change in {
                "keys met twice count once": dict(duplicates=False),
                "no chunk before": dict(chunks_before=0),
                "a chunk after": dict(chunks_after=1),
                "chunks of another length": dict(chunk=6),
            }.items():
                yield name, tuple(one and replace(one, **change) for one in mixer)


def other_heads(config: ModelConfig, head) -> Iterator[tuple[str, Any]]:
    match head:
        case LanguageModel():
            other = config.d_model**-0.5 if head.scale == 1 else 1.0
            yield "hidden states scaled before the head", replace(head, scale=other)
            if head.transform:
                yield "head without its transform", replace(head, transform=None)
            if isinstance(head.transform, zoo.Projection):
                changed = replace(head.transform, activation=OTHER[head.transform.activation])
                yield "head with another activation", replace(head, transform=changed)
            elif head.transform:
                yield "head with another activation", replace(head, transform=OTHER[head.transform])
        case TextFeatures():
            yield f"{head.name} of another token", replace(head, end=3)
            if head.end is not None:
                yield f"{head.name} of the largest id", replace(head, end=None)
        case zoo.ProjectedClasses():
            other = replace(head.projection, activation=OTHER[head.projection.activation])
            yield f"{head.name}: another activation", replace(head, projection=other)
            if head.pool is not None:
                pools = {"mean", "last", "position_0"} - {head.pool}
                for pooling in sorted(pools):
                    yield f"{head.name} of {pooling}", replace(head, pool=pooling)
        case Classification():
            yield f"{head.name} of the mean", replace(head, pool="mean")
            yield f"{head.name} of the last token", replace(head, pool="last")
            if head.pooler:
                yield f"{head.name} without its pooler", replace(head, pooler=None)
                yield f"{head.name}: another activation", replace(head, pooler="relu")


# Mistakes in the parameters: (name, leaves by path -> leaves by path)


def of_places(config: ModelConfig, leaves: dict[str, Any]) -> Iterator[tuple[str, Callable]]:
    """`of_parameters` of a stack, and of each place where it keeps layers of a kind."""
    yield from of_parameters(config, leaves)
    for place in sorted(set(re.findall(r"^layers/(\d+)/", "\n".join(leaves), re.MULTILINE))):
        inside = f"layers/{place}/"
        own = {
            path.replace(inside, "layers/", 1): leaf
            for path, leaf in leaves.items()
            if path.startswith(inside)
        }
        for mistake, change in of_parameters(config, own):

            def moved(leaves, inside=inside, own=own, change=change):
                found = change(own).items()
                return leaves | {path.replace("layers/", inside, 1): x for path, x in found}

            yield f"place {place}: {mistake}", moved


def of_parameters(config: ModelConfig, leaves: dict[str, Any]) -> Iterator[tuple[str, Callable]]:
    """Every mistake that applies to a stack's parameters."""

    def changed(change: Callable, *names: str):
        return lambda leaves: leaves | {name: change(leaves[name]) for name in names}

    def exchanged(one: str, two: str):
        return lambda leaves: (
            leaves
            | {
                name: leaves[name.replace(old, new)]
                for old, new in ((one, two), (two, one))
                for name in leaves
                if old in name and name.replace(old, new) in leaves
            }
        )

    attention = "layers/attention"
    for name in ("query", "key", "value", "out"):
        for module in (attention, "layers/cross_attention"):
            if f"{module}/{name}/bias" in leaves:
                yield (
                    f"{module[7:]}: no {name} bias",
                    changed(jnp.zeros_like, f"{module}/{name}/bias"),
                )
    for name in ("up", "down", "gate_up", "router"):
        if f"layers/feedforward/{name}/bias" in leaves:
            yield f"no {name} bias", changed(jnp.zeros_like, f"layers/feedforward/{name}/bias")
    for name in leaves:
        if name.endswith("/scale"):
            yield f"{name} dropped", changed(jnp.ones_like, name)
        elif name.endswith(("norm/bias", "norm/mean")) or (
            name.startswith("heads/") and name.endswith("bias")
        ):
            yield f"{name} dropped", changed(jnp.zeros_like, name)
        elif name.endswith("norm/variance"):
            yield f"{name} dropped", changed(jnp.ones_like, name)
        elif name.startswith("embedding/backbone") and name.endswith("kernel"):
            turned = lambda a: a.swapaxes(1, 2)
            yield f"{name} with lines as columns", changed(turned, name)
            yield f"{name} with channels shifted", changed(partial(jnp.roll, shift=1, axis=0), name)
    if "shared/positions" in leaves:
        yield (
            "object queries shifted",
            changed(partial(jnp.roll, shift=1, axis=0), "shared/positions"),
        )
        yield "no object queries", changed(jnp.zeros_like, "shared/positions")
    if "embedding/projection/bias" in leaves:
        yield "no bias of the embedding's map", changed(jnp.zeros_like, "embedding/projection/bias")
    if f"{attention}/query/kernel" not in leaves:  # dense layers, then layers of experts
        return
    query = leaves[f"{attention}/query/kernel"]
    _, D, N, H = query.shape
    inside_out = lambda a: a.reshape(*a.shape[:2], H, -1).swapaxes(2, 3)
    for name in ("query", "value"):
        path = f"{attention}/{name}/kernel"
        if N > 1 and leaves[path].shape[2] > 1:
            yield f"heads of {name} inside out", changed(inside_out, path)
        if leaves[path].shape[2] * H == D:
            turned = lambda a: a.reshape(len(a), D, D).swapaxes(1, 2).reshape(a.shape)
            yield f"{name} transposed", changed(turned, path)
    if N * H == D:
        turned = lambda a: a.reshape(len(a), D, D).swapaxes(1, 2).reshape(a.shape)
        yield "out transposed", changed(turned, f"{attention}/out/kernel")
    if leaves.get(f"{attention}/key/kernel", query[:0]).shape == query.shape:
        yield "query and key exchanged", exchanged(f"{attention}/query/", f"{attention}/key/")
        yield "key and value exchanged", exchanged(f"{attention}/key/", f"{attention}/value/")
    if 1 < config.kv_heads < N:  # head i reads group i % K, not i // (N / K)
        order = np.arange(N).reshape(-1, config.kv_heads).T.reshape(-1)
        names = [f"{attention}/query/kernel", f"{attention}/query/bias"]
        tiled = lambda leaves: (
            leaves
            | {name: leaves[name][..., order, :] for name in names if name in leaves}
            | {f"{attention}/out/kernel": leaves[f"{attention}/out/kernel"][:, order]}
        )
        yield "groups of heads tiled", tiled
    if "layers/feedforward/gate/kernel" in leaves:
        yield "gate and up exchanged", exchanged("feedforward/gate/", "feedforward/up/")
    if "layers/feedforward/choice_bias" in leaves:
        yield "no bias of choice", changed(jnp.zeros_like, "layers/feedforward/choice_bias")
    if f"{attention}/sinks" in leaves:
        yield "no sinks", changed(jnp.zeros_like, f"{attention}/sinks")
    up = "gate_up" if "layers/feedforward/gate_up/kernel" in leaves else "up"
    if up == "gate_up":
        in_turn = lambda a: a.reshape(*a.shape[:-1], -1, 2)[..., ::-1].reshape(a.shape)
        names = [f"layers/feedforward/gate_up/{name}" for name in ("kernel", "bias")]
        yield "gate and up exchanged", changed(in_turn, *names)
    if "layers/feedforward/router/kernel" in leaves:
        yield (
            "experts shifted",
            changed(partial(jnp.roll, shift=1, axis=-1), "layers/feedforward/router/kernel"),
        )
        yield (
            "layers and experts shifted",
            changed(partial(jnp.roll, shift=1, axis=1), f"layers/feedforward/{up}/kernel"),
        )
    yield (
        "attention_norm and feedforward_norm exchanged",
        exchanged("layers/attention_norm/", "layers/feedforward_norm/"),
    )
    if "layers/cross_attention/query/kernel" in leaves:
        yield (
            "the two attentions exchanged",
            exchanged("layers/attention/", "layers/cross_attention/"),
        )
        yield (
            "norms of the two attentions exchanged",
            exchanged("layers/attention_norm/", "layers/cross_attention_norm/"),
        )
    yield (
        "layers in reverse",
        lambda leaves: (
            leaves
            | {name: leaf[::-1] for name, leaf in leaves.items() if name.startswith("layers/")}
        ),
    )
    yield (
        "every layer the first",
        lambda leaves: (
            leaves
            | {
                name: jnp.broadcast_to(leaf[:1], leaf.shape)
                for name, leaf in leaves.items()
                if name.startswith("layers/")
            }
        ),
    )
    if "embedding/tokens" in leaves:
        yield "vocabulary shifted", changed(partial(jnp.roll, shift=1, axis=0), "embedding/tokens")
    for name in ("embedding/positions", "embedding/positions/lines", "embedding/positions/columns"):
        if name in leaves:
            yield f"{name} shifted", changed(partial(jnp.roll, shift=1, axis=0), name)
    if len(leaves.get("embedding/token_types", ())) == 2:
        yield "token types exchanged", changed(lambda a: a[::-1], "embedding/token_types")
    elif "embedding/token_types" in leaves:
        yield "no token types", changed(jnp.zeros_like, "embedding/token_types")
    if "embedding/class_token" in leaves:
        yield "no class token", changed(jnp.zeros_like, "embedding/class_token")
    if "embedding/extra_tokens" in leaves:
        yield "no extra tokens", changed(jnp.zeros_like, "embedding/extra_tokens")
    if "embedding/patches/kernel" in leaves:
        if "embedding/patches/bias" in leaves:
            yield "no bias of patches", changed(jnp.zeros_like, "embedding/patches/bias")
        yield (
            "patches column by column",
            changed(lambda a: a.swapaxes(1, 2), "embedding/patches/kernel"),
        )
        if leaves["embedding/patches/kernel"].shape[0] > 1:
            yield "colours in reverse", changed(lambda a: a[::-1], "embedding/patches/kernel")
    if "heads/distilled_classification/class_token/kernel" in leaves:
        yield (
            "classifiers exchanged",
            exchanged("classification/class_token/", "classification/distillation_token/"),
        )
    if "heads/pooled/probe" in leaves:
        yield "no probe", changed(jnp.zeros_like, "heads/pooled/probe")
    if "shared/relative" in leaves:
        yield (
            "heads of the relative table shifted",
            changed(partial(jnp.roll, shift=1, axis=1), "shared/relative"),
        )
        yield "buckets in reverse", changed(lambda a: a[::-1], "shared/relative")
        yield "no relative table", changed(jnp.zeros_like, "shared/relative")
    if f"{attention}/global_query/kernel" in leaves:
        for one in ("query", "key", "value"):
            plain = lambda leaves, one=one: (
                leaves
                | {
                    f"{attention}/global_{one}/{end}": leaves[f"{attention}/{one}/{end}"]
                    for end in ("kernel", "bias")
                }
            )
            yield f"global {one} as the local one", plain
    for name in leaves:
        if (
            name.startswith("heads/")
            and name.endswith("kernel")
            and leaves[name].shape[0] == leaves[name].shape[1]
        ):
            yield f"{name} transposed", changed(jnp.transpose, name)
        elif name.startswith("heads/") and name.endswith("kernel") and min(leaves[name].shape) > 1:
            yield (
                f"classes of {name} shifted",
                changed(
                    partial(
                        jnp.roll, shift=1, axis=int(name.count("/") < 2 or "language" not in name)
                    ),
                    name,
                ),
            )


# Mistakes in the tables: (name, rule -> rule)

EXCHANGES = {
    "gate_proj": "up_proj",
    "w1": "w3",
    "wi_0": "wi_1",
    "q_proj": "k_proj",
    "self.query": "self.key",
    "attention.query": "attention.key",
    "SelfAttention.q": "SelfAttention.k",
    "ln_1": "ln_2",
    "input_layernorm": "post_attention_layernorm",
    "fc1": "fc2",
    "layernorm_before": "layernorm_after",
    "norm1": "norm2",
    "layer_norm1": "layer_norm2",
    "layer_scale1.lambda1": "layer_scale2.lambda1",
    "cls_token": "distillation_token",
    "self_attention.query": "self_attention.value",
    "lines": "columns",
}


def of_rules(rules: list) -> Iterator[tuple[str, Callable]]:
    ends = [rule.theirs for rule in rules]
    for one, two in EXCHANGES.items():
        pairs = [end for end in ends if end.endswith(one) and end.removesuffix(one) + two in ends]
        if pairs:

            def swapped(rule, one=one, two=two):
                for old, new in ((one, two), (two, one)):
                    if rule.theirs.endswith(old):
                        return rule._replace(theirs=rule.theirs.removesuffix(old) + new)
                return rule

            yield f"table: {one} and {two} exchanged", swapped
    # heads that a model does not have change nothing, nor does a norm, which is a vector
    matrices = [
        rule
        for rule in rules
        if "layers/" in str(rule.ours) and not str(rule.ours).endswith("norm")
    ]
    kinds = {rule.kind for rule in matrices}
    for kind, other in (("linear", "conv1d"), ("conv1d", "linear")):
        if kind in kinds:
            yield (
                f"table: {kind} as {other}",
                lambda rule, kind=kind, other=other: (
                    rule._replace(kind=other) if rule.kind == kind else rule
                ),
            )
            yield (
                f"table: out as {other}",
                lambda rule, kind=kind, other=other: (
                    rule._replace(kind=other)
                    if rule.kind == kind and str(rule.ours).endswith("attention/out")
                    else rule
                ),
            )
    if any(isinstance(rule.ours, tuple) for rule in rules):
        for order in ((1, 0, 2), (1, 2, 0), (2, 1, 0)):
            yield (
                f"table: fused in the order {order}",
                lambda rule, order=order: (
                    rule._replace(ours=tuple(rule.ours[i] for i in order if i < len(rule.ours)))
                    if isinstance(rule.ours, tuple)
                    else rule
                ),
            )
        yield (
            "table: halves exchanged",
            lambda rule: (
                rule._replace(ours=rule.ours[::-1])
                if isinstance(rule.ours, tuple) and len(rule.ours) == 2
                else rule
            ),
        )
    yield "table: query and key biases left out", lambda rule: rule  # of the config: see `outcomes`


# Mistakes in what a model is called with: options of `answers`


def of_calls(
    config, kept: dict[str, np.ndarray]
) -> Iterator[tuple[str, dict[str, np.ndarray], dict]]:
    mask = kept.get("inputs/attention_mask")
    if mask is not None and not mask.all():
        ones = {"inputs/attention_mask": np.ones_like(mask)}
        yield "padding is seen", kept | ones, {}
    if "inputs/decoder_attention_mask" in kept:
        drop = {key: value for key, value in kept.items() if key != "inputs/attention_mask"}
        yield (
            "padding of the source is seen",
            drop | {"inputs/attention_mask": np.ones_like(mask)},
            {},
        )
    if "inputs/pixel_mask" in kept:
        ones = {"inputs/pixel_mask": np.ones_like(kept["inputs/pixel_mask"])}
        yield "padding of images is seen", kept | ones, {}
        positions = {
            "source_positions": jnp.arange(kept["outputs/encoder_last_hidden_state"].shape[1])[None]
        }
        yield "features counted", kept, positions
    if "inputs/token_type_ids" in kept:
        yield (
            "token types not given",
            kept | {"inputs/token_type_ids": 0 * kept["inputs/token_type_ids"]},
            {},
        )
    if "inputs/global_attention_mask" in kept:
        yield (
            "no global tokens",
            kept | {"inputs/global_attention_mask": 0 * kept["inputs/global_attention_mask"]},
            {},
        )
    if (
        isinstance(config, ModelConfig)
        and isinstance(config.positions, Learned)
        and mask is not None
    ):
        T = mask.shape[1]
        given = kept.get("inputs/position_ids")
        if mask[:, 0].min() == 0 and not np.array_equal(given, np.arange(T)[None]):
            yield "positions count the padding", kept, {"positions": jnp.arange(T)[None]}
        if config.context_length > T:
            yield "positions from 1", kept, {"positions": jnp.arange(T)[None] + 1}


def completed(config, leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves that another config needs, plain ones where the model has none."""
    wanted = paths(models.spec(config))
    return {
        path: leaves.get(
            path, jnp.ones(leaf.shape) if path.endswith("scale") else jnp.zeros(leaf.shape)
        )
        for path, leaf in wanted.items()
    }


def stacks(config) -> list[tuple[str, ModelConfig, bool]]:
    """(prefix of its parameters, stack, whether it has the heads)."""
    if isinstance(config, EncoderDecoder):
        return [("encoder/", config.encoder, False), ("decoder/", config.decoder, True)]
    return [("", config, True)]


def with_stack(config, prefix: str, stack: ModelConfig):
    return replace(config, **{prefix[:-1]: stack}) if prefix else stack


def outcomes(name: str) -> list[Outcome]:
    """Every mistake that applies to a golden model, and what became of it."""
    kept = golden.witness(name)
    folder = golden.folder(name)
    checkpoint = families.load(folder)
    config, params = checkpoint.config, checkpoint.params
    run = jax.jit(lambda params: runs.answers(config, params, kept))
    right = max(runs.misses(run(params), kept).values())
    assert right < TOLERANCE, f"{name} is {right:.1e} off without any mistake"
    found: list[Outcome] = []

    def record(mistake: str, answer: Callable, in_file: tuple | None = None):
        try:
            far = max(runs.misses(answer(), kept).values())
        except (ConfigError, ValueError, TypeError, KeyError, NotImplementedError) as error:
            found.append(Outcome(name, mistake, np.inf, f"refused ({type(error).__name__})"))
            return
        caught = "outputs" if far > TOLERANCE else None
        if caught is None and in_file is not None and differs(folder, *in_file):
            caught = "file"
        found.append(Outcome(name, mistake, far, caught))

    for prefix, stack, decodes in stacks(config):
        witnessed = tuple(
            h for h in stack.heads if h.name != "pooled" or "outputs/pooler_output" in kept
        )
        for mistake, wrong in of_config(stack, witnessed if decodes else ()):

            def answer(prefix=prefix, wrong=wrong):
                other = with_stack(config, prefix, wrong)
                own = unflatten_dict(completed(other, paths(params)), sep="/")
                return jax.jit(lambda params: runs.answers(other, params, kept))(own)

            record(prefix + mistake, answer)
        leaves = {
            path.removeprefix(prefix): leaf
            for path, leaf in paths(params).items()
            if path.startswith(prefix)
        }
        for mistake, change in of_places(stack, leaves):
            moved = {prefix + path: leaf for path, leaf in change(leaves).items()}
            if all(np.array_equal(leaf, paths(params)[path]) for path, leaf in moved.items()):
                continue  # a bias that is zero anyway
            wrong = unflatten_dict(paths(params) | moved, sep="/")
            # only a key bias and a head that nothing reads may hide; whatever else does is a hole
            # in the fixture
            hides = mistake.endswith(("key bias", "key/bias dropped")) or (
                "heads/pooled" in mistake and "outputs/pooler_output" not in kept
            )
            record(prefix + mistake, partial(run, wrong), (config, wrong) if hides else None)
    for mistake, called, options in of_calls(config, kept):
        record(
            mistake,
            lambda called=called, options=options: runs.answers(config, params, called, **options),
        )
    for mistake, answer in of_ties(config, params, kept):
        record(mistake, answer)
    family = families.FAMILIES[golden.config(name)["model_type"]]
    for mistake, change in of_rules(rules := family.rules(config)):
        if list(map(change, rules)) == rules and "left out" not in mistake:
            continue

        def answer(change=change):
            rules = lambda config: list(map(change, family.rules(config)))
            kind = golden.config(name)["model_type"]
            families.FAMILIES[kind] = family._replace(rules=rules)
            try:
                return run(families.load(folder).params)
            finally:
                families.FAMILIES[kind] = family

        if "left out" not in mistake:
            record(mistake, answer)
        elif isinstance(config, ModelConfig) and "layers/attention/key/bias" in paths(params):

            def answer_without():
                kind = golden.config(name)["model_type"]
                bare = lambda c, names: replace(
                    family.read(c, names), use_bias="value|out|up|down|norm|patches"
                )
                families.FAMILIES[kind] = family._replace(read=bare)
                try:
                    return run(families.load(folder).params)
                finally:
                    families.FAMILIES[kind] = family

            record(mistake, answer_without)
    return found


def of_ties(config, params, kept) -> Iterator[tuple[str, Callable]]:
    """The head's own matrix not read, or one drawn although it is the embedding's."""
    stack = config.decoder if isinstance(config, EncoderDecoder) else config
    if (
        not any(isinstance(head, LanguageModel) for head in stack.heads)
        or stack.hidden_width != stack.d_model
    ):
        return
    prefix = "decoder/" if isinstance(config, EncoderDecoder) else ""
    table = paths(params)[prefix + "embedding/tokens"]
    drawn = jnp.asarray(np.random.default_rng(0).normal(size=table.shape), table.dtype)
    other = with_stack(config, prefix, replace(stack, tie_embeddings=not stack.tie_embeddings))
    leaves = completed(other, paths(params))
    path = f"{prefix}heads/language_model/kernel"
    if path in leaves:
        leaves[path] = drawn
    yield "tie ignored", lambda: runs.answers(other, unflatten_dict(leaves, sep="/"), kept)


def differs(folder: Path, config, params) -> bool:
    """Whether the file that `save` writes is another than the one it was loaded from."""
    with tempfile.TemporaryDirectory() as beside:
        checkpoint = replace(families.load(folder), config=config, params=params, model_type=None)
        families.save(Path(beside) / "saved", checkpoint)
        ours, theirs = runs.tensors(Path(beside) / "saved"), runs.tensors(folder)
    family = families.FAMILIES[golden.config(folder.name)["model_type"]]
    named = names_in_file(safetensors.open_checkpoint(folder), family, ours)
    return any(not np.array_equal(ours[key], theirs[name]) for key, name in named.items())


def main(names: list[str]) -> int:
    every: list[Outcome] = []
    for name in names or NAMES:
        for outcome in outcomes(name):
            every.append(outcome)
            caught = outcome.caught or "MISSED"
            print(
                f"{outcome.name:18} {outcome.mistake:60} {outcome.far:8.1e}  {caught}", flush=True
            )
    missed = [outcome for outcome in every if outcome.caught is None]
    print(f"{len(every)} mistakes in {len(names or NAMES)} models, {len(missed)} missed")
    return bool(missed)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
