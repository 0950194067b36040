"""README.md of an exported run: the model, its scores, its data, and how to open it."""

import datetime
from collections.abc import Sequence
from typing import Any

from jaxformer import __version__, models
from jaxformer.config import storage
from jaxformer.masks import is_causal
from jaxformer.models import EncoderDecoder, Patches
from jaxformer.models.config import Classification, LanguageModel, TokenClassification
from jaxformer.params import count
from jaxformer.runs.run import Run

PROMISE = datetime.timedelta(days=180)  # for which JAX loads a program
# entries of `result.json` that are no scores
ABOUT_SCORES = ("unit", "examples", "scored", "tokens")


def page_of(run: Run, library: str, use: str) -> str:
    """The page of a run. `library` opens its folder, and `use` says how."""
    parts = [_front(run, library), _model(run), use, _scores(run), _data(run)]
    return "\n\n".join(parts) + "\n"


def auto_class(model: Any) -> str:
    """The class of transformers that opens a model, by what its first head says."""
    stack = models.last_stack(model)
    match stack.heads[:1]:
        case (LanguageModel(),) if isinstance(model, EncoderDecoder):
            return "AutoModelForSeq2SeqLM"
        case (LanguageModel(),):
            is_decoder = all(map(is_causal, stack.masks))
            return "AutoModelForCausalLM" if is_decoder else "AutoModelForMaskedLM"
        case (Classification(classes=int()),):
            reads_images = isinstance(stack.embedding, Patches)
            return f"AutoModelFor{'Image' if reads_images else 'Sequence'}Classification"
        case (TokenClassification(),):
            return "AutoModelForTokenClassification"
    return "AutoModel"


def _front(run: Run, library: str) -> str:
    lines = ["---", f"library_name: {library}", "tags:", "- jaxformer"]
    if auto_class(run.model) == "AutoModelForCausalLM":
        lines.append("pipeline_tag: text-generation")
    return "\n".join([*lines, "---", "", f"# {run.experiment.name}"])


def _model(run: Run) -> str:
    stack = models.last_stack(run.model)
    kind = "decoder" if all(map(is_causal, stack.masks)) else "encoder"
    if isinstance(run.model, EncoderDecoder):
        kind = "encoder and decoder"
    step, _, _ = run.checkpoint
    mean = "" if run.average == 1 else f" The weights are the mean of {run.average} checkpoints."
    return (
        f"A Transformer ({kind}) of {count(models.spec(run.model)):,} parameters: "
        f"{stack.num_layers} layers of width {stack.d_model} with {stack.num_heads} heads, "
        f"a context of {stack.context_length:,} tokens.\n\n"
        f"Trained with jaxformer {__version__}: run `{run.folder.path.name}`, step {step:,} of "
        f"{run.experiment.steps:,}, batches of {run.experiment.batch_size}.{mean}"
    )


def with_transformers(run: Run) -> str:
    """How transformers opens the folder."""
    name = auto_class(run.model)
    classes = name if run.tokenizer is None else f"{name}, AutoTokenizer"
    lines = [f"from transformers import {classes}", "", f'model = {name}.from_pretrained(".")']
    if run.tokenizer is not None:
        lines.append('tokenizer = AutoTokenizer.from_pretrained(".")')
    return _use(
        lines,
        'In jaxformer: `families.load(".")`. A name of a control token in a text is that token in '
        "transformers, and text in jaxformer.",
    )


def with_jax() -> str:
    """How JAX alone runs the program, and until when."""
    lines = [
        "import jax, jax.export, pathlib, safetensors.flax",
        "",
        'program = pathlib.Path("forward.stablehlo").read_bytes()',
        "forward = jax.export.deserialize(bytearray(program))",
        'output = forward.call(safetensors.flax.load_file("model.safetensors"), inputs)',
    ]
    until = datetime.date.today() + PROMISE
    return _use(
        lines,
        "`config.json` lists the arguments. JAX promises to load such a program for six months: "
        f"until {until.day} {until:%B %Y}. Export it again before.",
    )


def _use(lines: Sequence[str], after: str) -> str:
    return "\n".join(["## Use", "", "```python", *lines, "```", "", after])


def _scores(run: Run) -> str:
    """The scores at the end of the run; other checkpoints have others."""
    title = "## Scores on held-out data\n\n"
    is_last = run.step is None and run.average == 1
    if not (is_last and storage.is_file(run.folder.result)):
        return title + "Not recorded for these weights: `python -m jaxformer evaluate` prints them."
    scores = run.folder.read_json(run.folder.result).get("validation") or {}
    rows = [
        f"| {name} | {value:.4g} |"
        for name, value in scores.items()
        if isinstance(value, int | float) and name not in ABOUT_SCORES
    ]
    unit, scored = scores.get("unit", "examples"), scores.get("scored", "")
    about = f"A loss is a mean over {unit}" + (f"; {scored}." if scored else ".")
    return title + "\n".join(["| score | value |", "|---|---|", *rows, "", about])


def _data(run: Run) -> str:
    environment = run.folder.environment
    facts = run.folder.read_json(environment) if storage.is_file(environment) else {}
    digest = facts.get("data_digest", "unknown")
    return f"## Data\n\n`{run.experiment.data}`, sha256 `{digest}`."
