"""The joint `Kernel`: what is chosen, what is refused, who calls it, and whether `check_kernel`
finds a wrong one."""

import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import config, decoding, masks, models, zoo
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, LanguageModel, ModelConfig
from jaxformer.ops.attention import KERNELS, Kernel, _log_once, _warn_once, attention
from jaxformer.ops.attention.kernel import never_refuses
from jaxformer.ops.attention.reference import reference
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.kernel_check import CASES, Case, check_kernel, random_cases

OURS = {kernel.name: kernel for kernel in KERNELS}
# float32 sums of some ten terms of order one, in another order
CLOSE = dict(rtol=5e-6, atol=5e-6)


def exact(query, key, value, call):
    return reference(query, key, value, call)[0]


def only_causal(query, key, value, call):
    """A refusal as a user writes it."""
    if call.extras():
        return ", ".join(call.extras())
    return None if call.mask == masks.causal() else f"mask {call.mask}"


MINE = Kernel("mine", exact, never_refuses)
CAUSAL = Kernel("causal", exact, only_causal)


def counted(kernel):
    """(the kernel, the shapes of the queries that it was called with)."""
    shapes = []

    def attention(query, key, value, call):
        shapes.append(query.shape)
        return kernel.attention(query, key, value, call)

    return replace(kernel, attention=attention), shapes


def heads(T=5, S=5, N=4, K=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (2, T, N, 4), (2, S, K, 4), (2, S, K, 4)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


# `check_kernel`


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["query_blocked", "blockwise"])
def test_our_kernels_are_the_reference_in_random_cases(name, capsys):
    """The named cases are the tests of each kernel; here are draws of several options at once."""
    report = check_kernel(OURS[name], cases=CASES[:1], draws=12, seed=3)
    assert not report.wrong and capsys.readouterr().out == f"{report}\n"
    refused = {result.case for result in report.results if result.refuses}
    biased = {
        case
        for case in random_cases(12, 3)
        if any(option.startswith("bias") for option in case.options)
    }
    assert refused == (biased if name == "query_blocked" else set()) and biased


@pytest.mark.thorough
def test_the_kernel_of_tpus_is_the_reference_in_16_bits():
    cases = [
        Case("causal segments", ("sinks",), 129, 129),
        Case("causal", ("softcap",), 127, 129),
        Case(options=("bias",)),
    ]
    report = check_kernel(OURS["splash"], cases=cases, draws=0, dtype=jnp.bfloat16)
    assert [result.refuses for result in report.results] == [None, None, "bias"]


def wrong(name):
    """A kernel with one mistake, and a case that shows it."""

    def masked(mask):
        return lambda q, k, v, call: exact(q, k, v, replace(call, mask=mask(call.mask)))

    def without(field):
        return lambda q, k, v, call: exact(q, k, v, replace(call, **{field: None}))

    def overflowing(q, k, v, call):
        return reference(
            q,
            k,
            v,
            call,
            lambda scores, sinks: jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True),
        )[0]

    def narrow(q, k, v, call):
        half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
        return exact(*half, call).astype(v.dtype)

    def interleaved(q, k, v, call):
        """Query head n reads key head n mod K, not n // (N / K)."""
        repeats = (1, 1, q.shape[2] // k.shape[2], 1)
        return exact(q, jnp.tile(k, repeats), jnp.tile(v, repeats), call)

    def own_dropout(q, k, v, call):
        seed = None if call.dropout_seed is None else call.dropout_seed + jnp.uint32(1)
        return exact(q, k, v, replace(call, dropout_seed=seed))

    def top_left(q, k, v, call):
        return exact(q, k, v, replace(call, mask=call.mask.at(0)))

    def one_block(q, k, v, call):
        """Keys behind the last whole block of 64 are forgotten."""
        S = k.shape[1] // 64 * 64 or k.shape[1]
        return exact(
            q, k[:, :S], v[:, :S], replace(call, mask=call.mask.at(k.shape[1] - q.shape[1]))
        )

    return {
        "softcap is ignored": (without("softcap"), Case(options=("softcap",))),
        "sinks are ignored": (without("sinks"), Case(options=("sinks",))),
        "a bias is ignored": (without("bias"), Case(options=("bias by key",))),
        "a mask is ignored": (masked(lambda mask: masks.full()), Case()),
        "a window is one too long": (
            masked(lambda mask: masks.causal() & masks.window(21)),
            Case("causal window"),
        ),
        "segments are ignored": (
            masked(lambda mask: masks.causal()),
            Case("causal segments", (), 129, 129),
        ),
        "no maximum is subtracted": (overflowing, Case(large_scores=True)),
        "a row without keys is NaN": (overflowing, Case("hidden keys")),
        "products have 16 bits": (narrow, Case()),
        "heads are grouped in turns": (interleaved, Case("full", heads=(4, 2))),
        "other weights are dropped": (own_dropout, Case(options=("dropout",))),
        "the first query is at the first key": (top_left, Case("causal", (), 127, 129)),
        "the last keys are forgotten": (one_block, Case("full", (), 129, 129)),
        "the keys have no gradient": (
            lambda q, k, v, call: exact(q, jax.lax.stop_gradient(k), v, call),
            Case(),
        ),
        "the sinks have no gradient": (
            lambda q, k, v, call: exact(
                q, k, v, replace(call, sinks=jax.lax.stop_gradient(call.sinks))
            ),
            Case(options=("sinks",)),
        ),
    }[name]


QUICK = ("softcap is ignored", "the keys have no gradient", "a row without keys is NaN")
SLOW = (
    "sinks are ignored",
    "a bias is ignored",
    "a mask is ignored",
    "a window is one too long",
    "segments are ignored",
    "no maximum is subtracted",
    "products have 16 bits",
    "heads are grouped in turns",
    "other weights are dropped",
    "the first query is at the first key",
    "the last keys are forgotten",
    "the sinks have no gradient",
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW)]
)
def test_a_wrong_kernel_is_found(name):
    function, case = wrong(name)
    with pytest.raises(AssertionError, match=r"wrong: 1 of 1 cases are wrong") as caught:
        check_kernel(Kernel("wrong", function, never_refuses), cases=[case], draws=0)
    assert str(case) in str(caught.value)
    if "gradient" in name:
        array = "key" if "keys" in name else "sinks"
        assert f"WRONG: gradient of {array} by" in str(caught.value)


def test_a_check_that_compares_nothing_fails():
    nothing = Kernel("nothing", exact, lambda *arguments: "anything")
    with pytest.raises(AssertionError, match="refuses every case, so nothing was compared"):
        check_kernel(nothing, cases=CASES[:2], draws=1)


def test_an_error_of_a_kernel_names_its_case():
    def broken(query, key, value, call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        check_kernel(Kernel("broken", broken, never_refuses), cases=CASES[:1], draws=0)
    assert "check_kernel('broken'): in the case 127 x 127, causal" in caught.value.__notes__


@pytest.mark.thorough
def test_a_kernel_for_inference_is_checked_without_gradients():
    @jax.custom_vjp
    def forward(query, key, value, call):
        return exact(query, key, value, call)

    def refuse(*arguments):
        raise NotImplementedError("no gradients")

    forward.defvjp(lambda *arguments: (forward(*arguments), None), refuse)
    kernel = Kernel("inference", forward, never_refuses)
    case = Case(T=1, S=1)
    assert check_kernel(kernel, cases=[case], draws=0, gradients=False).results[
        0
    ].differences.keys() == {"output"}
    with pytest.raises(NotImplementedError, match="no gradients"):
        check_kernel(kernel, cases=[case], draws=0)


def test_random_cases_are_a_function_of_the_seed():
    assert random_cases(5, 1) == random_cases(5, 1) != random_cases(5, 2)
    assert random_cases(9, 1)[:5] == random_cases(5, 1)


# The choice


def test_a_kernel_is_called_in_place_of_a_name():
    kernel, shapes = counted(MINE)
    options = dict(mask=masks.causal(), softcap=2.0)
    found = attention(*heads(), implementation=kernel, **options)
    np.testing.assert_allclose(
        found, attention(*heads(), implementation="reference", **options), **CLOSE
    )
    assert shapes == [(2, 5, 4, 4)]


@pytest.mark.parametrize(
    "implementation",
    ["query_blocked", CAUSAL, OURS["query_blocked"]],
    ids=["a name", "a kernel of a user", "a kernel of ours"],
)
def test_what_is_named_alone_refuses_with_its_reason(implementation):
    """Also on a platform that it is not for: whoever names a kernel means it."""
    name = getattr(implementation, "name", implementation)
    bias = jnp.zeros((1, 1, 5, 5))
    with pytest.raises(
        NotImplementedError, match=f"{name}: no bias; implementation='blockwise' has it"
    ):
        attention(*heads(), mask=masks.causal(), bias=bias, implementation=implementation)
    elsewhere, shapes = counted(replace(MINE, platforms=("tpu",)))
    attention(*heads(), implementation=elsewhere)
    assert shapes


def test_a_tuple_takes_the_first_that_can_and_says_which(caplog):
    mine, shapes = counted(CAUSAL)
    elsewhere, never = counted(replace(MINE, name="elsewhere", platforms=("tpu", "gpu")))
    order = elsewhere, mine, "blockwise", "reference"
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jaxformer"):
        attention(*heads(), mask=masks.causal(), implementation=order)
        found = attention(*heads(), mask=masks.causal(), softcap=3.0, implementation=order)
    expected = attention(*heads(), mask=masks.causal(), softcap=3.0, implementation="reference")
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert len(shapes) == 1 and not never
    not_here = "elsewhere: for tpu and gpu, not for cpu"
    assert caplog.messages == [
        f"attention on cpu: causal; {not_here}",
        f"attention on cpu: blockwise; {not_here}; causal: no softcap",
    ]


def test_if_all_refuse_one_error_has_every_reason():
    said = (
        r"none of \(causal, query_blocked, splash\) computes this call: causal: no bias, softcap; "
        r"query_blocked: no bias; splash: for tpu, not for cpu"
    )
    bias = jnp.zeros((1, 1, 5, 5))
    with pytest.raises(NotImplementedError, match=said):
        attention(
            *heads(), bias=bias, softcap=2.0, implementation=(CAUSAL, "query_blocked", "splash")
        )


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_a_gpu_has_two_names(platform):
    assert all(replace(MINE, platforms=(name,)).is_for(platform) for name in ("gpu", "cuda"))
    assert not replace(MINE, platforms=("cpu",)).is_for(platform) and MINE.is_for(platform)


def test_only_the_reference_returns_weights():
    with pytest.raises(
        NotImplementedError, match="mine: no weights to return; implementation='reference' has it"
    ):
        attention(*heads(), implementation=MINE, return_weights=True)
    positions = jnp.arange(5)[None], jnp.arange(5)[None]
    with pytest.raises(
        NotImplementedError, match="mine: no positions by row; implementation='reference' has it"
    ):
        attention(*heads(), implementation=MINE, positions=positions)
    mine, shapes = counted(MINE)
    _, weights = attention(*heads(), implementation=(mine, "reference"), return_weights=True)
    assert weights.shape == (2, 4, 5, 5) and not shapes


@pytest.mark.thorough
def test_the_earlier_name_is_the_same_kernel_with_one_warning(caplog):
    _warn_once.cache_clear()
    model = ModelConfig(13, 1, 8, 2, context_length=8)
    earlier, now = (
        replace(model, attention_implementation=name) for name in ("rows", "query_blocked")
    )
    assert config.fingerprint(earlier) == config.fingerprint(now) == config.fingerprint(model)
    params = models.init(model, jax.random.key(0))
    with caplog.at_level(logging.WARNING, "jaxformer"):
        found = [
            models.apply(each, params, jnp.ones((1, 8), int)).logits
            for each in (earlier, now, earlier)
        ]
    np.testing.assert_array_equal(found[0], found[1])
    assert caplog.messages == ["attention: the implementation 'rows' is now 'query_blocked'"]


# Errors at the door


NO_IMPLEMENTATION = {
    "name": "flash",
    "nothing": (),
    "name in a tuple": ("reference", "flash"),
    "number": 3,
    "function": exact,
    "list": [MINE],
    "None in a tuple": (MINE, None),
}


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize("value", NO_IMPLEMENTATION.values(), ids=NO_IMPLEMENTATION)
def test_what_is_no_implementation_is_refused(value):
    expected = (
        "attention_implementation=.*expected None, one of reference, query_blocked, .*, a "
        "Kernel, or a tuple"
    )
    with pytest.raises(ConfigError, match=expected) as caught:
        ModelConfig(13, 1, 8, 2, context_length=8, attention_implementation=value)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        NotImplementedError, match=r"attention\(implementation=.*: expected None, one of reference"
    ):
        attention(*heads(), implementation=value)


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(name=""), "Kernel.name='': expected a name"),
        (
            dict(attention="flash"),
            r"Kernel\('mine'\).attention: expected a function \(query, key, value, call\)",
        ),
        (dict(refuses=None), r"Kernel\('mine'\).refuses: expected a function"),
        (dict(platforms="tpu"), r"platforms='tpu': expected a tuple of texts, as \(\"tpu\",\)"),
    ],
)
def test_a_kernel_of_other_parts_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(MINE, **change)


def test_another_shape_type_or_reason_is_refused_where_it_arises():
    """Otherwise a projection of the model would speak of it."""
    swapped = replace(MINE, attention=lambda *arguments: exact(*arguments).swapaxes(1, 2))
    with pytest.raises(
        ConfigError,
        match=r"Kernel 'mine': its output is float32\[2, 4, 5, 4\]; expected float32\[2, 5, 4, 4\]",
    ):
        attention(*heads(), implementation=swapped)
    wide = replace(MINE, attention=lambda *arguments: exact(*arguments).astype(jnp.float32))
    with pytest.raises(ConfigError, match=r"its output is float32\[.*expected bfloat16"):
        attention(*(x.astype(jnp.bfloat16) for x in heads()), implementation=wide)
    with pytest.raises(ConfigError, match="its output is tuple; expected"):
        attention(*heads(), implementation=replace(MINE, attention=reference))
    for reason in (True, ""):
        with pytest.raises(
            ConfigError, match=rf"refuses\(...\) gave {reason!r}; expected None, or in a few words"
        ):
            attention(
                *heads(),
                implementation=replace(MINE, refuses=lambda *arguments, reason=reason: reason),
            )


# Everything of a model that attends calls it


MODEL = ModelConfig(13, 2, 16, 4, context_length=8, num_kv_heads=2, feedforward="relu", d_ff=16)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 8)), jnp.int32)


def logits(model, tokens=TOKENS):
    params = models.init(model, jax.random.key(0))
    return jax.jit(partial(models.apply, model))(params, tokens).logits


VARIANTS = {
    "self-attention": None,
    "qk_norm": zoo.qk_norm.qk_norm,
    "gated": zoo.gated.gated,
    "differential": zoo.differential.differential,
    "value_residual": zoo.value_residual.value_residual,
    "temperature": partial(zoo.temperature.temperature, floor_scale=2, attn_scale=0.5),
    "LocalChunks": zoo.LocalChunks(4),
    "Longformer": zoo.Longformer(window=2),
    "BigBird": zoo.BigBird(block=2, random=1, layout="random"),
}
BOTH_WAYS = "Longformer", "BigBird"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("self-attention", "gated") else pytest.mark.thorough
        )
        for name in VARIANTS
    ],
)
def test_self_attention_and_variants_call_it(name):
    model = replace(MODEL, mixer=VARIANTS[name])
    tokens = TOKENS
    if name in BOTH_WAYS:
        model = replace(model, masks=(masks.full(),), context_length=16)
        tokens = jnp.concatenate([TOKENS, TOKENS], axis=1)
    kernel, shapes = counted(MINE)
    expected = logits(replace(model, attention_implementation="reference"), tokens)
    found = logits(replace(model, attention_implementation=kernel), tokens)
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert shapes


@pytest.mark.thorough
def test_linformer_calls_it():
    model = replace(MODEL, mixer=zoo.Linformer(rank=4), masks=(masks.full(),))
    kernel, shapes = counted(MINE)
    expected = logits(model)
    np.testing.assert_allclose(
        logits(replace(model, attention_implementation=kernel)), expected, **CLOSE
    )
    assert shapes and all(shape[1:] == (8, 4, 4) for shape in shapes)


def test_sigmoid_attention_refuses_it():
    with pytest.raises(
        NotImplementedError, match=r"mine, blockwise: no sigmoid attention; .*'reference' has it"
    ):
        models.spec(
            replace(MODEL, mixer=zoo.sigmoid.sigmoid, attention_implementation=(MINE, "blockwise"))
        )
    assert models.spec(
        replace(MODEL, mixer=zoo.sigmoid.sigmoid, attention_implementation=(MINE, "reference"))
    )


@pytest.mark.thorough
def test_cross_attention_and_an_encoder_call_it():
    kernel, shapes = counted(MINE)

    def pair(implementation):
        stack = replace(MODEL, attention_implementation=implementation)
        encoder = replace(stack, masks=(masks.full(),), heads=())
        return EncoderDecoder(encoder, replace(stack, heads=(LanguageModel(),)))

    params = models.init(pair(None), jax.random.key(0))
    source = TOKENS[:, :6]
    run = lambda model: jax.jit(partial(models.apply, model))(params, TOKENS, source=source).logits
    np.testing.assert_allclose(run(pair(kernel)), run(pair("reference")), **CLOSE)
    lengths = [shape[1] for shape in shapes]
    # a layer of the encoder; the decoder's attention to itself, and to the source
    assert lengths.count(8) == 2 * lengths.count(6) > 0


@pytest.mark.thorough
def test_the_prompt_of_a_decoding_calls_it_and_the_texts_are_those_of_the_reference():
    kernel, shapes = counted(CAUSAL)
    params = models.init(MODEL, jax.random.key(0))
    texts = [
        decoding.generate(
            replace(MODEL, attention_implementation=each),
            params,
            [[1, 2, 3], [4]],
            4,
            sampling=decoding.Sampling(temperature=0.0),
        )
        for each in ("reference", kernel)
    ]
    assert texts[0] == texts[1]
    assert shapes and all(shape[1] > 1 for shape in shapes)


@pytest.mark.thorough
def test_dropout_in_training_is_refused_and_not_left_out():
    dropping = replace(MODEL, attention_dropout_rate=0.1, attention_implementation=CAUSAL)
    params = models.init(dropping, jax.random.key(0))
    models.apply(dropping, params, TOKENS)
    with pytest.raises(
        NotImplementedError, match="causal: no dropout; implementation='blockwise' has it"
    ):
        models.apply(dropping, params, TOKENS, dropout_key=jax.random.key(1))


@pytest.mark.thorough
def test_on_a_mesh_gradients_are_those_of_one_device():
    def loss(implementation, *arrays):
        return jnp.sum(
            jnp.sin(attention(*arrays, mask=masks.causal(), implementation=implementation))
        )

    arrays = [jnp.concatenate([x] * 4) for x in heads(T=8, S=8)]
    one = jax.jit(jax.grad(partial(loss, "reference"), (0, 1, 2)))(*arrays)
    with jax.set_mesh(make_mesh(Mesh(data=2, fsdp=2, tensor=2))):
        many = jax.block_until_ready(jax.jit(jax.grad(partial(loss, MINE), (0, 1, 2)))(*arrays))
    jax.tree.map(partial(np.testing.assert_allclose, **CLOSE), many, one)


# A run's name


def named(model):
    return config.fingerprint(model)


def another(query, key, value, call):
    return reference(query, key, value, call)[0] + 0


def test_a_kernel_of_ones_own_is_part_of_a_runs_name_and_a_name_of_ours_is_not():
    unnamed = named(MODEL)
    for same in (*OURS, *KERNELS, ("splash", "blockwise"), (OURS["splash"], "reference")):
        assert named(replace(MODEL, attention_implementation=same)) == unnamed
    others = [MINE, CAUSAL, replace(MINE, attention=another), (MINE, "blockwise"), ("splash", MINE)]
    names = [named(replace(MODEL, attention_implementation=each)) for each in others]
    assert len({unnamed, *names}) == 1 + len(others)
    assert named(replace(MODEL, attention_implementation=MINE)) == names[0]


def test_a_changed_kernel_is_named_as_what_differs():
    def field(implementation):
        return replace(MODEL, attention_implementation=implementation)

    assert "attention_implementation" in config.execution_fields(field("splash"))
    assert "attention_implementation" not in config.execution_fields(field(MINE))
    assert config.changes(field(MINE)).keys() - config.changes(MODEL).keys() == {
        "attention_implementation"
    }
    differing = config.diff(
        config.describe(field(MINE)), config.describe(field(replace(MINE, attention=another)))
    )
    assert differing and all(
        name.startswith("attention_implementation.attention") for name in differing
    )
