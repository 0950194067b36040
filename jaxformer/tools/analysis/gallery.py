"""The pictures of a run: of its records, its model, and what the model does with an example. `NOTES` says how to read each."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxformer.tools.analysis.diagram import short

log = logging.getLogger("jaxformer")
SHOWN = 32  # tokens of an example whose attention is drawn
Pictures = dict[str, Callable[[], Any] | str]  # by a title of NOTES: what draws a matplotlib figure, or HTML

NOTES = {  # what a page shows, in this order
    "Loss": "How surprised the model is by the right answer, in nats; 0 is certainty. It learns from training text alone.",
    "Other numbers": "Lines: of training batches. Points: of the validation split. Of rms a line for each layer, the first "
    "ones dark, grey what is no layer: parts that die or explode show here.",
    "Architecture": "Read it from bottom to top. A dashed frame repeats; lines beside the boxes are the residual stream; the "
    "numbers beside the boxes count their parameters.",
    "Masks": "Which keys (columns) each query (row) may see: dark blue all of a block of pairs, light blue some, grey none.",
    "Costs": "A forward pass at several lengths: the share of each part in its FLOPs and in the bytes moved.",
    "Costs in numbers": "One forward pass at the length of the config, two FLOPs a multiply-add.",
    "Attention": "One validation example. Bright: the query (row) takes much from the key (column). Each row sums to 1.",
    "Gradients": "How strongly one validation example pulls on the parameters of each layer. Falling curves: gradients vanish.",
}


def record_pictures(runs: Mapping[str, Sequence[dict]], baseline: float | None) -> Pictures:
    """Pictures of the records of runs, all in one."""
    numbers = [name for records in runs.values() for record in records for name in record if not isinstance(record[name], str)]
    names = {name.removeprefix("validation_") for name in numbers}
    found: Pictures = {"Loss": lambda: figures.losses(runs, baseline)} if "loss" in names else {}
    return found | ({"Other numbers": lambda: figures.curves(runs)} if names - figures.NOT_CURVES else {})


def model_pictures(model: Any, name: str) -> Pictures:
    """Pictures of a config."""
    if not models.is_config(model):
        return {}
    stacks = {"": model} if isinstance(model, ModelConfig) else {"encoder": model.encoder, "decoder": model.decoder}

    def turn(i, n):
        return f"layer {i + 1} of every {n}" if n > 1 else "every layer"

    patterns = {
        f"{stack} {turn(i, len(config.masks))}".strip(): mask
        for stack, config in stacks.items()
        for i, mask in enumerate(config.masks)
    }
    length = last_stack(model).context_length
    pictures: Pictures = {
        "Architecture": lambda: diagram.diagram(model, name), "Masks": lambda: figures.masks(patterns, length),
    }  # fmt: skip
    lengths = [length] if any(isinstance(c.embedding, Patches) for c in stacks.values()) else [length // 4, length, 4 * length]
    with contextlib.suppress(ConfigError):  # what cannot be counted
        parts = {n: costs.parts(model, n) for n in lengths if n}
        pictures |= {"Costs": lambda: figures.costs(parts), "Costs in numbers": cost_table(parts[length])}
    return pictures


def cost_table(parts: Sequence[costs.Part]) -> str:
    """The parts as a table of HTML."""
    total = sum(part.flops for part in parts)

    def facts(part):
        return (part.parameters, short(part.flops), f"{part.flops / total:.1%}", f"{short(2 * part.numbers)}B")

    rows = {part.name.replace("_", " "): facts(part) for part in parts}
    columns = ("parameters", "FLOPs", "share", "bytes moved")
    return page.table(columns, [{name: row[i] for name, row in rows.items()} for i in range(len(columns))])


def run_pictures(folder: RunFolder) -> Pictures:
    """Pictures of a run's model, and of its attention and gradients of an example. A warning says what cannot be drawn.

    Without an example that the objective offers (`example_of`), nothing of an example is drawn, and nothing is said.
    """
    pictures: Pictures = {}
    with warn_on_failure("what needs the model"):
        run = open_run(folder.path)
        model = run.experiment.model
        pictures = model_pictures(model, run.experiment.name)
        if not models.is_config(model) or not folder.checkpoints.is_dir():
            return pictures
        row = batching.open_dataset(run.experiment.data, model).validation[0]
        batch = {name: jnp.asarray(value)[None] for name, value in row.items()}
        example = example_of(run.experiment.objective, model, batch)
        if example is None:
            return pictures
        with warn_on_failure("Attention"):
            pictures["Attention"] = attention(run, example)
        if last_stack(model).num_layers > 1:
            with warn_on_failure("Gradients"):
                pictures["Gradients"] = gradients(run, batch)
    return pictures


def example_of(objective: Any, model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array] | None:
    """What the report of a run may draw of a batch of one row: `objective.example(model, batch)`, or that of what scores it.

    It is what the model reads: `tokens` or `images`, and other arguments of `models.apply`, such as `segment_ids`. None where
    neither has the method.
    """
    scored = getattr(objective, "evaluation", lambda: objective)()
    for each in (objective, scored):
        if hasattr(each, "example"):
            return each.example(model, batch)
    return None


@contextlib.contextmanager
def warn_on_failure(what: str) -> Iterator[None]:
    """Logs an error inside as a warning: the page is written without that part."""
    try:
        yield
    except Exception as error:
        log.warning("report: %s is left out: %s", what, error)


def attention(run: Run, batch: dict[str, jax.Array]) -> Callable[[], Any]:
    """The maps of the last layers; of an encoder-decoder, where the target looks in the source. NotImplementedError: none."""
    model, field = run.experiment.model, "images" if "images" in batch else "tokens"
    name = "layers/*/attention/weights" if isinstance(model, ModelConfig) else "decoder/layers/*/cross_attention/weights"
    with run.on_mesh():
        output = models.apply(model, run.params, batch[field], intermediates=(name,), **model_inputs(batch))
    weights = np.asarray(output.intermediates[name])[-4:, 0, :4]

    def word(token):
        return run.tokenizer.decode([token]) if run.tokenizer else str(token)

    # of an image, the numbers of its patches
    def words(x, count):
        return [word(token) for token in x[0].tolist()] if x.ndim == 2 else [str(i) for i in range(count)]

    tokens, keys = words(batch[field], weights.shape[-2]), words(batch.get("source", batch[field]), weights.shape[-1])

    def real(name, count):
        return min(SHOWN, int((batch[name] != 0).sum()) if name in batch else count)

    T, S = real("segment_ids", len(tokens)), real("source_segment_ids" if "source" in batch else "segment_ids", len(keys))
    first = last_stack(model).num_layers - len(weights)
    return lambda: figures.attention(weights[..., :T, :S], tokens[:T], keys[:S], first)


def gradients(run: Run, batch: dict[str, jax.Array]) -> Callable[[], Any]:
    """The norm of the gradient of an example's loss with respect to the parameters of each layer."""

    references = run.references

    def loss(trained: Tree, step: int, references: Tree) -> jax.Array:
        sums = run.recipe.score(trained, batch, jax.random.key(0), step, references)
        return sums.loss / jnp.maximum(sums.weight, 1e-9)

    with run.on_mesh():
        step, trained, _ = run.checkpoint
        leaves = params.paths(jax.jit(jax.grad(loss))(trained, step, references))
    squares: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        stack, _, rest = path.partition("layers/")
        place, _, inside = rest.partition("/") if rest[:1].isdigit() else ("", "", rest)
        if name := inside.split("/")[0]:
            name = f"{stack}{name} {place}".strip().replace("/", " ").replace("_", " ")
            squares[name] = squares.get(name, 0.0) + np.square(np.asarray(leaf, np.float64)).reshape(len(leaf), -1).sum(axis=1)
    norms = {name: (range(len(all)), np.sqrt(all)) for name, all in squares.items() if not name.endswith("norm")}
    return lambda: figures.lines(norms, xlabel="layer", ylabel="norm of the gradient", yscale="log")
