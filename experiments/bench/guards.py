"""What the guards of a run cost: its train step with all of them beside one with none, at GPT-2 small's shapes.

With: a step whose numbers are not finite or spike changes nothing, the watchdog, the account of time, metrics checked one step
late; and, every --save steps, the fingerprints that a checkpoint has. Without: gradients, clip, update, and the loss fetched
one step late. Both in one process, in turns; the ratio is the median of the rounds' ratios.
Expected: 1.00 to 1.01 on two CPU cores.
Time: 5 minutes on two cores.
Command: make bench WHAT=guards
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax

from experiments.gpt2_small import experiment as gpt2_small
from jaxformer.parallel.processes import Watchdog
from jaxformer.runs import memory
from jaxformer.runs.goodput import Goodput
from jaxformer.runs.manifest import fingerprints
from jaxformer.runs.metrics import Console, Reporter
from jaxformer.training import Spikes, step as steps
from jaxformer.training.recipe import build


def bare_step(recipe, state, batch):
    """The step of a trainer without guards: the same gradients, clip and update, always applied."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), 1), state.step)
    sums, gradients = steps.accumulate(recipe, state.params, batch, key, 1.0)
    norm = optax.tree.norm(jax.tree.map(lambda g: g / sums.weight, gradients))
    factor = steps.clip_factor(norm, recipe.clip_norm) / sums.weight
    state, _ = steps.update(recipe, gradients, factor, jnp.float32(recipe.schedule(state.step)), {}, state)
    return replace(state, step=state.step + 1), {"loss": sums.loss / sums.weight, "grad_norm": norm}


def median_ms(times):
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    memory.keep()
    experiment = replace(gpt2_small, batch_size=options.rows, accumulation=1, spikes=Spikes())
    recipe = build(experiment)
    tokens = jax.random.randint(jax.random.key(0), (options.rows, options.length), 0, experiment.model.vocab_size)
    batch = {"tokens": tokens, "labels": tokens, "weights": jnp.ones(tokens.shape)}
    guarded = jax.jit(steps.make_train_step(recipe), donate_argnums=0)
    bare = jax.jit(partial(bare_step, recipe), donate_argnums=0)
    states = {"with": steps.first_state(recipe), "without": steps.first_state(recipe)}
    reporter = Reporter(lambda *_: None, Console(10**6, heard=False), every=10, last=10**6, max_skipped=10)
    account, waiting, number = Goodput(None, time.monotonic()), [], 0
    times: dict[str, list[float]] = {"with": [], "without": []}
    with Watchdog(300.0) as watchdog:
        for turn in range(options.rounds + 2):
            for name in times if turn % 2 else reversed(times):
                jax.block_until_ready(states)
                began = time.perf_counter()
                if name == "with":
                    account.lap("data" if reporter.is_idle() else "step")
                    watchdog.beat(number)
                    with jax.transfer_guard("disallow"):
                        states[name], metrics = guarded(states[name], batch)
                    reporter.later(number, metrics)
                    account.lap("step")
                else:
                    states[name], metrics = bare(states[name], batch)
                    waiting.append(metrics)
                    [float(one["loss"]) for one in waiting[-2:-1]]
                jax.block_until_ready(states[name])
                times[name].append(time.perf_counter() - began)
            number += 1
    fingerprints(jax.tree.leaves(states["with"]))  # compiles
    began = time.perf_counter()
    fingerprints(jax.tree.leaves(states["with"]))
    prints = 1e3 * (time.perf_counter() - began)
    found = {name: median_ms(values[2:]) for name, values in times.items()}  # the first two compile
    share = 2 * prints / options.save  # two saves an interval
    shape, device = f"{options.rows} x {options.length} tokens", jax.devices()[0].device_kind
    print(f"GPT-2 small, {shape}, {device}, {options.rounds} rounds in turns")
    for name, values in times.items():
        print(f"  {name:8} median {found[name]:8.1f} ms a step   all {[round(1e3 * value) for value in values[2:]]}")
    print(f"  fingerprints of a checkpoint {prints:.0f} ms, two in {options.save} steps: {share:.1f} ms a step")
    rounds = [one / other for one, other in zip(*(values[2:] for values in times.values()), strict=True)]
    print(f"  ratio with / without: {statistics.median(rounds) + share / found['without']:.4f}, the median over rounds")
    print(f"  ratio of the fastest steps: {min(times['with'][2:]) / min(times['without'][2:]):.4f}")


if __name__ == "__main__":
    main()
