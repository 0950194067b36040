"""What does not fit a model is refused before anything is computed, in one line that names it."""

import importlib
import math
import pkgutil
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer import decoding, masks, models, ops, params, zoo
from jaxformer.config.override import meanings
from jaxformer.data.augment import Crop, Move
from jaxformer.errors import ConfigError
from jaxformer.models import (
    Classification,
    Embedding,
    EncoderDecoder,
    LanguageModel,
    Learned,
    Mixture,
    ModelConfig,
    Patches,
    Relative,
    adaptation,
    blocks,
    vision,
)
from jaxformer.models.mixers import attention
from jaxformer.models.mup import MuP
from jaxformer.models.stacks import pipeline
from jaxformer.training import MaskedTokens, SpanCorruption, TokenCrossEntropy

MODEL = ModelConfig(vocab_size=7, num_layers=2, d_model=8, num_heads=2, context_length=6)
ENCODER = replace(MODEL, heads=(), masks=(masks.full(),))
CONFIGS = {
    "gpt2": MODEL,
    "bert": replace(
        MODEL,
        embedding=Embedding(norm=True, token_types=2),
        masks=(masks.full(),),
        block=blocks.post_norm,
        heads=(LanguageModel("gelu", bias=True), Classification(3)),
    ),
    "t5": replace(
        MODEL,
        positions=Relative(4, 6, False),
        feedforward="swiglu",
        use_bias=False,
        norm="rms_norm",
    ),
    "experts": replace(MODEL, feedforward=Mixture(3, 2)),
    "turns": replace(MODEL, mixer=(None, zoo.qk_norm.qk_norm, zoo.Linear()), num_layers=3),
    "images": ModelConfig(
        0,
        1,
        8,
        2,
        5,
        embedding=Patches((4, 4), (2, 2)),
        heads=(Classification(2),),
        tie_embeddings=False,
        masks=(masks.full(),),
    ),
    "pair": EncoderDecoder(ENCODER, MODEL),
    "two tables": EncoderDecoder(replace(ENCODER, d_model=6), MODEL, share_embeddings=False),
}
IDS = jax.ShapeDtypeStruct((2, 5), jnp.int32)


def traced(config, tree, tokens=IDS, **options):
    if isinstance(config, EncoderDecoder):
        options = {"source": IDS} | options
    elif isinstance(config.embedding, Patches):
        tokens = jax.ShapeDtypeStruct((2, 4, 4, 3), jnp.float32)
    arrays = {name: value for name, value in options.items() if value is not None}
    return jax.eval_shape(lambda p, t, o: models.apply(config, p, t, **o), tree, tokens, arrays)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("bert", "images") else pytest.mark.slow) for n in CONFIGS],
)
def test_every_leaf_that_does_not_fit_is_named(name):
    config = CONFIGS[name]
    tree = params.abstract(models.spec(config))
    traced(config, tree)
    leaves = params.paths(tree)
    for path, leaf in leaves.items():
        others = [
            (*leaf.shape[:i], size + 1, *leaf.shape[i + 1 :]) for i, size in enumerate(leaf.shape)
        ]
        for shape in (*others, leaf.shape[1:], (*leaf.shape, 1)):
            misfit = unflatten_dict(
                leaves | {path: jax.ShapeDtypeStruct(shape, leaf.dtype)}, sep="/"
            )
            with pytest.raises(ConfigError) as refusal:
                traced(config, misfit)
            assert str(refusal.value).startswith(
                f"apply: parameter {path} has shape {shape}; expected {leaf.shape};"
            )
        fewer = unflatten_dict({p: leaf for p, leaf in leaves.items() if p != path}, sep="/")
        with pytest.raises(ConfigError, match=f"apply: parameter {path} .* is missing"):
            traced(config, fewer)
    for path in {path.rsplit("/", 1)[0] for path in leaves if "heads" not in path}:
        more = unflatten_dict(leaves | {f"{path}/other": leaf}, sep="/")
        with pytest.raises(
            ConfigError, match=f"apply: parameter {path}/other is no parameter of this config"
        ):
            traced(config, more)


@pytest.mark.thorough
def test_what_may_be_there_or_wrapped():
    """Heads of another use of the same stack; leaves that have no shape, as a quantised weight of a
    user's may have none."""
    config = CONFIGS["bert"]
    tree = params.abstract(models.spec(config))
    for heads in ((), config.heads[:1], config.heads[1:]):
        assert traced(replace(config, heads=heads), tree).hidden.shape == (2, 5, 8)
    without = {name: part for name, part in tree.items() if name != "heads"}
    assert jax.eval_shape(partial(models.encode, config), without, IDS).hidden.shape == (2, 5, 8)
    assert (
        params.mismatch({"a": models.spec(MODEL)}, {"a": models.spec(MODEL) | {"layers": object()}})
        is None
    )
    with pytest.raises(ConfigError, match="parameter decoder is no parameter of this config"):
        traced(MODEL, params.abstract(models.spec(CONFIGS["pair"])))
    with pytest.raises(ConfigError, match=r"parameter decoder/embedding/positions .* is missing"):
        traced(CONFIGS["pair"], params.abstract(models.spec(MODEL)))


def changed(**fields):
    """MODEL as somebody makes it whose types nobody checks, as this suite does."""
    config = copy(MODEL)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
    return config


@dataclass
class Unhashable:
    def __call__(self, config):
        return attention(config)


def test_a_config_that_cannot_be_hashed_is_checked_too():
    config = replace(MODEL, mixer=Unhashable())
    tree = params.abstract(models.spec(config))
    assert traced(config, tree).logits.shape == (2, 5, 7)
    with pytest.raises(ConfigError, match="embedding/tokens has shape"):
        traced(replace(config, vocab_size=8), tree)


def test_a_carry_needs_layers_that_hand_it_on():
    config = replace(MODEL, mixer=(zoo.value_residual.value_residual, zoo.qk_norm.qk_norm))
    with pytest.raises(ConfigError, match="hands a carry to the next layer"):
        traced(config, params.abstract(models.spec(config)))


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (ints(5), {}, r"tokens int32\[5\]: expected integers \[B, T\]"),
        (ints(2, 5, 1), {}, "tokens"),
        (jax.ShapeDtypeStruct((2, 5), jnp.float32), {}, r"tokens float32\[2, 5\]"),
        (
            IDS,
            dict(positions=ints(5)),
            r"positions int32\[5\]: expected integers \[2, 5\] or \[1, 5\]",
        ),
        (IDS, dict(positions=ints(2, 4)), "positions"),
        (
            IDS,
            dict(segment_ids=ints(1, 5)),
            r"segment_ids int32\[1, 5\]: expected integers \[2, 5\]",
        ),
        (IDS, dict(segment_ids=ints(2, 6)), "segment_ids"),
        (IDS, dict(segment_ids=jax.ShapeDtypeStruct((2, 5), jnp.float32)), "segment_ids float32"),
        (IDS, dict(token_types=ints(2, 1)), "token_types"),
    ],
)
def test_inputs_of_other_shapes_and_types(tokens, options, message):
    config = CONFIGS["bert"]
    run = lambda tree, tokens, options: models.encode(config, tree, tokens, **options)
    with pytest.raises(ConfigError, match=f"apply: {message}"):
        jax.eval_shape(run, params.abstract(models.spec(config)), tokens, options)


def test_rows_of_a_source_and_of_a_cache():
    config = CONFIGS["pair"]
    tree = params.abstract(models.spec(config))
    run = lambda tree, tokens, source: models.apply(config, tree, tokens, source=source)
    with pytest.raises(ConfigError, match=r"source \[3, 5\] and tokens \[2, 5\]: as many rows"):
        jax.eval_shape(run, tree, IDS, ints(3, 5))
    cache = jax.eval_shape(lambda: decoding.init_cache(MODEL, 3, 5))
    with pytest.raises(
        ConfigError, match="2 rows of 5 tokens do not fit a cache of 3 rows of 5 slots"
    ):
        traced(MODEL, params.abstract(models.spec(MODEL)), cache=cache)
    with pytest.raises(ConfigError, match="a cache keeps one text a row; give `lengths`"):
        traced(MODEL, params.abstract(models.spec(MODEL)), cache=cache, segment_ids=ints(2, 5))
    with pytest.raises(
        ConfigError, match="`lengths` go with a cache; without one, segment_ids=0 marks padding"
    ):
        traced(MODEL, params.abstract(models.spec(MODEL)), lengths=ints(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(masks=masks.causal()), r"model.masks=causal\(\): expected a tuple of values"),
        (dict(masks=("causal",)), "expected a tuple of values"),
        (dict(masks=()), "expected a tuple of values"),
        (
            dict(masks=(masks.prefix(jnp.ones(2, jnp.int32)),)),
            r"model.masks: prefix\(.*\) holds arrays or an offset",
        ),
        (
            dict(masks=(masks.causal() & masks.segments(jnp.ones((2, 5), jnp.int32)),)),
            "holds arrays",
        ),
        (dict(masks=(masks.causal().at(3),)), "holds arrays or an offset"),
        (dict(norm="layernorm"), "model.norm='layernorm': expected one of layer_norm, rms_norm"),
        (
            dict(block="post"),
            "model.block='post': expected a function such as blocks.post_norm, or None",
        ),
        (dict(remat="all"), "model.remat='all': expected one of none, dots, qkv, attention, full"),
        (dict(feedforward="gelu2"), "model.feedforward='gelu2': expected one of relu"),
        (
            dict(feedforward=jax.nn.gelu),
            "model.feedforward=gelu: an activation is given by its name, one of relu, gelu",
        ),
        (dict(feedforward=jnp.tanh), "model.feedforward=tanh: an activation is given by its name"),
        (
            dict(feedforward=ops.feedforward.gelu),
            "model.feedforward=gelu: an activation is given by its name",
        ),
        (
            dict(heads=(LanguageModel("swiglu"),)),
            "model.heads: transform='swiglu': expected one of relu",
        ),
        (
            dict(heads=(Classification(2, pooler="tan"),)),
            "model.heads: pooler='tan': expected one of relu",
        ),
        *(
            (dict([(name, cap)]), f"model.{name}={cap}: must be above 0 and finite, or None")
            for name in ("attention_softcap", "logit_softcap")
            for cap in (0.0, -1.0, float("inf"), float("nan"))
        ),
    ],
)
def test_choices_that_there_are_not(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        changed(**change)
    assert "\n" not in str(caught.value)


ZOO = [
    importlib.import_module(found.name)
    for found in pkgutil.iter_modules(zoo.__path__, "jaxformer.zoo.")
]


def dataclasses_of(*modules):
    values = [value for module in modules for value in vars(module).values()]
    return {value for value in values if is_dataclass(value) and isinstance(value, type)}


WORDS = [
    (cls, field.name)
    for cls in sorted(
        dataclasses_of(models, models.config, *ZOO, vision, ops, ops.positions), key=str
    )
    for field in fields(cls)
    # some take a function too
    if Literal in map(get_origin, (field.type, *get_args(field.type)))
    and {type(None), str} & {field.type, *get_args(field.type)} == set()
]


@pytest.mark.parametrize(("cls", "field"), WORDS)
def test_every_field_that_takes_one_of_some_words_refuses_another(cls, field):
    value = {ModelConfig: MODEL, Classification: Classification(2)}.get(cls) or cls()
    value = copy(value)
    object.__setattr__(value, field, "Another")
    refuse = (
        partial(ops.positions.rope_frequencies, 2, value)
        if cls is ops.positions.Rope
        else value.__post_init__
    )
    with pytest.raises((ConfigError, ValueError), match=r"'Another'.*expected ") as caught:
        refuse()
    assert "\n" not in str(caught.value)


def test_words_were_found():
    assert {(zoo.Performer, "kernel"), (zoo.Linformer, "sharing"), (ModelConfig, "remat")} < set(
        WORDS
    )


@pytest.mark.parametrize(
    "fields", [dict(feedforward="Swiglu"), dict(attention_implementation="flash")]
)
def test_other_words(fields):
    with pytest.raises((ConfigError, NotImplementedError), match=str(*fields.values())):
        traced(replace(MODEL, **fields), params.abstract(models.spec(MODEL)))


@pytest.mark.thorough
def test_a_source_belongs_to_an_encoder_decoder():
    with pytest.raises(ConfigError, match="only an encoder-decoder has a `source`"):
        models.encode(
            MODEL,
            models.init(MODEL, jax.random.key(0)),
            jnp.ones((2, 5), int),
            source=jnp.ones((2, 5), int),
        )


def test_every_field_says_what_it_means():
    """`--help` shows it."""
    found = dataclasses_of(models, vision) | {
        cls for cls in dataclasses_of(*ZOO) if cls.__module__.startswith("jaxformer.zoo")
    }
    called = (models.Inputs, models.Output, zoo.linear_attention.State)
    classes = [
        cls
        for cls in found
        if {"models", "zoo"} & set(cls.__module__.split(".")) and cls not in called
    ]
    classes += [adaptation.Lora, pipeline.Pipeline, zoo.Reversible]
    assert {ModelConfig, Mixture, Patches, zoo.Performer, vision.Reconstruction} <= set(classes)
    silent = [
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in fields(cls)
        if not meanings(cls).get(field.name)
    ]
    assert not silent, silent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Learned(-1), "Learned.offset=-1"),
        (lambda: Relative(buckets=0), "Relative.buckets=0"),
        (lambda: Relative(buckets=3), "Relative.buckets=3 has 0 exact"),
        (lambda: Relative(buckets=32, max_distance=8), "must be in \\(0, 8\\)"),
        (lambda: Relative(max_distance=-5), "Relative.max_distance=-5"),
        (lambda: models.Axial((-2, -3), (4, 4)), "Axial.shape=-2"),
        (lambda: models.Axial((2, 3), (8, 0)), "Axial.widths=0"),
    ],
)
def test_positions_of_numbers_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


NUMBERS = {  # a config, and the least value of its numbers; -inf: any finite one
    MODEL: dict(
        vocab_size=1,
        num_layers=1,
        d_ff=1,
        head_width=1,
        unroll=1,
        norm_eps=0,
        init_std=0,
        attention_scale=-math.inf,
    ),
    Embedding(): dict(scale=-math.inf, token_types=0),
    LanguageModel(): dict(scale=-math.inf),
    Classification(3): dict(classes=1, pooler_width=1),
    models.TokenClassification(2): dict(classes=1),
    Patches(): dict(channels=1),
    MuP(64): dict(base_width=1, init_std=0, base_head_width=1),
    Mixture(): dict(
        experts=1, top_k=1, d_ff=1, shared=0, groups=1, capacity=0, balance_loss=0, router_z_loss=0
    ),
    zoo.Longformer(): dict(window=0, global_tokens=0, max_globals=0),
    zoo.BigBird(): dict(block=1, random=0, seed=0, dense_length=0),
    zoo.Linear(): dict(eps=0, chunk=1),
    zoo.Efficient(): dict(chunk=1),
    zoo.Performer(): dict(features=1, seed=0, chunk=1),
    zoo.Linformer(): dict(rank=1),
    zoo.Reformer(): dict(
        chunk=1, rounds=1, buckets=2, chunks_before=0, chunks_after=0, seed=0, multiple=1
    ),
    zoo.LocalChunks(): dict(chunk=1, before=0, after=0, multiple=1),
    TokenCrossEntropy(): dict(z_loss=0),
    MaskedTokens(5): dict(mask_token=0, vocab_size=1),
    SpanCorruption(9, 1): dict(sentinel=0, end=0, start=0, mean_span=1),
    Crop(): dict(padding=0),
    Move(): dict(degrees=0, pixels=0),
}


@pytest.mark.parametrize("config", NUMBERS, ids=lambda config: type(config).__name__)
def test_a_number_is_finite_whole_where_it_counts_and_not_too_small(config, as_users_call):
    declared = {field.name: (field.type, *get_args(field.type)) for field in fields(config)}
    for name, least in NUMBERS[config].items():
        wrong = [
            math.nan,
            math.inf,
            *([] if least == -math.inf else [least - 1]),
            *([] if float in declared[name] else [1.5]),
        ]
        for number in wrong:
            with pytest.raises(ConfigError, match=rf"{name}={number}"):
                replace(config, **{name: number})


def test_numbers_that_do_not_fit_each_other_are_refused(as_users_call):
    for make, said in (
        (partial(zoo.Reformer, chunk=4, multiple=6), "multiple of chunk=4"),
        (partial(zoo.Reformer, buckets=(4, 3)), "even numbers"),
        (partial(zoo.Reversible, streams=3), "streams=3"),
        (partial(Patches, image=(32,)), "image=.*two numbers"),
        (partial(Patches, patch=(0, 4)), "patch=0"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()
