"""Our train step beside the same step in torch, eager and compiled (SDPA, fused AdamW).

On CPU the GPT-2 of transformers is a peer, too. All run in turns, each in its own process, in
float32 and bfloat16; torch also with freed memory kept, like ours. The shapes on CPU are nanoGPT's
two for Shakespeare, and GPT-2 small of experiments/gpt2_small.py at 4 x 256 and 1 x 1024 tokens.
nanoGPT's second shape has a batch that a CPU can compute, undivided and in 4 micro-batches on both
sides. On a GPU, in bfloat16: 124 million and 1.3 billion parameters, 1,024 and 2,048 tokens. MFU is
model FLOPs / the peak of the data sheet (no discount for the causal mask).

It takes an hour on 2 cores. The first use sets up .venv-bench with CPU builds of torch and
transformers; with TORCH_PYTHON the peers use another interpreter that has torch.
Command: make bench WHAT=train
         make bench WHAT=train ARGS="--rounds 3 --shapes small"
         make bench WHAT=train ARGS="--profile runs/bench/trace --shapes large"     (times of parts)
         TORCH_PYTHON=python3 make bench WHAT=train
"""

import argparse
import itertools
import json
import sys
from dataclasses import replace
from typing import Any

from experiments.bench import compare, trace
from experiments.bench.shapes import GPU, TRAIN, find

SHAPES = {"cpu": [shape for shape in TRAIN if shape != "quickstart"], "gpu": list(GPU)}


def experiment_of(shape: str, precision: Any):
    """The experiment whose step is timed: that of its file, with the sizes of this shape."""
    from experiments import gpt2_small, shakespeare_char

    size, parts = find(shape)
    whole = (
        gpt2_small if shape in GPU or shape.startswith("gpt2") else shakespeare_char
    ).experiment
    model = replace(
        whole.model,
        num_layers=size.layers,
        d_model=size.width,
        num_heads=size.heads,
        context_length=size.context,
        vocab_size=size.vocabulary,
    )
    return replace(
        whole, model=model, batch_size=size.rows, accumulation=parts, precision=precision
    )


def program(experiment, batch: dict[str, Any]):
    """(the train step, compiled as by `make train`; its first state; the batch on the device)."""
    import jax

    from jaxformer.training.recipe import build
    from jaxformer.training.step import first_state, make_train_step

    recipe, batch = build(experiment), jax.device_put(batch)
    state = first_state(recipe)
    return (
        jax.jit(make_train_step(recipe), donate_argnums=0).lower(state, batch).compile(),
        state,
        batch,
    )


def ours(experiment, batch: dict[str, Any]):
    """(a call that makes one step and returns its loss, an array; the compiled program)."""
    compiled, state, batch = program(experiment, batch)

    def step():
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    return step, compiled


def case(shape: str, precision: str):
    """`ours` of a shape, with memory treated as in a run."""
    from jaxformer.runs import memory

    memory.keep()  # before JAX starts
    size, _ = find(shape)
    return ours(
        experiment_of(shape, precision), token_batch(size.rows, size.context, size.vocabulary)
    )


def token_batch(rows: int, context: int, vocabulary: int) -> dict[str, Any]:
    """Random tokens, each its own label."""
    import jax

    tokens = jax.random.randint(jax.random.key(0), (rows, context), 0, vocabulary)
    return {"tokens": tokens, "labels": tokens, "weights": jax.numpy.ones((rows, context))}


def one(shape: str, precision: str) -> dict[str, float]:
    step, _ = case(shape, precision)
    line = dict(loss=float(step())) | compare.measure(step, float, find(shape)[0].steps)
    line |= compare.peak_memory()
    del step  # and its arrays, before the ceiling is measured
    return line | compare.chip_peak() | dict(ceiling=compare.ceiling(precision))


def commands(name: str, precisions: list[str]) -> dict[tuple[str, str], list[str]]:
    """The runs of a case: ours, and its peers."""
    runs, parts = {}, find(name)[0].parts
    for precision, shape in itertools.product(
        precisions, [name, f"{name}/{parts}"] if parts > 1 else [name]
    ):
        how = f", {parts} parts" if "/" in shape else ""
        runs[compare.OURS + how, precision] = [
            sys.executable,
            "-m",
            "experiments.bench.train",
            "--one",
            shape,
            precision,
        ]
        for mode in ("eager", "compiled"):
            peers = {f"torch {mode}{how}": compare.run_of_peer("train", shape, mode, precision)}
            if shape.startswith("gpt2"):
                peers[f"transformers {mode}"] = compare.run_of_peer("gpt2", shape, mode, precision)
            for peer, command in peers.items():
                runs |= compare.both_heaps(peer, precision, command)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    shapes = SHAPES[compare.platform()]
    parser.add_argument(
        "--shapes", nargs="+", choices=[*SHAPES["cpu"], *SHAPES["gpu"]], default=shapes
    )
    precisions = compare.PRECISIONS if compare.platform() == "cpu" else ["bfloat16"]
    parser.add_argument(
        "--precisions", nargs="+", choices=compare.PRECISIONS, default=list(precisions)
    )
    parser.add_argument(
        "--profile", metavar="FOLDER", help="trace our step and print its parts, no comparison"
    )
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "PRECISION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    from jaxformer.models.cost import training_flops

    for shape in options.shapes:
        size, _ = find(shape)
        if options.profile:
            trace.profile(
                *case(shape, options.precisions[-1]),
                options.profile,
                f"{shape}, {options.precisions[-1]}",
            )
            continue
        found = compare.alternate(commands(shape, options.precisions), options.rounds)
        flops = (
            size.rows
            * size.context
            * training_flops(experiment_of(shape, "float32").model, size.context)
        )
        title = (
            f"{shape}: {size.layers} layers x {size.width}, batch {size.rows} x "
            f"{size.context}, a training step"
        )
        compare.report(title, found, flops)


if __name__ == "__main__":
    main()
