"""The tasks of lm-evaluation-harness (the package lm-eval): its prompts, requests and scores, with a model of ours.

lm = harness.model(config, params, tokenizer)
results = harness.evaluate(lm, ["my_task"], include="tasks/")
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

MAX_TOKENS = 256  # of an answer, where a task gives no number: lm-eval's own default


class Decoder(NamedTuple):
    """A language model, and how its tokens are read and written."""

    config: ModelConfig
    params: Any  # as `decoding.prepare` makes them
    tokenizer: Any  # has encode(text) and decode(tokens)
    end: tuple[int, ...]  # tokens that end a text
    prefix: int  # stands before a text that nothing precedes
    rows: int  # texts at a time
    precision: str


def model(
    config: Any, params: Any, tokenizer: Any, *, end: Sequence[int] = (), prefix: int | None = None, rows: int = 16,
    precision: str = "float32",
) -> Any:  # fmt: skip
    """An `lm_eval.api.model.LM` with all three requests: loglikelihood, loglikelihood_rolling, generate_until.

    `tokenizer` has encode(text) and decode(tokens). Of a Hugging Face checkpoint, `end` is its `tokens.eos` and `prefix` its
    `tokens.bos`; by default the prefix is the first of `end`, or else a newline. Texts are scored `rows` at a time, the
    longest first, in few lengths, so that few programs are compiled. As in lm-eval's own models, what is longer than
    context_length loses its beginning. Raises ConfigError for a model that does not predict the next token.
    """
    check_whole("harness: rows", rows)
    if not continues_text(config):
        raise ConfigError("harness: the model sees later tokens or has no language model, so it continues no text")
    with package_of("harness"):
        from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyrefly: ignore[missing-import]
    if prefix is None:
        prefix = end[0] if end else tokenizer.encode("\n")[0]
    params = prepare(config, params, jnp.dtype(precision))
    decoder = Decoder(config, params, tokenizer, tuple(end), prefix, rows, precision)

    class Model(TemplateLM):
        eot_token_id = prefix_token_id = prefix
        max_length = config.context_length

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
            return list(tokenizer.encode(string))

        def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
            return log_likelihoods(decoder, [(context, new) for _, context, new in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            def windows(text):
                return get_rolling_token_windows(self.tok_encode(text), prefix, self.max_length, context_len=1)

            texts = [[make_disjoint_window(window) for window in windows(request.args[0])] for request in requests]
            found = iter(log_likelihoods(decoder, [window for text in texts for window in text]))
            return [float(sum(next(found)[0] for _ in text)) for text in texts]

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            return answers(decoder, [request.args for request in requests])

    return Model()


def log_likelihoods(decoder: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """(log-likelihood in nats of the second tokens after the first, whether greedy decoding finds them) of each pair.

    Raises ConfigError where the second alone exceeds the model's context.
    """
    from tqdm import tqdm

    config, some = decoder.config, 8 * decoder.rows
    window = config.context_length + 1  # the last token is predicted, but not read
    if (longest := max((len(new) for _, new in pairs), default=0)) >= window:
        raise ConfigError(f"harness: {longest} tokens are to be scored in one piece; the model's context has {window - 1}")
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    found: dict[int, tuple[float, bool]] = {}
    for first in tqdm(range(0, len(order), some), desc=f"log-likelihoods by {some}", disable=None):
        numbers = order[first : first + some]
        prompts, texts = zip(*(pairs[i] for i in numbers), strict=True)
        prompts = [(list(p) or [decoder.prefix])[len(text) - window :] for p, text in zip(prompts, texts, strict=True)]
        scores = score(config, decoder.params, prompts, texts, rows=decoder.rows, dtype=jnp.dtype(decoder.precision))
        found |= {i: (one.log_likelihood, one.greedy) for i, one in zip(numbers, scores, strict=True)}
    return [found[i] for i in range(len(pairs))]


def answers(decoder: Decoder, requests: Sequence[tuple[str, dict]]) -> list[str]:
    """The model's continuation of each text by the task's generation arguments, up to the first string of `until`."""
    found: dict[int, str] = {}
    kinds = [json.dumps(arguments, sort_keys=True) for _, arguments in requests]
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        texts = _continue_all(decoder, [requests[number][0] for number in numbers], json.loads(kind))
        found |= dict(zip(numbers, texts, strict=True))
    return [found[number] for number in range(len(requests))]


def _continue_all(decoder: Decoder, texts: Sequence[str], arguments: dict) -> list[str]:
    from lm_eval.models.utils import normalize_gen_kwargs  # pyrefly: ignore[missing-import]

    how: dict[str, Any] = {"temperature": 0.0, **normalize_gen_kwargs(arguments, MAX_TOKENS)}
    until, count, _ = [*filter(None, how.pop("until"))], how.pop("max_gen_toks"), how.pop("do_sample")
    sampling = Sampling(how.pop("temperature"), how.pop("top_k", 0) or None, how.pop("top_p", None), how.pop("min_p", None))
    room = decoder.config.context_length - count
    if how or room < 1:
        problem = f"{', '.join(how)} is not known" if how else f"max_gen_toks={count} leaves no room for a prompt"
        context = f"a context of {decoder.config.context_length}"
        raise ConfigError(f"harness: generation_kwargs of the task: {problem} in {context}; change the task's YAML")
    prompts = [(list(decoder.tokenizer.encode(text)) or [decoder.prefix])[-room:] for text in texts]
    found = generation.answers(
        decoder.config, decoder.params, [Question(prompt, "") for prompt in prompts], decoder.tokenizer, count, sampling,
        stop=until, stop_tokens=decoder.end, rows=decoder.rows, precision=decoder.precision,
    )  # fmt: skip
    return [text for (text,) in found]


def evaluate(lm: Any, tasks: Sequence[str], include: str | None = None, limit: int | None = None) -> tuple[dict, str]:
    """(what `lm_eval.simple_evaluate` gives for these tasks, its table); `include` is a folder with YAML files of more tasks.

    `limit`: only so many examples of each task. Raises ConfigError for an unknown task, and for data out of reach.
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
            raise ConfigError(f"--tasks: no task {name!r}{did_you_mean(name, manager.all_tasks)}; --include DIR adds your own")
    try:
        found = lm_eval.simple_evaluate(lm, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    except OSError as error:
        raise ConfigError(f"--tasks {','.join(tasks)}: the data are out of reach ({error})") from error
    results: Any = found
    return results, "\n".join(make_table(results, part) for part in ("results", "groups") if results.get(part))
