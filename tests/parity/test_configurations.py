"""What the drawn configurations of `tests.parity.documented` do not reach: rotations with a cache,
every activation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LENGTH_SCALINGS = {
    "dynamic": dict(rope_type="dynamic", factor=2.0, rope_theta=50.0),
    "longrope": dict(
        rope_type="longrope",
        rope_theta=50.0,
        original_max_position_embeddings=8,
        short_factor=[1.0, 1.5, 2.0],
        long_factor=[2.0, 3.0, 5.0],
        factor=4.0,
    ),
}


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("kind", LENGTH_SCALINGS)
def test_rotations_that_read_the_length_with_a_cache(kind, tmp_path):
    """All keys of a text have the rotation of its whole length, read in pieces too: theirs is one
    forward pass over it.

    Theirs turns each piece by the length that it has reached, so that its pieces are not its whole
    text.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jaxformer import decoding, families, models
    from tests.golden.write import EXACT, redraw

    sizes = dict(
        vocab_size=31,
        hidden_size=18,
        intermediate_size=15,
        num_hidden_layers=2,
        num_attention_heads=3,
    )
    config = LlamaConfig(
        **sizes, max_position_embeddings=8, rope_parameters=LENGTH_SCALINGS[kind], **EXACT
    )
    model = LlamaForCausalLM(config).eval()
    redraw(model, 0)
    model.save_pretrained(tmp_path)
    checkpoint = families.load(tmp_path)
    ours, params = checkpoint.config, checkpoint.params
    tokens = np.random.default_rng(0).integers(0, 31, (2, 14))
    step = jax.jit(lambda params, tokens, cache: models.apply(ours, params, tokens, cache=cache))
    for length in (8, 14):  # the original length, and beyond it
        cache = decoding.init_cache(ours, 2, 16, text_lengths=jnp.array([length, length]))
        with torch.no_grad():
            theirs = model(torch.from_numpy(tokens[:, :length])).logits.numpy()
        for start, end in [(0, 5), *((i, i + 1) for i in range(5, length))]:
            found = step(params, jnp.asarray(tokens[:, start:end]), cache)
            cache = found.cache
            np.testing.assert_allclose(found.logits, theirs[:, start:end], rtol=0, atol=2e-5)


# Of the fields that each config class declares, those that change no number of a forward pass in
# evaluation
IRRELEVANT = {
    *(
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "pretraining_tp",
    ),
    *("classifier_dropout", "embd_pdrop", "summary_first_dropout", "reorder_and_upcast_attn"),
    # of GPT2DoubleHeadsModel, refused
    *(
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
    ),
    *("output_router_logits", "router_jitter_noise", "axial_norm_std", "chunk_size_lm_head"),
    *("lsh_attention_probs_dropout_prob", "local_attention_probs_dropout_prob"),
}
CLASSES = ["GPT2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Reformer"]


@pytest.mark.parity
@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_read_or_changes_nothing(name):
    import transformers

    from jaxformer import families

    class Recorded(dict):
        def __getitem__(self, key):
            asked.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

    asked, kind = set(), getattr(transformers, f"{name}Config")
    config = kind(**{"attn_layers": ["lsh", "local"]} if name == "Reformer" else {})
    for changed in (
        {},
        {"axial_pos_embds": False},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": None},
    ):
        architecture = {"architectures": [f"{name}Model"]}
        families.FAMILIES[config.model_type].read(
            Recorded(config.to_dict() | architecture | changed), ()
        )
    declared = {
        field
        for one in kind.__mro__
        if one.__name__ == f"{name}Config"
        for field in one.__annotations__
    }
    declared -= {"model_type", "keys_to_ignore_at_inference", "attribute_map", "default_theta"}
    declared = {field for field in declared if not field.startswith(("base_model_", "_"))}
    assert declared and not declared - asked - IRRELEVANT


@pytest.mark.parity
def test_every_activation_without_parameters_is_computed():
    import torch
    from transformers.activations import ACT2FN

    from jaxformer.families.settings import ACTIVATION
    from jaxformer.ops.feedforward import ACTIVATIONS as OURS

    # trained; a router's
    assert ACT2FN.keys() - ACTIVATION.keys() == {
        "prelu",
        "xielu",
        "sqrtsoftplus",
    }
    x = np.linspace(-12, 12, 241, dtype=np.float32)
    for name, ours in ACTIVATION.items():
        expected = ACT2FN[name](torch.from_numpy(x)).numpy()
        # float32 erf and tanh to a few 1e-7, times x; of a square, of x^2
        np.testing.assert_allclose(
            OURS[ours](jnp.asarray(x)), expected, rtol=1e-6, atol=5e-6, err_msg=name
        )


# names of transformers that change no number here, or that the family reads itself
NOT_RENAMED = {"deepseek_v3": {"num_mtp_layers"}, "qwen3_moe": {"num_experts"}}
# names that the config class takes in its constructor
TAKEN = {"bloom": {"n_embed": "hidden_size"}, "falcon": {"n_embed": "hidden_size"}}


@pytest.mark.parity
def test_other_names_are_those_of_transformers():
    from transformers import CONFIG_MAPPING

    from jaxformer import families

    for kind, family in families.FAMILIES.items():
        theirs = {
            name: own
            for name, own in CONFIG_MAPPING[kind].attribute_map.items()
            if name not in NOT_RENAMED.get(kind, ())
        }
        assert family.other_names == theirs | TAKEN.get(kind, {}), kind
