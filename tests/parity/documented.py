"""Draws configurations from what transformers documents, not from what we support, and compares.

Each drawn model is computed here as there, or refused by a line that names one of its settings;
there is no third kind.

`python -m tests.parity.documented 30` draws 30 of each family and prints a table of those that were
computed and those that were refused.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import collections
import copy
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.activations import ACT2FN

from jaxformer import families, models
from jaxformer.errors import ConfigError
from tests.families import calls
from tests.golden.write import EXACT, finite_masks, redraw
from tests.parity import ranges
from tests.parity.draws import rope

FAMILIES = {
    "bert": "Bert",
    "big_bird": "BigBird",
    "gpt2": "GPT2",
    "llama": "Llama",
    "longformer": "Longformer",
    "marian": "Marian",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "reformer": "Reformer",
    "roberta": "Roberta",
    "t5": "T5",
    "vit": "ViT",
}
FAMILIES |= {family: module.FAMILIES[family] for family, module in ranges.FILES.items()}
TOLERANCE = 2e-5  # float32 on both sides: reference/models.md, section 1
V = 41

# families whose models have an encoder and a decoder, except for those of these classes
PAIRS = {"t5", "marian", *ranges.PAIRS}
ONE_STACK = ("EncoderModel", "ForTokenClassification", "ForCausalLM")

# Fields that change no output of a forward pass in evaluation.
NO_NUMBER = {
    *(
        "use_cache",
        "initializer_range",
        "init_std",
        "initializer_factor",
        "axial_norm_std",
        "onnx_export",
        "pretraining_tp",
    ),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout", "dropout"),
    *(
        "attention_dropout",
        "classifier_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout_rate",
    ),
    *(
        "activation_dropout",
        "encoder_layerdrop",
        "decoder_layerdrop",
        "local_attention_probs_dropout_prob",
    ),
    *(
        "lsh_attention_probs_dropout_prob",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "forced_eos_token_id",
        "decoder_start_token_id",
        "chunk_size_lm_head",
    ),
    *ranges.NO_NUMBER,
}


# Values of every other field that is not a size: as documented, and a few beside the default.
RANGE = dict(
    activation_function=list(ACT2FN),
    hidden_act=list(ACT2FN),
    pooler_act=list(ACT2FN),
    summary_activation=["tanh", None],
    feed_forward_proj=[
        "relu",
        "gated-gelu",
        "gated-silu",
        "gelu_new",
        "gated-relu",
        "silu",
        "gated-gelu_new",
        "quick_gelu",
    ],
    scale_attn_weights=[False],
    scale_attn_by_inverse_layer_idx=[True],
    reorder_and_upcast_attn=[True],
    add_cross_attention=[True],
    summary_type=["last", "first", "mean"],
    summary_use_proj=[False],
    summary_proj_to_labels=[False],
    tie_word_embeddings=[True, False],
    is_decoder=[True],
    layer_norm_epsilon=[1e-6, 1e-2],
    layer_norm_eps=[1e-5, 1e-2],
    rms_norm_eps=[1e-5, 1e-2],
    type_vocab_size=[1, 3],
    pad_token_id=[None, 0, 1, 7],
    sep_token_id=[2, 5],
    scale_embedding=[True],
    share_encoder_decoder_embeddings=[False],
    decoder_vocab_size=[V, V - 4],
    attention_bias=[True],
    mlp_bias=[True],
    sliding_window=[None, 1, 3, 7],
    use_sliding_window=[True],
    max_window_layers=[0, 1, 2],
    head_dim=[6, 10],
    num_key_value_heads=[1],
    rescale_embeddings=[True],
    use_bias=[False],
    attention_type=["original_full", "block_sparse"],
    num_random_blocks=[1, 2],
    relative_attention_num_buckets=[4, 8],
    relative_attention_max_distance=[9, 20],
    num_decoder_layers=[1, 3],
    qkv_bias=[False],
    pooler_output_size=[5, 12],
    num_hashes=[2, 3],
    num_buckets=[4, 8, [2, 4]],
    lsh_num_chunks_before=[0, 2],
    lsh_num_chunks_after=[1],
    local_num_chunks_before=[0, 2],
    local_num_chunks_after=[1],
    axial_pos_embds=[False],
    n_inner=[None, 21],
    num_experts_per_tok=[1, 2, 3],
)


RANGE = ranges.merged(RANGE)


def sizes(family: str, r) -> dict:
    """What a small model of the family must have."""
    heads = r.choice([1, 2, 3])
    layers, width, inner = r.randint(1, 3), heads * r.choice([4, 6]), r.randint(9, 30)
    common = dict(
        vocab_size=V,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=r.choice([20, 36]),
    )
    if family in ranges.FILES:
        return ranges.FILES[family].sizes(family, r, common)
    match family:
        case "gpt2":
            return dict(
                vocab_size=V,
                n_positions=r.choice([12, 36]),
                n_embd=width,
                n_head=heads,
                n_layer=layers,
            )
        case "llama" | "mistral" | "mixtral" | "qwen2" | "qwen3":
            common |= dict(
                num_key_value_heads=heads, rope_parameters=rope(r) if r.random() < 0.7 else None
            )
            if family in ("qwen2", "qwen3") and r.random() < 0.3:
                common["layer_types"] = [
                    r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)
                ]
            return common | (dict(num_local_experts=r.randint(3, 5)) if family == "mixtral" else {})
        case "longformer":
            windows = [r.choice([2, 4, 6]) for _ in range(layers)]
            return common | dict(attention_window=r.choice([windows, windows[:1] * layers]))
        case "big_bird":
            return common | dict(block_size=r.choice([2, 3]), max_position_embeddings=60)
        case "t5":
            return dict(
                vocab_size=V,
                d_model=r.choice([12, 18]),
                d_kv=r.choice([4, 7]),
                d_ff=inner,
                num_layers=layers,
                num_heads=heads,
            )
        case "marian":
            sides = {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
            sides |= {f"{side}_layers": r.randint(1, 2) for side in ("encoder", "decoder")}
            sides |= {f"{side}_ffn_dim": r.randint(9, 30) for side in ("encoder", "decoder")}
            tokens = dict(pad_token_id=V - 5, decoder_start_token_id=V - 5)
            return (
                dict(vocab_size=V, d_model=heads * r.choice([4, 5]), max_position_embeddings=36)
                | sides
                | tokens
            )
        case "vit":
            del common["vocab_size"], common["max_position_embeddings"]
            patch = r.choice([2, 4])
            image = r.choice([patch * 3, [patch * r.randint(1, 3), patch * r.randint(1, 3)]])
            return common | dict(
                image_size=image,
                patch_size=patch,
                num_channels=r.choice([1, 3]),
                encoder_stride=r.choice([patch, 16]),
            )
        case "reformer":
            del common["num_hidden_layers"], common["intermediate_size"]
            shape, widths, kinds = (
                r.choice([(4, 6), (3, 8)]),
                (width // 2, width - width // 2),
                r.choice(["local", "lsh", "both"]),
            )
            return common | dict(
                attention_head_size=r.choice([4, 6]),
                feed_forward_size=inner,
                max_position_embeddings=24,
                hash_seed=3,
                axial_pos_shape=shape,
                axial_pos_embds_dim=widths,
                lsh_attn_chunk_length=r.choice([4, 6]),
                num_buckets=4,
                local_attn_chunk_length=r.choice([4, 6]),
                attn_layers=["local", "lsh"] if kinds == "both" else [kinds] * layers,
                is_decoder=r.random() < 0.5,
            )
    return common


def classes(family: str) -> list[str]:
    """The names of the family's models."""
    found = []
    for name in sorted(dir(transformers)):
        if name.startswith(FAMILIES[family]) and not name.endswith(
            ("PreTrainedModel", "Config", "Tokenizer")
        ):
            kind = getattr(transformers, name)
            if (
                isinstance(kind, type)
                and issubclass(kind, transformers.PreTrainedModel)
                and kind.config_class.model_type == family
            ):
                found.append(name)
    return found


def fields(family: str) -> set[str]:
    """The fields that the family's config class documents beside those of every class."""
    # Gemma3Config is that of text and images: the name of the text model's config has one more word
    name = FAMILIES[family] + ("TextConfig" if family.endswith("_text") else "Config")
    config = getattr(transformers, name)
    return (
        config.__dataclass_fields__.keys()
        - transformers.PretrainedConfig.__dataclass_fields__.keys()
    )


class Drawn(NamedTuple):
    """A model of theirs, the settings that made it, and how it is called."""

    kind: type
    settings: dict
    model: torch.nn.Module
    call: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    real: np.ndarray | None  # [B, T] of what comes out, or None: all


def draw(family: str, seed: int) -> Drawn:
    """The first model from this seed on that transformers itself builds and runs."""
    r = random.Random(f"{family} {seed}")
    while True:
        kind = getattr(transformers, r.choice(classes(family)))
        chosen = {
            name: r.choice(RANGE[name])
            for name in sorted(fields(family) & RANGE.keys())
            if r.random() < 0.25
        }
        settings = chosen | sizes(family, r) if r.random() < 0.5 else sizes(family, r) | chosen
        if r.random() < 0.5:
            settings["num_labels"] = r.randint(1, 4)
        try:
            torch.manual_seed(0)
            model = kind(kind.config_class(**settings, **exact(family))).eval()
            redraw(model, seed)
            for module in model.modules():  # a row of zeros would hide how padding is counted
                if isinstance(module, torch.nn.Embedding):
                    module.padding_idx = None
            call, real = arguments(family, kind.__name__, model.config, r)
            # in float32 the sums of its rounds are rounded to 0.008, beside scores of -1e5
            if family == "reformer":
                model = model.double()
            outputs = run(model, call)
        except Exception:  # theirs refuses it too: no model
            continue
        if all(np.isfinite(value).all() for value in outputs.values()):
            return Drawn(kind, settings, model, call, outputs, real)


def exact(family: str) -> dict:
    """Options of a model that computes everything plainly; Reformer has no others."""
    if family == "reformer":
        return {}
    return getattr(ranges.FILES.get(family), "EXACT", EXACT)


def run(model, call: dict) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(array) for name, array in call.items()}
    with torch.no_grad():
        output = model(
            **{
                name: x.to(model.dtype) if x.is_floating_point() else x
                for name, x in tensors.items()
            }
        )
    return {
        name: x.numpy()
        for name, x in output.items()
        if name in OUTPUTS and isinstance(x, torch.Tensor)
    }


def arguments(family: str, name: str, config, r) -> tuple[dict, np.ndarray | None]:
    """What the model is called with: rows without padding, padded on the right or on the left; pad
    ids within a row too."""
    rng = np.random.default_rng(r.randrange(2**32))
    own = getattr(ranges.FILES.get(family), "arguments", None)
    if own is not None:
        return own(name, config, r, rng)
    if family == "vit":
        size = (
            config.image_size
            if isinstance(config.image_size, list | tuple)
            else (config.image_size,) * 2
        )
        call = dict(
            pixel_values=rng.normal(size=(2, config.num_channels, *size)).astype(np.float32)
        )
        if name == "ViTForMaskedImageModeling" and config.encoder_stride == config.patch_size:
            call["bool_masked_pos"] = (
                rng.random((2, size[0] * size[1] // config.patch_size**2)) < 0.5
            )
        return call, None
    T = r.choice([5, 11, 18])
    if family == "big_bird":
        T = r.choice([11, 24, 40, 59])
    if family == "reformer":
        T = 24 if config.axial_pos_embds else r.choice([12, 24])
    shape = (2, 3, T) if name.endswith("ForMultipleChoice") else (2, T)
    pad = 0 if getattr(config, "pad_token_id", None) is None else config.pad_token_id
    letters = [
        token
        for token in range(config.vocab_size)
        if token not in (pad, getattr(config, "sep_token_id", None))
    ]
    tokens = rng.choice(letters, shape)
    sides = getattr(ranges.FILES.get(family), "SIDES", ("none", "left", "right", "right"))
    real, side = np.ones(shape, np.int64), r.choice(sides)
    if side != "none":
        real[-1:, ..., slice(0, 3) if side == "left" else slice(T - 3, T)] = 0
        tokens[real == 0] = pad
    if r.random() < 0.2 and not name.endswith("ForSequenceClassification"):
        tokens[0, ..., T // 2] = pad
    if family == "longformer" and name.endswith("ForQuestionAnswering"):
        tokens[:, [1, T // 3, T // 3 + 1]] = config.sep_token_id
    call = dict(input_ids=tokens, attention_mask=real)
    if side == "none" and r.random() < 0.5:
        del call["attention_mask"]
    if hasattr(config, "type_vocab_size") and r.random() < 0.5:
        call["token_type_ids"] = rng.integers(0, config.type_vocab_size, shape)
    if family == "longformer" and r.random() < 0.5 and len(shape) == 2:
        call["global_attention_mask"] = (np.arange(T)[None] < [[2], [1]]).astype(np.int64)
    if family in PAIRS and not name.endswith(ONE_STACK):
        target = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        call["decoder_input_ids"], real = rng.integers(0, target, (2, 7)), None
    return call, real


# their output -> ours
OUTPUTS = {
    "last_hidden_state": lambda output: output.hidden,
    "pooler_output": lambda output: output.heads["pooled"],
    "image_embeds": lambda output: output.heads["features"],
    "text_embeds": lambda output: output.heads["features"],
    "logits": lambda output: output.logits,
    "pred_boxes": lambda output: output.heads["boxes"],
    "prediction_logits": lambda output: output.heads["language_model"],
    "seq_relationship_logits": lambda output: output.heads["next_sentence"],
    "sop_logits": lambda output: output.heads["sentence_order"],
    "start_logits": lambda output: output.heads["span"][..., 0],
    "end_logits": lambda output: output.heads["span"][..., 1],
    "reconstruction": lambda output: output.heads["reconstruction"].transpose(0, 3, 1, 2),
}


def compare(drawn: Drawn) -> tuple[str, str]:
    """("computed", ""), ("refused", why), or ("wrong", how)."""
    folder = Path(tempfile.mkdtemp())
    drawn.model.save_pretrained(folder / "theirs")
    try:
        checkpoint = families.load(folder / "theirs")
    except ConfigError as error:
        rope = drawn.settings.get("rope_parameters") or {}
        nested = {name for value in rope.values() if isinstance(value, dict) for name in value}
        names = {*drawn.settings, *rope, *nested, drawn.kind.__name__}
        named = any(name in str(error) for name in names)
        return "refused" if named else "wrong", str(error).replace(str(folder), "")
    try:
        if how := difference(drawn, checkpoint):
            return "wrong", how
        families.save(folder / "ours", checkpoint)
        again = drawn.kind.from_pretrained(
            folder / "ours", **exact(drawn.model.config.model_type)
        ).eval()
        again = run(again.to(drawn.model.dtype), drawn.call)
        # an activation may be saved under the other of its names
        for (
            name,
            theirs,
        ) in drawn.outputs.items():
            if not np.abs(again[name] - theirs).max() <= tolerance(theirs):
                return "wrong", f"saved by us, it gives another {name} there"
    except ConfigError as error:
        return "wrong", f"loaded, then refused: {error}"
    finally:
        shutil.rmtree(folder)
    return "computed", ""


def difference(drawn: Drawn, checkpoint: families.Checkpoint) -> str | None:
    """The first output that is another than theirs, in words."""
    output = answer(drawn, checkpoint)
    for name, theirs in drawn.outputs.items():
        if name == "pooler_output" and "pooled" not in output.heads:
            continue  # a file without its weights
        ours = np.asarray(OUTPUTS[name](output))
        if ours.shape != theirs.shape:
            return f"{name}: {ours.shape}, theirs {theirs.shape}"
        shown = np.ones((1,) * ours.ndim, bool)
        if drawn.real is not None and ours.shape[: drawn.real.ndim] == drawn.real.shape:
            shown = (drawn.real > 0).reshape(
                drawn.real.shape + (1,) * (ours.ndim - drawn.real.ndim)
            )
        error = np.where(shown, np.abs(ours - theirs), 0).max()
        if not error <= tolerance(theirs):
            # narrow layers with a tiny eps enlarge both sides' rounding: ours may be as far from
            # float64 as theirs is
            with finite_masks():
                wide = run(copy.deepcopy(drawn.model).double(), drawn.call)[name]
            mine, their_own = (
                np.where(shown, np.abs(one - wide), 0).max() for one in (ours, theirs)
            )
            if not mine <= their_own:
                return (
                    f"{name}: off by {error:.1e}; from float64 ours is {mine:.1e}, theirs "
                    f"{their_own:.1e}"
                )
    return None


def answer(drawn: Drawn, checkpoint: families.Checkpoint) -> models.Output:
    """Our output, with the rotations that a Reformer drew."""
    constants = rotations(drawn.model.config, checkpoint.config)
    if constants is None:
        return calls.apply(checkpoint, **drawn.call)
    tokens, options = calls.translate(checkpoint, **drawn.call)
    return models.apply(
        checkpoint.config, checkpoint.params, tokens, constants=constants, **options
    )


def tolerance(theirs: np.ndarray) -> float:
    """Of numbers in the tens, float32 keeps fewer digits."""
    return TOLERANCE * max(1.0, float(np.abs(theirs).max()) / 8)


def rotations(theirs, config):
    """What Reformer's layers hash with, `[L, N, H, rounds, buckets / 2]`, a part for each factor;
    None for other families."""
    if theirs.model_type != "reformer" or "lsh" not in theirs.attn_layers:
        return None
    factors = (
        theirs.num_buckets if isinstance(theirs.num_buckets, list | tuple) else [theirs.num_buckets]
    )
    torch.manual_seed(theirs.hash_seed)
    shape = (
        theirs.num_attention_heads,
        theirs.attention_head_size,
        theirs.num_hashes,
        sum(factors) // 2,
    )
    drawn = torch.randn(shape, dtype=torch.float64).numpy().astype(np.float32)
    parts = np.split(drawn, np.cumsum(factors)[:-1] // 2, axis=-1)
    parts = tuple(
        jnp.asarray(np.broadcast_to(part, (config.num_layers, *part.shape))) for part in parts
    )
    return parts if len(parts) > 1 else parts[0]


def main(count: int, families: list[str]) -> None:
    total: collections.Counter = collections.Counter()
    for family in families:
        found: collections.Counter = collections.Counter()
        for seed in range(count):
            drawn = draw(family, seed)
            try:
                outcome, why = compare(drawn)
            except Exception as error:
                outcome, why = "wrong", f"{type(error).__name__}: {str(error)[:300]}"
            found[outcome] += 1
            if outcome == "wrong" or os.environ.get("VERBOSE"):
                side = {name: array.shape for name, array in drawn.call.items()}
                print(
                    (
                        f"{family} {seed} {outcome}: {drawn.kind.__name__} {why}\n    "
                        f"{drawn.settings} {side}"
                    ),
                    flush=True,
                )
        total += found
        print(f"{family:12} {dict(found)}", flush=True)
    print(f"{'all':12} {dict(total)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or sorted(FAMILIES))
