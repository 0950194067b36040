"""What a run makes of prompts: streamed, from a file, with beams, filters and stop strings, and on
a mesh."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxformer
from jaxformer import cli, models
from jaxformer.data.sources import Stdlib
from jaxformer.errors import ConfigError
from jaxformer.runs import run as runs
from jaxformer.training.experiment import Experiment, Sample
from tests.tiny import furnish


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run."""
    folder = furnish(tmp_path_factory.mktemp("trained"))
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["train", "tiny"]) == 0
    return next((folder / "runs").glob("tiny-*"))


def generate(capsys, trained, *options):
    with contextlib.chdir(trained.parents[1]):
        code = cli.main(["generate", str(trained), *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.thorough
def test_pieces_make_up_the_text(trained):
    run = jaxformer.open_run(trained)
    pieces = list(run.stream("the ", seed=3, tokens=7))
    assert "".join(pieces) == run.generate("the ", seed=3, tokens=7)[4:]
    assert sum(map(bool, pieces)) > 2


@pytest.mark.thorough
def test_a_stop_string_ends_the_text_and_is_left_out(trained):
    run = jaxformer.open_run(trained)
    free = run.generate("the ", tokens=10)[4:]
    # characters are tokens: the string lies across their border
    for string in {
        free[3:5],
        free[2:6],
        free[:1],
    }:
        before = free[: free.index(string)]
        assert "".join(run.stream("the ", tokens=10, stop=[string])) == before
        assert run.continue_all(["the ", "a"], tokens=10, stop=[string, "never"])[0] == [before]


def test_a_pair_whose_data_ask_no_question_is_told_so():
    encoder, decoder = (
        models.ModelConfig(9, 1, 8, 2, context_length=8, **heads) for heads in (dict(heads=()), {})
    )
    experiment = Experiment(
        name="pair", model=models.EncoderDecoder(encoder, decoder), data=Stdlib()
    )
    run = SimpleNamespace(
        tokenizer="any", experiment=experiment, folder=SimpleNamespace(path="runs/pair")
    )
    with pytest.raises(
        ConfigError, match=r"runs/pair: it continues no text: .* reads a source, which data make"
    ):
        runs.Run._check_text(run)


def test_part_of_a_stop_string_is_held_back_until_it_is_decided():
    assert runs._held_back("abc<e", ["<end>", "e!"]) == 2
    assert runs._held_back("abc", ["<end>"]) == 0
    assert runs._final_part(str, None, [], [], "caf\ufffd") == "caf"  # its bytes may go on
    assert runs.before_stop("one two one", ["two", "wo"]) == "one "


@pytest.mark.parametrize("positions", [models.Learned(), models.Axial((2, 4), (3, 5))])
def test_a_prompt_as_long_as_the_table_of_positions_is_refused(positions):
    model = models.ModelConfig(
        vocab_size=9, num_layers=1, d_model=8, num_heads=2, context_length=8, positions=positions
    )
    experiment, tokenizer = (
        Experiment("x", model, Stdlib()),
        SimpleNamespace(encode=lambda text: [1] * len(text)),
    )
    assert len(runs.ask(experiment, Sample("a" * 7), tokenizer).prompt) == 7
    with pytest.raises(
        ConfigError, match=r"sample.prompt is 8 tokens, no room in 8 learned positions"
    ):
        runs.ask(experiment, Sample("a" * 8), tokenizer)


@pytest.mark.thorough
def test_a_file_of_prompts_becomes_a_file_of_texts(trained, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "the "}\n\n{"prompt": "a"}\n{"prompt": "there "}\n')
    options = ["--prompts", str(source), "--out", str(target), "--tokens=6"]
    code, out, _ = generate(
        capsys,
        trained,
        *options,
        "--temperature=0",
        "--filter",
        "Repetition(1.5)",
        "--filter=NoRepeatNgram(2)",
    )
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert (
        code == 0
        and "3 prompts" in out
        and [line["prompt"] for line in lines] == ["the ", "a", "there "]
    )
    # bytes may join to characters
    assert all(len(line["texts"]) == 1 and 0 < len(line["texts"][0]) <= 6 for line in lines)
    code, *_ = generate(
        capsys, trained, *options, "--beams=3", "--n-best=2", "--length-penalty=0.5"
    )
    best = [json.loads(line)["texts"] for line in target.read_text().splitlines()]
    # a list has no copies: bytes that are no letters are written alike, so it may be shorter than
    # asked for
    assert code == 0 and all(
        1 <= len(texts) <= 2 and len(set(texts)) == len(texts) for texts in best
    )
    assert len(best) == 3 and len(best[0]) == 2
    code, out, _ = generate(
        capsys, trained, "--prompt", "the ", "--tokens=6", "--beams=3", "--length-penalty=0.5"
    )
    assert out.splitlines()[-1] == "the " + best[0][0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options, said",
    [
        ([], "give --prompt TEXT"),
        (["--prompt=a", "--prompts=b"], "give --prompt TEXT"),
        (["--prompt=a", "--out=b"], "give --prompt TEXT"),
        (["--prompts=none.jsonl", "--out=x"], "none.jsonl"),
        (["--prompt=a", "--filter=TopK(0)"], "TopK(0)"),
        (["--prompt=a", "--filter=Nothing(1)"], "Nothing"),
        (["--prompt=a", "--beams=2", "--n-best=3"], "n_best=3"),
        (["--prompt=a", "--model.d-model=32"], "only --mesh."),
        (["--prompt=a", "--temprature=1"], "temprature"),
        (
            ["--prompt=a", "--beams=4", "--temperature=0.5"],
            "--beams, --temperature: a beam search draws nothing",
        ),
        (
            ["--prompt=a", "--n-best=2", "--top-k=3", "--min-p=0"],
            "--n-best, --top-k, --min-p: a beam search draws nothing",
        ),
    ],
)
def test_what_does_not_fit_gets_one_line(trained, capsys, options, said):
    code, _, err = generate(capsys, trained, *options)
    assert code == 2 and said in err and err.strip().count("\n") == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lines, said",
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": 5}', "the prompt 5 is no text"),
        ('{"prompt": null}', "the prompt None is no text"),
        ('{"prompt": ["a"]}', "the prompt ['a'] is no text"),
        ('{"text": "a"}', "'prompt'"),
        ('"a"', "each line must be"),
        ("a", "each line must be"),
        ("[" * 100_000, "RecursionError"),
        (b"\xff", "each line must be"),
    ],
)
def test_a_file_that_holds_no_prompts_gets_one_line(trained, tmp_path, capsys, lines, said):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    code, _, err = generate(capsys, trained, "--prompts", str(source), "--out", str(target))
    assert code == 2 and said in err and err.strip().count("\n") == 0 and not target.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [["--mesh.tensor=2", "--mesh.data=2"], ["--mesh.fsdp=4"]])
def test_a_mesh_changes_nothing(trained, mesh):
    one, split = jaxformer.open_run(trained), jaxformer.open_run(trained, overrides=mesh)
    kernel = split.params["layers"]["feedforward"]["up"]["kernel"]
    assert len(kernel.sharding.device_set) == 4 and not kernel.sharding.is_fully_replicated
    assert split.generate("the ", tokens=8) == one.generate("the ", tokens=8)
    with contextlib.chdir(trained.parents[1]):
        found, expected = split.evaluate(), one.evaluate()
    for name in [name for name, value in expected.items() if isinstance(value, str)]:
        assert found.pop(name) == expected.pop(name)
    assert found == pytest.approx(expected, rel=1e-5)  # float32, summed in another order


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [["--mesh.fsdp=512"], ["--mesh.data=3"], ["--mesh.data=-1", "--mesh.fsdp=3"]]
)
def test_a_mesh_that_is_not_here_becomes_one_device(trained, mesh):
    """Nor does one that the run's batch, of 4, does not divide among: it cannot be changed any
    more."""
    run = jaxformer.open_run(trained, overrides=mesh)
    assert run.mesh is None and run.generate("the ", tokens=3).startswith("the ")
    with pytest.raises(ConfigError, match="another run"):
        jaxformer.open_run(trained, overrides=["--steps=7"])


@pytest.mark.thorough
def test_weights_in_8_bits_are_scored_beside(trained):
    with contextlib.chdir(trained.parents[1]):
        scores = jaxformer.open_run(trained).evaluate(int8=True)
    assert scores["int8_loss"] != scores["loss"] and scores["int8_loss"] == pytest.approx(
        scores["loss"], abs=0.05
    )


@pytest.mark.thorough
def test_a_second_process_compiles_nothing_again(trained, tmp_path):
    """`generate` in a process of its own, twice: the second finds every program in the compilation
    cache."""
    script = (
        "import sys, jax\n"
        "from jaxformer import cli\n"
        "misses = []\n"
        "count = lambda name, **_: misses.append(name) if name.endswith('cache_misses') else None\n"
        "jax.monitoring.register_event_listener(count)\n"
        f"assert cli.main(['generate', {str(trained)!r}, '--prompt', 'the ', '--tokens=5', "
        f"'--top-k=3']) == 0\n"
        "print('misses', len(misses))\n"
    )
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = (
        "0"  # every program is kept, however long it took to compile
    )
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=trained.parents[1],
            env=env,
        )
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout.split()[-1]))
    assert counts[0] > 0 and counts[1] == 0
