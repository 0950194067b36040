"""Pages that are made, not written: the API, the experiments, the notebooks.

mkdocs calls the functions `on_...`.

A package, an experiment or a notebook that is new has its page without a line here.
"""

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jaxformer"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
CACHE = ROOT / "dist" / "notebooks"


def on_config(config):
    """The API is the last part of the navigation."""
    config.nav.append({"API": [{title: f"api/{title}.md"} for title in packages()]})
    return config


def on_files(files, config):
    for title, modules in packages().items():
        files.append(File.generated(config, f"api/{title}.md", content=api_page(title, modules)))
    for path in NOTEBOOKS:
        folder = executed(path)
        for made in sorted(folder.iterdir()):
            content = made.read_bytes() if made.suffix == ".png" else made.read_text()
            files.append(File.generated(config, f"notebooks/{made.name}", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """`<!-- experiments FOLDER -->` becomes a section for each experiment of that folder."""
    return re.sub(
        r"<!-- experiments (\S+) -->", lambda found: experiments(ROOT / found[1]), markdown
    )


def packages() -> dict[str, list[str]]:
    """The modules of each page of the API, a package each, by the page's name."""
    files = ("config", "errors", "params", "sharding")
    pages = {"jaxformer": [f"jaxformer.{name}" for name in files]}
    for folder in sorted(path.parent for path in PACKAGE.rglob("*/__init__.py")):
        title = ".".join(folder.relative_to(PACKAGE).parts)
        if title not in ("config", "cli"):
            modules = sorted(path.stem for path in folder.glob("[a-z]*.py"))
            pages[title] = [f"jaxformer.{title}.{module}" for module in modules]
    return pages


def api_page(title: str, modules: list[str]) -> str:
    """What the package offers, with links, then its modules one after the other."""
    package = "jaxformer" if title == "jaxformer" else f"jaxformer.{title}"
    source = (ROOT / Path(*package.split(".")) / "__init__.py").read_text()
    lines = [f"# {title}", ""]
    if "names that the package offers" in source:
        offered = [
            f"[`{alias.name}`][{node.module}.{alias.name}]"
            for node in ast.parse(source).body
            if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(f"{package}.")
            for alias in node.names
            if f"{node.module}.{alias.name}" not in modules and not alias.name.isupper()
        ]
        lines += [f"`from {package} import ...` offers {', '.join(offered)}.", ""]
    lines += [
        f"::: {package}",
        "    options: {show_root_heading: false, show_root_toc_entry: false}",
        "",
    ]
    return "\n".join([*lines, *(f"::: {module}\n" for module in modules)])


def executed(path: Path) -> Path:
    """The folder with what a notebook gave: its page and its pictures.

    The notebook runs where it or the library has changed.
    """
    sources = [path, Path(__file__).with_name("notebook.py"), *sorted(PACKAGE.rglob("*.py"))]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    folder = CACHE / f"{path.stem}-{digest}"
    if not folder.is_dir():
        for old in CACHE.glob(f"{path.stem}-*"):
            shutil.rmtree(old)
        print(f"running {path.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, sources[1], path, folder], cwd=ROOT, check=True)
    return folder


def experiments(folder: Path) -> str:
    """A section for each experiment: its description, expected result, time and command."""
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    # a file without these is a part of others
    starts = re.compile(r"^experiment = |__main__", flags=re.MULTILINE)
    told = {
        name: ast.get_docstring(ast.parse(text))
        for name, text in sources.items()
        if starts.search(text)
    }
    return "\n\n".join(section(name, docstring or "") for name, docstring in told.items())


def section(name: str, docstring: str) -> str:
    """The docstring as Markdown: `Expected:` and the like as terms, the command as code."""
    terms = r"(?:^|(?<=\. ))(Expected|Time|Predicted|Data)\b([^:.]{0,80}):(?= |$)"
    docstring = re.sub(r"(?<=\. )Command:", "\nCommand:", docstring)
    told, command, asked = docstring.partition("\nCommand:")
    body = re.sub(terms, r"\n\n**\1\2.**", told, flags=re.MULTILINE)
    commands = f"```text\n{textwrap.dedent(asked).strip()}\n```" if command else ""
    return f"### {name}\n\n{body}\n\n{commands}"
