"""Configs are frozen dataclasses; this package gives them files, options and descriptions.

Nothing here imports JAX, so a mistake is reported at once. A mistake of the user raises
`ConfigError`.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.config.checks import check_types
from jaxformer.config.describe import (
    changes,
    describe,
    diff,
    execution,
    execution_fields,
    fingerprint,
    flat,
    is_config,
)
from jaxformer.config.files import (
    Source,
    again,
    available,
    in_library,
    load,
    new_file,
    read,
    read_bytes,
    read_json,
    read_text,
    regular_file,
    to_json,
    with_numbers,
    write_atomically,
)
from jaxformer.config.override import help_text, override
from jaxformer.errors import ConfigError
