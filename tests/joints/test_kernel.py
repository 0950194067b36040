"""The page docs/your-own-kernel.md: a Pallas kernel for causal attention is checked, trained and
decoded with."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxformer
from jaxformer import cli, decoding
from jaxformer.ops.attention import attention
from jaxformer.tools.kernel_check import Case, check_kernel
from tests.joints.harness import (
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    assert_short,
    read_page,
    run_of,
)

PAGE = read_page("your-own-kernel")
STEPS = "--steps=10"


@pytest.fixture(scope="module")
def page():
    """The names that the page's file defines."""
    names = {"__name__": "flash"}
    exec(compile(PAGE["flash"], "flash.py", "exec"), names)
    return names


def test_the_page_is_short():
    assert_short(PAGE)


@pytest.mark.thorough
def test_the_kernel_of_the_page_is_the_reference(page):
    cases = [
        Case(),
        Case(T=1, S=1),
        Case(T=129, S=129, heads=(4, 1)),
        Case("full"),
        Case(options=("softcap", "sinks")),
    ]
    report = check_kernel(page["mine"], cases=cases, draws=0)
    refused = [result.refuses for result in report.results]
    assert refused == [
        None,
        None,
        None,
        "mask full() of 127 queries and 127 keys",
        "sinks, softcap",
    ]


@pytest.mark.thorough
def test_the_page_survives_a_kill_runs_on_eight_devices_and_decodes(tmp_path):
    folder = assert_resumes_to_the_same_bits(PAGE, tmp_path, STEPS)
    assert_same_on_eight_devices(PAGE, tmp_path, STEPS, whole=folder)

    run, shapes = jaxformer.open_run(run_of(folder, "flash")), []
    model, kernel = run.experiment.model, run.experiment.model.attention_implementation

    def counted(query, key, value, call):
        shapes.append(query.shape)
        return kernel.attention(query, key, value, call)

    prompts, greedy = [[1, 2, 3, 4, 5, 6, 7, 8, 16], [3, 16]], decoding.Sampling(temperature=0.0)
    texts = [
        decoding.generate(
            replace(model, attention_implementation=each), run.params, prompts, 6, sampling=greedy
        )
        for each in ("reference", replace(kernel, attention=counted))
    ]
    assert texts[0] == texts[1] and shapes


@pytest.mark.thorough
def test_a_changed_kernel_is_another_run_and_a_changed_comment_is_not(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text, names = PAGE["flash"], []
    for changed in (
        text,
        text.replace("BLOCK = 32", "BLOCK = 64"),
        text.replace("# queries of a", "# for each"),
    ):
        Path("flash.py").write_text(changed)
        assert cli.main(["show", "flash.py"]) == 0
        names.append(capsys.readouterr().out.splitlines()[-1])
    assert names[0] == names[2] != names[1]


@pytest.mark.thorough
def test_a_call_that_it_refuses_ends_with_the_reason(page):
    arrays = [jnp.ones((1, 4, 2, 8))] * 3
    said = r"flash: no mask full\(\) of 4 queries and 4 keys; implementation='blockwise'"
    with pytest.raises(NotImplementedError, match=said):
        jax.eval_shape(lambda *x: attention(*x, implementation=page["mine"]), *arrays)
    assert attention(*arrays, implementation=(page["mine"], "blockwise")).shape == (1, 4, 2, 8)
