"""Whether a run goes on with the data that it began with, in the same order.

Also whether the run that it starts from has the same tokens.
"""

import logging
import shlex
from typing import Any

from jaxformer.config import storage
from jaxformer.data import batching, tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runs.run_folder import RunFolder

log = logging.getLogger("jaxformer")


def check_data(folder: RunFolder, metadata: dict, dataset: Any) -> None:
    """Raises ConfigError where the data are not those of the checkpoint's training."""
    digest = str(metadata.get("data_digest"))
    if digest not in (dataset.digest, *dataset.former_digests):
        problem = (
            f"the data changed since this run began (digest {digest[:12]},"
            f" now {dataset.digest[:12]})"
        )
        initial = f"--initial={shlex.quote(str(folder.path))} --name=..."
        advice = f"restore them, or train on from its parameters as another run: {initial}"
        raise ConfigError(f"{folder.path}: {problem}; {advice}")


def warn_of_order(folder: RunFolder, metadata: dict, dataset: Any) -> None:
    """Warns where a run's remaining examples come in another order than the one it began with."""
    if metadata.get("order", 1) == batching.ORDER or not batching.order_changed(dataset.train):
        return
    cause = (
        f"the order of more than {batching.LARGEST_TABLE:,} examples changed since this run began"
    )
    effect = "it goes on in the new one, so this epoch gives some examples twice and others not"
    log.warning(
        "%s: %s; %s. Begin it anew under another --name for one order", folder.path, cause, effect
    )


def warn_of_tokenizer(field: str, folder: RunFolder, tokenizer: Any) -> None:
    """Warns where the weights of another run know other tokens than those of the data.

    The sizes may agree, and nothing fails: each number is another piece of text.
    """
    if tokenizer is None or not storage.is_file(folder.tokenizer):
        return
    other = tokenizers.load(folder.tokenizer, folder.path)
    if _pieces(other) == _pieces(tokenizer) or _digests(other) & _digests(tokenizer):
        return
    log.warning(
        "%s=%s: that run has another tokenizer than these data, so the same number is another "
        "piece of text; Corpus(..., tokenizer=%r) encodes a text with that of the run",
        field,
        folder.path,
        str(folder.tokenizer),
    )


def _pieces(tokenizer: Any) -> dict[str, Any]:
    """What decides which number a piece of text has."""
    state = getattr(tokenizer, "state", {})
    return {name: value for name, value in state.items() if name not in ("chat", "end_of_text")}


def _digests(tokenizer: Any) -> set[str]:
    return {tokenizer.digest, *getattr(tokenizer, "former_digests", ())}
