"""What is here: versions, devices, and which optional parts of the package work."""

import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import jax

import jaxformer
from jaxformer.errors import install_command
from jaxformer.parallel.numerics import version_of

PACKAGES = ("jax", "jaxlib", "flax", "optax", "chex", "orbax-checkpoint", "grain", "numpy")
NOT_SHOWN = ("hosts",)  # other extras together


def report() -> str:
    """Lines for a person, and for an issue."""
    versions = [f"{name} {version_of(name) or 'not installed'}" for name in PACKAGES]
    lines = [
        f"jaxformer {jaxformer.__version__}, {Path(jaxformer.__file__).parent}",
        f"Python {platform.python_version()}, {sys.executable}, {platform.platform()}",
        *versions,
        f"devices: {devices()}",
        "optional parts:",
    ]
    of_extras = extras()
    for extra, missing in of_extras.items():
        lines.append(f"  {extra}: {'works' if not missing else 'without ' + ', '.join(missing)}")
    if any(of_extras.values()):
        lines.append(f"what a part NAME lacks comes with: {install_command('NAME')}")
    if not of_extras:
        lines.append("  unknown: jaxformer is on the path, and not installed")
    return "\n".join(lines)


def devices() -> str:
    """The devices of this process, by kind. A failure to find them is part of the answer."""
    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return f"none ({str(error).splitlines()[0]})"
    kinds = [f"{each.platform} {each.device_kind}" for each in found]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def extras() -> dict[str, list[str]]:
    """{extra: its packages that are not installed}; empty if jaxformer itself is not installed."""
    try:
        needed = metadata.requires("jaxformer") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for requirement in needed:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra is None or name is None or extra[1] in NOT_SHOWN:
            continue
        missing = found.setdefault(extra[1], [])
        for package in (name[0], plugin_of(requirement)):
            if package is not None and version_of(package) is None:
                missing.append(package)
    return found


def plugin_of(requirement: str) -> str | None:
    """The package that an extra of JAX's own brings, such as the compiler of jax[tpu]."""
    part = re.match(r"jax\[(\w+)", requirement)
    return {"tpu": "libtpu", "cuda13": "jax-cuda13-plugin"}.get(part[1]) if part else None
