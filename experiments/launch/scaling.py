"""A grid of small runs, and the law of their losses: L(N, D) = E + A / N^alpha + B / D^beta.

    python -m experiments.launch.scaling EXPERIMENT --sizes "--model.d-model=32,64,128"
        --steps 200,400,800 [--parallel N]

Each size trains for each number of steps, each time with its own schedule (Hoffmann et al. 2022,
approach 3). The runs are ordinary ones, so a killed grid continues where it was. It writes
scaling-NAME.jsonl, one line for each run, and scaling-NAME.png. N counts all parameters except the
tables of tokens and learned positions (Kaplan et al. 2020). D counts the weighted labels of
training.
"""

import sys

from etils import epath

from jaxformer import cli, config, models, params
from jaxformer.cli.sweeps import parser_of_trials, shorten, sweep
from jaxformer.cli.trials import Trial, joined, read_trials
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.runs.run_folder import run_folder
from jaxformer.runs.signals import Interrupted
from jaxformer.tools.analysis import figures, scaling


def size(trial: Trial) -> int:
    """The number of parameters outside of embeddings."""
    leaves = params.paths(models.spec(trial.experiment.model)).items()
    return sum(params.count(leaf) for path, leaf in leaves if "embedding/" not in path)


def labels(trial: Trial) -> float:
    """The number of labels of a run: the weights of its first batch, times the number of steps."""
    experiment = trial.experiment
    dataset = batching.open_dataset(experiment.data, experiment.model)
    batch = batching.batches(dataset.train, experiment.batch_size, experiment.seed)[0]
    return float(batch["weights"].sum()) * experiment.steps


def row(trial: Trial, runs: str) -> dict:
    loss = trial.scores["loss"]
    return {
        "run": str(run_folder(trial.experiment, runs).path),
        "parameters": size(trial),
        "tokens": labels(trial),
        "loss": loss,
    }


def summary(law: scaling.Law, ranges: scaling.Law) -> str:
    """The constants with their intervals, and the exponents in the literature."""
    lines = [
        f"{name:>6} = {value:.4g}  ({low:.4g} to {high:.4g}, 95 %)"
        for name, value, (low, high) in zip(law._fields, law, ranges, strict=True)
    ]
    share = lambda law: law.beta / (law.alpha + law.beta)
    lines.append(
        f"best N grows as C^{share(law):.2f}; Hoffmann et al. 2022: "
        f"alpha 0.34, beta 0.28, C^{share(scaling.HOFFMANN):.2f}"
    )
    return "\n".join([*lines, "Kaplan et al. 2020: alpha 0.076, beta 0.103, C^0.73"])


def main(argv: list[str]) -> int:
    parser = parser_of_trials("scaling", __doc__)
    parser.add_argument("--sizes", default="--model.d-model=32,64,128")
    parser.add_argument("--steps", default="200,400,800")
    options, overrides = parser.parse_known_args(joined(argv, "--sizes"))
    trials = read_trials(options.name, f"{options.sizes} --steps={options.steps}", overrides)
    constants = len(scaling.Law._fields)
    if len(trials) < constants:
        raise ConfigError(
            f"scaling: {len(trials)} runs, and the law has {constants} constants; "
            "give more --sizes or --steps"
        )
    examples = [trial.experiment.steps * trial.experiment.batch_size for trial in trials]
    scaling.check([size(trial) for trial in trials], examples)  # before anything is trained
    try:
        ended = sweep(trials, options.runs, [figures.loss_report], options.parallel)
        ended = [trial for trial in ended if not trial.problem]
    except Interrupted as error:
        print(f"scaling: {error}", file=sys.stderr)
        return error.exit_code
    if len(ended) < constants:
        raise ConfigError(
            f"scaling: {len(ended)} of {len(trials)} runs ended well, "
            f"and the law has {constants} constants"
        )
    rows = sorted(
        (row(trial, options.runs) for trial in ended),
        key=lambda row: (row["parameters"], row["tokens"]),
    )
    path = epath.Path(options.runs) / f"scaling-{shorten(ended[0].experiment.name)}.jsonl"
    config.write_atomically(path, "".join(config.to_json(row) + "\n" for row in rows))
    columns = [[row[name] for row in rows] for name in ("loss", "parameters", "tokens")]
    law = scaling.fit(*columns)
    print(summary(law, scaling.intervals(law, *columns)))
    picture = figures.save(lambda: figures.scaling_law(law, *columns), path.with_suffix(".png"))
    print(f"scaling: {path}, {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, sys.argv[1:]))
