"""Multi-token prediction beside its equations in float64, as a part of training, and as a draft."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models, params as P
from jaxformer.decoding import HiddenDraft, Sampling, speculate
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full, prefix, window
from jaxformer.models import Classification, EncoderDecoder, LanguageModel, Mixture, ModelConfig
from jaxformer.objectives import MultiToken, StepContext, TokenCrossEntropy
from jaxformer.objectives.multi_token import drafter, module_of, with_shared
from jaxformer.ops.positions import Rope

rng = np.random.default_rng(0)
B, T, V, D = 2, 9, 11, 8
MODEL = ModelConfig(
    V, 2, D, 1, context_length=T, norm="rms_norm", feedforward="relu", positions=None,
    use_bias=False, init_std=0.3,
)  # fmt: skip
LLAMA = ModelConfig(
    V, 3, 16, 4, num_kv_heads=2, context_length=40, norm="rms_norm", feedforward="swiglu",
    positions=Rope(), use_bias=False, tie_embeddings=False, init_std=0.5,
    masks=(causal() & window(6), causal() & window(3)),
)  # fmt: skip
KEY = jax.random.key(0)
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[1, 2, 3, 4, 5], [7], [4] * 8]


def init(spec, seed):
    return jax.jit(partial(P.init, spec))(jax.random.key(seed))


def both(model, objective):
    """(the model's parameters, the objective's)."""
    return init(models.spec(model), 1), init(objective.spec(model), 2)


def sums_of(objective, model, params, own, batch):
    return jax.jit(objective, static_argnums=0)(model, params, batch, StepContext(KEY, params=own))


def batch_of(model=MODEL, length=T):
    text = rng.integers(0, model.vocab_size, (B, length + 1))
    weights = rng.choice([0.0, 0.5, 1.0], (B, length))
    return {
        "tokens": jnp.asarray(text[:, :-1], jnp.int32),
        "labels": jnp.asarray(text[:, 1:], jnp.int32),
        "weights": jnp.float32(weights),
    }


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + MODEL.norm_eps) * scale["scale"]


def layer(p, x):
    """A pre-norm layer with one head, causal, without positions. x [B, T, D]."""
    y = rms(x, p["attention_norm"])
    maps = {name: p["attention"][name]["kernel"] for name in ("query", "key", "value", "out")}
    query, key, value = (
        np.einsum("btd,dnh->btnh", y, maps[n])[:, :, 0] for n in maps if n != "out"
    )
    scores = query @ key.swapaxes(1, 2) / np.sqrt(D)
    scores = np.where(np.tril(np.ones(scores.shape[1:])), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    heads = scores / scores.sum(axis=-1, keepdims=True) @ value
    x = x + heads @ maps["out"][0]
    y = np.maximum(rms(x, p["feedforward_norm"]) @ p["feedforward"]["up"]["kernel"], 0)
    return x + y @ p["feedforward"]["down"]["kernel"]


def cross_entropy(hidden, table, labels, weights):
    logits = hidden @ table.T
    top = logits.max(axis=-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return -np.sum(np.take_along_axis(logs, labels[..., None], axis=-1)[..., 0] * weights)


def by_equations(params, own, batch, count, weight):
    """(loss, [CE of each module]) as section 2.2 writes them, in float64."""
    tokens, labels = np.asarray(batch["tokens"]), np.asarray(batch["labels"])
    weights, table = np.asarray(batch["weights"], float), params["embedding"]["tokens"]
    hidden = table[tokens]
    for i in range(MODEL.num_layers):
        hidden = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), hidden)
    hidden = rms(hidden, params["final_norm"])
    loss = cross_entropy(hidden, table, labels, weights)
    of_modules = []
    for k in range(1, count + 1):
        p = own["modules"][str(k - 1)]
        join = p["embedding"]["join"]
        vectors = table[tokens[:, k:]]
        joined = np.concatenate(
            [rms(hidden[:, :-1], join["hidden_norm"]), rms(vectors, join["token_norm"])], axis=-1
        )
        first = jax.tree.map(lambda leaf: leaf[0], p["layers"])
        hidden = rms(layer(first, joined @ join["map"]["kernel"]), p["final_norm"])
        of_modules.append(cross_entropy(hidden, table, labels[:, k:], weights[:, k:]))
    return loss + weight / count * sum(of_modules), of_modules


@pytest.mark.thorough
def test_the_loss_and_its_gradient_are_those_of_the_equations():
    objective = MultiToken(modules=2, weight=0.4)
    params, own = both(MODEL, objective)
    batch = batch_of()

    @jax.jit
    def ours(trees):
        def loss(trees):
            sums = objective(MODEL, trees[0], batch, StepContext(KEY, params=trees[1]))
            return sums.loss, sums

        return jax.value_and_grad(loss, has_aux=True)(trees)

    (value, sums), gradient = ours((params, own))
    wide = jax.tree.map(lambda leaf: np.array(leaf, float), (params, own))
    expected, of_modules = by_equations(*wide, batch, 2, 0.4)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    weights = np.asarray(batch["weights"])
    np.testing.assert_allclose(sums.weight, weights.sum())
    for k, of_module in enumerate(of_modules, 1):
        np.testing.assert_allclose(sums.metrics[f"module_{k}_loss"][0], of_module, rtol=1e-5)
        np.testing.assert_allclose(sums.metrics[f"module_{k}_loss"][1], weights[:, k:].sum())
    slopes = P.paths({"model": gradient[0], "own": gradient[1]})
    for path, leaf in P.paths({"model": wide[0], "own": wide[1]}).items():
        index = tuple(int(rng.integers(n)) for n in leaf.shape)
        values = []
        for change in (1e-6, -1e-6):
            leaf[index] += change
            values.append(by_equations(*wide, batch, 2, 0.4)[0])
            leaf[index] -= change
        slope = (values[0] - values[1]) / 2e-6
        np.testing.assert_allclose(slopes[path][index], slope, rtol=1e-3, atol=1e-4, err_msg=path)


def test_embedding_and_head_are_those_of_the_model():
    own = MultiToken(modules=2).spec(LLAMA)["modules"]
    assert set(own) == {"0", "1"} and set(own["0"]) == {"layers", "final_norm", "embedding"}
    assert set(own["0"]["embedding"]) == {"join"}
    model = models.spec(LLAMA)
    tree = with_shared(model, own["0"])
    assert P.mismatch(models.spec(module_of(LLAMA)), tree) is None
    assert tree["heads"] is model["heads"]
    assert tree["embedding"]["tokens"] is model["embedding"]["tokens"]


@pytest.mark.thorough
def test_packed_rows_count_as_their_texts_alone():
    """No module reads or predicts a token of the next text."""
    objective = MultiToken(modules=2, weight=1.0)
    params, own = both(LLAMA, objective)
    batch = batch_of(LLAMA)
    segments = jnp.asarray([[1] * 3 + [2] * 5 + [0]] * B, jnp.int32)
    packed = batch | {"segment_ids": segments, "weights": jnp.float32(segments != 0)}
    found = sums_of(objective, LLAMA, params, own, packed)
    loss, of_modules = 0.0, np.zeros((2, 2))
    for start, stop in ((0, 3), (3, 8)):
        alone = {name: array[:, start:stop] for name, array in batch.items()}
        alone["weights"] = jnp.ones((B, stop - start))
        sums = sums_of(objective, LLAMA, params, own, alone)
        loss += sums.loss
        of_modules += [sums.metrics[f"module_{k}_loss"] for k in (1, 2)]
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    for k in (1, 2):
        np.testing.assert_allclose(found.metrics[f"module_{k}_loss"], of_modules[k - 1], rtol=1e-5)
    assert of_modules[1, 1] == B * (1 + 3)


@pytest.mark.thorough
def test_evaluation_is_that_of_the_model_alone():
    objective = MultiToken()
    params, own = both(MODEL, objective)
    batch = batch_of()
    sums = sums_of(objective.evaluation(), MODEL, params, own, batch)
    plain = sums_of(TokenCrossEntropy(), MODEL, params, {}, batch)
    assert sums.loss == plain.loss and sums.perplexity and "module_1_accuracy" in sums.metrics
    assert not sums_of(objective, MODEL, params, own, batch).perplexity


@pytest.mark.thorough
def test_experts_of_a_module_have_a_routing_loss():
    """One expert of weight 1: the router has no other gradient."""
    model = replace(MODEL, feedforward=Mixture(experts=3, top_k=1, balance_loss=0.1))
    objective = MultiToken()
    params, own = both(model, objective)
    batch = batch_of()

    @jax.jit
    def gradient(own):
        context = StepContext(KEY, params=own)
        return jax.grad(
            lambda own: objective(model, params, batch, replace(context, params=own)).loss
        )(own)

    paths = P.paths(gradient(own))
    router = next(leaf for path, leaf in paths.items() if "router" in path)
    assert np.isfinite(router).all() and np.asarray(router).any()


def test_what_does_not_fit_is_refused():
    stack = replace(MODEL, heads=())
    for model in (
        EncoderDecoder(stack, MODEL),
        replace(MODEL, heads=(Classification(2),)),
        replace(MODEL, masks=(full(),)),
        replace(MODEL, masks=(causal() | prefix(3),)),
    ):
        with pytest.raises(ConfigError, match="ModelConfig with a LanguageModel and causal masks"):
            MultiToken().spec(model)
    for make in (lambda: MultiToken(modules=0), lambda: MultiToken(weight=-0.1)):
        with pytest.raises(ConfigError, match="objective"):
            make()


def draft_of(model, seed=2):
    own = init(MultiToken().spec(model), seed)
    return drafter(model, init(models.spec(model), 1), own)


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [1, 3])
def test_greedy_tokens_are_those_of_generate(ahead):
    """Whatever the draft; texts are longer than the windows."""
    params = init(models.spec(LLAMA), 1)
    expected = decoding.generate(LLAMA, params, PROMPTS, 17, sampling=GREEDY, rows=4)
    found = speculate(
        LLAMA, params, PROMPTS, 17, draft=draft_of(LLAMA), ahead=ahead, sampling=GREEDY
    )
    assert found.tokens == expected and isinstance(draft_of(LLAMA), HiddenDraft)
    alone = speculate(
        LLAMA, params, PROMPTS[1:2], 17, draft=draft_of(LLAMA), ahead=ahead, sampling=GREEDY
    )
    assert alone.tokens == expected[1:2] and alone.accepted == found.accepted[1:2]


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [True, False])
def test_drafts_are_what_the_module_predicts_in_training(tied):
    """The numbers of proposed and accepted tokens are those of one pass over the whole text."""
    model = replace(LLAMA, tie_embeddings=tied, vocab_size=4, init_std=0.7)
    params = init(models.spec(model), 1)
    draft = draft_of(model)
    found = speculate(model, params, [[1, 2, 3]], 30, draft=draft, ahead=1, sampling=GREEDY)
    text = jnp.asarray([[1, 2, 3, *found.tokens[0]]], jnp.int32)
    hidden = models.encode(model, params, text).hidden
    module = models.apply(
        draft.config, draft.params, text[:, 1:], inputs={"hidden": hidden[:, :-1]}
    )
    predicted = np.argmax(module.logits[0], axis=-1)  # [i] is of token i + 2
    proposed, accepted, length = 0, 0, 4
    while length < 32:  # one token is left: none is proposed
        proposed += 1
        right = predicted[length - 2] == text[0, length]
        accepted += right
        length += 1 + right
    assert (found.proposed, found.accepted) == ([proposed], [accepted])
    assert 0 < accepted < proposed


@pytest.mark.thorough
def test_sampled_tokens_have_the_distribution_of_the_model():
    """Chi-square over 20,000 texts of three tokens; the second and third come of drafts."""
    model = ModelConfig(4, 1, 8, 2, context_length=16, init_std=0.5)
    params = init(models.spec(model), 3)
    n, prompt = 20_000, [1, 2, 0]
    sampling = Sampling(temperature=0.8)
    found = speculate(
        model, params, [prompt] * n, 4, draft=draft_of(model), ahead=2, sampling=sampling, rows=n
    )
    assert 0.1 < sum(found.accepted) / sum(found.proposed) < 0.95
    texts = np.indices((4, 4, 4)).reshape(3, -1).T
    tokens = np.concatenate([np.tile(prompt, (64, 1)), texts], axis=1)
    logits = models.apply(model, params, jnp.asarray(tokens, jnp.int32)).logits / 0.8
    logs = np.asarray(jax.nn.log_softmax(logits))[:, 2:5]
    expected = n * np.exp(np.take_along_axis(logs, texts[..., None], axis=-1).sum(axis=(1, 2)))
    observed = np.bincount(np.array(found.tokens)[:, :3] @ [16, 4, 1], minlength=64)
    chi = ((observed - expected) ** 2 / expected).sum()
    assert abs(chi - 63) < 4 * np.sqrt(2 * 63), chi  # four standard deviations


@pytest.mark.thorough
def test_a_draft_that_does_not_fit_is_refused():
    draft = draft_of(replace(MODEL, vocab_size=V + 1, heads=(LanguageModel(),)))
    with pytest.raises(ConfigError, match=f"draft of {V + 1} tokens"):
        speculate(MODEL, init(models.spec(MODEL), 1), PROMPTS, 3, draft=draft)
    pair = EncoderDecoder(replace(MODEL, heads=()), MODEL)
    params = init(models.spec(pair), 1)
    with pytest.raises(ConfigError, match="HiddenDraft reads the hidden states of a decoder alone"):
        speculate(pair, params, PROMPTS, 3, draft=draft_of(MODEL), sources=PROMPTS)
