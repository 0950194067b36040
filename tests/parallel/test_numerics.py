"""What decides the numbers of a process can be told anywhere, packages without metadata too."""

from importlib import metadata

import jax
import pytest

from jaxformer.parallel.numerics import numerics, version_of
from jaxformer.runs.run_folder import environment


@pytest.fixture
def copied(monkeypatch):
    """All packages are found on the path, but none was installed."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)


def test_a_version_is_that_of_the_installed_package():
    assert version_of("jax") == jax.__version__
    assert version_of("no-such-package") is None


def test_packages_may_be_copied_instead_of_installed(copied):
    """On a machine without a package index, packages come on the path (PYTHONPATH, --target)."""
    assert set(environment({})["packages"].values()) == {None}
    assert numerics()["the version of jax"] == jax.__version__
