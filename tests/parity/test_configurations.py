"""Models of other shapes than the golden ones: drawn at random, built by transformers, loaded and answered by us, and back."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu"]
SYNONYMS = ["gelu_python", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "swish"]
ALL_ACTIVATIONS = [
    *ACTIVATIONS, *SYNONYMS, "gelu_10", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu2",
    "relu6", "sigmoid", "tanh",
]  # fmt: skip
TASKS = ["Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
DRAWS = 6


def task(r, language_model):
    """Half of them language models; what a class's name ends in."""
    return r.choice([language_model] * len(TASKS) + TASKS)


def draw_gpt2(r):
    heads = r.choice([1, 3, 5])
    return "GPT2" + task(r, "LMHeadModel"), dict(
        vocab_size=r.randint(30, 60), n_positions=r.randint(12, 40), n_embd=heads * r.choice([4, 6]), n_head=heads,
        n_layer=r.randint(1, 4), n_inner=r.choice([None, 21]), activation_function=r.choice(ALL_ACTIVATIONS),
        layer_norm_epsilon=r.choice([1e-5, 1e-2]), tie_word_embeddings=r.random() < 0.5, num_labels=r.randint(1, 5),
        scale_attn_weights=r.random() < 0.7, scale_attn_by_inverse_layer_idx=r.random() < 0.5, pad_token_id=0,
        reorder_and_upcast_attn=r.random() < 0.5, summary_type="first", use_cache=r.random() < 0.5,
    )  # fmt: skip


def draw_gpt_neo(r):
    heads, layers = r.choice([1, 3]), r.choice([2, 3, 4])
    kinds = r.choice([["global"], ["local"], ["global", "local"], ["global", "global", "local"]])
    types = [[kinds, layers // len(kinds)]] if layers % len(kinds) == 0 else [[["global"], layers - 1], [["local"], 1]]
    return "GPTNeo" + task(r, "ForCausalLM"), dict(
        vocab_size=41, max_position_embeddings=24, hidden_size=heads * 6, num_heads=heads, num_layers=layers,
        attention_types=types, window_size=r.randint(1, 6), intermediate_size=r.choice([None, 17]), num_labels=3,
        activation_function=r.choice(ALL_ACTIVATIONS), pad_token_id=0,
    )  # fmt: skip


def draw_rope(r, width, **partial):
    """Half of the calls, of 11 tokens, go beyond the original length."""
    original, pairs = r.choice([2, 8, 16]), width // 2
    factors = lambda: [round(r.uniform(1, 6), 2) for _ in range(pairs)]
    yarn = dict(rope_type="yarn", factor=r.choice([0.5, 4.0]), original_max_position_embeddings=original)
    rope = r.choice([
        dict(rope_type="default", **partial), dict(rope_type="linear", factor=3.0), dict(rope_type="dynamic", factor=2.0),
        dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=original, low_freq_factor=1.0,
             high_freq_factor=r.choice([0.5, 1.0, 4.0])),
        yarn | dict(truncate=r.random() < 0.5, beta_fast=r.choice([4, 32]), beta_slow=r.choice([1, 2])),
        yarn | r.choice([dict(attention_factor=0.8), dict(mscale=0.7, mscale_all_dim=1.2), dict(mscale=0.7)]),
        dict(rope_type="longrope", short_factor=factors(), long_factor=factors(), original_max_position_embeddings=original,
             **r.choice([{}, dict(factor=4.0), dict(attention_factor=1.5)])),
    ])  # fmt: skip
    return rope | dict(rope_theta=r.choice([50.0, 10_000.0]))


def draw_llama(r, prefix="Llama", width=None, **more):
    kv, group = r.choice([1, 2, 3]), r.choice([1, 2, 3])
    heads, each = kv * group, r.choice([4, 6])
    partial = r.choice([{}, dict(partial_rotary_factor=0.5)])
    return prefix + task(r, "ForCausalLM"), dict(
        vocab_size=r.randint(30, 60), hidden_size=heads * each, intermediate_size=r.randint(9, 30), pad_token_id=0,
        num_hidden_layers=r.randint(1, 4), num_attention_heads=heads, num_key_value_heads=kv, num_labels=r.randint(1, 5),
        max_position_embeddings=r.choice([7, 10, 64]), head_dim=width or each, rms_norm_eps=r.choice([1e-6, 1e-2]),
        rope_parameters=draw_rope(r, width or each, **partial), tie_word_embeddings=r.random() < 0.5,
        hidden_act=r.choice(ALL_ACTIVATIONS), **more,
    )  # fmt: skip


def draw_plain_llama(r):
    return draw_llama(r, "Llama", r.choice([None, 8]), attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5)


def draw_mistral(r):
    width = r.choice([None, 10])
    name, config = draw_llama(r, "Mistral", width, sliding_window=r.choice([None, 1, 3, 7]))
    return name, config | (dict(hidden_size=config["hidden_size"] + 1) if width else {})  # no multiple of the heads


def draw_qwen2(r):
    return draw_llama(r, "Qwen2", r.choice([None, 8]), **draw_windows(r))


def draw_qwen3(r):
    return draw_llama(r, "Qwen3", r.choice([6, 10]), attention_bias=r.random() < 0.5, **draw_windows(r))


def draw_windows(r):
    return dict(
        use_sliding_window=r.random() < 0.7, sliding_window=r.choice([1, 3, None]), max_window_layers=r.randint(0, 3)
    )


def draw_mixtral(r):
    experts = r.randint(2, 6)
    more = dict(
        num_local_experts=experts, num_experts_per_tok=r.randint(1, experts), sliding_window=r.choice([None, 4])
    )
    return draw_llama(r, "Mixtral", 6, router_jitter_noise=0.1, **more)


def draw_reformer(r):
    decoder, heads, layers = r.random() < 0.5, r.choice([1, 2, 3]), r.randint(1, 4)
    kind = r.choice(["ModelWithLMHead" if decoder else "ForMaskedLM"] * 3 + ["Model", *TASKS[1::2]])
    labels = {} if kind == "ForQuestionAnswering" else dict(num_labels=3)
    after = 0 if kind == "ModelWithLMHead" else r.choice([0, 0, 1, 2])
    return "Reformer" + kind, dict(
        vocab_size=r.randint(30, 60), hidden_size=16, attention_head_size=r.choice([5, 6]), num_attention_heads=heads,
        attn_layers=[r.choice(["local", "lsh"]) for _ in range(layers)], feed_forward_size=r.randint(9, 30),
        hidden_act=r.choice(ALL_ACTIVATIONS), is_decoder=decoder, axial_pos_embds=r.random() < 0.5, axial_pos_shape=[6, 8],
        axial_pos_embds_dim=[6, 10], max_position_embeddings=48, lsh_attn_chunk_length=r.choice([3, 4, 6]),
        local_attn_chunk_length=r.choice([3, 4, 8]), lsh_num_chunks_after=after,
        lsh_num_chunks_before=r.choice([0, 1, 1, 2, 5]), local_num_chunks_before=r.choice([0, 1, 1, 2, 5]),
        local_num_chunks_after=after, hash_seed=r.randint(1, 9),
        num_buckets=r.choice([None, 6, [4, 2]]), num_hashes=r.choice([1, 2, 3]), **labels,
    )  # fmt: skip


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
    if family == "reformer":  # the sums of their rounds are rounded to 0.008 in float32, beside scores of -1e5
        model, back = model.double(), back.double()

    rng, config = np.random.default_rng(seed), model.config
    call, given, arguments = {}, {}, ()
    if family == "vit":
        call["pixel_values"] = rng.normal(size=(2, config.num_channels, *config.image_size)).astype(np.float32)
        arguments, real = (jnp.asarray(call["pixel_values"].transpose(0, 2, 3, 1)),), None
    else:
        T = {"longformer": 24, "bigbird": 24, "reformer": r.randint(4, 24)}.get(family, 11)
        tokens = rng.integers(4, config.vocab_size - 1, (2, T))
        real = np.ones((2, T), np.int64)
        real[1, T - 3 :] = 0
        call |= {"input_ids": tokens, "attention_mask": real}
        if family in ("roberta", "longformer") or "SequenceClassification" in name:
            tokens[real == 0] = config.pad_token_id or 0
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
    with torch.no_grad():
        theirs, again = (m(**{key: torch.from_numpy(x) for key, x in call.items()}) for m in (model, back))
    if family == "reformer":
        given["constants"] = rotations(config)
    arguments, given = jax.tree.map(jnp.asarray, (arguments, given))
    output = models.apply(ours.config, ours.params, *arguments, **given)
    expected, same = map(answered, (theirs, again))
    found = output.hidden if output.logits is None or "last_hidden_state" in theirs else output.logits
    hide = np.zeros((1,) * found.ndim) if real is None or found.shape[:2] != real.shape else (real == 0)[..., None]
    scale = max(1.0, float(expected.abs().max()) / 8)  # logits are some units large; T5's, unscaled, tens
    error = np.abs(np.where(hide, 0, np.asarray(found) - expected.numpy())).max()
    assert error <= 2e-5 * scale, (error, scale, name, config)
    # one function has several names and codes, which round differently; the first name is written
    rounding = 1e-5 if getattr(config, "hidden_act", getattr(config, "activation_function", "")) in SYNONYMS else 0
    np.testing.assert_allclose(same.numpy(), expected.numpy(), rtol=0, atol=rounding)


def answered(output):
    """Their logits, or a body's hidden states."""
    import torch

    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits if "logits" in output else output.last_hidden_state


def rotations(config):
    """What each LSH layer of their Reformer hashes float64 vectors with: ours `[L, N, H, rounds, buckets / 2]`."""
    import torch

    sizes = config.num_buckets if isinstance(config.num_buckets, list) else [config.num_buckets or 2]
    torch.manual_seed(config.hash_seed)
    shape = config.num_attention_heads, config.attention_head_size, config.num_hashes, sum(sizes) // 2
    drawn = torch.randn(shape, dtype=torch.float64).numpy()
    parts = np.split(drawn, np.cumsum(sizes)[:-1] // 2, axis=-1)
    parts = tuple(np.broadcast_to(part, (config.num_hidden_layers, *part.shape)) for part in parts)
    return parts if isinstance(config.num_buckets, list) else parts[0]


LENGTH_SCALINGS = {
    "dynamic": dict(rope_type="dynamic", factor=2.0, rope_theta=50.0),
    "longrope": dict(
        rope_type="longrope", rope_theta=50.0, original_max_position_embeddings=8, short_factor=[1.0, 1.5, 2.0],
        long_factor=[2.0, 3.0, 5.0], factor=4.0,
    ),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("kind", LENGTH_SCALINGS)
def test_rotations_that_read_the_length_with_a_cache(kind, tmp_path):
    """Token by token across the original length of 8: keys of earlier calls stay as their own call turned them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jaxformer import decoding, models
    from jaxformer.interop import huggingface
    from tests.golden.write import EXACT, redraw

    sizes = dict(vocab_size=31, hidden_size=18, intermediate_size=15, num_hidden_layers=2, num_attention_heads=3)
    config = LlamaConfig(**sizes, max_position_embeddings=8, rope_parameters=LENGTH_SCALINGS[kind], **EXACT)
    model = LlamaForCausalLM(config).eval()
    redraw(model, 0)
    model.save_pretrained(tmp_path)
    ours, params = huggingface.load(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 14))
    past, cache = None, decoding.init_cache(ours, 2, 16)
    step = jax.jit(lambda params, tokens, cache: models.apply(ours, params, tokens, cache=cache))
    for start, end in [(0, 5), *((i, i + 1) for i in range(5, 14))]:
        with torch.no_grad():
            theirs = model(torch.from_numpy(tokens[:, start:end]), past_key_values=past, use_cache=True)
        found = step(params, jnp.asarray(tokens[:, start:end]), cache)
        past, cache = theirs.past_key_values, found.cache
        np.testing.assert_allclose(found.logits, theirs.logits.numpy(), rtol=0, atol=2e-5)


# Of the fields that each config class declares, those that change no number of a forward pass in evaluation
IRRELEVANT = {
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"),
    *("classifier_dropout", "embd_pdrop", "embed_dropout", "summary_first_dropout", "reorder_and_upcast_attn"),
    *(
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
    ),  # of GPT2DoubleHeadsModel, refused
    *("output_router_logits", "router_jitter_noise", "axial_norm_std", "chunk_size_lm_head"),
    *("lsh_attention_probs_dropout_prob", "local_attention_probs_dropout_prob"),
}
CLASSES = ["GPT2", "GPTNeo", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Reformer"]


@pytest.mark.parity
@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_read_or_changes_nothing(name):
    import transformers

    from jaxformer.interop import huggingface

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
        huggingface.FAMILIES[config.model_type].read(Recorded(config.to_dict() | architecture | changed), ())
    declared = {field for one in kind.__mro__ if one.__name__ == f"{name}Config" for field in one.__annotations__}
    declared -= {"model_type", "keys_to_ignore_at_inference", "attribute_map", "default_theta"}
    declared = {field for field in declared if not field.startswith(("base_model_", "_"))}
    assert declared and not declared - asked - IRRELEVANT


@pytest.mark.parity
def test_every_activation_without_parameters_is_computed():
    import torch
    from transformers.activations import ACT2FN

    from jaxformer.interop.tables import ACTIVATION
    from jaxformer.ops.feedforward import ACTIVATIONS as OURS

    assert ACT2FN.keys() - ACTIVATION.keys() == {"prelu", "xielu", "sqrtsoftplus"}  # trained; a router's
    x = np.linspace(-12, 12, 241, dtype=np.float32)
    for name, ours in ACTIVATION.items():
        expected = ACT2FN[name](torch.from_numpy(x)).numpy()
        # float32 erf and tanh to a few 1e-7, times x; of a square, of x^2
        np.testing.assert_allclose(OURS[ours](jnp.asarray(x)), expected, rtol=1e-6, atol=5e-6, err_msg=name)
