"""The tasks of lm-evaluation-harness (the package lm-eval): its prompts, requests and scores, with a model of ours.

lm = harness.model(config, params, tokenizer)
results = harness.evaluate(lm, ["my_task"], include="tasks/")
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxformer.data.tokenizers import END_OF_TEXT
from jaxformer.decoding import Sampling, generate, prepare, score
from jaxformer.errors import ConfigError, did_you_mean, package_of
from jaxformer.models import heads
from jaxformer.models.config import Axial, Learned, ModelConfig
from jaxformer.training.run import before_stop, stop_strings

MAX_TOKENS = 256  # of an answer, where a task gives no number: lm-eval's own default


class Decoder(NamedTuple):
    """A language model, and how its tokens are read and written."""

    config: ModelConfig
    params: Any  # as `decoding.prepare` makes them
    tokenizer: Any  # has encode(text) and decode(tokens)
    end: tuple[int, ...]  # tokens that end a text
    prefix: int  # stands before a text that nothing precedes
    rows: int  # texts at a time
    dtype: Any

    @property
    def window(self) -> int:
        """The most tokens of a text that is scored. The model does not read the last one, but `score` counts it as read."""
        length = self.config.context_length
        return length if isinstance(self.config.positions, Learned | Axial) else length + 1


def model(
    config: ModelConfig, params: Any, tokenizer: Any, *, end: Sequence[int] = (), prefix: int | None = None, rows: int = 16,
    dtype=None,
) -> Any:  # fmt: skip
    """An `lm_eval.api.model.LM` with all three requests: loglikelihood, loglikelihood_rolling, generate_until.

    `tokenizer` has encode(text) and decode(tokens). Of a Hugging Face checkpoint, `end` is its `tokens.eos` and `prefix` its
    `tokens.bos`; by default the prefix is the first of `end`, or else a newline. Texts are scored `rows` at a time, the
    longest first, in few lengths, so that few programs are compiled. As in lm-eval's own models, what is longer than
    context_length loses its beginning. Raises ConfigError for a model that is no decoder.
    """
    if not isinstance(config, ModelConfig) or heads.language_model(config) is None:
        raise ConfigError(f"harness: {type(config).__name__} has no language model; expected a decoder that continues text")
    with package_of("harness"):
        from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyrefly: ignore[missing-import]
    if prefix is None:
        prefix = end[0] if end else _newline(tokenizer)
    decoder = Decoder(config, prepare(config, params, dtype), tokenizer, tuple(end), prefix, rows, dtype)

    class Model(TemplateLM):
        eot_token_id = end[0] if end else prefix
        prefix_token_id = prefix
        max_length = decoder.window - 1

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
            return list(tokenizer.encode(string))

        def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
            return log_likelihoods(decoder, [(context, new) for _, context, new in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            windows = lambda text: get_rolling_token_windows(self.tok_encode(text), prefix, self.max_length, context_len=1)
            texts = [[make_disjoint_window(window) for window in windows(request.args[0])] for request in requests]
            found = iter(log_likelihoods(decoder, [window for text in texts for window in text]))
            return [float(sum(next(found)[0] for _ in text)) for text in texts]

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            return answers(decoder, [request.args for request in requests])

    return Model()


def _newline(tokenizer: Any) -> int:
    with contextlib.suppress(ConfigError):  # the characters of a text may have none
        return tokenizer.encode("\n")[0]
    return 0


def log_likelihoods(decoder: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """(log-likelihood in nats of the second tokens after the first, whether greedy decoding finds them) of each pair.

    Raises ConfigError where the second alone exceeds the model's context.
    """
    from tqdm import tqdm

    config, params, window, some = decoder.config, decoder.params, decoder.window, 8 * decoder.rows
    if (longest := max((len(new) for _, new in pairs), default=0)) >= window:
        raise ConfigError(f"harness: {longest} tokens are to be scored in one piece; the model's context has {window - 1}")
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    found: dict[int, tuple[float, bool]] = {}
    for first in tqdm(range(0, len(order), some), desc=f"log-likelihoods by {some}", disable=None):
        numbers = order[first : first + some]
        prompts, texts = zip(*(pairs[i] for i in numbers), strict=True)
        prompts = [(list(p) or [decoder.prefix])[len(text) - window :] for p, text in zip(prompts, texts, strict=True)]
        scores = score(config, params, prompts, texts, rows=decoder.rows, dtype=decoder.dtype)
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
    until, count, _ = [*filter(None, how.pop("until")), END_OF_TEXT], how.pop("max_gen_toks"), how.pop("do_sample")
    sampling = Sampling(how.pop("temperature"), how.pop("top_k", 0) or None, how.pop("top_p", None), how.pop("min_p", None))
    room = decoder.config.context_length - count
    if how or room < 1:
        problem = f"{', '.join(how)} is not known" if how else f"max_gen_toks={count} leaves no room for a prompt"
        context = f"a context of {decoder.config.context_length}"
        raise ConfigError(f"harness: generation_kwargs of the task: {problem} in {context}; change the task's YAML")
    encode, decode = decoder.tokenizer.encode, decoder.tokenizer.decode
    prompts = [(list(encode(text)) or [decoder.prefix])[-room:] for text in texts]
    outs = generate(
        decoder.config, decoder.params, prompts, count, how=sampling, key=jax.random.key(0), stop_tokens=decoder.end,
        stop=stop_strings(decode, until), rows=decoder.rows, dtype=decoder.dtype,
    )  # fmt: skip
    written = [decode([*prompt, *out])[len(decode(prompt)) :] for prompt, out in zip(prompts, outs, strict=True)]
    return [before_stop(text, until) for text in written]


def evaluate(lm: Any, tasks: Sequence[str], include: str | None = None, limit: int | None = None) -> tuple[dict, str]:
    """(what `lm_eval.simple_evaluate` gives for these tasks, its table); `include` is a folder with YAML files of more tasks.

    `limit`: only so many examples of each task. Raises ConfigError for an unknown task, and for data out of reach.
    """
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
