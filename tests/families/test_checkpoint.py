"""`Checkpoint`: tokens and labels of a Hugging Face checkpoint, read, kept and written; T5's
encoder alone."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models
from jaxformer.errors import ConfigError
from jaxformer.families import Checkpoint, Tokens
from jaxformer.models import EncoderDecoder, TokenClassification
from tests import golden
from tests.families import calls


def settings(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


# one of each way to be called; the Reformer draws rotations of its own
CALLED = ["longformer_mlm", "marian", "roberta_mlm", "vit"]
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in golden.NAMES
    if name not in (*CALLED, "reformer")
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*CALLED, *OTHERS])
def test_a_call_in_their_words_gives_their_outputs(name):
    """Tolerance: what float32 can be held to (models.md, section 1)."""
    kept = golden.witness(name)
    checkpoint = families.load(golden.folder(name))
    arguments = {
        key.removeprefix("inputs/"): array
        for key, array in kept.items()
        if key.startswith("inputs/")
    }
    output = calls.apply(checkpoint, **arguments)
    wanted = {
        key.removeprefix("outputs/"): array
        for key, array in kept.items()
        if key.startswith("outputs/")
    }
    logits = {"prediction_logits", "logits"} & wanted.keys()
    found, want = (
        (output.logits, wanted[logits.pop()])
        if logits
        else (output.hidden, wanted["last_hidden_state"])
    )
    mask = arguments.get(
        "decoder_attention_mask" if "decoder_input_ids" in arguments else "attention_mask"
    )
    far = np.abs(np.asarray(found, np.float64) - want)
    if mask is not None and far.shape[:2] == mask.shape:
        far = far * np.expand_dims(mask > 0, tuple(range(2, far.ndim)))
    assert far.max() < 2e-5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "marian", "llama_gqa", "gpt2"])
def test_tokens_are_kept(name, tmp_path):
    """Those of generation_config.json come before those of config.json, as in transformers."""
    checkpoint = families.load(golden.folder(name))
    tokens = Tokens(start=3, bos=4, eos=(5, 6), pad=7, sep=8, forced_eos=9)
    families.save(tmp_path / "one", replace(checkpoint, tokens=tokens))
    assert families.load(tmp_path / "one").tokens == tokens
    (tmp_path / "one" / "generation_config.json").write_text(
        '{"eos_token_id": 11, "pad_token_id": null}'
    )
    again = families.load(tmp_path / "one")
    assert again.tokens == replace(tokens, eos=(11,))
    families.save(tmp_path / "two", again)
    assert settings(tmp_path / "two")["eos_token_id"] == 11
    assert families.load(tmp_path / "two").tokens == again.tokens


@pytest.mark.thorough
@pytest.mark.parametrize(
    "key,value", [("eos_token_id", "two"), ("pad_token_id", [1, 2]), ("bos_token_id", True)]
)
def test_what_is_no_token_is_refused(key, value, tmp_path):
    families.save(tmp_path / "one", families.load(golden.folder("gpt2")))
    (tmp_path / "one" / "config.json").write_text(
        json.dumps(settings(tmp_path / "one") | {key: value})
    )
    with pytest.raises(ConfigError, match=key):
        families.load(tmp_path / "one")


@pytest.mark.thorough
def test_no_token_is_made_up(tmp_path):
    """Where a checkpoint names none, its file says null: transformers would assume some."""
    checkpoint = families.load(golden.folder("t5"))
    families.save(tmp_path / "one", replace(checkpoint, tokens=Tokens()))
    assert families.load(tmp_path / "one").tokens == Tokens()
    assert {
        name: value for name, value in settings(tmp_path / "one").items() if "token_id" in name
    } == {f"{name}_token_id": None for name in ("bos", "eos", "pad", "sep")}
    with pytest.raises(ConfigError, match="a marian needs the token"):
        families.save(
            tmp_path / "two", replace(families.load(golden.folder("marian")), tokens=Tokens())
        )
    assert not (tmp_path / "two").exists()


@pytest.mark.thorough
def test_a_pad_token_that_positions_contradict_is_refused(tmp_path):
    checkpoint = families.load(golden.folder("roberta_mlm"))
    with pytest.raises(ConfigError, match=r"tokens\.pad=5"):
        families.save(tmp_path / "one", replace(checkpoint, tokens=Tokens(pad=5)))


@pytest.mark.thorough
def test_labels_are_kept(tmp_path):
    config = replace(
        families.load(golden.folder("bert_mlm")).config, heads=(TokenClassification(3),)
    )
    params = models.init(config, jax.random.key(0))
    families.save(tmp_path / "one", Checkpoint(config, params, labels=("place", "person", "else")))
    assert settings(tmp_path / "one")["id2label"] == {"0": "place", "1": "person", "2": "else"}
    again = families.load(tmp_path / "one")
    assert again.labels == ("place", "person", "else")
    with pytest.raises(ConfigError, match="2 labels for 3 classes"):
        families.save(tmp_path / "two", replace(again, labels=("a", "b")))
    bare = families.load(tmp_path / "one", heads=(), allow_unexpected="classifier")
    assert bare.labels == ()


@pytest.mark.thorough
def test_a_t5_encoder_alone(tmp_path):
    """It reads the encoder's tensors of a pair, and its own file."""
    pair = families.load(golden.folder("t5"))
    assert isinstance(pair.config, EncoderDecoder)
    own = pair.params["encoder"] | {
        "embedding": {"tokens": pair.params["decoder"]["embedding"]["tokens"]}
    }
    encoder = Checkpoint(pair.config.encoder, own)
    families.save(tmp_path / "one", encoder)
    assert settings(tmp_path / "one")["architectures"] == ["T5EncoderModel"]
    again = families.load(tmp_path / "one")
    assert again.config == encoder.config
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), again.params, encoder.params)
    )
    tokens = jnp.arange(10).reshape(2, 5)
    hidden = models.encoder_decoder.encode_source(
        pair.config, pair.params, models.Inputs(None, source=tokens)
    ).hidden
    np.testing.assert_array_equal(models.apply(again.config, again.params, tokens).hidden, hidden)


@pytest.mark.thorough
def test_positions_that_count_padding_too():
    """As those of transformers do, which `models.apply` is told."""
    checkpoint = families.load(golden.folder("gpt2"))
    tokens = jnp.array([[0, 0, 5, 6, 7]])
    mask = jnp.array([[0, 0, 1, 1, 1]])
    run = partial(models.apply, checkpoint.config, checkpoint.params)
    found = run(tokens, segment_ids=mask, positions=jnp.arange(5)[None]).logits[:, 2:]
    want = run(tokens[:, 2:], positions=jnp.arange(2, 5)[None]).logits
    np.testing.assert_allclose(found, want, atol=2e-6)  # float32 sums of 5 terms, 2 of them 0
