"""The stacks of a model, whose layers have names of their own in a file."""

from typing import Any


def stack_under(config: Any, name: str) -> Any:
    """The stack whose parameters are under `name`: the model, a half of a pair, or that of a head.

    A head that has layers has a method `stack(config)`: the config of its stack.
    """
    if not name.startswith("heads/"):
        return getattr(config, name) if name else config
    (head,) = [head for head in config.heads if head.name == name.removeprefix("heads/")]
    return head.stack(config)
