"""A forward pass and a training step of BERT-base, ViT-B/16 and T5-small beside transformers.

All run in turns, each in its own process, in float32 and bfloat16, with random weights and no
dropout. The peers are transformers eager and compiled, also with freed memory kept, like ours. BERT
predicts every token, ViT one of 1,000 classes, T5 128 tokens from 128. In a forward pass with
bfloat16 the weights are bfloat16, too, on both sides. It takes two hours on 2 cores. The first use
sets up .venv-bench with CPU builds of torch and transformers.

Command: make bench WHAT=forward
         make bench WHAT=forward ARGS="--rounds 3 --models bert --works forward"
         make bench WHAT=forward ARGS="--profile runs/bench/trace --models bert --works forward"
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from experiments.bench import compare, trace
from experiments.bench.shapes import MODELS
from experiments.bench.train import ours, token_batch

WORKS = ("forward", "train")


def config_of(name: str) -> Any:
    """The preset, without dropout."""
    from jaxformer.models import PRESETS

    config: Any = PRESETS[{"bert": "bert_base_mlm", "vit": "vit_base", "t5": "t5_small"}[name]]
    quiet = lambda stack: replace(stack, dropout_rate=0.0, attention_dropout_rate=0.0)
    return (
        replace(config, encoder=quiet(config.encoder), decoder=quiet(config.decoder))
        if name == "t5"
        else quiet(config)
    )


def batch_of(name: str) -> dict[str, Any]:
    """A random batch in the form that the objective reads."""
    import jax

    rows, length = MODELS[name]
    if name == "vit":
        images = jax.random.normal(jax.random.key(0), (rows, 224, 224, 3))
        return {"images": images, "labels": jax.numpy.arange(rows), "weights": jax.numpy.ones(rows)}
    batch = token_batch(rows, length, 30_000)
    return batch | {"source": batch["tokens"]} if name == "t5" else batch


def train(name: str, precision: Any):
    """A training step."""
    from experiments.shakespeare_char import experiment
    from jaxformer.training import ClassCrossEntropy, TokenCrossEntropy

    objective, config = (
        ClassCrossEntropy() if name == "vit" else TokenCrossEntropy(),
        config_of(name),
    )
    rows = MODELS[name][0]
    return ours(
        replace(
            experiment, model=config, objective=objective, batch_size=rows, precision=precision
        ),
        batch_of(name),
    )


def forward(name: str, precision: str):
    """A forward pass to logits."""
    import jax

    from jaxformer import models

    config, dtype, batch = config_of(name), jax.numpy.dtype(precision), batch_of(name)
    params = jax.jit(
        lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), models.init(config, key))
    )(jax.random.key(0))
    inputs = {"source": batch["source"]} if name == "t5" else {}
    call = jax.jit(
        lambda params, x, inputs: models.apply(config, params, x, dtype=dtype, **inputs).logits
    )
    arguments = params, batch["images" if name == "vit" else "tokens"], inputs
    compiled = call.lower(*arguments).compile()
    return lambda: compiled(*arguments), compiled


def case(work: str, name: str, precision: str):
    """(the timed call, its compiled program), with memory treated as in a run."""
    from jaxformer.runs import memory

    memory.keep()  # before JAX starts
    return {"forward": forward, "train": train}[work](name, precision)


def one(work: str, name: str, precision: str) -> dict[str, float]:
    import jax

    call, _ = case(work, name, precision)
    line = dict(loss=float(call())) if work == "train" else {}
    return (
        line
        | compare.measure(call, jax.block_until_ready, 5)
        | dict(ceiling=compare.ceiling(precision))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--precisions", nargs="+", choices=compare.PRECISIONS, default=list(compare.PRECISIONS)
    )
    parser.add_argument(
        "--profile", metavar="FOLDER", help="trace our calls and print their parts, no comparison"
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("WORK", "MODEL", "PRECISION"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    from jaxformer.models.cost import training_flops

    for name in options.models:
        rows, length = MODELS[name]
        for work in options.works:
            if options.profile:
                precision = options.precisions[-1]
                trace.profile(
                    *case(work, name, precision), options.profile, f"{name}, {work}, {precision}"
                )
                continue
            runs = {}
            for precision in options.precisions:
                own = [
                    sys.executable,
                    "-m",
                    "experiments.bench.forward",
                    "--one",
                    work,
                    name,
                    precision,
                ]
                runs[compare.OURS, precision] = own
                for mode in ("eager", "compiled"):
                    command = compare.run_of_peer(f"model-{work}", name, mode, precision)
                    runs |= compare.both_heaps(f"transformers {mode}", precision, command)
            flops = (
                rows
                * length
                * training_flops(config_of(name), length)
                / (3 if work == "forward" else 1)
            )
            title = (
                f"{name}, {rows} x {length}, "
                f"{'a forward pass' if work == 'forward' else 'a training step'}"
            )
            compare.report(title, compare.alternate(runs, options.rounds), flops)


if __name__ == "__main__":
    main()
