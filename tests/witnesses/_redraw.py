"""Parameters redrawn from a seeded NumPy generator: norms that are not 1, biases that are not 0, so
that mistakes show."""

import numpy as np
import torch


def redraw(model: torch.nn.Module, seed: int, gain: float = 1.0) -> dict[str, np.ndarray]:
    """Fills a model with float32 numbers, norm-preserving matrices times `gain`, and returns them
    by name."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        draw = rng.normal(size=tuple(parameter.shape))
        if parameter.ndim > 1:
            draw = draw * gain / np.sqrt(parameter.shape[-1])
        else:
            draw = 0.3 * draw + (1.0 if name.endswith("weight") else 0.0)
        weights[name] = draw.astype(np.float32)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(weights[name]))
    return weights
