"""Adapters of PEFT: a folder with low-rank factors and trained modules, for a model beside it.

    checkpoint = families.load("base")
    adapter = peft.load("adapter", checkpoint)
    params = adapter.merged(checkpoint.params)      # the adapted model, for everything here
    peft.save("mine", checkpoint, adapter)          # PEFT opens it

`Lora(rank=adapter.rank, alpha=adapter.alpha)` trains such factors on.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.families.peft.adapter import Adapter, Trained
from jaxformer.families.peft.read import load
from jaxformer.families.peft.write import save
