"""The cost of a run's guards: the train step with all guards beside one with none, for GPT-2 small.

With guards: a step that is not finite or a spike changes nothing; there are the watchdog, the
account of time, metrics checked one step late and, every --save steps, the fingerprints of a
checkpoint. Without: gradients, clip, update, and the loss fetched one step late. Both run in one
process, in turns. The ratio is the median of the rounds' ratios.

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
from jaxformer.runs.reporter import Console, Reporter
from jaxformer.training import Spikes, step as steps
from jaxformer.training.recipe import build


def bare_step(recipe, state, batch):
    """The step of a trainer without guards: the same gradients, clip and update, always applied."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), 1), state.step)
    sums, gradients = steps.accumulate(recipe, state.params, batch, key, 1.0)
    norm = optax.tree.norm(jax.tree.map(lambda g: g / sums.weight, gradients))
    factor = steps.clip_factor(norm, recipe.clip_norm) / sums.weight
    state, _ = steps.update(
        recipe, gradients, factor, jnp.float32(recipe.schedule(state.step)), {}, state
    )
    return replace(state, step=state.step + 1), {"loss": sums.loss / sums.weight, "grad_norm": norm}


def time_steps(recipe, batch, rounds: int):
    """({name: seconds of each step}, the state after the guarded steps)."""
    guarded = jax.jit(steps.make_train_step(recipe), donate_argnums=0)
    bare = jax.jit(partial(bare_step, recipe), donate_argnums=0)
    states = {"with": steps.first_state(recipe), "without": steps.first_state(recipe)}
    reporter = Reporter(
        lambda *_: None, Console(10**6, heard=False), every=10, last=10**6, max_skipped=10
    )
    account = Goodput(None, time.monotonic())
    waiting = []
    times: dict[str, list[float]] = {"with": [], "without": []}
    with Watchdog(300.0) as watchdog:
        for number in range(rounds):
            for name in times if number % 2 else reversed(times):
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
    return times, states["with"]


def fingerprint_ms(state) -> float:
    """Milliseconds of the fingerprints of a checkpoint."""
    fingerprints(jax.tree.leaves(state))  # compiles
    began = time.perf_counter()
    fingerprints(jax.tree.leaves(state))
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    memory.keep()
    experiment = replace(gpt2_small, batch_size=options.rows, accumulation=1, spikes=Spikes())
    recipe = build(experiment)
    tokens = jax.random.randint(
        jax.random.key(0), (options.rows, options.length), 0, experiment.model.vocab_size
    )
    batch = {"tokens": tokens, "labels": tokens, "weights": jnp.ones(tokens.shape)}
    times, state = time_steps(recipe, batch, options.rounds + 2)
    times = {name: values[2:] for name, values in times.items()}  # the first two compile
    prints = fingerprint_ms(state)
    share = 2 * prints / options.save  # milliseconds a step, for two saves in an interval
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    shape = f"{options.rows} x {options.length} tokens"
    print(f"GPT-2 small, {shape}, {jax.devices()[0].device_kind}, {options.rounds} rounds in turns")
    for name, values in times.items():
        print(
            f"  {name:8} median {medians[name]:8.1f} ms a step   all "
            f"{[round(1e3 * value) for value in values]}"
        )
    print(
        f"  fingerprints of a checkpoint {prints:.0f} ms, two in {options.save} steps: "
        f"{share:.1f} ms a step"
    )
    ratios = [one / other for one, other in zip(times["with"], times["without"], strict=True)]
    print(
        f"  ratio with / without: {statistics.median(ratios) + share / medians['without']:.4f}, "
        "the median over rounds"
    )
    print(f"  ratio of the fastest steps: {min(times['with']) / min(times['without']):.4f}")


if __name__ == "__main__":
    main()
