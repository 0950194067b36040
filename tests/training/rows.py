"""A linear map of one's own, its data, and an objective with parameters and variables: a step
without a transformer."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import ones, zeros

from jaxformer.data.sources import Dataset
from jaxformer.objectives import LossSums
from jaxformer.params import Spec
from jaxformer.training import AdamW, Checkpoints, Constant, Experiment


@dataclass(frozen=True)
class Line:
    """x [B, 8] -> x w [B], and a variable that counts steps."""

    def spec(self):
        kernel = Spec((8, 1), ("embed", None), ones, ("embed",))
        return {"w": {"kernel": kernel}, "steps": Spec((), (), zeros, trained=False)}

    def apply(self, params, x):
        return (x @ params["w"]["kernel"])[:, 0]


@dataclass(frozen=True)
class Errors:
    """Squared errors of scaled inputs; the scale trains, and a variable keeps a moving mean of the
    inputs."""

    def spec(self, model):
        scale = Spec((8,), ("embed",), ones)
        return {"scale": scale, "mean": Spec((8,), ("embed",), zeros, trained=False)}

    def __call__(self, model, params, batch, context):
        x = batch["x"] * context.params["scale"][None]
        errors = jnp.square(model.apply(params, x) - batch["y"])
        mean = 0.5 * context.params["mean"] + 0.5 * batch["x"].mean(axis=0)
        updates = {"steps": params["steps"] + 1, "objective": {"mean": mean}}
        weights = batch["weights"]
        return LossSums(errors @ weights, weights.sum(), {}, updates, unit="rows")


class Rows:
    """Random inputs, and a fixed linear map of them."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = np.random.default_rng((self.seed, index)).normal(size=8).astype(np.float32)
        return {"x": x, "y": np.float32(x @ np.arange(8)), "weights": np.float32(1)}


class Data:
    def open(self, model):
        return Dataset(Rows(64, 0), Rows(16, 1), digest="rows 1")


EXPERIMENT = Experiment(
    name="rows",
    model=Line(),
    data=Data(),
    objective=Errors(),
    optimizer=AdamW(learning_rate=0.1),
    schedule=Constant(),
    steps=6,
    batch_size=16,
    log_every=1,
    eval_every=3,
    checkpoints=Checkpoints(every=2, keep_latest=3),
)


def batch_of(step=0, count=16):
    rows = [Rows(1000, 2)[step * count + i] for i in range(count)]
    weights = np.arange(count) % 3 + 1.0  # uneven, so that means of means would show
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return stacked | {"weights": weights.astype(np.float32)}
