"""Speculation changes the number of steps and nothing else: tokens at temperature 0, their
distribution otherwise."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models
from jaxformer.decoding import Draft, Lookup, Sampling, speculate, speculative
from jaxformer.decoding.arguments import Settings
from jaxformer.decoding.filters import History
from jaxformer.decoding.speculative import Proposal, accept
from jaxformer.errors import ConfigError
from jaxformer.models import Alibi, EncoderDecoder, LanguageModel, ModelConfig, Relative
from jaxformer.ops.positions import NTK, Rope
from jaxformer.zoo.linear_attention import Linear
from jaxformer.zoo.performer import Performer

V = 11
GPT = ModelConfig(
    vocab_size=V, num_layers=1, d_model=16, num_heads=4, context_length=40, init_std=0.6
)
LLAMA = replace(
    GPT,
    num_layers=2,
    norm="rms_norm",
    feedforward="swiglu",
    positions=Rope(),
    use_bias=False,
    tie_embeddings=False,
    num_kv_heads=2,
    masks=(masks.causal() & masks.window(3), masks.causal() & masks.window(6)),
)
STACK = replace(
    GPT,
    d_model=16,
    norm="rms_norm",
    use_bias=False,
    positions=Relative(8, 16),
    heads=(),
    masks=(masks.full(),),
    tie_embeddings=False,
)
T5 = EncoderDecoder(
    STACK,
    replace(
        STACK,
        positions=Relative(8, 16, bidirectional=False),
        heads=(LanguageModel(),),
        masks=(masks.causal(),),
    ),
)
MODELS = {
    "llama": LLAMA,  # texts are longer than its windows
    "t5": T5,
    "alibi": replace(GPT, positions=Alibi()),
    "gpt2": replace(GPT, masks=(masks.causal() | masks.prefix(4),)),  # longer than a prompt
}
PROMPTS, SOURCES = [[1, 2, 3, 4, 5], [7], [4] * 8], [[1, 2, 3, 4], [8, 9], [3, 1, 4]]
LIMIT, GREEDY, KEY = 17, Sampling(temperature=0.0), jax.random.key(0)
init = jax.jit(models.init, static_argnums=0)
forward = jax.jit(models.apply, static_argnums=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "alibi" else ()) for n in MODELS]
)
def test_greedy_tokens_are_those_of_generate_whatever_the_draft(name):
    config = MODELS[name]
    params, options = (
        init(config, jax.random.key(3)),
        dict(sampling=GREEDY, key=KEY, sources=SOURCES if name == "t5" else None),
    )
    expected = decoding.generate(config, params, PROMPTS, LIMIT, rows=4, **options)
    good = speculate(config, params, PROMPTS, LIMIT, draft=Draft(config, params), **options)
    assert good.tokens == expected and good.accepted == good.proposed
    # the first token is the model's; then rounds of 4 tokens of the draft and one of the model
    assert good.proposed == [4 * 3] * 3
    bad = speculate(
        config,
        params,
        PROMPTS,
        LIMIT,
        draft=Draft(config, init(config, jax.random.key(4))),
        **options,
    )
    assert bad.tokens == expected and sum(bad.accepted) < 0.5 * sum(bad.proposed)
    if name in ("gpt2", "llama"):  # look-up knows no model
        assert (
            speculate(config, params, PROMPTS, LIMIT, draft=Lookup(), **options).tokens == expected
        )


TINY = ModelConfig(
    vocab_size=5, num_layers=1, d_model=8, num_heads=2, context_length=16, init_std=0.5
)
CHEAP = replace(TINY, d_model=4, num_heads=1)


def no_even_twice(logits, history):
    """Depends on the row: an even last token is not repeated."""
    last = jnp.take_along_axis(history.tokens, history.length[:, None] - 1, axis=1)
    return jnp.where(
        (last % 2 == 0) & (jnp.arange(logits.shape[1])[None] == last), -jnp.inf, logits
    )


def top_3(logits, history):
    """TopK(3), for rows of five: that of the library works on lines of 256."""
    return jnp.where(logits >= jnp.sort(logits, axis=1)[:, -3:-2], logits, -jnp.inf)


FILTERS, TEMPERATURE = (no_even_twice, top_3), 0.8


def exact(params, prompt, count):
    """The probability of each continuation of `count` tokens, [5^count], by forward passes over all
    of them."""
    texts = np.indices((TINY.vocab_size,) * count).reshape(count, -1).T.astype(np.int32)
    tokens = np.concatenate([np.tile(np.array(prompt, np.int32), (len(texts), 1)), texts], axis=1)
    logits, total = forward(TINY, params, tokens).logits, np.ones(len(texts))
    for i, length in enumerate(range(len(prompt), len(prompt) + count)):
        row = logits[:, length - 1]
        for function in FILTERS:
            row = function(row, History(jnp.array(tokens), jnp.full(len(texts), length), None))
        total *= np.asarray(jax.nn.softmax(row / TEMPERATURE, axis=-1))[
            np.arange(len(texts)), texts[:, i]
        ]
    return total


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["model", "look-up"])
def test_tokens_have_the_distribution_of_the_model(kind):
    """Chi-square over 20,000 texts: the first token is that of the prompt, two more come of rounds
    with rejections."""
    params, prompt, n = init(TINY, jax.random.key(3)), [1, 2, 0, 2, 0, 2], 20_000
    draft = Lookup() if kind == "look-up" else Draft(CHEAP, init(CHEAP, jax.random.key(5)))
    options = dict(
        sampling=Sampling(TEMPERATURE), filters=FILTERS, key=jax.random.key(7), rows=n, ahead=2
    )
    out = speculate(TINY, params, [prompt] * n, 4, draft=draft, **options)
    assert 0.1 < sum(out.accepted) / sum(out.proposed) < 0.9
    observed, expected = (
        np.bincount(np.array(out.tokens)[:, :3] @ [25, 5, 1], minlength=125),
        n * exact(params, prompt, 3),
    )
    some = expected > 0
    assert 20 < some.sum() < 40 and not observed[~some].any()
    chi, degrees = ((observed - expected)[some] ** 2 / expected[some]).sum(), some.sum() - 1
    # four standard deviations of a chi-square
    assert abs(chi - degrees) < 4 * np.sqrt(2 * degrees), (
        chi,
        degrees,
    )


@pytest.mark.thorough
def test_accepted_tokens_follow_p_for_any_p_and_q():
    """Rows of 20,000 keys: the first token follows p, the second the next p where the first was
    that of the draft."""
    n, V, p, q = 20_000, 4, *np.random.default_rng(0).dirichlet(np.full(4, 0.4), (2, 3))

    @jax.jit
    def run(keys):
        drawn = jax.vmap(lambda key: jax.random.categorical(key, jnp.log(jnp.array(q[:2]))))(
            keys[0]
        )
        wide = lambda x: jnp.broadcast_to(jnp.array(x, jnp.float32), (n, *x.shape))
        return accept(wide(p), Proposal(drawn, wide(q[:2])), jnp.full(n, 2), keys[1], 1.0)

    new, taken = jax.device_get(run(jax.random.split(KEY, (2, n))))
    error = 4 * np.sqrt(0.25 / n)  # four standard errors, at most
    np.testing.assert_allclose(np.bincount(new[:, 0], minlength=V) / n, p[0], atol=error)
    second = new[taken > 0, 1]
    np.testing.assert_allclose(
        np.bincount(second, minlength=V) / len(second), p[1], atol=4 * np.sqrt(0.25 / len(second))
    )
    # the share of tokens taken is sum_d min(p, q): Leviathan et al., theorem 3.5
    assert abs((taken > 0).mean() - np.minimum(p[0], q[0]).sum()) < error


@pytest.mark.thorough
def test_the_model_itself_is_always_accepted_and_its_opposite_never():
    params = init(LLAMA, jax.random.key(3))
    run = partial(speculate, LLAMA, params, PROMPTS, LIMIT, key=KEY)
    own = run(draft=Draft(LLAMA, params), sampling=Sampling(temperature=0.7))
    # two shapes of a product round differently
    assert sum(own.accepted) >= 0.98 * sum(own.proposed) > 0
    opposite = params | {"heads": jax.tree.map(jnp.negative, params["heads"])}
    other = run(draft=Draft(LLAMA, opposite), sampling=GREEDY)
    assert (
        sum(other.accepted) == 0
        and other.tokens == run(draft=Draft(LLAMA, params), sampling=GREEDY).tokens
    )


@pytest.mark.thorough
def test_rows_are_what_they_are_alone():
    params = init(LLAMA, jax.random.key(3))
    run = partial(
        speculate,
        LLAMA,
        params,
        max_tokens=14,
        draft=Lookup(),
        sampling=Sampling(temperature=0.5),
        key=KEY,
        rows=4,
    )
    prompts = [*PROMPTS, [1, 2, 3, 1, 2], [5, 5]]
    together = run(prompts)
    for i in range(5):  # the number of a prompt is in its key
        alone = run([[0] if row != i else prompt for row, prompt in enumerate(prompts)])
        assert alone.tokens[i] == together.tokens[i] and alone.accepted[i] == together.accepted[i]


@pytest.mark.thorough
def test_limits_and_stop_tokens_end_a_row_inside_an_accepted_run():
    params = init(LLAMA, jax.random.key(8))
    run = partial(
        speculate, LLAMA, params, PROMPTS, draft=Draft(LLAMA, params), sampling=GREEDY, key=KEY
    )
    whole = run(LIMIT).tokens
    assert len(set(whole[0])) > 3
    for limit in range(9, LIMIT, 2):
        assert run(limit).tokens == [tokens[:limit] for tokens in whole]
    for stop in set(whole[0]):
        cut = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in whole]
        assert run(LIMIT, stop_tokens=[stop]).tokens == cut


@pytest.mark.thorough
def test_look_up_proposes_what_followed_the_longest_match():
    def propose(text, n=3, ahead=4):
        # 9: not in use
        row = (
            jnp.array([[*text, *[9] * 5]]),
            jnp.array([len(text)]),
            jnp.array([1]),
        )
        return (
            Lookup(n)
            .propose(ahead, History(*row), None, None, None, Settings((), 0.0, None))
            .tokens[0]
            .tolist()
        )

    assert propose([1, 2, 3, 4, 5, 6, 7, 2, 3]) == [4, 5, 6, 7]
    # of equal matches, the latest
    assert propose([1, 2, 3, 4, 0, 2, 3, 5, 0, 2, 3]) == [
        5,
        0,
        2,
        3,
    ]
    assert propose([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3]) == [4, 0, 2, 3]  # the longer one is earlier
    assert propose([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3], n=2) == [5, 1, 2, 3]
    assert propose([7, 1, 2, 1, 2]) == [1, 2, 1, 2]  # what follows runs beyond the end
    assert propose([6, 6]) == [6, 6, 6, 6]
    assert propose([1, 2, 3]) == [1, 2, 3, 1]


@pytest.mark.thorough
def test_other_numbers_compile_nothing():
    params, key = init(LLAMA, jax.random.key(3)), KEY
    run = partial(speculate, LLAMA, params, draft=Draft(LLAMA, params), key=key)
    run(PROMPTS, LIMIT, sampling=GREEDY)
    size = speculative._run._cache_size()
    for prompts, limit, temperature, stop in (
        ([[4] * 9, [5, 6], [1]], 20, 0.5, [1, 2]),
        ([[1] * 3] * 4, 15, 1.0, [3]),
    ):
        with jax.transfer_guard("disallow"):
            run(prompts, limit, sampling=Sampling(temperature), stop_tokens=stop)
    assert speculative._run._cache_size() == size


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", [Performer(features=8), (None, Linear())])
def test_sums_of_all_tokens_cannot_be_taken_back(mixer):
    config = replace(GPT, mixer=mixer, num_layers=2)
    params = init(config, jax.random.key(0))
    with pytest.raises(NotImplementedError, match=r"(Linear|Performer) cannot take tokens back"):
        speculate(config, params, PROMPTS, 4, draft=Lookup())
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        speculate(GPT, init(GPT, KEY), PROMPTS, 4, draft=Draft(config, params))


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    params = init(GPT, jax.random.key(0))
    other = replace(GPT, vocab_size=V + 1)
    with pytest.raises(ConfigError, match=f"draft of {V + 1} tokens"):
        speculate(GPT, params, PROMPTS, 4, draft=Draft(other, params))
    with pytest.raises(ConfigError, match="at least 1"):
        speculate(GPT, params, PROMPTS, 4, draft=Lookup(), ahead=0)
    with pytest.raises(ConfigError, match="at least 1"):
        Lookup(0)
    with pytest.raises(ConfigError, match="40 learned positions"):
        speculate(GPT, params, PROMPTS, 40, draft=Lookup())
    config = replace(GPT, positions=Rope(scaling=NTK(2.0, 12)))
    params = init(config, jax.random.key(0))
    with pytest.raises(NotImplementedError, match="original length"):
        # 8 + 5: the thirteenth token is written, but not read
        speculate(config, params, PROMPTS, 6, draft=Lookup())
