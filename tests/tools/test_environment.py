"""What `env` says of versions, devices and optional parts."""

from importlib import metadata

from jaxformer import cli
from jaxformer.tools import environment

REQUIRED = [
    "jax>=0.10",
    'numpy>=1; extra == "here"',
    'surely-not-installed>=1; extra == "absent"',
    "numpy; extra == 'absent'",
    'jax[tpu]>=0.10; extra == "tpu"',
    'jaxformer[here]; extra == "hosts"',
]


def test_an_extra_works_if_its_packages_are_installed(monkeypatch):
    versions = {"jax": "0.12", "numpy": "2.5"}
    monkeypatch.setattr(environment, "version_of", versions.get)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    absent = {"absent": ["surely-not-installed"], "tpu": ["libtpu"]}
    assert environment.extras() == {"here": [], **absent}
    report = environment.report()
    assert "  here: works" in report and "  absent: without surely-not-installed" in report
    assert "pip install 'jaxformer[NAME]'" in report
    versions["libtpu"] = "0.0.50"
    assert environment.extras()["tpu"] == []


def test_a_package_on_the_path_has_no_list_of_extras(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert "unknown: jaxformer is on the path" in environment.report()


def test_no_device_is_an_answer(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend\nlong story")

    monkeypatch.setattr(environment.jax, "local_devices", fail)
    assert environment.devices() == "none (Unable to initialize backend)"


def test_the_command(capsys):
    assert cli.main(["env"]) == 0
    said = capsys.readouterr().out
    assert "devices: 8 x cpu" in said and "jax 0." in said
    assert cli.main(["env", "x"]) == 2
