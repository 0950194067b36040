"""Writes a golden model: builds it, redraws its weights, evaluates in float64, and lets it save
itself and its gradients."""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from tests.golden import CASES
from tests.golden.families import feature_mask

transformers.utils.logging.disable_progress_bar()
GENERATED = 64
# {argument of their `generate`: its name in witness.npz}
PROMPTS = {
    "input_ids": "prompt",
    "attention_mask": "prompt_mask",
    "input_features": "prompt_features",
}
T5_PAIRS = (
    transformers.T5ForConditionalGeneration,
    transformers.MT5ForConditionalGeneration,
    transformers.UMT5ForConditionalGeneration,
)
EXACT = dict(attn_implementation="eager", experts_implementation="eager")


def write(name: str, folder: Path) -> None:
    """The four files of case `name` into `folder`, whose earlier content is gone."""
    case = CASES[name]
    kind = getattr(transformers, case.model)
    torch.manual_seed(0)
    model = kind(kind.config_class(**case.config, **EXACT)).double().eval()
    if case.untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    redraw(model, case.seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = (
                None  # would hide the gradient of the pad token, with which Marian's targets begin
            )
    witness = {f"inputs/{key}": array for key, array in case.inputs.items()}
    if name == "reformer":
        # its backward pass insists; without dropout nothing else changes
        model.reformer.encoder.train()
        witness["rotations"] = rotations(model.config)
    with finite_masks():
        answered = answer(model, case.inputs)
        weights = loss_weights(case.inputs, answered)
        loss = sum(
            (torch.from_numpy(w).double() * answered[key]).sum() for key, w in weights.items()
        )
        loss.backward()
        if case.prompt:
            witness |= {PROMPTS.get(key, key): array for key, array in case.prompt.items()}
            witness["generated"] = generate(model, case.prompt)
    witness["loss"] = loss.detach().numpy()
    witness |= {f"loss/{key}": array for key, array in weights.items()}
    witness |= {f"outputs/{key}": array for key, array in at_real(case.inputs, answered).items()}

    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as beside:
        single = copy.deepcopy(model).float()
        single.save_pretrained(folder)
        with torch.no_grad():
            for parameter in single.parameters():
                parameter.zero_()  # also those that are never trained
            for buffer in norms(single):
                buffer.zero_()
            for tensor, source in zip(tensors(single), tensors(model), strict=True):
                tensor.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
                assert torch.isfinite(tensor).all(), f"a gradient of {name} is not finite"
        # which ties and renames the gradients as it does the weights
        single.save_pretrained(beside)
        shutil.copy(Path(beside) / "model.safetensors", folder / "gradients.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "witness.npz", **witness)


def tensors(model) -> list[torch.Tensor]:
    """Whatever of a model is drawn and saved: its parameters, and the bias that Marian calls a
    buffer."""
    # without sinusoids
    drawn = [
        p
        for name, p in model.named_parameters()
        if "embed_positions" not in name or p.requires_grad
    ]
    buffers = ("final_logits_bias", "e_score_correction_bias")
    return drawn + [b for name, b in model.named_buffers() if name.endswith(buffers)]


@torch.no_grad()
def redraw(model, seed: int) -> None:
    """Fills a model with float32 numbers: embeddings 0.7 N, norms 1 + 0.3 N, biases 0.3 N, matrices
    N / sqrt(fan_in)."""
    rng = np.random.default_rng(seed)
    modules = {
        id(p): (m, name) for m in model.modules() for name, p in m.named_parameters(recurse=False)
    }
    for tensor in tensors(model):
        module, name = modules.get(id(tensor), (model, "bias"))
        draw = rng.normal(size=tuple(tensor.shape))
        if name == "bias":
            draw = 0.3 * draw
        elif tensor.ndim == 1:
            draw = 1 + 0.3 * draw
        elif isinstance(module, torch.nn.Linear | torch.nn.Conv2d) or name in (
            "gate_up_proj",
            "down_proj",
        ):
            draw = draw / np.sqrt(tensor[0].numel() if tensor.ndim != 3 else tensor.shape[-1])
        elif isinstance(module, Conv1D):
            draw = draw / np.sqrt(tensor.shape[0])
        else:
            draw = 0.7 * draw
        tensor.copy_(torch.from_numpy(np.asarray(draw, np.float32)))
        tensor.requires_grad_()
    for i, tensor in enumerate(norms(model)):
        draw = rng.normal(size=tuple(tensor.shape))
        around_one = np.exp(0.3 * draw)
        draw = 0.3 * draw if i % 4 in (1, 2) else around_one
        tensor.copy_(torch.from_numpy(np.asarray(draw, np.float32)))


def norms(model) -> Iterator[torch.Tensor]:
    """The factors, biases, means and variances of frozen batch norms: saved, and never trained."""
    for module in model.modules():
        if "FrozenBatchNorm" in type(module).__name__:
            yield from (module.weight, module.bias, module.running_mean, module.running_var)


def finite_masks():
    """What hides is -1e30: float64's lowest number, cast for a softmax in float32, makes NaN where
    nothing is seen."""
    return mock.patch.object(torch, "finfo", lambda dtype: SimpleNamespace(min=-1e30, max=1e30))


def answer(model, inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """All that a model answers under its own names, and its body's `last_hidden_state`, after the
    final norm."""
    bodies = []
    body = model.decoder if isinstance(model, T5_PAIRS) else model.base_model
    if isinstance(model, transformers.OPTForCausalLM):  # which does not call its `OPTModel`
        body = model.model.decoder
    hook = body.register_forward_hook(
        lambda module, args, out: bodies.append(out.last_hidden_state)
    )
    out = model(**as_tensors(model, inputs))
    hook.remove()
    answered = {key: x for key, x in out.items() if isinstance(x, torch.Tensor)}
    return answered | {"last_hidden_state": bodies[0]}


def as_tensors(model, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The arguments of a model; numbers with a fraction are in its dtype."""
    given = {key: torch.from_numpy(x) for key, x in arrays.items()}
    return {key: x.to(model.dtype) if x.is_floating_point() else x for key, x in given.items()}


def real(inputs: dict[str, np.ndarray], key: str, array) -> np.ndarray:
    """Where an output is an answer to a real token or image; of the shape of the output."""
    decoder = (
        "decoder_" if "decoder_attention_mask" in inputs and not key.startswith("encoder") else ""
    )
    mask = inputs.get(f"{decoder}attention_mask")
    if "pixel_mask" in inputs and key.startswith("encoder"):
        mask = feature_mask(inputs["pixel_mask"], array.shape[1])
    if mask is None or mask.shape != array.shape[:2]:
        return np.ones(array.shape, bool)
    return np.broadcast_to((mask > 0).reshape(mask.shape + (1,) * (array.ndim - 2)), array.shape)


def at_real(inputs, answered) -> dict[str, np.ndarray]:
    return {
        key: np.where(real(inputs, key, x), x.detach().numpy(), 0) for key, x in answered.items()
    }


def loss_weights(inputs, answered) -> dict[str, np.ndarray]:
    """Of every output of the heads, or of the body where there is no head: random numbers whose
    squares sum to about one."""
    rng = np.random.default_rng(1)
    learned = [key for key, output in answered.items() if output.requires_grad]
    heads = [key for key in learned if key != "encoder_last_hidden_state"]
    if len(heads) > 1 and "pooler_output" not in heads:
        heads.remove("last_hidden_state")
    weights = {}
    for key in heads:
        counts = real(inputs, key, answered[key])
        drawn = np.where(counts, rng.normal(size=counts.shape), 0) / np.sqrt(counts.sum())
        weights[key] = np.asarray(drawn, np.float32)
    return weights


@torch.no_grad()
def generate(model, prompt: dict[str, np.ndarray]) -> np.ndarray:
    """64 new tokens of each row; raises AssertionError where rounding could have chosen another."""
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = model.config.pad_token_id or 0
    given = as_tensors(model, prompt)
    # Whisper's own `generate` cuts and joins pieces of sound
    out = transformers.GenerationMixin.generate(
        model, **given, do_sample=False, max_new_tokens=GENERATED
    )
    new = out[:, -GENERATED:]
    if model.config.is_encoder_decoder:
        logits = model(**given, decoder_input_ids=out[:, :-1]).logits
    else:
        mask = torch.cat([given["attention_mask"], torch.ones_like(new)], dim=1)[:, :-1]
        logits = model(
            out[:, :-1], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    best = logits[:, -GENERATED:].topk(2)
    assert torch.equal(best.indices[..., 0], new), (
        "step by step it generates something else than at once"
    )
    gap = (best.values[..., 0] - best.values[..., 1]).min().item()
    assert gap > 1e-4, f"two tokens lie {gap:.1e} apart: choose another seed"
    return new.numpy()


def rotations(config) -> np.ndarray:
    """What every LSH layer hashes float64 vectors with: each sets the seed anew."""
    torch.manual_seed(config.hash_seed)
    shape = (
        config.num_attention_heads,
        config.attention_head_size,
        config.num_hashes,
        config.num_buckets // 2,
    )
    return torch.randn(shape, dtype=torch.float64).numpy()
