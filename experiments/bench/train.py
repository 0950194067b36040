"""Our train step beside the same step in torch eager (SDPA, fused AdamW), on nanoGPT's two shapes.

Both run alternately, each in its own process, at float32 and bfloat16; a ratio compares the best precision of each, by the
median over rounds of each round's median step. Above 1 we are faster.
Command: make bench WHAT=train          (sets up .venv-bench with a CPU build of torch on first use)
         python -m experiments.bench.train --rounds 5 --shapes small
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# layers, width, heads, context, batch, vocabulary: shakespeare_char's CPU size and its GPU size at a batch that a CPU bears
SHAPES = {"small": (4, 128, 4, 64, 12, 65), "large": (6, 384, 6, 256, 16, 65)}
STEPS = {"small": 40, "large": 5}
PRECISIONS = ("float32", "bfloat16")
VENV = Path(".venv-bench")


def time_steps(step, count: int) -> float:
    """Median milliseconds of `count` steps, after three that do not count."""
    for _ in range(3):
        step()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def ours(shape: str, precision: Any):
    """One step of the library's own train step, as `make train` runs it."""
    from functools import partial

    import jax

    from experiments.shakespeare_char import experiment
    from jaxformer.training import memory
    from jaxformer.training.recipe import build
    from jaxformer.training.step import init_state, make_train_step

    memory.keep()
    layers, width, heads, context, batch, vocabulary = SHAPES[shape]
    model = replace(
        experiment.model, num_layers=layers, d_model=width, num_heads=heads, context_length=context,
        vocab_size=vocabulary, unroll=layers,
    )  # fmt: skip
    experiment = replace(experiment, model=model, batch_size=batch, precision=precision)
    tokens = jax.random.randint(jax.random.key(0), (batch, context), 0, vocabulary)
    data = {"tokens": tokens, "labels": tokens, "weights": jax.numpy.ones((batch, context))}
    recipe = build(experiment)
    state = jax.jit(partial(init_state, recipe))()
    compiled = jax.jit(make_train_step(recipe), donate_argnums=0)

    def step():
        nonlocal state
        state, metrics = compiled(state, data)
        jax.block_until_ready(metrics)

    return step


def torch_twin(shape: str, precision: str):
    """The same model, loss, clipping and optimizer in torch, eager."""
    import torch  # pyrefly: ignore[missing-import]
    import torch.nn.functional as F  # pyrefly: ignore[missing-import]
    from torch import nn  # pyrefly: ignore[missing-import]

    layers, width, heads, context, batch, vocabulary = SHAPES[shape]
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            split = self.qkv(self.norms[0](x)).view(batch, context, 3, heads, width // heads)
            query, key, value = split.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    tokens, positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
    body, last = nn.Sequential(*(Layer() for _ in range(layers))), nn.LayerNorm(width, bias=False)
    model = nn.ModuleList([tokens, positions, body, last])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    for matrix in matrices:
        nn.init.normal_(matrix, std=0.02)
    groups = [
        dict(params=matrices, weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    ids = torch.randint(0, vocabulary, (batch, context))
    places = torch.arange(context)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            logits = last(body(tokens(ids) + positions(places))) @ tokens.weight.T
            loss = F.cross_entropy(logits.view(-1, vocabulary), ids.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def torch_python(*packages: str) -> str:
    """The interpreter of .venv-bench, made on first use, with torch and these packages."""
    python, packages = VENV / "bin" / "python", ("torch==2.13.0", "numpy", *packages)
    ready = VENV / "ready"
    if not ready.exists() or not set(packages) <= set(ready.read_text().split()):
        print(f"setting up {VENV} with {', '.join(packages)} for CPU (once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        ready.write_text("\n".join(packages))
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--one", nargs=3, metavar=("WHO", "SHAPE", "PRECISION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        who, shape, precision = options.one
        make = {"jaxformer": ours, "torch": torch_twin}[who]
        print(json.dumps(time_steps(make(shape, precision), STEPS[shape])))
        return
    interpreters = {"jaxformer": sys.executable, "torch": torch_python()}
    for shape in options.shapes:
        layers, width, _, context, batch, _ = SHAPES[shape]
        print(
            f"{shape}: {layers} layers x {width}, batch {batch} x {context}; ms a step, {options.rounds} rounds",
            flush=True,
        )
        times = {(who, precision): [] for who in interpreters for precision in PRECISIONS}
        for _ in range(options.rounds):
            for (who, precision), values in times.items():
                command = [interpreters[who], "-m", "experiments.bench.train", "--one", who, shape, precision]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                values.append(json.loads(done.stdout.splitlines()[-1]))
        medians = {run: statistics.median(values) for run, values in times.items()}
        for (who, precision), values in times.items():
            print(f"  {who:9} {precision:8} median {medians[who, precision]:8.2f}   all {[round(v, 1) for v in values]}")
        best = {who: min(medians[who, precision] for precision in PRECISIONS) for who in interpreters}
        print(f"  ratio torch / jaxformer, best precision of each: {best['torch'] / best['jaxformer']:.2f}", flush=True)


if __name__ == "__main__":
    main()
