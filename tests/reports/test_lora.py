"""Low-rank updates and other adaptations: what users of PEFT and its peers reported, tried on
ours."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxformer import families, masks, models, params
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, LanguageModel, ModelConfig, adaptation
from jaxformer.models.adaptation import Lora
from jaxformer.training import AdamW, ClassCrossEntropy, Experiment
from jaxformer.training.recipe import build

GPT = ModelConfig(13, 2, 8, 2, 8, d_ff=12)
CLASSES = replace(GPT, masks=(masks.full(),), heads=(Classification(3, pooler=None),))


def start(spec, key):
    return params.init(spec, key)


def recipe_of(model=GPT, **changes):
    objective = {"objective": ClassCrossEntropy()} if model is CLASSES else {}
    fields = {
        "name": "a",
        "data": Reverse(vocab_size=12, length=3),
        "initial": start,
        "adaptation": Lora(),
    }
    return build(Experiment(**fields | objective | {"model": model} | changes))


def drawn(spec, dtype=np.float32):
    """Parameters of random numbers, in NumPy: nothing is compiled."""
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: generator.normal(size=leaf.shape).astype(dtype), spec)


def trained(recipe):
    return [
        path for path in params.paths(recipe.spec) if not re.search(recipe.frozen or "$^", path)
    ]


@pytest.mark.report(
    "huggingface/peft#1959",
    "NVIDIA-NeMo/Megatron-Bridge#1738",
    "dllm-reasoning/d1#6",
    right=(
        "a target that no matrix has is named, also where another target of the same pattern has "
        "one"
    ),
    hit=(
        "only a pattern without any matrix was refused; of attention/(query|valu) nobody heard "
        "that valu has none"
    ),
)
def test_a_target_that_there_is_not_is_named(caplog):
    with caplog.at_level("WARNING", "jaxformer"):
        recipe = recipe_of(adaptation=Lora("attention/(query|valu)/kernel"))
        recipe_of(adaptation=Lora("attention/(query|valu)/kernel"))
        recipe_of(adaptation=Lora("attention/(query|value)/kernel"))
    assert {path.split("/")[-2] for path in trained(recipe) if path.startswith("factors/")} == {
        "kernel"
    }
    (line,) = [text for text in caplog.messages if "matches nothing" in text]  # said once
    assert line.startswith(
        "lora: valu of 'attention/(query|valu)/kernel' matches nothing; correct it"
    )


@pytest.mark.report(
    "4AI/LS-LLaMA#3",
    "huggingface/peft#1070",
    listed="first 09",
    right=(
        "the head of a new task trains beside the factors; the head of a language model stays "
        "frozen"
    ),
    hit="every head was frozen, so that a new one stayed random",
)
def test_a_new_head_trains():
    heads = {path for path in trained(recipe_of(CLASSES)) if "/heads/" in path}
    assert heads == {"weights/heads/classification/kernel", "weights/heads/classification/bias"}
    untied = replace(GPT, tie_embeddings=False, heads=(LanguageModel(bias=True),))
    assert all(path.startswith("factors/") for path in trained(recipe_of(untied)))
    assert not [
        path
        for path in trained(recipe_of(CLASSES, adaptation=Lora(trains=None)))
        if "heads" in path
    ]
    with_norms = trained(recipe_of(adaptation=Lora(trains="norm/")))
    assert {path.split("/")[-2] for path in with_norms if path.startswith("weights/")} == {
        "attention_norm", "feedforward_norm", "final_norm",
    }  # fmt: skip


@pytest.mark.report(
    "paiml/entrenar#276",
    listed="third 18",
    right=(
        "a rank below 1, an alpha that is no positive number and a broken pattern are refused by "
        "name"
    ),
    hit=(
        "rank 0 and -1, alpha 0 and nan were taken or failed inside JAX, and a broken pattern "
        "was a traceback"
    ),
)
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": -1}, "rank=-1"),
        ({"alpha": 0.0}, "alpha=0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"pattern": "("}, "regular expression"),
        ({"trains": "["}, "regular expression"),
        ({"pattern": "heads/", "trains": "heads/"}, "matches all"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        recipe_of(replace(CLASSES), adaptation=Lora(**settings), objective=ClassCrossEntropy())


@pytest.mark.report(
    "Blaizzy/mlx-vlm#845", "Blaizzy/mlx-vlm#841", "rasbt/LLMs-from-scratch#821",
    right="the update is alpha / rank times the product of the factors",
)  # fmt: skip
def test_the_update_is_scaled_by_alpha_over_rank():
    recipe = recipe_of(adaptation=Lora(pattern="query/kernel$", rank=4, alpha=6.0))
    tree = drawn(recipe.spec)
    merged = recipe.weights(tree)["layers"]["attention"]["query"]["kernel"]
    a, b = (
        tree["factors"]["layers/attention/query/kernel"][name].astype(np.float64) for name in "ab"
    )
    before = tree["weights"]["layers"]["attention"]["query"]["kernel"]
    expected = before + 6 / 4 * np.einsum("ldr,lrnh->ldnh", a, b)
    # float32 against float64
    np.testing.assert_allclose(np.asarray(merged), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.report(
    "NVIDIA-NeMo/Megatron-Bridge#1738", "vllm-project/vllm#55193",
    right="a pattern that no matrix matches is refused, with the names that there are",
)  # fmt: skip
@pytest.mark.parametrize("pattern", ["q_proj", "^query", "bias$"])
def test_a_pattern_without_a_matrix_is_refused(pattern):
    with pytest.raises(ConfigError, match="attention/query/kernel"):
        recipe_of(adaptation=Lora(pattern=pattern))


@pytest.mark.report(
    "huggingface/peft#2018",
    "huggingface/transformers#45127",
    right=(
        "the head of a tied model has no factors of its own, which would change the table too: "
        "refused"
    ),
)
def test_the_head_of_a_tied_model_has_no_factors():
    with pytest.raises(ConfigError, match="no matrix matches"):
        recipe_of(adaptation=Lora(pattern="heads/language_model|embedding/tokens"))
    untied = recipe_of(
        replace(GPT, tie_embeddings=False), adaptation=Lora(pattern="heads/language_model")
    )
    tree = drawn(untied.spec)
    merged = untied.weights(tree)
    assert np.array_equal(merged["embedding"]["tokens"], tree["weights"]["embedding"]["tokens"])
    assert not np.allclose(
        merged["heads"]["language_model"]["kernel"],
        tree["weights"]["heads"]["language_model"]["kernel"],
    )


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/torchtitan#3438",
    right=(
        "norms, tables and biases are frozen as matrices are: an update with decay moves no weight"
    ),
)
@pytest.mark.report(
    "ServiceNow/Fast-LLM#183", right="frozen weights have no state of the optimizer"
)  # fmt: skip
def test_only_the_factors_move_and_have_a_state():
    recipe = recipe_of(optimizer=AdamW(weight_decay=0.5))
    tree = drawn(recipe.spec)
    state = recipe.optimizer.init(tree)
    updates, _ = recipe.optimizer.update(jax.tree.map(np.ones_like, tree), state, tree)
    moved = {path for path, update in params.paths(updates).items() if np.any(np.asarray(update))}
    assert moved == {path for path in params.paths(tree) if path.startswith("factors/")}
    numbers = lambda tree: sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
    assert numbers(state) <= 2 * numbers(tree["factors"]) + 4  # two moments, and counters


@pytest.mark.report(
    "cloneofsimo/lora#26",
    right="layers that are computed again have the gradients of factors that kept layers have",
)
@pytest.mark.thorough
def test_layers_computed_again_train_the_factors():
    def gradients(remat):
        model = replace(GPT, remat=remat)
        recipe = recipe_of(model)
        tokens = jnp.arange(6)[None] % 13

        def loss(factors, weights):
            merged = recipe.weights({"weights": weights, "factors": factors})
            return (models.apply(model, merged, tokens).logits ** 2).sum()

        tree = drawn(recipe.spec)
        return jax.jit(jax.grad(loss))(tree["factors"], tree["weights"])

    kept, again = gradients("none"), gradients("full")
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(again))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-3 * np.abs(b).max()),
        again,
        kept,
    )


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/peft#1388", "meta-pytorch/torchtune#1101",
    right="a merge into bfloat16 rounds once: it is the float32 sum, rounded",
)  # fmt: skip
def test_a_merge_into_bfloat16_rounds_once():
    spec = models.spec(GPT)
    factors = drawn(adaptation.lora(spec, "kernel$", 3), ml_dtypes.bfloat16)
    weights = drawn(spec, ml_dtypes.bfloat16)
    wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)
    narrow = adaptation.merge(
        jax.tree.map(jnp.asarray, weights), jax.tree.map(jnp.asarray, factors), 0.7
    )
    exact = adaptation.merge(wide(weights), wide(factors), 0.7)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(a, b.astype(jnp.bfloat16)), narrow, exact)
    )


@pytest.mark.thorough
@pytest.mark.report(
    "unslothai/unsloth-zoo#1087",
    right=(
        "a merged model keeps its trained head and its class names in the folder that other "
        "tools read"
    ),
)
def test_a_merged_model_keeps_its_head(tmp_path):
    model = replace(
        CLASSES,
        masks=(masks.causal(),),
        heads=(Classification(3, pool="last", pooler=None, bias=False),),
    )
    recipe = recipe_of(model, objective=ClassCrossEntropy())
    tree = drawn(recipe.spec)
    merged = recipe.weights(tree)
    names = ("negative", "none", "positive")
    families.save(
        tmp_path / "a", families.Checkpoint(model, merged, labels=names, model_type="gpt2")
    )
    loaded = families.load(tmp_path / "a")
    assert loaded.labels == names
    assert jax.tree.all(
        jax.tree.map(np.array_equal, loaded.params, jax.tree.map(np.asarray, merged))
    )
    head = loaded.params["heads"]["classification"]["kernel"]
    assert np.array_equal(head, tree["weights"]["heads"]["classification"]["kernel"])


@pytest.mark.thorough_after(2)
@pytest.mark.report(
    "stephantul/skeletoken#108", "huggingface/transformers#1730", "huggingface/transformers#851",
    right="another vocabulary changes the table, an untied head and the bias of the head alike",
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [10, 15])
def test_another_vocabulary_reaches_every_part(tied, size):
    model = replace(GPT, tie_embeddings=tied, heads=(LanguageModel(bias=True),))
    new, weights = adaptation.resize_vocabulary(
        model, jax.tree.map(jnp.asarray, drawn(models.spec(model))), size, jax.random.key(0)
    )
    assert params.mismatch(models.spec(new), weights) is None
    kept = min(size, 13)
    before, after = drawn(models.spec(model)), params.paths(weights)
    assert np.array_equal(
        after["heads/language_model/bias"][:kept], before["heads"]["language_model"]["bias"][:kept]
    )
    assert np.array_equal(after["embedding/tokens"][:kept], before["embedding"]["tokens"][:kept])


@pytest.mark.report(
    "huggingface/peft#1355",
    right=(
        "to merge changes nothing that was given: merged again from the same weights, the model "
        "is the same"
    ),
)
def test_a_merge_changes_nothing_that_was_given():
    spec = models.spec(GPT)
    weights, factors = drawn(spec), drawn(adaptation.lora(spec, "query/kernel$", 2))
    before = jax.tree.map(np.copy, weights)
    first, second = (adaptation.merge(weights, factors, 0.5) for _ in range(2))
    assert jax.tree.all(jax.tree.map(np.array_equal, weights, before))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    assert not np.array_equal(
        first["layers"]["attention"]["query"]["kernel"],
        before["layers"]["attention"]["query"]["kernel"],
    )
