"""The golden models of tests/fixtures/golden: transformers still writes and answers them, and opens
what we save of them."""

import json
import logging

import numpy as np
import pytest

from tests import golden


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", golden.NAMES)
def test_transformers_still_writes_what_is_kept(name, tmp_path):
    from safetensors.numpy import load_file

    from tests.golden.write import write

    write(name, tmp_path)
    kept = golden.folder(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in kept.iterdir()
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config | {"transformers_version": "any"} == golden.config(name) | {
        "transformers_version": "any"
    }
    weights = load_file(kept / "model.safetensors")
    for file, load in (
        ("model.safetensors", load_file),
        ("gradients.safetensors", load_file),
        ("witness.npz", np.load),
    ):
        written, before = load(tmp_path / file), load(kept / file)
        assert sorted(written) == sorted(before)
        for key in before:
            is_table = file == "gradients.safetensors" and np.array_equal(before[key], weights[key])
            if is_table and not written[key].any():
                continue  # sinusoids have no gradient; the kept file has them, so that it opens
            # It computes norms, rotations and softmax in float32, which on another machine may
            # round otherwise: by 1.4e-6 in gradients of Qwen2-MoE, and by 1e-5 in Gemma, whose
            # scores are larger because embeddings are scaled by sqrt(D). Weights are drawn, exact.
            rounding = 2e-5 if name.startswith("gemma") else 2e-6
            exact = file == "model.safetensors"
            np.testing.assert_allclose(
                written[key],
                before[key],
                rtol=0 if exact else 1e-6,
                atol=0 if exact else rounding,
                err_msg=f"{file}: {key}",
            )


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", golden.NAMES)
def test_float32_answers_as_the_witness_does(name):
    """No case hangs on rounding: no near tie between experts, no feature of a bucket near zero."""
    arrays = golden.witness(name)
    wide = name == "reformer"  # whose rotations are other random numbers in float32
    for key, answered in _answers(golden.folder(name), name, wide)[0].items():
        # twice what the worst case (T5's unscaled logits) misses by
        np.testing.assert_allclose(
            answered, arrays[f"outputs/{key}"], rtol=0, atol=1.5e-5, err_msg=key
        )


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", golden.NAMES)
def test_saved_by_us_opens_in_transformers(name, tmp_path):
    from jaxformer import families

    families.save(tmp_path / "ours", families.load(golden.folder(name)))
    answered, warned = _answers(golden.folder(name), name, True)
    ours, warned_of_ours = _answers(tmp_path / "ours", name, True)
    # of every T5 with its own head transformers warns, its own files too
    assert set(warned_of_ours) <= set(warned)
    assert sorted(ours) == sorted(answered)
    for key in answered:
        # no weight is rounded on the way there and back
        np.testing.assert_allclose(ours[key], answered[key], rtol=1e-6, atol=1e-6, err_msg=key)


def _answers(folder, name, wide):
    """(what the model in `folder` answers to the inputs of `name`, in float64 if `wide`; what
    transformers warned of)."""
    import transformers

    from tests.golden.write import EXACT, answer, at_real, finite_masks

    inputs = {
        key.removeprefix("inputs/"): x
        for key, x in golden.witness(name).items()
        if key.startswith("inputs/")
    }
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    # an earlier test may have had the same warning
    transformers.utils.logging.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        model, report = getattr(transformers, kind).from_pretrained(
            folder, output_loading_info=True, **EXACT
        )
        with finite_masks():
            answered = at_real(inputs, answer(model.double() if wide else model, inputs))
    finally:
        logger.removeHandler(handler)
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    return answered, said
