"""An HTML page in one file, made of sections: no network, light and dark, readable on a phone."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark;
  --line: #d0d7de; --ground: #ffffff; --text: #1f2328; --quiet: #59636e; }
@media (prefers-color-scheme: dark) { :root {
  --line: #3d444d; --ground: #0d1117; --text: #e6edf3; --quiet: #9198a1; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); }
body { max-width: 62rem; margin: auto; padding: 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; border-bottom: 1px solid var(--line); margin-top: 2rem; }
p { color: var(--quiet); max-width: 46rem; }
figure { margin: 0; overflow-x: auto; } figcaption { font-weight: bold; }
img { max-width: 100%; height: auto; } img.large { min-width: 32rem; }
.runs { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
td, th { border: 1px solid var(--line); padding: .2rem .6rem; text-align: left;
  overflow-wrap: break-word; max-width: 26rem; }
table.lens { font-family: ui-monospace, monospace; } table.lens td { white-space: nowrap; }
summary { font-size: 1.15rem; font-weight: bold; margin-top: 2rem; cursor: pointer; }
pre { border: 1px solid var(--line); padding: .6rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .85rem; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole page: a title and the sections `parts`."""
    title = html.escape(title)
    icon = '<link rel="icon" href="data:,">'  # without one a browser asks a server for it
    view = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head = f"<head>{view}{icon}<style>{STYLE}</style><title>{title}</title></head>"
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>\n'


def heading(title: str, note: str = "") -> str:
    """The heading of a section; `note` says how to read the section."""
    return f"<h2>{html.escape(title)}</h2>" + (f"<p>{html.escape(note)}</p>" if note else "")


def side_by_side(parts: Mapping[str, str]) -> str:
    """Parts of several runs by name, beside each other where the page is wide enough."""
    pieces = []
    for name, part in parts.items():
        caption = f"<figcaption>{html.escape(name)}</figcaption>" if len(parts) > 1 else ""
        pieces.append(f"<figure>{caption}{part}</figure>")
    return f'<div class="runs">{"".join(pieces)}</div>'


def picture(title: str, light: bytes, dark: bytes) -> str:
    """A PNG picture, in one version for light pages and one for dark pages."""
    # the picture has 120 dots an inch; a pixel of a page is 1/96 inch
    width = int.from_bytes(light[16:20], "big") * 4 // 5
    large = ' class="large"' if width > 800 else ""

    def address(data):
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    source = f'<source srcset="{address(dark)}" media="(prefers-color-scheme: dark)">'
    return (
        f'<picture>{source}<img{large} width="{width}" src="{address(light)}" '
        f'alt="{html.escape(title)}"></picture>'
    )


def text(words: str) -> str:
    """Preformatted text."""
    return f"<pre>{html.escape(words)}</pre>"


def folded(title: str, words: str) -> str:
    """Preformatted text that a click on its title opens."""
    return (
        f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(words)}</pre></details>"
    )


def table(columns: Sequence[str], values: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each name that any column has."""
    rows = [
        "<tr><th></th>" + "".join(f"<th>{html.escape(column)}</th>" for column in columns) + "</tr>"
    ]
    for name in dict.fromkeys(name for column in values for name in column):
        cells = "".join(f"<td>{_shown(column.get(name, ''))}</td>" for column in values)
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _shown(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_count = abs(value) < 1e15 and float(value).is_integer()
        return f"{value:,.0f}" if is_count else f"{value:.4g}"
    return html.escape(str(value))
