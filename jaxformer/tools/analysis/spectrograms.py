"""Pictures of sounds: log-mel frames under the words that were spoken and heard."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Num

from jaxformer.tools.analysis import figures
from jaxformer.tools.analysis.labels import plain

RIGHT, WRONG = "#1d7a45", "#b3243b"


def transcripts(
    frames: Num[np.ndarray, "n T C"],
    spoken: Sequence[str],
    heard: Sequence[str],
    seconds: int | float,
    columns: int = 3,
) -> Any:
    """A figure of sounds that last `seconds`: time to the right, mel bins upwards, loud is bright.

    The titles are red where other words were heard than were spoken.
    """
    all_axes = figures.panels(len(frames), columns, 3.2, 1.75)
    for axes, sound, said, text in zip(all_axes, frames, spoken, heard, strict=True):
        extent = (0, seconds, 0, sound.shape[1])
        image = sound.T.astype(np.float32)
        axes.imshow(image, cmap="magma", aspect="auto", origin="lower", extent=extent)
        color = RIGHT if said == text else WRONG
        title = f"spoken: {said}\nheard: {text}"
        axes.set_title(plain(title), fontsize=8, loc="left", color=color)
        axes.set_yticks([])
    figure = all_axes[0].figure
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel(f"{frames.shape[2]} mel bins, low to high", fontsize=8)
    return figure
