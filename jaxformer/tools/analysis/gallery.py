"""The pictures of a run: of its records, of its model, and of what the model does with an example.

`NOTES` says how to read each picture.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models, params
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig, last_stack
from jaxformer.models.config import Patches
from jaxformer.objectives.objective import model_inputs
from jaxformer.params import Tree
from jaxformer.runs.run import Run, open_run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.tools.analysis import costs, diagram, figures, page
from jaxformer.tools.analysis.labels import short

log = logging.getLogger("jaxformer")
SHOWN = 32  # the number of tokens of an example whose attention is drawn
# {title of NOTES: a function that returns a matplotlib figure, or HTML}
Pictures = dict[str, Callable[[], Any] | str]

# the sections of a page, in this order, with a note for the reader
NOTES = {
    "Loss": "What training makes small, as a mean. For text it says how surprised the model is "
    "by the next token, in nats: 0 is certainty. The model learns from training data alone.",
    "Other numbers": "Lines: of training batches. Points: of the validation split. "
    "Of rms a line for each layer, the first ones dark, grey what is no layer: "
    "parts that die or explode show here.",
    "Architecture": "Read it from bottom to top. A dashed frame repeats; "
    "lines beside the boxes are the residual stream; "
    "the numbers beside the boxes count their parameters.",
    "Masks": "Which keys (columns) each query (row) may see: "
    "dark blue all of a block of pairs, light blue some, grey none.",
    "Costs": "A forward pass at several lengths: "
    "the share of each part in its FLOPs and in the bytes moved.",
    "Costs in numbers": "One forward pass at the length of the config, two FLOPs a multiply-add.",
    "Attention": "One validation example. "
    "Bright: the query (row) takes much from the key (column). Each row sums to 1.",
    "Gradients": "How strongly one validation example pulls on the parameters of each layer. "
    "Falling curves: gradients vanish.",
}


def record_pictures(
    runs: Mapping[str, Sequence[dict]], baseline: float | None, unit: str = ""
) -> Pictures:
    """Pictures of the records of runs; each picture shows all runs. `unit` is that of the loss."""
    names = set()
    for records in runs.values():
        for record in records:
            numbers = [name for name, value in record.items() if not isinstance(value, str)]
            names |= {name.removeprefix("validation_") for name in numbers}
    pictures: Pictures = {}
    if "loss" in names:
        pictures["Loss"] = partial(figures.losses, runs, baseline, unit)
    if names - figures.NOT_CURVES:
        pictures["Other numbers"] = partial(figures.curves, runs)
    return pictures


def model_pictures(model: Any, name: str) -> Pictures:
    """Pictures of a config."""
    if not models.is_config(model):
        return {}
    if isinstance(model, ModelConfig):
        stacks = {"": model}
    else:
        stacks = {"encoder": model.encoder, "decoder": model.decoder}
    masks = {}
    for stack, config in stacks.items():
        count = len(config.masks)
        for i, mask in enumerate(config.masks, 1):
            layers = f"layer {i} of every {count}" if count > 1 else "every layer"
            masks[f"{stack} {layers}".strip()] = mask
    length = last_stack(model).context_length
    pictures: Pictures = {
        "Architecture": partial(diagram.diagram, model, name),
        "Masks": partial(figures.masks, masks, length),
    }
    reads_images = any(isinstance(config.embedding, Patches) for config in stacks.values())
    lengths = [length] if reads_images else [length // 4, length, 4 * length]
    with contextlib.suppress(ConfigError):  # of a model whose costs cannot be counted
        parts = {n: costs.parts(model, n) for n in lengths if n}
        pictures |= {
            "Costs": partial(figures.costs, parts),
            "Costs in numbers": cost_table(parts[length]),
        }
    return pictures


def cost_table(parts: Sequence[costs.Part]) -> str:
    """The parts as an HTML table."""
    total = sum(part.flops for part in parts)
    columns: dict[str, Callable[[costs.Part], Any]] = {
        "parameters": lambda part: part.parameters,
        "FLOPs": lambda part: short(part.flops),
        "share": lambda part: f"{part.flops / total:.1%}",
        "bytes moved": lambda part: f"{short(2 * part.numbers)}B",
    }
    cells = [
        {part.name.replace("_", " "): of_part(part) for part in parts}
        for of_part in columns.values()
    ]
    return page.table(list(columns), cells)


def run_pictures(folder: RunFolder) -> Pictures:
    """Pictures of a run's model, and of attention and gradients for one validation example.

    A warning names each picture that cannot be drawn. If the objective offers no example
    (`example_of`), pictures of an example are left out without a warning.
    """
    pictures: Pictures = {}
    with warn_on_failure("what needs the model"):
        run = open_run(folder.path)
        model = run.experiment.model
        pictures = model_pictures(model, run.experiment.name)
        if not models.is_config(model) or not folder.checkpoints.is_dir():
            return pictures
        validation = batching.open_dataset(run.experiment.data, model).validation
        batch = {name: jnp.asarray(value)[None] for name, value in validation[0].items()}
        example = example_of(run.experiment.objective, model, batch)
        if example is None:
            return pictures
        with warn_on_failure("Attention"):
            pictures["Attention"] = attention(run, example)
        if last_stack(model).num_layers > 1:
            with warn_on_failure("Gradients"):
                pictures["Gradients"] = gradients(run, batch)
    return pictures


def example_of(
    objective: Any, model: Any, batch: dict[str, jax.Array]
) -> dict[str, jax.Array] | None:
    """The inputs of the model that a report may draw: `objective.example(model, batch)`.

    An objective without this method is asked through its `evaluation()`. The inputs are `tokens` or
    `images`, and further arguments of `models.apply`, such as `segment_ids`. `batch` holds one
    example. None if neither has the method.
    """
    scored = getattr(objective, "evaluation", lambda: objective)()
    for each in (objective, scored):
        if hasattr(each, "example"):
            return each.example(model, batch)
    return None


@contextlib.contextmanager
def warn_on_failure(what: str) -> Iterator[None]:
    """Logs an error inside the `with` block as a warning; the page is written without that part."""
    try:
        yield
    except Exception as error:
        log.warning("report: %s is left out: %s", what, error)


def attention(run: Run, batch: dict[str, jax.Array]) -> Callable[[], Any]:
    """A function that draws the attention maps of the last four layers, four heads of each.

    Of an encoder-decoder it draws the cross-attention of the decoder. Raises NotImplementedError if
    the model gives no maps.
    """
    model = run.experiment.model
    field = "images" if "images" in batch else "tokens"
    name = (
        "layers/*/attention/weights"
        if isinstance(model, ModelConfig)
        else "decoder/layers/*/cross_attention/weights"
    )
    with run.on_mesh():
        output = models.apply(
            model, run.params, batch[field], intermediates=(name,), **model_inputs(batch)
        )
    weights = np.asarray(output.intermediates[name])[-4:, 0, :4]
    source = "source" if "source" in batch else field
    queries = _words(run, batch[field], weights.shape[-2])
    keys = _words(run, batch[source], weights.shape[-1])
    T = _shown_length(batch, "segment_ids", len(queries))
    S = _shown_length(
        batch, "source_segment_ids" if source == "source" else "segment_ids", len(keys)
    )
    first_layer = last_stack(model).num_layers - len(weights)
    return partial(figures.attention, weights[..., :T, :S], queries[:T], keys[:S], first_layer)


def _words(run: Run, inputs: jax.Array, count: int) -> list[str]:
    """The tokens of an example as text; patches of an image are numbered."""
    if inputs.ndim != 2:
        return [str(i) for i in range(count)]
    tokens = inputs[0].tolist()
    return [run.tokenizer.decode([token]) if run.tokenizer else str(token) for token in tokens]


def _shown_length(batch: dict[str, jax.Array], segment_ids: str, count: int) -> int:
    """The number of tokens to draw: those that are not padding, at most SHOWN."""
    if segment_ids in batch:
        count = int((batch[segment_ids] != 0).sum())
    return min(SHOWN, count)


def gradients(run: Run, batch: dict[str, jax.Array]) -> Callable[[], Any]:
    """A function that draws |d loss / d parameters| of an example.

    It draws a curve over the layers for each kind of parameters. The loss is divided by its weight.
    """
    references = run.references

    def loss(trained: Tree, step: Any, references: Tree) -> jax.Array:
        sums = run.recipe.eval_loss(trained, batch, jax.random.key(0), step, references)
        return sums.loss / jnp.maximum(sums.weight, 1e-9)

    with run.on_mesh():
        step, trained, _ = run.checkpoint
        leaves = params.paths(jax.jit(jax.grad(loss))(trained, step, references))
    squares: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        stack, _, rest = path.partition("layers/")
        number, _, inside = rest.partition("/") if rest[:1].isdigit() else ("", "", rest)
        if name := inside.split("/")[0]:
            name = f"{stack}{name} {number}".strip().replace("/", " ").replace("_", " ")
            of_layers = np.square(np.asarray(leaf, np.float64)).reshape(len(leaf), -1).sum(axis=1)
            squares[name] = squares.get(name, 0.0) + of_layers
    norms = {
        name: (range(len(of_layers)), np.sqrt(of_layers))
        for name, of_layers in squares.items()
        if not name.endswith("norm")
    }
    labels = {"xlabel": "layer", "ylabel": "norm of the gradient", "yscale": "log"}
    return partial(figures.lines, norms, **labels)
