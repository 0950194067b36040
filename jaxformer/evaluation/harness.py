"""Runs the tasks of lm-evaluation-harness (the package lm-eval) with a model of jaxformer.

lm = harness.model(config, params, tokenizer)
results = harness.evaluate(lm, ["my_task"], include="tasks/")

Prompts, requests and scores are those of lm-eval.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer.data.sources import Question
from jaxformer.decoding import Sampling, prepare, score
from jaxformer.errors import ConfigError, check_whole, did_you_mean, package_of
from jaxformer.evaluation import generation
from jaxformer.models.config import ModelConfig
from jaxformer.models.heads import continues_text

MAX_TOKENS = 256  # of an answer, if a task gives no number: lm-eval's own default


class Decoder(NamedTuple):
    """A language model, its tokenizer, and how texts are scored."""

    config: ModelConfig
    params: Any  # as `decoding.prepare` makes them
    tokenizer: Any  # has encode(text) and decode(tokens)
    end: tuple[int, ...]  # tokens that end a text
    prefix: int  # the token before a text without a context
    rows: int  # texts at a time
    precision: str  # dtype of activations


def model(
    config: Any,
    params: Any,
    tokenizer: Any,
    *,
    end: Sequence[int] = (),
    prefix: int | None = None,
    rows: int = 16,
    precision: str = "float32",
) -> Any:
    """An `lm_eval.api.model.LM` for loglikelihood, loglikelihood_rolling and generate_until.

    `tokenizer` has encode(text) and decode(tokens). For a Hugging Face checkpoint, `end` is its
    `tokens.eos` and `prefix` its `tokens.bos`. By default the prefix is the first of `end`, or a
    newline if there is none. Texts are scored `rows` at a time, the longest first, in few lengths,
    so that few programs are compiled. As in lm-eval's own models, a text longer than
    context_length loses its beginning. Raises ConfigError for a model that does not predict the
    next token.
    """
    check_whole("harness: rows", rows)
    if not continues_text(config):
        raise ConfigError(
            "harness: the model sees later tokens or has no language model, so it continues no text"
        )
    with package_of("harness"):
        from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]
    if prefix is None:
        prefix = end[0] if end else tokenizer.encode("\n")[0]
    params = prepare(config, params, jnp.dtype(precision))
    decoder = Decoder(config, params, tokenizer, tuple(end), prefix, rows, precision)

    class Model(TemplateLM):
        eot_token_id = prefix_token_id = prefix
        max_length = config.context_length

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs
        ) -> list[int]:
            return list(tokenizer.encode(string))

        def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
            return log_likelihoods(decoder, [(context, new) for _, context, new in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            return rolling_log_likelihoods(decoder, [request.args[0] for request in requests])

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            return answers(decoder, [request.args for request in requests])

    return Model()


def log_likelihoods(
    decoder: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[float, bool]]:
    """(log-likelihood in nats, whether greedy decoding finds the text) for each (context, text).

    Both are those of the tokens of the text after those of the context. Raises ConfigError for a
    text that exceeds the model's context.
    """
    from tqdm import tqdm

    config = decoder.config
    group_size = 8 * decoder.rows
    window = config.context_length + 1  # the last token is predicted, but not read
    if (longest := max((len(new) for _, new in pairs), default=0)) >= window:
        raise ConfigError(
            f"harness: {longest} tokens are to be scored in one piece; "
            f"the model's context has {window - 1}"
        )
    options = dict(rows=decoder.rows, dtype=jnp.dtype(decoder.precision))
    longest_first = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    results: dict[int, tuple[float, bool]] = {}
    firsts = range(0, len(pairs), group_size)
    for first in tqdm(firsts, desc=f"log-likelihoods by {group_size}", disable=None):
        numbers = longest_first[first : first + group_size]
        contexts, texts = zip(*(pairs[i] for i in numbers), strict=True)
        prompts = [
            (list(context) or [decoder.prefix])[len(text) - window :]
            for context, text in zip(contexts, texts, strict=True)
        ]
        scores = score(config, decoder.params, prompts, texts, **options)
        for i, result in zip(numbers, scores, strict=True):
            results[i] = (result.log_likelihood, result.greedy)
    return [results[i] for i in range(len(pairs))]


def rolling_log_likelihoods(decoder: Decoder, texts: Sequence[str]) -> list[float]:
    """The log-likelihood in nats of each whole text, in windows as long as the context."""
    from lm_eval.utils import (  # pyrefly: ignore[missing-import]
        get_rolling_token_windows,
        make_disjoint_window,
    )

    windows = []
    numbers = []  # the text of each window
    for number, text in enumerate(texts):
        tokens = list(decoder.tokenizer.encode(text))
        length = decoder.config.context_length
        for window in get_rolling_token_windows(tokens, decoder.prefix, length, context_len=1):
            windows.append(make_disjoint_window(window))
            numbers.append(number)
    sums = [0.0] * len(texts)
    for number, (log_likelihood, _) in zip(numbers, log_likelihoods(decoder, windows), strict=True):
        sums[number] += log_likelihood
    return sums


def answers(decoder: Decoder, requests: Sequence[tuple[str, dict]]) -> list[str]:
    """The continuation of each text, by the generation arguments of its task.

    It ends before the first of the strings `until`.
    """
    continuations: dict[int, str] = {}
    kinds = [json.dumps(arguments, sort_keys=True) for _, arguments in requests]
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        prompts = [requests[number][0] for number in numbers]
        texts = _continue_all(decoder, prompts, json.loads(kind))
        continuations |= dict(zip(numbers, texts, strict=True))
    return [continuations[number] for number in range(len(requests))]


def _continue_all(decoder: Decoder, texts: Sequence[str], arguments: dict) -> list[str]:
    from lm_eval.models.utils import normalize_gen_kwargs  # pyrefly: ignore[missing-import]

    options: dict[str, Any] = {"temperature": 0.0, **normalize_gen_kwargs(arguments, MAX_TOKENS)}
    until = [string for string in options.pop("until") if string]
    max_tokens = options.pop("max_gen_toks")
    options.pop("do_sample")
    sampling = Sampling(
        options.pop("temperature"),
        options.pop("top_k", 0) or None,
        options.pop("top_p", None),
        options.pop("min_p", None),
    )
    prompt_length = decoder.config.context_length - max_tokens
    if options or prompt_length < 1:
        problem = (
            f"{', '.join(options)} is not known"
            if options
            else f"max_gen_toks={max_tokens} leaves no room for a prompt"
        )
        context = f"a context of {decoder.config.context_length}"
        raise ConfigError(
            f"harness: generation_kwargs of the task: {problem} in {context}; "
            "change the task's YAML"
        )
    prompts = [list(decoder.tokenizer.encode(text)) or [decoder.prefix] for text in texts]
    answer_lists = generation.answers(
        decoder.config,
        decoder.params,
        [Question(prompt[-prompt_length:], "") for prompt in prompts],
        decoder.tokenizer,
        max_tokens,
        sampling,
        stop=until,
        stop_tokens=decoder.end,
        rows=decoder.rows,
        precision=decoder.precision,
    )
    return [text for (text,) in answer_lists]


def evaluate(
    lm: Any, tasks: Sequence[str], include: str | None = None, limit: int | None = None
) -> tuple[dict, str]:
    """(the results of `lm_eval.simple_evaluate` for these tasks, a table of them).

    `include` is a folder with YAML files of more tasks. `limit` is the number of examples of each
    task; None: all. Raises ConfigError for an unknown task, and for data out of reach.
    """
    if limit is not None:
        check_whole("harness: limit", limit)
    with package_of("harness"):
        import lm_eval  # pyrefly: ignore[missing-import]
        from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]
        from lm_eval.utils import make_table  # pyrefly: ignore[missing-import]
    manager = TaskManager(include_path=include, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)  # reads thousands of files
    for name in tasks:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"--tasks: no task {name!r}{did_you_mean(name, manager.all_tasks)}; "
                "--include DIR adds your own"
            )
    try:
        results: Any = lm_eval.simple_evaluate(
            lm, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False
        )
    except OSError as error:
        raise ConfigError(
            f"--tasks {','.join(tasks)}: the data are out of reach ({error})"
        ) from error
    tables = [make_table(results, name) for name in ("results", "groups") if results.get(name)]
    return results, "\n".join(tables)
