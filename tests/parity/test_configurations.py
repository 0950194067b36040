"""Models of other shapes than the golden ones: drawn at random, built by transformers, loaded and answered by us, and back."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu"]
DRAWS = 6


def draw_gpt2(r):
    heads = r.choice([1, 3, 5])
    return "GPT2LMHeadModel", dict(
        vocab_size=r.randint(30, 60), n_positions=r.randint(12, 40), n_embd=heads * r.choice([4, 6]), n_head=heads,
        n_layer=r.randint(1, 4), n_inner=r.choice([None, 21]), activation_function=r.choice(ACTIVATIONS),
        layer_norm_epsilon=r.choice([1e-5, 1e-2]), tie_word_embeddings=r.random() < 0.5,
    )  # fmt: skip


def draw_gpt_neo(r):
    heads, layers = r.choice([1, 3]), r.choice([2, 3, 4])
    kinds = r.choice([["global"], ["local"], ["global", "local"], ["global", "global", "local"]])
    types = [[kinds, layers // len(kinds)]] if layers % len(kinds) == 0 else [[["global"], layers]]
    return "GPTNeoForCausalLM", dict(
        vocab_size=41, max_position_embeddings=24, hidden_size=heads * 6, num_heads=heads, num_layers=layers,
        attention_types=types, window_size=r.randint(1, 6), intermediate_size=r.choice([None, 17]),
    )  # fmt: skip


def draw_llama(r, model="LlamaForCausalLM", **more):
    kv, group = r.choice([1, 2, 3]), r.choice([1, 2, 3])
    heads = kv * group
    rope = r.choice([
        dict(rope_type="default"), dict(rope_type="linear", factor=3.0), dict(rope_type="dynamic", factor=2.0),
        dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ])  # fmt: skip
    return model, dict(
        vocab_size=r.randint(30, 60), hidden_size=heads * r.choice([4, 6]), intermediate_size=r.randint(9, 30),
        num_hidden_layers=r.randint(1, 4), num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=64,
        rms_norm_eps=r.choice([1e-6, 1e-2]), rope_parameters=rope | dict(rope_theta=r.choice([50.0, 10_000.0])),
        tie_word_embeddings=r.random() < 0.5, hidden_act=r.choice(["silu", "gelu", "relu"]), **more,
    )  # fmt: skip


def draw_plain_llama(r):
    return draw_llama(r, attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5, head_dim=r.choice([None, 8]))


def draw_mistral(r):
    return draw_llama(r, "MistralForCausalLM", sliding_window=r.choice([None, 1, 3, 7]), head_dim=r.choice([None, 10]))


def draw_qwen2(r):
    name, config = draw_llama(r, "Qwen2ForCausalLM")
    if r.random() < 0.5:
        config |= dict(use_sliding_window=True, sliding_window=3, max_window_layers=r.randint(0, 2))
    return name, config


def draw_qwen3(r):
    return draw_llama(r, "Qwen3ForCausalLM", head_dim=r.choice([6, 10]), attention_bias=r.random() < 0.5)


def draw_mixtral(r):
    experts = r.randint(2, 6)
    more = dict(
        num_local_experts=experts,
        num_experts_per_tok=r.randint(2, experts),
        sliding_window=r.choice([None, 4]),
        head_dim=6,
    )
    return draw_llama(r, "MixtralForCausalLM", **more)


def draw_bert(r, prefix="Bert", **more):
    heads, kind = (
        r.choice([1, 2, 3]),
        r.choice(["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]),
    )
    return prefix + kind, dict(
        vocab_size=r.randint(30, 60), hidden_size=heads * 6, num_attention_heads=heads, num_hidden_layers=r.randint(1, 3),
        intermediate_size=r.randint(9, 30), max_position_embeddings=36, type_vocab_size=r.choice([1, 2, 3]),
        hidden_act=r.choice(ACTIVATIONS), layer_norm_eps=r.choice([1e-12, 1e-2]), num_labels=r.randint(2, 5), **more,
    )  # fmt: skip


def draw_roberta(r):
    return draw_bert(r, "Roberta", pad_token_id=r.choice([0, 1, 3]))


def draw_longformer(r):
    name, config = draw_bert(r, "Longformer", pad_token_id=1)
    return name, config | dict(attention_window=[4] * config["num_hidden_layers"], hidden_act="gelu")


def draw_t5(r):
    return "T5ForConditionalGeneration", dict(
        vocab_size=r.randint(30, 60), d_model=r.choice([12, 18]), d_kv=r.choice([4, 7]), d_ff=r.randint(9, 30),
        num_layers=r.randint(1, 3), num_decoder_layers=r.randint(1, 3), num_heads=r.choice([1, 3]),
        relative_attention_num_buckets=r.choice([4, 8, 32]), relative_attention_max_distance=r.choice([20, 40]),
        feed_forward_proj=r.choice(["relu", "gated-gelu", "gated-silu", "gelu_new", "gated-relu"]),
        tie_word_embeddings=r.random() < 0.5, layer_norm_epsilon=r.choice([1e-6, 1e-2]),
    )  # fmt: skip


def draw_marian(r):
    sides = {f"{side}_attention_heads": r.choice([1, 2, 3]) for side in ("encoder", "decoder")}
    sides |= {f"{side}_layers": r.randint(1, 3) for side in ("encoder", "decoder")}
    sides |= {f"{side}_ffn_dim": r.randint(9, 30) for side in ("encoder", "decoder")}
    return "MarianMTModel", dict(
        vocab_size=41, d_model=12, max_position_embeddings=40, pad_token_id=40, decoder_start_token_id=40,
        activation_function=r.choice(ACTIVATIONS), scale_embedding=r.random() < 0.5, **sides,
    )  # fmt: skip


def draw_vit(r):
    heads, patch, kind = r.choice([1, 2, 3]), r.choice([2, 4]), r.choice(["ViTForImageClassification", "ViTModel"])
    return kind, dict(
        hidden_size=heads * 6, num_attention_heads=heads, num_hidden_layers=r.randint(1, 3), num_labels=r.randint(2, 5),
        intermediate_size=r.randint(9, 30), image_size=[patch * r.randint(1, 4), patch * r.randint(1, 4)], patch_size=patch,
        num_channels=r.choice([1, 3, 4]), qkv_bias=r.random() < 0.5, hidden_act=r.choice(ACTIVATIONS),
        layer_norm_eps=r.choice([1e-12, 1e-2]),
    )  # fmt: skip


def draw_bigbird(r):
    name, config = draw_bert(r, "BigBird")
    block = r.choice([2, 3])
    return name, config | dict(
        attention_type=r.choice(["block_sparse", "original_full"]), block_size=block, num_random_blocks=1,
        rescale_embeddings=r.random() < 0.5, max_position_embeddings=block * 12,
    )  # fmt: skip


FAMILIES = {name.removeprefix("draw_"): f for name, f in list(globals().items()) if name.startswith("draw_")}
del FAMILIES["llama"]


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_drawn_configurations_agree(family, seed, tmp_path):
    import torch
    import transformers

    from jaxformer import models
    from jaxformer.interop import huggingface
    from tests.golden.write import EXACT, redraw

    r = random.Random(f"{family} {seed}")
    name, config = FAMILIES[family](r)
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**config, **EXACT)).eval()
    redraw(model, seed)
    model.save_pretrained(tmp_path / "theirs")
    ours = huggingface.load(tmp_path / "theirs")
    huggingface.save(tmp_path / "ours", ours)
    back = kind.from_pretrained(tmp_path / "ours", **EXACT).eval()

    rng, config = np.random.default_rng(seed), model.config
    call, given, arguments = {}, {}, ()
    if family == "vit":
        call["pixel_values"] = rng.normal(size=(2, config.num_channels, *config.image_size)).astype(np.float32)
        arguments, real = (jnp.asarray(call["pixel_values"].transpose(0, 2, 3, 1)),), None
    else:
        T = 24 if family in ("longformer", "bigbird") else 11
        tokens = rng.integers(4, config.vocab_size - 1, (2, T))
        real = np.ones((2, T), np.int64)
        real[1, T - 3 :] = 0
        call |= {"input_ids": tokens, "attention_mask": real}
        if family in ("roberta", "longformer"):
            tokens[real == 0] = config.pad_token_id
        if family in ("bert", "bigbird"):
            call["token_type_ids"] = given["token_types"] = rng.integers(0, config.type_vocab_size, (2, T))
        if family == "longformer":
            flags = (np.arange(T)[None] < [[2], [1]]).astype(np.int64)
            call["global_attention_mask"], given["inputs"] = flags, {"global_tokens": flags > 0}
        arguments, given = (tokens,), given | {"segment_ids": real}
        if family in ("t5", "marian"):
            target = rng.integers(4, config.vocab_size - 1, (2, 7))
            call["decoder_input_ids"], arguments = target, (target,)
            given, real = {"source": tokens, "source_segment_ids": real}, None
    arguments, given = jax.tree.map(jnp.asarray, (arguments, given))
    output = models.apply(ours.config, ours.params, *arguments, **given)
    with torch.no_grad():
        theirs, again = (m(**{key: torch.from_numpy(x) for key, x in call.items()}) for m in (model, back))
    expected = theirs.logits if "logits" in theirs else theirs.last_hidden_state
    found = output.hidden if output.logits is None or "logits" not in theirs else output.logits
    hide = np.zeros((1,) * found.ndim) if real is None or found.shape[:2] != real.shape else (real == 0)[..., None]
    scale = max(1.0, float(expected.abs().max()) / 8)  # logits are some units large; T5's, unscaled, tens
    error = np.abs(np.where(hide, 0, np.asarray(found) - expected.numpy())).max()
    assert error <= 2e-5 * scale, (error, scale, name, config)
    same = again.logits if "logits" in again else again.last_hidden_state
    np.testing.assert_array_equal(same.numpy(), expected.numpy())
