"""A Transformer that runs a finite automaton, exactly: its weights are written down, not learned.

Liu et al. 2022, arXiv:2210.10749, theorem 1. A symbol is a function of states, and a text is their
composition. Layer l composes the function of each position with that of the position 2^l before it,
so log2(T) layers compose all functions before a position, where a recurrence needs T steps.
The stream of a position holds a function f as a table of 0 and 1 (f[q, r] = 1 where f(q) = r), a
second table g for the function that attention reads, and the position itself.

    attention:    g <- f of position max(t - 2^l, 0); position 0 holds the identity
    feed-forward: f <- f after g, which is sum_r relu(g[q, r] + f[r, s] - 1);  g <- 0

All numbers are whole, so float32 and bfloat16 give the same answers.
Expected: 0 wrong states of 64,000 for each of three automata: the remainder by 7 of a binary
number, a ball under five cups that are swapped (their group is not solvable), a random automaton.
The first l layers alone are right for 2^l symbols and then lose track, so the last layer is only
needed for a text of more than 64 symbols: the figure.
Time: 30 seconds.
Command: python -m experiments.theory.automaton [--out automaton.png]
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments.theory import small
from jaxformer import models
from jaxformer.masks import full
from jaxformer.models import ModelConfig, TokenClassification, blocks
from jaxformer.params import Tree

SURE = 1000.0  # a score beside scores of 0: exp(-1000) is 0 in float32


class Automaton(NamedTuple):
    """The next state of each state [Q] after each symbol [A], and the first state."""

    next_state: Int[np.ndarray, "Q A"]
    start: int = 0

    states = property(lambda self: len(self.next_state))
    symbols = property(lambda self: self.next_state.shape[1])


def remainder(divisor: int) -> Automaton:
    """The remainder of a binary number, read from its first digit."""
    states = np.arange(divisor)[:, None]
    return Automaton((2 * states + np.arange(2)) % divisor)


def ball_under_cups(cups: int = 5) -> Automaton:
    """The cup of a ball: symbol 0 swaps the first two cups, symbol 1 moves each cup by one."""
    swapped = np.arange(cups)
    swapped[:2] = 1, 0
    return Automaton(np.stack([swapped, (np.arange(cups) + 1) % cups], axis=1))


def random_automaton(states: int, symbols: int, seed: int = 0) -> Automaton:
    """Each next state is drawn from all states, so that symbols forget, too."""
    return Automaton(np.random.default_rng(seed).integers(states, size=(states, symbols)))


def run(automaton: Automaton, text: Sequence[int]) -> list[int]:
    """The state after each symbol, step by step."""
    state, states = automaton.start, []
    for symbol in text:
        state = int(automaton.next_state[state, symbol])
        states.append(state)
    return states


def transformer(automaton: Automaton, length: int) -> ModelConfig:
    """The sizes of a model for texts of `length` symbols, behind a token of the start."""
    Q, T = automaton.states, length + 1
    return ModelConfig(
        vocab_size=automaton.symbols + 1,
        num_layers=math.ceil(math.log2(T)),
        d_model=2 * Q**2 + T,
        num_heads=1,
        head_width=max(Q**2, T),
        context_length=T,
        d_ff=Q**3 + 2 * Q**2,
        feedforward="relu",
        block=blocks.bare,  # a norm would round the tables
        masks=(full(),),
        heads=(TokenClassification(Q, name="state"),),
    )


def weights(automaton: Automaton, length: int) -> Tree:
    """The parameters of `transformer`, written down."""
    config = transformer(automaton, length)
    params = jax.tree.map(np.array, models.init(config, jax.random.key(0)))
    params = jax.tree.map(np.zeros_like, params)
    Q, T, L = automaton.states, config.context_length, config.num_layers
    f = np.arange(Q**2).reshape(Q, Q)  # places in the stream: of f[q, r], of g[q, r], of positions
    g = f + Q**2
    position = 2 * Q**2 + np.arange(T)

    table = params["embedding"]["tokens"]
    for symbol in range(automaton.symbols):
        table[symbol, f[np.arange(Q), automaton.next_state[:, symbol]]] = 1
    table[automaton.symbols, np.diag(f)] = 1  # the token of the start is the identity
    params["embedding"]["positions"][np.arange(T), position] = 1

    attention, feedforward = params["layers"]["attention"], params["layers"]["feedforward"]
    sure = SURE * math.sqrt(config.head_size)  # attention divides scores by sqrt(H)
    for layer in range(L):
        before = np.maximum(np.arange(T) - 2**layer, 0)
        attention["query"]["kernel"][layer, position, 0, before] = sure
        attention["key"]["kernel"][layer, position, 0, np.arange(T)] = 1
        attention["value"]["kernel"][layer, f.ravel(), 0, np.arange(Q**2)] = 1
        attention["out"]["kernel"][layer, 0, np.arange(Q**2), g.ravel()] = 1

    up, down = (feedforward[name] for name in ("up", "down"))
    triples = np.arange(Q**3).reshape(Q, Q, Q)
    for (q, r, s), unit in np.ndenumerate(triples):  # relu(g[q, r] + f[r, s] - 1)
        up["kernel"][:, [g[q, r], f[r, s]], unit] = 1
        up["bias"][:, unit] = -1
        down["kernel"][:, unit, f[q, s]] = 1
    for i, place in enumerate([*f.ravel(), *g.ravel()]):  # what the old tables hold is taken away
        up["kernel"][:, place, Q**3 + i] = 1
        down["kernel"][:, Q**3 + i, place] = -1

    params["heads"]["state"]["kernel"][f[automaton.start], np.arange(Q)] = 1
    return params


def answers(
    automaton: Automaton,
    texts: Int[np.ndarray, "B T"],
    dtype: str = "float32",
    layers: int | None = None,
) -> Int[np.ndarray, "B T"]:
    """The state after each symbol, by the Transformer, or by its first `layers` alone."""
    config = transformer(automaton, texts.shape[1])
    params = weights(automaton, texts.shape[1])
    if layers is not None:
        config = replace(config, num_layers=layers)
        params["layers"] = jax.tree.map(lambda leaf: leaf[:layers], params["layers"])
    start = np.full((len(texts), 1), automaton.symbols)
    tokens = jnp.asarray(np.concatenate([start, texts], axis=1))

    @jax.jit
    def logits(params: Tree, tokens: Int[jax.Array, "B S"]) -> Float[jax.Array, "B S Q"]:
        return models.apply(config, params, tokens, dtype=jnp.dtype(dtype)).logits

    return np.asarray(logits(params, tokens).argmax(axis=-1))[:, 1:]


def draw(shares: dict[int, np.ndarray], chance: float):
    """The share of right states at each symbol [T], for each number of layers."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 3.6), layout="constrained").add_subplot()
    for i, (layers, share) in enumerate(shares.items()):
        style = dict(color=small.COLORS[i], marker="osD^vP"[i], markersize=4)
        axes.plot(np.arange(1, len(share) + 1), share, label=f"{layers} layers", **style)
    axes.axhline(chance, color="#888888", linestyle=":", linewidth=1, label="chance")
    axes.set(ylim=(0, 1.05), xlabel="symbols read", ylabel="share of right states")
    axes.set_title("remainder by 7 of a binary number", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return axes.figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="automaton.png")
    options = parser.parse_args()
    length, texts_of_each = 64, 1000
    shares: dict[int, np.ndarray] = {}
    automata = {
        "remainder by 7": remainder(7),
        "ball under five cups": ball_under_cups(),
        "random, 6 states": random_automaton(6, 4),
    }
    print("automaton | states | layers | width | wrong states of", f"{length * texts_of_each:,}")
    for name, automaton in automata.items():
        texts = np.random.default_rng(1).integers(automaton.symbols, size=(texts_of_each, length))
        truth = np.array([run(automaton, text) for text in texts.tolist()])
        wrong = (answers(automaton, texts) != truth).sum()
        config = transformer(automaton, length)
        sizes = automaton.states, config.num_layers, config.d_model
        print(" | ".join(map(str, (name, *sizes, wrong))))
        if not shares:  # the figure is of the first automaton
            for layers in range(2, config.num_layers):
                found = answers(automaton, texts, layers=layers)
                shares[layers] = (found == truth).mean(axis=0)
    chance = 1 / next(iter(automata.values())).states
    small.save_figure(partial(draw, shares, chance), options.out)


if __name__ == "__main__":
    main()
