"""The calls of the `tokenizers` package, with limits of size and time, and one line for a panic.

A tokenizer.json may come from anybody. It holds regular expressions, and rules that make a text
longer; both may take any time. The package fails with a panic of Rust, which is not an Exception
and prints a traceback of its own.
"""

import contextlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxformer.errors import ConfigError, install_command

LARGEST = 100_000_000  # letters of a file; the one of Gemma has 33 million
PATTERN = 20_000  # letters of all regular expressions; that of GPT-4o has 500
PARTS = 1000  # rules; DeepSeek has about ten
GROWTH = 10_000  # rules may make a text this many times as long
SHORT = 100_000  # letters of a text that takes almost no time
# for any text, plus 1/1000 for each letter; an ordinary tokenizer reads a million letters a second
SECONDS = 60.0
STAGES = "normalizer", "pre_tokenizer", "post_processor", "decoder"


def require_package() -> Any:
    """The `tokenizers` package. Raises ConfigError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            f"data.tokenizer: bpe needs the package tokenizers; {install_command('text')}"
        ) from None
    return tokenizers


def open_tokenizer(serialized: str) -> Any:
    """The package's tokenizer of a JSON text.

    Raises ConfigError beyond a limit, and ValueError if the package fails.
    """
    check(serialized)
    with _panic_as_error():
        return require_package().Tokenizer.from_str(serialized)


def encode(tokenizer: Any, texts: list[str], offsets: bool = False) -> list[Any]:
    """The package's encodings of texts, without control tokens, computed on all cores.

    Only with `offsets` they say which characters each token has. Raises ConfigError if the package
    fails.
    """
    letters = sum(map(len, texts))
    function = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        with _quiet(letters):
            return within_time(lambda: function(texts, add_special_tokens=False), letters)
    except ConfigError:
        raise
    except Exception as error:  # the package raises it for a text that its vocabulary cannot write
        problem = f"the tokenizer cannot write a text ({error})"
        raise ConfigError(
            f"{problem}; give one with a token for what its vocabulary lacks"
        ) from error


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens, with control tokens. Raises ConfigError if the package fails."""
    try:
        with _panic_as_error():
            return tokenizer.decode(ids, skip_special_tokens=False)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer cannot read tokens ({error}); give another tokenizer.json"
        ) from error


def check(serialized: str) -> None:
    """Raises ConfigError for a tokenizer.json with more than any tokenizer needs."""
    problem = None
    if len(serialized) > LARGEST:
        problem = f"has {len(serialized):,} letters; at most {LARGEST:,} are read"
    else:
        with contextlib.suppress(ValueError, RecursionError):  # the package refuses invalid JSON
            problem = _excess(json.loads(serialized))
    if problem:
        raise ConfigError(f"tokenizer.json: {problem}; give the file of a tokenizer that you trust")


def _excess(state: Any) -> str | None:
    """In words, which limit the rules of a tokenizer exceed; None if they exceed none."""
    if not isinstance(state, dict):
        return None
    rules = [rule for name in STAGES for rule in _objects(state.get(name))]
    if len(rules) > PARTS:
        return f"has more than {PARTS} rules"
    patterns = sum(len(rule["Regex"]) for rule in rules if isinstance(rule.get("Regex"), str))
    if patterns > PATTERN:
        return f"its regular expressions have {patterns:,} letters; at most {PATTERN:,} are read"
    growth = 0.0  # the logarithm
    for rule in rules:
        for name in ("content", "prepend", "replacement"):
            if isinstance(rule.get(name), str):
                growth += math.log(max(len(rule[name]), 1))
    if growth > math.log(GROWTH):
        return f"its rules may make a text {GROWTH:,} times as long"
    return None


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a JSON value. It stops after PARTS + 1, one more than allowed."""
    todo = [value]
    objects = []
    while todo and len(objects) <= PARTS:
        value = todo.pop()
        if isinstance(value, dict):
            objects.append(value)
            children = value.values()
        else:
            children = value if isinstance(value, list) else ()
        todo += [each for each in children if isinstance(each, dict | list)]
    return objects


def within_time(
    call: Callable[[], Any],
    letters: int,
    problem: str = "the tokenizer needs more than {seconds:.0f} s for {letters:,} letters: its "
    "regular expressions do not end; give another tokenizer.json",
) -> Any:
    """The result of `call()`. ConfigError if it takes longer than the limit for so long a text.

    The package releases the interpreter lock, so the call runs in a thread, and Ctrl-C works. Both
    wall time and processor time must pass the limit: a sleeping or busy computer does not count.
    """
    results: list[Any] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            problems.append(error)

    limit = SECONDS + letters / 1000
    began = time.monotonic(), time.process_time()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    while (
        thread.is_alive()
        and min(time.monotonic() - began[0], time.process_time() - began[1]) < limit
    ):
        thread.join(1.0)
    if thread.is_alive():
        raise ConfigError(problem.format(seconds=limit, letters=letters))
    for error in problems:
        raise _as_error(error)
    return results[0]


@contextlib.contextmanager
def _panic_as_error() -> Iterator[None]:
    """Turns a panic of the package, which is not an Exception, into a ValueError."""
    with _quiet(0):
        try:
            yield
        except BaseException as error:
            raise _as_error(error) from None


def _as_error(error: BaseException) -> BaseException:
    is_panic = type(error).__name__ == "PanicException"
    return ValueError(f"the tokenizers package fails: {error}") if is_panic else error


_lock = threading.Lock()
# at most one: (descriptor of the process's own stderr, file that replaces it)
_held: list[tuple[int, Any]] = []
_depth = 0  # the number of calls that need stderr held


@contextlib.contextmanager
def _quiet(letters: int) -> Iterator[None]:
    """Drops the message that a panic writes on stderr. Other messages are written afterwards.

    During a long text nothing is held back: messages of other threads should not wait so long.
    """
    if letters > SHORT:
        yield
        return
    _hold(+1)
    try:
        yield
    finally:
        _hold(-1)


def _hold(change: int) -> None:
    """Redirects stderr to a file for the first call that needs it, and back after the last one.

    `change` is +1 at the beginning of a call, and -1 at its end.
    """
    global _depth
    with _lock:
        _depth += change
        if _depth == 1 and change == 1:
            with contextlib.suppress(OSError):  # no stderr, or no space for files
                # the last call closes the file
                stderr = os.dup(2)
                file = tempfile.TemporaryFile()  # noqa: SIM115
                os.dup2(file.fileno(), 2)
                _held.append((stderr, file))
        elif _depth == 0 and _held:
            stderr, file = _held.pop()
            os.dup2(stderr, 2)
            file.seek(0)
            output = file.read()
            if output and b"panicked at" not in output:
                os.write(stderr, output)
            os.close(stderr)
            file.close()
