"""One text in a language model, token by token: losses, predictions, logit lens, attention heads.

`inspect` computes an `Inspection`; `table` and `page_of` show it.
"""

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
    """What a model says about a text of T tokens. Each token but the first was predicted."""

    tokens: list[str]
    losses: np.ndarray  # [T], nats; NaN for the first token
    # the likeliest next tokens after each token, with their probabilities
    predictions: list[list[tuple[str, float]]]
    lens: list[list[str]]  # [L][T]: the likeliest next token if the model ended after this layer
    # {name of a measure: [L, N]}; empty if the mixer gives no attention weights
    heads: dict[str, np.ndarray]
    weights: np.ndarray | None  # [L, N, T, T]


def inspect(
    config: models.ModelConfig,
    params: Any,
    tokenizer: Any,
    text: str,
    top: int = 3,
    dtype: Any = None,
) -> Inspection:
    """Computes losses, predictions, logit lens and attention measures of a text.

    The logit lens (nostalgebraist 2020) applies the final norm and the unembedding to the states
    after each layer. `top` is the number of predictions for each token. Raises ConfigError for a
    text of fewer than two tokens, and for a model that is not a decoder alone.
    """
    check_whole("inspect: top", top)
    tokens = [int(token) for token in tokenizer.encode(text)]
    if not isinstance(config, models.ModelConfig) or models.heads.language_model(config) is None:
        raise ConfigError(
            "inspect: the model has no language model of its own to look into; "
            "give a run of a decoder"
        )
    if models.heads.sees_later_tokens(config):
        raise ConfigError(
            "inspect: the model sees later tokens, so its losses would not be those "
            "of the next token"
        )
    if len(tokens) < 2:
        raise ConfigError(f"inspect: {text!r} is {len(tokens)} tokens; give a text of at least two")
    has_maps = attention_maps.has_weights(config, params, jnp.array([tokens]))
    logits, lens, weights = _run(config, has_maps, dtype, params, jnp.array([tokens]))
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)  # [T, V]
    losses = np.array([np.nan, *(-log_probs[t, token] for t, token in enumerate(tokens[1:]))])

    def word(token):
        return tokenizer.decode([int(token)])

    predictions = []
    for next_token in log_probs:
        likeliest = np.argsort(-next_token)[:top]
        predictions.append([(word(v), float(np.exp(next_token[v]))) for v in likeliest])
    guesses = [[word(token) for token in of_layer] for of_layer in np.asarray(lens)]
    words = [word(token) for token in tokens]
    if not has_maps:
        return Inspection(words, losses, predictions, guesses, {}, None)
    heads = _heads(jnp.array([tokens]), weights)
    return Inspection(words, losses, predictions, guesses, heads, np.asarray(weights))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(config, has_maps: bool, dtype, params, tokens):
    """(logits [T, V], likeliest token after each layer [L, T], weights [L, N, T, T] or None)."""
    names = (RESIDUAL, WEIGHTS) if has_maps else (RESIDUAL,)
    output = models.apply(config, params, tokens, dtype=dtype, intermediates=names)
    block = layout.kinds(config)[0].block

    def guess(stream):
        hidden = block.end(transformer.of_block(block, params), stream, Context(masks.full(), None))
        logits = transformer.read(config, params, models.Output(None, hidden)).logits
        return logits[0].argmax(axis=-1)

    weights = output.intermediates[WEIGHTS][:, 0] if has_maps else None
    return output.logits[0], jax.lax.map(guess, output.intermediates[RESIDUAL]), weights


def _heads(tokens, weights) -> dict[str, np.ndarray]:
    """{name of a measure: its value for each head [L, N]}."""
    maps = weights[:, None]
    scores = {"entropy": attention_maps.entropy(maps), "distance": attention_maps.distance(maps)}
    means = {name: attention_maps.head_means(score) for name, score in scores.items()}
    behaviours = {
        "previous token": attention_maps.previous_tokens,
        "induction": attention_maps.induction_targets,
    }
    for name, targets_of in behaviours.items():
        targets = targets_of(tokens)
        if (targets >= 0).any():
            means[name] = attention_maps.head_means(
                attention_maps.weight_at(maps, targets), targets >= 0
            )
    return {name: np.asarray(value) for name, value in means.items()}


def table(inspection: Inspection, width: int = 120) -> str:
    """The inspection as text for a terminal: a line for each token, then the measures of heads.

    A line holds the token, its loss, the expected next tokens, and the guess of each of the last
    layers. `width` is that of the terminal.
    """

    def shown(token):
        return repr(token)[1:-1][:10]

    likely = [
        ", ".join(f"{shown(token)} {share:.0%}" for token, share in prediction)
        for prediction in inspection.predictions
    ]
    likely_width = max(map(len, likely), default=0)
    shown_layers = max(1, (width - 24 - likely_width) // 12)
    layers = range(len(inspection.lens))[-shown_layers:]
    titles = "".join(f"layer {layer:<6}" for layer in layers)
    lines = [f"{'token':<12}{'loss':>6}  {'expected next':<{likely_width}}  {titles}"]
    for t, token in enumerate(inspection.tokens):
        loss = f"{inspection.losses[t]:6.2f}" if t else " " * 6
        guesses = "".join(f"{shown(inspection.lens[layer][t]):<12}" for layer in layers)
        lines.append(f"{shown(token):<12}{loss}  {likely[t]:<{likely_width}}  {guesses}".rstrip())
    count = len(inspection.tokens) - 1
    mean = np.nanmean(inspection.losses)
    lines.append(f"mean loss {mean:.3f} nats a token over {count} tokens")
    for name, value in inspection.heads.items():
        layer, head = np.unravel_index(np.argmax(value), value.shape)
        lines.append(
            f"{name}: mean of all heads {value.mean():.3f}, "
            f"most in layer {layer}, head {head}: {value[layer, head]:.3f}"
        )
    return "\n".join(lines)


def page_of(inspection: Inspection, name: str) -> str:
    """The inspection as an HTML page: tokens coloured by loss, a table, pictures of the heads."""

    def shade(loss):
        return f' style="background: rgba(209, 73, 91, {np.nan_to_num(min(loss / 8, 1)):.2f})"'

    def word(token):
        return html.escape(token.replace(" ", "␣").replace("\n", "⏎"))

    text = ""
    layers = "".join(f"<th>layer {layer}</th>" for layer in range(len(inspection.lens)))
    lines = [f"<tr><th>token</th><th>loss</th><th>expected here</th>{layers}</tr>"]
    for t, (token, loss) in enumerate(zip(inspection.tokens, inspection.losses, strict=True)):
        # what was said about this token stands at the token before it
        prediction = inspection.predictions[t - 1] if t else []
        likely = ", ".join(f"{word(other)} {share:.0%}" for other, share in prediction)
        guesses = [word(of_layer[t - 1]) if t else "" for of_layer in inspection.lens]
        lens = "".join(f"<td>{guess}</td>" for guess in guesses)
        number = f"{loss:.2f}" if t else ""
        lines.append(
            f"<tr><th>{word(token)}</th><td{shade(loss)}>{number}</td><td>{likely}</td>{lens}</tr>"
        )
        text += (
            f'<span{shade(loss)} title="{number} nats; expected {likely}">'
            f"{html.escape(token)}</span>"
        )
    mean = (
        f"The mean loss is {np.nanmean(inspection.losses):.3f} nats a token. "
        "The redder a token, the less it was expected."
    )
    note = (
        "What was expected at each place, and what each layer would have said "
        "if the model ended there (the logit lens)."
    )
    parts = [
        page.heading("The text", mean),
        f"<pre>{text}</pre>",
        page.heading("Token by token", note),
        f'<div class="wide"><table class="lens">{"".join(lines)}</table></div>',
    ]
    if inspection.weights is not None:
        parts += _head_pictures(inspection, inspection.weights)
    return page.page(f"A text in {name}", parts)


def _head_pictures(inspection: Inspection, weights: np.ndarray) -> list[str]:
    """The section about attention heads: their measures, and the maps of the last layers."""

    def picture(title, draw):
        return page.picture(title, figures.png(draw), figures.png(draw, dark=True))

    note = "Entropy in nats, distance in tokens, the rest from 0 to 1."
    measures = {
        title: picture(title, partial(figures.heat, value, "head", "layer", title))
        for title, value in inspection.heads.items()
    }
    maps = weights[-4:, :4, :32, :32]
    first_layer = max(len(inspection.lens) - 4, 0)
    draw_maps = partial(figures.attention, maps, inspection.tokens[:32], None, first_layer)
    return [
        page.heading("Where the heads look", note),
        page.side_by_side(measures),
        picture("attention", draw_maps),
    ]
