"""lucidrains' performer-pytorch with one given projection: softmax features, causal and not, and
the ReLU kernel."""

import contextlib
import io
import warnings

import numpy as np


def witness() -> dict[str, np.ndarray]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of APIs that went out of date
        from performer_pytorch.performer_pytorch import (
            FastAttention,
            causal_linear_attention_noncuda,
        )

    rng = np.random.default_rng(0)
    B, N, T, H, M = 2, 3, 14, 8, 11
    arrays = {name: rng.normal(size=(B, T, N, H)) for name in ("query", "key", "value")}
    heads_first = [torch.from_numpy(x.swapaxes(1, 2).copy()) for x in arrays.values()]
    arrays["projection"] = rng.normal(size=(M, H))
    for name, options in (
        ("softmax", {}),
        ("causal", {"causal": True}),
        ("relu", {"generalized_attention": True}),
    ):
        with contextlib.redirect_stdout(io.StringIO()):  # it says that it has no CUDA kernel
            module = FastAttention(H, nb_features=M, **options).double()
        module.projection_matrix.copy_(torch.from_numpy(arrays["projection"]))
        if "causal" in options:
            module.causal_linear_fn = causal_linear_attention_noncuda
        arrays[name] = module(*heads_first).detach().numpy().swapaxes(1, 2)
    return arrays
