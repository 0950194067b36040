"""Multi-token prediction: modules that predict the tokens behind the next one.

`MultiToken` is the objective. At position i, module k joins the hidden state of module k - 1 with
token i + k, and predicts token i + k + 1. Module 1 reads the hidden state of the model. A module is
a `ModelConfig` of one layer (`module_of`) whose embedding joins the two, so it trains and decodes
like any model. The first module drafts in speculative decoding (`drafter`).
DeepSeek-AI 2024, arXiv:2412.19437, section 2.2.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, ones

from jaxformer import models, ops, params as parameters
from jaxformer.decoding.speculative import HiddenDraft
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models import heads
from jaxformer.models.embedding import embedder_of
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.models.stacks import layout
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    batch_of_row,
    in_both_forms,
    model_inputs,
    with_reports,
)
from jaxformer.objectives.tokens import head_cross_entropy
from jaxformer.ops.losses import LossSums
from jaxformer.params import Spec, Tree


@dataclass(frozen=True)
class Joined:
    """M [RMSNorm(h); RMSNorm(Emb(t))] of hidden states h and tokens t (equation 21).

    The hidden states `[B, T, D]` are `inputs["hidden"]` of `models.apply`.
    """

    embedding: Any  # that of the model: Emb

    def __call__(self, config: models.ModelConfig) -> Embedder:
        of_tokens = embedder_of(replace(config, embedding=self.embedding))
        D = config.d_model
        scale = Spec((D,), ("embed",), ones)
        start = normal(config.std)
        join = {
            "hidden_norm": {"scale": scale},
            "token_norm": {"scale": scale},
            "map": parameters.linear((2 * D, D), ("embed", None), ("embed",), start, bias=False),
        }

        def apply(params: Tree, tokens: Array, inputs: Tree, context: Context) -> Array:
            vectors = of_tokens.apply(params, tokens, inputs, context)
            vectors = of_tokens.end(params, vectors, context)
            hidden = inputs["hidden"].astype(vectors.dtype)
            own = params["join"]
            parts = (
                ops.rms_norm(hidden, own["hidden_norm"]["scale"], config.norm_eps),
                ops.rms_norm(vectors, own["token_norm"]["scale"], config.norm_eps),
            )
            return linear("btd,de->bte", jnp.concatenate(parts, axis=-1), own["map"])

        return Embedder(of_tokens.spec | {"join": join}, apply, of_tokens.length)


def module_of(model: Any) -> models.ModelConfig:
    """The config of a module: the model's last layer, behind an embedding `Joined`.

    Raises ConfigError for a model that is no decoder of this library, or that sees later tokens.
    """
    head = heads.language_model(model) if isinstance(model, models.ModelConfig) else None
    if head is None or heads.sees_later_tokens(model, everywhere=True):
        raise ConfigError(
            "objective: MultiToken needs a ModelConfig with a LanguageModel and causal masks; "
            "a module would see the token that it predicts"
        )
    if model.hidden_width != model.d_model:
        raise ConfigError(
            f"objective: MultiToken: the model's stack has hidden states of {model.hidden_width} "
            f"features; expected model.d_model={model.d_model}"
        )
    last = model.num_layers - 1
    return replace(
        layout.layer_config(model, last),
        num_layers=1,
        masks=(model.masks[last % len(model.masks)],),
        heads=(head,),
        embedding=Joined(model.embedding),
        stack=None,
        unroll=None,
    )


def own_parameters(module: models.ModelConfig) -> Tree:
    """The specs of a module's own parameters: all except the embedding and the head."""
    tree = models.spec(module)
    own = {name: leaves for name, leaves in tree.items() if name not in ("embedding", "heads")}
    return own | {"embedding": {"join": tree["embedding"]["join"]}}


def with_shared(params: Tree, own: Tree) -> Tree:
    """A module's parameters, with the embedding and the heads of the model's `params`."""
    shared = {"heads": params["heads"]} if "heads" in params else {}
    return {**own, **shared, "embedding": {**params["embedding"], **own["embedding"]}}


def drafter(model: models.ModelConfig, params: Tree, own: Tree, dtype: Any = None) -> HiddenDraft:
    """The first module as the draft of `decoding.speculate`.

    `own` are the objective's parameters, such as `run.checkpoint[1]["objective"]`.
    """
    return HiddenDraft(module_of(model), with_shared(params, own["modules"]["0"]), dtype)


@dataclass(frozen=True)
class MultiToken:
    """CE + weight / D sum over k of CE_k, where CE_k is the cross entropy of module k (eq. 24, 25).

    Every term is divided by the number of the batch's tokens. The data are next-token data: token
    i + 1 is the label of position i. A module reads no token of another segment. Its hidden states
    are those after the final norm, the model's and its own. Reported are the cross entropy and the
    accuracy of each module (`module_1_loss`, `module_1_accuracy`). Evaluation scores the model
    alone, and reports the same. Raises ConfigError as `module_of` does.
    """

    modules: int = 1  # D
    weight: float = 0.3  # lambda; the paper has 0.3, and 0.1 for the last third of training

    def __post_init__(self):
        check_numbers("objective.", self, modules=1, weight=0)

    def spec(self, model: Any) -> Tree:
        """The parameters of the modules."""
        own = own_parameters(module_of(model))
        return {"modules": {str(k): own for k in range(self.modules)}}

    def evaluation(self) -> "MultiToken":
        return replace(self, weight=0.0)

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        module = module_of(model)
        inputs = dict(dtype=context.dtype, **model_inputs(batch))
        output = models.encode(model, params, batch["tokens"], dropout_key=context.key, **inputs)
        total = report(model, params, output, batch, perplexity=not self.weight)
        loss, metrics, updates = total.loss, dict(total.metrics), {}
        mixer_inputs: Any = batch.get("inputs", {})
        hidden = output.hidden
        for k in range(1, self.modules + 1):
            later = shifted(batch, k)
            tree = with_shared(params, context.params["modules"][str(k - 1)])
            inputs["inputs"] = {**mixer_inputs, "hidden": hidden}
            key = None if context.key is None else jax.random.fold_in(context.key, k)
            ahead = models.encode(module, tree, later["tokens"], dropout_key=key, **inputs)
            sums = report(module, tree, ahead, later)
            if self.weight:
                loss = loss + self.weight / self.modules * sums.loss
            metrics[f"module_{k}_loss"] = sums.loss, sums.weight
            metrics[f"module_{k}_accuracy"] = sums.metrics["accuracy"]
            if sums.updates is not None:
                updates[str(k - 1)] = sums.updates
            hidden = ahead.hidden
        changed = {"objective": {"modules": updates}} if updates else {}
        new = {**(total.updates or {}), **changed} or None
        return replace(total, loss=loss, metrics=metrics, updates=new)


def report(
    config: models.ModelConfig, params: Tree, output: Any, batch: Batch, perplexity: bool = False
) -> LossSums:
    """The sums of the cross entropy of a model's or a module's hidden states."""
    head = heads.language_model(config)
    labels, weights = batch["labels"], batch["weights"]
    sums = head_cross_entropy(config, head, params, output.hidden, labels, weights)
    return with_reports(sums, output, unit="tokens", perplexity=perplexity)


def shifted(batch: Batch, k: int) -> Batch:
    """Tokens, labels and weights of k positions later; weight 0 where the segment ends before."""

    def later(x: Array) -> Array:
        return jnp.pad(x[:, k:], ((0, 0), (0, min(k, x.shape[1]))))

    moved = {name: later(batch[name]) for name in ("tokens", "labels", "weights")}
    if "segment_ids" in batch:
        same = later(batch["segment_ids"]) == batch["segment_ids"]
        moved["weights"] = jnp.where(same, moved["weights"], 0)
    return moved
