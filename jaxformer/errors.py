"""The one error that a user's own input causes."""


class ConfigError(ValueError):
    """The user's input is at fault. The message is one line: what, where, what was expected, what to do."""

    def __init__(self, message: object):
        super().__init__(" ".join(line.strip() for line in str(message).splitlines()))
