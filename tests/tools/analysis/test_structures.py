"""Pictures of molecules."""

import numpy as np
import pytest

pytest.importorskip("rdkit")

from jaxformer.data.molecules import read
from jaxformer.tools.analysis import figures, structures


def test_a_molecule_is_drawn():
    picture = structures.drawing(read("CC(=O)Oc1ccccc1C(=O)O"), 90, 120)
    assert picture.shape == (90, 120, 3) and picture.min() < 0.5 < picture.mean() <= 1
    # another order of its atoms, which may turn it
    again = structures.drawing(read("OC(=O)c1ccccc1OC(C)=O"), 90, 120)
    assert abs(picture.mean() - again.mean()) < 0.05


def test_each_molecule_stands_under_its_answers():
    truth = np.array([1.0, 2.0, 4.0])
    found = {"one": truth + 0.5, "other": truth - [0, 0, 3]}
    figure = structures.answers("logP", truth, found, [read("CCO"), read("c1ccccc1")])
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("center", "left")]
    assert "one: mean error 0.50" in titles and "other: mean error 1.00" in titles
    assert "true logP: 2.00\none: 2.50\nother: 2.00" in titles
    assert len(figure.axes) == 4 and len(figures.png(lambda: figure)) > 5000
