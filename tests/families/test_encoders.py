"""BERT and its relatives, and ViT: their classes and their heads of their own matrix."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models
from jaxformer.errors import ConfigError
from jaxformer.families import bert, bigbird, longformer
from jaxformer.families.tensors import plan
from jaxformer.params import paths
from tests import golden
from tests.families import calls, golden_runs as runs

SIZES = dict(
    vocab_size=11,
    hidden_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=5,
    pad_token_id=1,
    max_position_embeddings=9,
    id2label={"0": "a", "1": "b", "2": "c"},
    attention_window=[2, 4],
    block_size=2,
    num_random_blocks=1,
)
KINDS = [
    (model_type, family.name + kind)
    for model_type, family in (
        ("bert", bert.BERT), ("roberta", bert.ROBERTA), ("longformer", longformer.LONGFORMER),
        ("big_bird", bigbird.BIGBIRD),
    )
    for kind in family.kinds
]  # fmt: skip


def read(model_type, kind, **settings):
    return families.FAMILIES[model_type].read(SIZES | settings | {"architectures": [kind]}, ())


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("model_type,kind", KINDS)
def test_every_class_is_read_and_written(model_type, kind):
    family = families.FAMILIES[model_type]
    config = read(
        model_type,
        kind,
        is_decoder=kind.endswith(("LMHeadModel", "ForCausalLM")),
        attention_type="original_full",
    )
    written = family.write(config)
    assert written["architectures"] == [kind]
    assert family.read(written, plan(family, config)) == config
    # as in BERT's code
    assert all(getattr(head, "pool", "position_0") == "position_0" for head in config.heads)
    assert str(config.masks[0]) == ("causal()" if written.get("is_decoder") else "full()")


@pytest.mark.parametrize("kind", longformer.LONGFORMER.kinds)
def test_global_tokens_of_each_class(kind):
    """The first one for a sequence, none, or (None) those of each call."""
    given_in_calls = kind in ("ForQuestionAnswering", "ForMultipleChoice")
    tokens = None if given_in_calls else int(kind == "ForSequenceClassification")
    mixers = read("longformer", "Longformer" + kind).mixer
    assert [(mixer.window, mixer.global_tokens) for mixer in mixers] == [(2, tokens), (4, tokens)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name,head", [("bert_mlm", "cls.predictions."), ("roberta_mlm", "lm_head.")]
)
@pytest.mark.parametrize("names", [("bias",), ("decoder.bias",), ("bias", "decoder.bias")])
def test_a_head_of_its_own_matrix_has_the_decoders_bias(name, head, names, tmp_path):
    """transformers 5 writes both biases and reads the decoder's; version 4 had one under either
    name."""
    rng = np.random.default_rng(0)
    kernel, biases = (
        rng.normal(size=(37, 18)).astype(np.float32),
        rng.normal(size=(2, 37)).astype(np.float32),
    )

    def change(arrays):
        del arrays[head + "bias"]
        return (
            arrays
            | {head + "decoder.weight": kernel}
            | {head + n: b for n, b in zip(names, biases, strict=False)}
        )

    folder = runs.altered(tmp_path, name, change, tie_word_embeddings=False)
    checkpoint = families.load(folder)
    found = checkpoint.params["heads"]["language_model"]
    assert not checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(found["kernel"], kernel)
    np.testing.assert_array_equal(found["bias"], biases[len(names) - 1])
    families.save(tmp_path / "saved", checkpoint)
    np.testing.assert_array_equal(
        runs.tensors(tmp_path / "saved")[head + "decoder.bias"], found["bias"]
    )
    again = families.load(tmp_path / "saved")
    assert again.config == checkpoint.config
    assert all(
        np.array_equal(leaf, paths(again.params)[path])
        for path, leaf in paths(checkpoint.params).items()
    )


def test_queries_keys_and_values_without_biases():
    assert not any(
        "query/bias" in path
        for path in paths(models.spec(read("big_bird", "BigBirdModel", use_bias=False)))
    )
    assert (
        families.FAMILIES["big_bird"].write(read("big_bird", "BigBirdModel", use_bias=False))[
            "use_bias"
        ]
        is False
    )


REFUSED = [
    ("big_bird", "BigBirdForQuestionAnswering", {}, "architecture"),
    # block_sparse is never causal
    (
        "big_bird",
        "BigBirdForCausalLM",
        dict(is_decoder=True),
        "is_decoder",
    ),
    ("bert", "BertModel", dict(is_decoder=True), "is_decoder"),
    (
        "bert",
        "BertLMHeadModel",
        dict(add_cross_attention=True, is_decoder=True),
        "add_cross_attention",
    ),
    ("roberta", "RobertaForNextSentencePrediction", {}, "architecture"),
    ("roberta", "RobertaModel", dict(pad_token_id=None), "pad_token_id"),
    ("longformer", "LongformerModel", dict(attention_window=[2, 4, 6]), "attention_window"),
    ("longformer", "LongformerModel", dict(attention_window=3), "attention_window"),
    ("longformer", "LongformerModel", dict(is_decoder=True), "is_decoder"),
]


@pytest.mark.parametrize("model_type,kind,settings,word", REFUSED)
def test_what_is_not_computed_is_refused_by_name(model_type, kind, settings, word):
    with pytest.raises(ConfigError, match=word):
        read(model_type, kind, **settings)


@pytest.mark.thorough
def test_a_pad_id_reads_the_pad_tokens_row():
    """Position -1 is the row before the first position's, the one that transformers gives the pad
    id."""
    checkpoint = families.load(golden.folder("roberta_mlm"))
    pad, table = checkpoint.tokens.pad, checkpoint.params["embedding"]["positions"]
    tokens = jnp.array([[5, pad, 6]])
    before = calls.apply(checkpoint, input_ids=tokens).hidden
    moved = checkpoint.params["embedding"] | {"positions": table.at[pad].multiply(-1)}
    other = models.apply(
        checkpoint.config,
        checkpoint.params | {"embedding": moved},
        tokens,
        positions=jnp.array([[0, -1, 1]]),
    )
    assert float(jnp.abs(other.hidden - before).max()) > 0.1
    same = checkpoint.params["embedding"] | {
        "positions": table.at[pad + 3 :].multiply(-1).at[:pad].multiply(-1)
    }
    other = models.apply(
        checkpoint.config,
        checkpoint.params | {"embedding": same},
        tokens,
        positions=jnp.array([[0, -1, 1]]),
    )
    np.testing.assert_array_equal(other.hidden, before)


@pytest.mark.thorough
def test_a_pooler_of_another_width(tmp_path):
    change = lambda a: {name: array[:7] if "pooler" in name else array for name, array in a.items()}
    checkpoint = families.load(runs.altered(tmp_path, "vit_pooled", change, pooler_output_size=7))
    images = np.random.default_rng(0).normal(
        size=(2, *checkpoint.config.embedding.image, checkpoint.config.embedding.channels)
    )
    whole = families.load(golden.folder("vit_pooled"))
    wide, narrow = (
        models.apply(c.config, c.params, jnp.float32(images)).heads["pooled"]
        for c in (whole, checkpoint)
    )
    # the same sums, perhaps in another order
    np.testing.assert_allclose(narrow, wide[:, :7], atol=1e-6)
    families.save(tmp_path / "saved", checkpoint)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["pooler_output_size"] == 7
    assert families.load(tmp_path / "saved").config == checkpoint.config
    assert (
        families.load(runs.altered(tmp_path / "null", "vit_pooled", pooler_output_size=None)).config
        == whole.config
    )


@pytest.mark.thorough
def test_masked_images_are_read_and_written(tmp_path):
    """With their mask token and decoder; a call hides patches as theirs does."""
    vit = dict(
        hidden_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=5,
        image_size=6,
        patch_size=[3, 2],
        num_channels=2,
        encoder_stride=2,
        architectures=["ViTForMaskedImageModeling"],
    )
    with pytest.raises(ConfigError, match="image_size=6"):
        families.FAMILIES["vit"].read(vit, ())
    config = families.FAMILIES["vit"].read(vit | {"patch_size": 3}, ())
    params = models.init(config, jax.random.key(0))
    families.save(tmp_path / "saved", families.Checkpoint(config, params))
    shapes = {name: array.shape for name, array in runs.tensors(tmp_path / "saved").items()}
    assert shapes["vit.embeddings.mask_token"] == (1, 1, 6) and shapes["decoder.0.weight"] == (
        8,
        6,
        1,
        1,
    )
    again = families.load(tmp_path / "saved")
    assert again.config == config
    images, masked = np.ones((2, 2, 6, 6), np.float32), np.eye(2, 4)
    found = calls.apply(again, pixel_values=images, bool_masked_pos=masked).heads["reconstruction"]
    options = {"inputs": {"masked": jnp.asarray(masked) > 0}}
    want = models.apply(config, params, jnp.asarray(images.transpose(0, 2, 3, 1)), **options).heads[
        "reconstruction"
    ]
    assert found.shape == (2, 4, 4, 2)
    np.testing.assert_array_equal(found, want)
