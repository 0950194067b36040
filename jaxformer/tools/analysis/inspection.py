"""One text through a model, token by token: losses, predictions, what each layer would say, where the heads look."""

import html
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import masks, models
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import transformer
from jaxformer.models.layer import Context
from jaxformer.models.stacks import layout
from jaxformer.tools.analysis import attention_maps, figures, page
from jaxformer.tools.analysis.attention_maps import WEIGHTS

RESIDUAL = "layers/*/residual"


class Inspection(NamedTuple):
    """Of T tokens, of which each but the first was predicted."""

    tokens: list[str]
    losses: np.ndarray  # [T], nats; of the first NaN
    predictions: list[list[tuple[str, float]]]  # for the token behind each: the likeliest with their probabilities
    lens: list[list[str]]  # [L][T]: what would be likeliest if the model ended after a layer
    heads: dict[str, np.ndarray]  # [L, N] by the names of numbers; empty where the mixer keeps no weights
    weights: np.ndarray | None  # [L, N, T, T]


def inspect(config: models.ModelConfig, params: Any, tokenizer: Any, text: str, top: int = 3, dtype: Any = None) -> Inspection:
    """What a language model makes of a text. The lens is nostalgebraist's (2020): final norm and unembedding of each layer.

    Raises ConfigError for a text without two tokens, and for what is no decoder alone.
    """
    check_whole("inspect: top", top)
    tokens = [int(token) for token in tokenizer.encode(text)]
    if not isinstance(config, models.ModelConfig) or models.heads.language_model(config) is None:
        raise ConfigError("inspect: the model has no language model of its own to look into; give a run of a decoder")
    if models.heads.sees_later_tokens(config):
        raise ConfigError("inspect: the model sees later tokens, so its losses would not be those of the next token")
    if len(tokens) < 2:
        raise ConfigError(f"inspect: {text!r} is {len(tokens)} tokens; give a text of at least two")
    maps = attention_maps.has_weights(config, params, jnp.array([tokens]))
    logits, lens, weights = _run(config, maps, dtype, params, jnp.array([tokens]))
    logs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    losses = np.array([np.nan, *(-logs[t, token] for t, token in enumerate(tokens[1:]))])

    def word(token):
        return tokenizer.decode([int(token)])

    likeliest = np.argsort(-logs, axis=-1)[:, :top]
    predictions = [[(word(v), float(np.exp(row[v]))) for v in some] for row, some in zip(logs, likeliest, strict=True)]
    guesses = [[word(token) for token in row] for row in np.asarray(lens)]
    heads, weights = (_heads(jnp.array([tokens]), weights), np.asarray(weights)) if maps else ({}, None)
    return Inspection([word(token) for token in tokens], losses, predictions, guesses, heads, weights)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(config, maps: bool, dtype, params, tokens):
    """(logits [T, V], likeliest token after each layer [L, T], weights [L, N, T, T] or None)."""
    names = (RESIDUAL, WEIGHTS) if maps else (RESIDUAL,)
    output = models.apply(config, params, tokens, dtype=dtype, intermediates=names)

    block = layout.kinds(config)[0].block

    def guess(stream):
        hidden = block.end(transformer.of_block(block, params), stream, Context(masks.full(), None))
        return transformer.read(config, params, models.Output(None, hidden)).logits[0].argmax(axis=-1)

    weights = output.intermediates[WEIGHTS][:, 0] if maps else None
    return output.logits[0], jax.lax.map(guess, output.intermediates[RESIDUAL]), weights


def _heads(tokens, weights) -> dict[str, np.ndarray]:
    maps = weights[:, None]
    scores = {"entropy": attention_maps.entropy(maps), "distance": attention_maps.distance(maps)}
    means = {name: attention_maps.head_means(score) for name, score in scores.items()}
    behaviours = {"previous token": attention_maps.previous_tokens, "induction": attention_maps.induction_targets}
    for name, targets_of in behaviours.items():
        targets = targets_of(tokens)
        if (targets >= 0).any():
            means[name] = attention_maps.head_means(attention_maps.weight_at(maps, targets), targets >= 0)
    return {name: np.asarray(value) for name, value in means.items()}


def table(found: Inspection, width: int = 120) -> str:
    """The text as lines for a terminal: token, its loss, what was expected behind it, and the guess of each layer."""

    def shown(token):
        return repr(token)[1:-1][:10]

    likely = [", ".join(f"{shown(token)} {share:.0%}" for token, share in row) for row in found.predictions]
    room, layers = max(map(len, likely), default=0), list(range(len(found.lens)))
    layers = layers[-max(1, (width - 24 - room) // 12) :]
    lines = [f"{'token':<12}{'loss':>6}  {'expected next':<{room}}  " + "".join(f"layer {layer:<6}" for layer in layers)]
    for t, token in enumerate(found.tokens):
        loss = f"{found.losses[t]:6.2f}" if t else " " * 6
        guesses = "".join(f"{shown(found.lens[layer][t]):<12}" for layer in layers)
        lines.append(f"{shown(token):<12}{loss}  {likely[t]:<{room}}  {guesses}".rstrip())
    lines.append(f"mean loss {np.nanmean(found.losses):.3f} nats a token over {len(found.tokens) - 1} tokens")
    for name, value in found.heads.items():
        layer, head = np.unravel_index(np.argmax(value), value.shape)
        lines.append(
            f"{name}: mean of all heads {value.mean():.3f}, most in layer {layer}, head {head}: {value[layer, head]:.3f}"
        )
    return "\n".join(lines)


def page_of(found: Inspection, name: str) -> str:
    """The text as a page of HTML: tokens coloured by their losses, a table of what was expected, pictures of the heads."""

    def shade(loss):
        return f' style="background: rgba(209, 73, 91, {np.nan_to_num(min(loss / 8, 1)):.2f})"'

    def word(token):
        return html.escape(token.replace(" ", "␣").replace("\n", "⏎"))

    flow, layers = "", "".join(f"<th>layer {layer}</th>" for layer in range(len(found.lens)))
    rows = [f"<tr><th>token</th><th>loss</th><th>expected here</th>{layers}</tr>"]
    for t, (token, loss) in enumerate(zip(found.tokens, found.losses, strict=True)):
        likely = ", ".join(f"{word(other)} {share:.0%}" for other, share in found.predictions[t - 1]) if t else ""
        lens = "".join(f"<td>{word(row[t - 1]) if t else ''}</td>" for row in found.lens)
        number = f"{loss:.2f}" if t else ""
        rows.append(f"<tr><th>{word(token)}</th><td{shade(loss)}>{number}</td><td>{likely}</td>{lens}</tr>")
        flow += f'<span{shade(loss)} title="{number} nats; expected {likely}">{html.escape(token)}</span>'
    mean = f"The mean loss is {np.nanmean(found.losses):.3f} nats a token. The redder a token, the less it was expected."
    parts = [page.heading("The text", mean), f"<pre>{flow}</pre>"]
    note = "What was expected at each place, and what each layer would have said if the model ended there (the logit lens)."
    parts += [page.heading("Token by token", note), f'<div class="wide"><table class="lens">{"".join(rows)}</table></div>']
    if found.weights is not None:
        parts.append(page.heading("Where the heads look", "Entropy in nats, distance in tokens, the rest from 0 to 1."))

        def drawn(title, draw):
            return page.picture(title, figures.png(draw), figures.png(draw, dark=True))

        heads = {title: partial(figures.heat, value, "head", "layer", title) for title, value in found.heads.items()}
        parts.append(page.side_by_side({title: drawn(title, draw) for title, draw in heads.items()}))
        weights, first = found.weights[-4:, :4, :32, :32], max(len(found.lens) - 4, 0)
        parts.append(drawn("attention", lambda: figures.attention(weights, found.tokens[:32], None, first)))
    return page.page(f"A text in {name}", parts)
