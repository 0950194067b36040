"""A trained run as a folder for others: weights, tokenizer, settings of generation, a page.

`transformers` opens the folder by its AutoModel classes and AutoTokenizer, if one of
`families.FAMILIES` can express the model. Any model can be exported as a program
(`interop.export`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxformer import families, models, params as parameters
from jaxformer.data.tokenizer_files import files_of
from jaxformer.decoding import Beams, Sampling
from jaxformer.errors import ConfigError
from jaxformer.families.known import write_settings
from jaxformer.interop import export as programs
from jaxformer.models import EncoderDecoder
from jaxformer.runs.questions import ends_of, writes_text
from jaxformer.runs.run import Run
from jaxformer.tools.model_page import page_of, with_jax, with_transformers


def export(
    run: Run,
    folder: str | Path,
    *,
    dtype: Any = None,
    model_type: str | None = None,
    family: families.Family | None = None,
) -> None:
    """Writes the run's model into `folder`, for transformers, with all that its users need.

    An adaptation is merged. `dtype` rounds the weights. `model_type` is one of `families.FAMILIES`;
    None: the first that can express the model. `family` is one of your own, for `model_type`.
    Raises ConfigError for a model of one's own, for a model that no family can express, and for a
    folder that is not empty.
    """
    check_model(run)
    known = families.FAMILIES if family is None else {str(model_type): family}
    try:
        model, params, kind = in_a_family(run.model, weights(run, dtype), model_type, known)
    except ConfigError as error:
        raise ConfigError(
            f"export: {run.folder.path}: {error} (--model-type on the command line); --program "
            "writes the forward pass as StableHLO, which needs no family"
        ) from None
    checkpoint = families.Checkpoint(
        model, params, _tokens(run), _labels(run), kind, _generation(run)
    )
    files = files_beside(run, page_of(run, "transformers", with_transformers(run)))
    families.save(folder, checkpoint, family=family, files=files)


def export_program(run: Run, folder: str | Path, *, dtype: Any = None) -> None:
    """Writes the run's forward pass as StableHLO into `folder`, with all that its users need.

    Raises ConfigError for a model of one's own, and for a folder that is not empty.
    """
    check_model(run)
    files = files_beside(run, page_of(run, "jax", with_jax()))
    programs.save(folder, run.model, weights(run, dtype), files=files)


def check_model(run: Run) -> None:
    """Raises ConfigError for a model of the user's own class."""
    if not models.is_config(run.model):
        raise ConfigError(
            f"export: {run.folder.path} has a model of its own; "
            "expected a ModelConfig or an EncoderDecoder"
        )


def files_beside(run: Run, page: str) -> dict[str, bytes]:
    """{name: contents} of the files beside the weights: those of the tokenizer, and the page."""
    files = {"README.md": page.encode()}
    if run.tokenizer is not None:
        stack = models.last_stack(run.model)
        files |= files_of(run.tokenizer, stack.vocab_size, stack.context_length)
    return files


def in_a_family(
    model: Any, params: Any, model_type: str | None, known: Mapping[str, families.Family]
) -> tuple[Any, Any, str]:
    """(model, parameters, model type) of the same function, in the words of a known family.

    A family such as GPT-2 has no word for a model without biases: then they are zeros. Raises
    ConfigError if no family can express the model.
    """
    reasons = []
    for wording in (model, _with_biases(model)):
        try:
            kind = write_settings(wording, model_type, known)["model_type"]
        except ConfigError as error:
            reasons.append(error)
            continue
        return wording, with_zero_biases(wording, params), kind
    raise reasons[0]  # about the model as it is


def with_zero_biases(model: Any, params: Any) -> Any:
    """The parameters, with zeros for the biases of the model that they lack."""
    leaves = parameters.paths(params)
    dtype = next(iter(leaves.values())).dtype
    for path, leaf in parameters.paths(models.spec(model)).items():
        if path not in leaves and path.endswith("bias"):
            leaves[path] = jnp.zeros(leaf.shape, dtype)
    return unflatten_dict(leaves, sep="/")


def _with_biases(model: Any) -> Any:
    """The model with all biases and a bias in its norms."""
    if isinstance(model, EncoderDecoder):
        encoder, decoder = map(_with_biases, (model.encoder, model.decoder))
        return replace(model, encoder=encoder, decoder=decoder)
    return replace(model, use_bias=True)


def weights(run: Run, dtype: Any) -> Any:
    """The run's parameters in `dtype`; variables, such as the bias that chooses experts, stay."""
    if dtype is None:
        return run.params
    variables = parameters.variables(models.spec(run.model))
    leaves = {
        path: leaf if path in variables else leaf.astype(dtype)
        for path, leaf in parameters.paths(run.params).items()
    }
    return unflatten_dict(leaves, sep="/")


def _tokens(run: Run) -> families.Tokens:
    """The tokens that end a text, and the one that a target begins with."""
    tokenizer, data = run.tokenizer, run.experiment.data
    if tokenizer is None:
        return families.Tokens()
    size = models.last_stack(run.model).vocab_size
    ends = tuple(end for end in ends_of(data, tokenizer) if end < size)
    start = None
    if isinstance(run.model, EncoderDecoder):  # as in `data.pairs.Pairs`
        start = getattr(data, "start", None)
        start = tokenizer.end_of_text if start is None else start
    return families.Tokens(start=start, eos=ends)


def _labels(run: Run) -> tuple[str, ...]:
    """The names of the classes, if the data name as many as the model has."""
    labels = getattr(run.experiment.data, "labels", ())
    counts = [getattr(head, "classes", None) for head in models.last_stack(run.model).heads]
    return tuple(labels) if isinstance(labels, tuple) and len(labels) in counts else ()


def _generation(run: Run) -> dict[str, Any]:
    """generation_config.json: how the experiment's own sample is drawn."""
    sample = run.experiment.sample
    if not writes_text(run.experiment):
        return {}
    settings: dict[str, Any] = {"max_new_tokens": sample.tokens}
    how = sample.sampling
    if isinstance(how, Beams):
        settings |= {"num_beams": how.beams, "do_sample": False}
        if isinstance(how.length_penalty, int | float):
            settings["length_penalty"] = how.length_penalty
    elif isinstance(how, Sampling) and how.temperature:
        # without an entry transformers keeps only the 50 likeliest tokens
        settings |= {"do_sample": True, "temperature": how.temperature, "top_k": how.top_k or 0}
        others = {"top_p": how.top_p, "min_p": how.min_p, "typical_p": how.typical}
        settings |= {name: value for name, value in others.items() if value is not None}
    else:
        settings["do_sample"] = False
    return settings
