"""Whether a run goes on with the data that it began with, in the same order."""

import logging
import shlex
from typing import Any

from jaxformer.data import batching
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
