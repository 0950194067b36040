"""Pictures of molecules: structural formulas under what was answered, and answers by the truth."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from jaxformer.errors import package_of
from jaxformer.tools.analysis import figures
from jaxformer.tools.analysis.labels import plain


def drawing(
    molecule: Any, height: int = 300, width: int = 400
) -> Float[np.ndarray, "{height} {width} 3"]:
    """The structural formula of an rdkit molecule in pixels, with values from 0 to 1."""
    from matplotlib.image import imread

    with package_of("molecules"):
        from rdkit.Chem.Draw.rdMolDraw2D import MolDraw2DCairo

    canvas = MolDraw2DCairo(width, height)
    canvas.DrawMolecule(molecule)
    canvas.FinishDrawing()
    return imread(io.BytesIO(canvas.GetDrawingText()))


def answers(
    name: str,
    truth: Num[np.ndarray, " n"],
    found: Mapping[str, Num[np.ndarray, " n"]],
    molecules: Sequence[Any],
    columns: int = 4,
) -> Any:
    """A figure: answers by the true value of a property, then the first molecules with both.

    `found` has the answers of each model by its name.
    """
    all_axes = figures.panels(len(found) + len(molecules), columns, 2.2, 2.1)
    every = np.concatenate([truth, *found.values()])
    ends = [every.min(), every.max()]
    for axes, (model, values) in zip(all_axes, found.items(), strict=False):
        axes.plot(truth, values, ".", markersize=3, alpha=0.4)
        axes.plot(ends, ends, "k", lw=0.8)
        axes.set(xlabel=plain(f"true {name}"), ylabel="answer", xlim=ends, ylim=ends)
        axes.set_title(plain(f"{model}: mean error {abs(values - truth).mean():.2f}"), fontsize=8)
    for i, axes in enumerate(all_axes[len(found) :]):
        axes.imshow(drawing(molecules[i]))
        each = "\n".join(f"{model}: {values[i]:.2f}" for model, values in found.items())
        axes.set_title(plain(f"true {name}: {truth[i]:.2f}\n{each}"), fontsize=7, loc="left")
        axes.set_axis_off()
    return all_axes[0].figure
