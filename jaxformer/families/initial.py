"""Weights of Hugging Face as the start of a run: `Experiment(initial=HuggingFace("gpt2"))`."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxformer import models, params
from jaxformer.families import folder
from jaxformer.families.comparison import differences
from jaxformer.models.differences import list_differences


@dataclass(frozen=True)
class HuggingFace:
    """The weights of a folder with config.json and safetensors, or of a name on the hub."""

    name: str  # a folder, or a name such as openai-community/gpt2
    part: str | None = None  # a tower of a CLIP or SigLIP: vision or text

    def __call__(self, spec: params.Tree, key: jax.Array) -> params.Tree:
        return folder.load(self.name, part=self.part).params

    def differences(self, model: Any) -> list[str]:
        """A line for each field in which `model` differs from the model of these weights."""
        if not isinstance(model, models.ModelConfig | models.EncoderDecoder):
            return []
        return list_differences(differences(folder.read_config(self.name, part=self.part), model))
