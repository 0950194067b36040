"""Adapters of PEFT: a model with one computes here what it computes there, and back."""

import jax.numpy as jnp
import numpy as np
import pytest

TOKENS = np.random.default_rng(0).integers(3, 37, (2, 9))
LLAMA = dict(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=20,
    max_position_embeddings=64,
)
GPT2 = dict(vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# {name: (class, its settings, the adapter's)}
ADAPTERS = {
    "queries and values": (
        "LlamaForCausalLM",
        LLAMA,
        dict(r=4, target_modules=["q_proj", "v_proj"]),
    ),
    "all maps": ("LlamaForCausalLM", LLAMA, dict(r=3, lora_alpha=7, target_modules=ALL)),
    "rank-stabilised": (
        "LlamaForCausalLM",
        LLAMA,
        dict(r=4, use_rslora=True, target_modules=["k_proj", "down_proj"]),
    ),
    "other ranks": (
        "LlamaForCausalLM",
        LLAMA,
        dict(
            r=4,
            target_modules=ALL,
            rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
            alpha_pattern={"q_proj": 3, "o_proj": 11},
        ),
    ),
    "some layers": (
        "LlamaForCausalLM",
        LLAMA,
        dict(r=2, target_modules=["q_proj"], layers_to_transform=[1]),
    ),
    "table and head": (
        "LlamaForCausalLM",
        LLAMA,
        dict(r=3, target_modules=["embed_tokens", "lm_head", "o_proj"]),
    ),
    "a new head": (
        "LlamaForSequenceClassification",
        LLAMA | dict(num_labels=5, pad_token_id=0),
        dict(
            r=4, target_modules=["v_proj"], modules_to_save=["score", "norm"], task_type="SEQ_CLS"
        ),
    ),
    "one tensor of three maps": (
        "GPT2LMHeadModel",
        GPT2,
        dict(r=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    ),
}


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_theirs_and_goes_back(name, tmp_path):
    import peft as theirs
    import torch
    import transformers

    from jaxformer import families, models
    from jaxformer.families import peft

    kind, settings, options = ADAPTERS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    base = cls(cls.config_class(**settings)).eval()
    base.save_pretrained(tmp_path / "base")
    model = theirs.get_peft_model(base, theirs.LoraConfig(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # B begins at zero
                parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)).logits.numpy()

    checkpoint = families.load(tmp_path / "base")
    adapter = peft.load(tmp_path / "adapter", checkpoint)
    output = models.apply(checkpoint.config, adapter.merged(checkpoint.params), jnp.asarray(TOKENS))
    # float32 on both sides, and factors of order one
    tolerance = 2e-5 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(output.logits, expected, atol=tolerance, rtol=0)

    peft.save(tmp_path / "ours", checkpoint, adapter, base=str(tmp_path / "base"))
    again = cls.from_pretrained(tmp_path / "base").eval()
    opened = theirs.PeftModel.from_pretrained(again, tmp_path / "ours").eval()
    with torch.no_grad():
        found = opened(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
