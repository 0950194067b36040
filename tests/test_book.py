"""The book leads somewhere: its links, the names of the library in its text, its equations."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.test_mathematics import exists

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
NOTEBOOKS = {f"notebooks/{path.stem}": path for path in sorted(DOCS.glob("notebooks/*.py"))}
# packages whose names a page writes without `jaxformer.`
PACKAGES = {path.parent.name for path in (ROOT / "jaxformer").glob("*/__init__.py")}
# a page has these names for values of its own: the data or the config of an experiment
VALUES = {"data.generate", "data.augment", "config.kv_heads", "config.json"}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def module(name):
    """A file of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


links = module("links")


def text_of(path):
    """The text of a page without its blocks of code; of a notebook, the text of its cells."""
    if path.suffix == ".py":
        return "\n".join(re.findall(r"^# (.*)", path.read_text(), flags=re.MULTILINE))
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors of the headings, as mkdocs makes them."""
    text = text_of(path)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    slugs = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


def source_of(file):
    """The file from which the book makes this page; pages of the API are made from the package."""
    parts = file.relative_to(DOCS).parts if file.is_relative_to(DOCS) else ()
    if parts[:1] == ("notebooks",):
        return file.with_suffix(".py")
    if parts[:1] == ("api",):
        return ROOT / "jaxformer" / file.stem.replace(".", "/") / "__init__.py"
    return file


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS, "README"])
def test_no_link_is_dead(page):
    path = (PAGES | NOTEBOOKS | {"README": ROOT / "README.md"})[page]
    for link in LINK.findall(text_of(path)):
        address, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", address):
            continue
        leads_to = source_of((path.parent / address).resolve()) if address else path
        assert leads_to.exists(), link
        assert not anchor or anchor in anchors(leads_to), link


def named(text):
    """The names of the library in the code inside of a text: ops.rope, jaxformer.ops.rope."""
    for name in links.NAME.findall(text):
        first, _, rest = name.partition(".")
        is_file = re.search(r"\.(py|md|json|png|txt|toml|npz)$", name)
        is_ours = first in PACKAGES | {"jaxformer"} or first in links.read().classes
        if rest and is_ours and not is_file and name not in VALUES:
            yield name


def exists_in_package(name):
    """Whether the library has this name; of a class, also a field without a default."""
    first, _, attribute = name.partition(".")
    if first[0].isupper():
        classes = links.read().classes[first]
        return any(exists_in_package(f"{path}.{attribute}") for path in classes)
    path = name if first == "jaxformer" else f"jaxformer.{name}"
    if exists(path):
        return True
    owner, _, field = path.rpartition(".")
    home, _, class_name = owner.rpartition(".")
    if not class_name[:1].isupper() or not exists(owner):
        return False
    found = getattr(importlib.import_module(home), class_name)
    return any(field in vars(base).get("__annotations__", {}) for base in found.__mro__)


# the changelog has names of older versions
@pytest.mark.parametrize("page", [*(page for page in PAGES if page != "changelog"), *NOTEBOOKS])
def test_names_in_the_text_exist(page):
    text = text_of((PAGES | NOTEBOOKS)[page])
    missing = {name for name in named(text) if not exists_in_package(name)}
    assert not missing


def test_names_become_links():
    """To a function from wherever it is offered, to the class of a field, to a package's page."""
    for name, place in {
        "ops.attention": "jaxformer.ops.attention.attention",
        "jaxformer.ops.rope": "jaxformer.ops.positions.rope",
        "ops.swiglu": "jaxformer.ops.feedforward.swiglu",
        "masks.causal": "jaxformer.masks.builders.causal",
        "blocks.post_norm": "jaxformer.models.blocks.post_norm",
        "ModelConfig.block": "jaxformer.models.config.ModelConfig",
        "zoo.Performer": "jaxformer.zoo.performer.Performer",
        "jaxformer.ops.bias": "jaxformer.ops.bias",
    }.items():
        assert links.linked(f"see `{name}`.") == f"see [`{name}`][{place}]."
    assert links.linked("`masks.causal()`") == "[`masks.causal()`][jaxformer.masks.builders.causal]"
    assert links.linked("`jaxformer.zoo`") == "[`jaxformer.zoo`](api/zoo.md)"
    assert links.linked("`jaxformer.zoo`", "notebooks") == "[`jaxformer.zoo`](../api/zoo.md)"


@pytest.mark.parametrize(
    "text",
    [
        "## `ops.rope`",
        "[`ops.rope`](speed.md)",
        "```python\n`ops.rope`\n```",
        "`data.generate` of a data set",
        "`jax.grad`, `ops.never_was`, `train.py`",
    ],
)
def test_other_text_stays(text):
    assert links.linked(text) == text


def test_each_equation_stands_beside_its_function():
    """Each part with an equation has a link to what computes it."""
    page = PAGES["one-function-at-a-time"].read_text()
    parts = [part for part in re.split(r"^##+ ", page, flags=re.MULTILINE) if "```math" in part]
    assert len(parts) >= 35
    for part in parts:
        text = re.sub(r"^```.*?^```", "", part, flags=re.DOTALL | re.MULTILINE)
        assert any(links.target(name) for name in named(text)), part.splitlines()[0]


def test_all_names_of_the_page_of_functions_lead_to_the_api():
    text = text_of(PAGES["one-function-at-a-time"])
    assert not [name for name in named(text) if links.target(name) is None]


THEORY = [
    path.stem
    for path in sorted((ROOT / "experiments" / "theory").glob("*.py"))
    if "__main__" in path.read_text()
]
MOST_BYTES = 60_000  # of a figure: a page of fifteen opens at once


@pytest.mark.parametrize("name", THEORY)
def test_each_experiment_of_the_theory_has_a_section_and_a_figure(name):
    """Or the section says why there is none; the experiment writes it where `--out` says."""
    source = (ROOT / "experiments" / "theory" / f"{name}.py").read_text()
    assert f'"--out", default="{name}.png"' in source and "small.save_figure(" in source
    sections = re.split(r"^## ", PAGES["theory"].read_text(), flags=re.MULTILINE)[1:]
    (section,) = (one for one in sections if f"python -m experiments.theory.{name}`" in one)
    assert re.search(r"\d", section.partition("`\n")[2])  # its number
    picture = re.search(rf"^!\[.{{20,}}\]\((pictures/theory_{name}\.png)\)$", section, re.MULTILINE)
    assert picture or "No figure here: " in section
    assert not picture or (DOCS / picture[1]).stat().st_size <= MOST_BYTES


def test_the_table_of_the_theory_leads_to_each_section():
    text = PAGES["theory"].read_text()
    headings = re.findall(r"^## ", text, flags=re.MULTILINE)
    assert len(re.findall(r"^\| \[.*\]\(#", text, flags=re.MULTILINE)) == len(headings)


def equations(text):
    blocks = re.findall(r"^```math\n(.*?)\n```", text, flags=re.DOTALL | re.MULTILINE)
    return [*blocks, *re.findall(r"(?<![\\$`\w])\$(?=\S)([^$`\n]+)(?<=\S)\$(?!\w)", text)]


def test_equations_become_mathml():
    pytest.importorskip("latex2mathml")  # of the dependency group `docs`
    equation = module("equations")
    count = 0
    for path in PAGES.values():
        for latex in equations(path.read_text()):
            assert equation.display(latex).startswith('<div class="equation"><math ')
            count += 1
    assert count >= 45
    with pytest.raises(ValueError, match="unheard"):
        equation.mathml(r"\unheard x", "inline")


def test_a_page_shows_its_equation_without_a_script():
    pytest.importorskip("latex2mathml")
    content = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p>'
    shown = module("equations").on_page_content(content, None, None, None)
    assert "<math" in shown and "arithmatex" not in shown and "&#x0003C;" in shown
