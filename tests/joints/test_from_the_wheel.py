"""The built wheel is enough for every page that fills a joint: its files train and answer, without
the checkout.

The processes start with `python -S`, so that no `.pth` file brings the checkout back: they see the
folder into which the wheel was installed, the folder of the other packages, and the folder in which
they start.
"""

import json
import os
import subprocess
import sys
import sysconfig

import pytest

from tests.joints import harness

LIMITS = ("--eval-examples=16", "--final-examples=16")
SHORT = ("--steps=3", "--eval-every=3", "--log-every=1", *LIMITS)
TWO_EVALUATIONS = ("--steps=10", "--eval-every=5", *LIMITS)
# what a model is asked to continue: a text, tokens where the data have no tokenizer, or nothing
TEXT = "def "
PROMPTS = {
    ("your-own-block", "parallel"): TEXT,
    ("your-own-block", "olmo2-order"): TEXT,
    ("your-own-block", "layer-scale"): TEXT,
    ("your-own-diffusion", "bars"): None,  # pictures, of which the page makes none
    ("your-own-objective", "two-tokens"): TEXT,
    ("preferences", "reversals"): [1, 2, 3, 4, 8],
    ("preferences", "reversals-lora"): [1, 2, 3, 4, 8],
    ("data-from-the-model", "count"): "3",
    ("variables", "balanced"): TEXT,
    ("variables", "codes"): TEXT,
    ("your-own-kernel", "flash"): [1, 2, 3, 16],
    ("your-own-kernel", "dense"): [1, 2, 3, 16],
    ("your-own-positions", "fourier"): TEXT,
    ("your-own-family", "mine"): TEXT,
    ("your-own-stack", "denseformer"): TEXT,
    ("your-own-scores", "stripes"): "",  # pictures, which take no prompt
}
LAST = [key for key in PROMPTS if key != ("preferences", "reversals")]  # each page's chain once
PAGES = {stem: harness.read_page(stem) for stem, _ in PROMPTS}
CONTINUE = """
import json, pathlib, sys
from jaxformer import decoding, open_run
(folder,) = pathlib.Path("runs").glob(sys.argv[1] + "-????????")
run = open_run(folder)
print(json.dumps(decoding.generate(run.model, run.params, [json.loads(sys.argv[2])], 3)))
"""
# runs the assertions of the harness in a process that has the wheel: it is found by its path, not
# as tests.joints
CHECK = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("harness", sys.argv[1])
harness = importlib.util.module_from_spec(spec)
spec.loader.exec_module(harness)
page = harness.read_page(sys.argv[2])
files = {name: block for name, block in page.items() if name in sys.argv[3].split(",")}
whole = harness.assert_resumes_to_the_same_bits(files, pathlib.Path.cwd(), *sys.argv[4:])
harness.assert_same_on_eight_devices(files, pathlib.Path.cwd(), *sys.argv[4:], whole=whole)
print("the same bits, and the same losses")
"""


def files_of(stem, name):
    """The file of an experiment, after those of its page that it begins from."""
    page = PAGES[stem]
    names = list(page)[: list(page).index(name) + 1] if stem == "preferences" else [name]
    return {name: page[name] for name in names}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which the wheel of the checkout was installed."""
    return harness.install_wheel(tmp_path_factory.mktemp("wheel"))


def python(installed, folder, *words, **environment):
    """What a Python with the wheel and without the checkout prints in a folder."""
    packages = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    environment = os.environ | {"PYTHONPATH": packages, "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-S", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_file_of_the_pages_is_here():
    experiments = {(stem, name) for stem, page in PAGES.items() for name in page}
    assert experiments == set(PROMPTS) | {("preferences", "copies")}  # which the others begin from


@pytest.mark.thorough
def test_the_checkout_is_not_there(installed, tmp_path):
    code = (
        "import importlib.util, json, jaxformer, sys;"
        "parts = [importlib.util.find_spec(name) for name in ('tests', 'experiments')];"
        "print(json.dumps([jaxformer.__file__, sys.path, [str(part) for part in parts]]))"
    )
    file, path, parts = json.loads(python(installed, tmp_path, "-c", code))
    assert file == str(installed / "jaxformer" / "__init__.py")
    assert str(harness.ROOT) not in path and parts == ["None", "None"]


@pytest.mark.thorough
@pytest.mark.parametrize(("stem", "name"), LAST, ids=[name for _, name in LAST])
def test_a_file_of_a_page_trains_and_answers(stem, name, installed, tmp_path):
    for each, block in files_of(stem, name).items():
        (tmp_path / f"{each}.py").write_text(block, encoding="utf-8")
        said = python(installed, tmp_path, "-m", "jaxformer", "train", f"{each}.py", *SHORT)
        assert "step 3/3 loss" in said and "next: python -m jaxformer" in said
    prompt = PROMPTS[stem, name]
    if isinstance(prompt, list):
        said = python(installed, tmp_path, "-c", CONTINUE, name, json.dumps(prompt))
        (answer,) = json.loads(said.splitlines()[-1])
        assert len(answer) == 3
    elif prompt is not None:
        asked = ["--prompt", prompt, "--tokens=4"] if prompt else []
        said = python(installed, tmp_path, "-m", "jaxformer", "generate", name, *asked)
        assert prompt in said if prompt else "8 pictures" in said


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "name"), PROMPTS, ids=[name for _, name in PROMPTS])
def test_a_file_of_a_page_is_killed_resumed_and_split(stem, name, installed, tmp_path):
    files = ",".join(files_of(stem, name))
    words = [str(harness.ROOT / "tests" / "joints" / "harness.py"), stem, files, *TWO_EVALUATIONS]
    said = python(installed, tmp_path, "-c", CHECK, *words, JAX_NUM_CPU_DEVICES="8")
    assert said.endswith("the same bits, and the same losses\n")
