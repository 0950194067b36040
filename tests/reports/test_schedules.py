"""Learning rate schedules: what users of others reported, tried here."""

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import config
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.training import WSD, AdamW, Constant, Cosine, Experiment, Linear, Noam

MODEL = ModelConfig(vocab_size=11, num_layers=1, d_model=64, num_heads=2, context_length=6)
BASE = Experiment(
    name="a", model=MODEL, data=Copy(vocab_size=8, length=2), optimizer=AdamW(learning_rate=1.0)
)


def unchecked(value, **fields):
    """A copy with other fields, as Python makes it where no test checks types."""
    value = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(value, name, field)
    return value


def rates(schedule, steps, beyond=0):
    """The rate of every step of a run with peak 1."""
    return np.asarray(jax.vmap(schedule(replace(BASE, steps=steps)))(jnp.arange(steps + beyond)))


@pytest.mark.report(
    "huggingface/transformers#34754", listed="second 32",
    right="the rate follows the definition at each step, and no step of the warm-up has rate 0",
)  # fmt: skip
def test_cosine_and_linear_by_their_definitions():
    steps, warmup, final = 21, 5, 0.25
    s = np.arange(steps)
    share = np.clip((s - (warmup - 1)) / (steps - warmup), 0, 1)
    up = np.minimum((s + 1) / warmup, 1)
    for kind, shape in ((Cosine, (1 - np.cos(np.pi * share)) / 2), (Linear, share)):
        expected = up * (1 - shape + final * shape)
        np.testing.assert_allclose(rates(kind(warmup, final), steps), expected, atol=1e-6)


@pytest.mark.report(
    "Nerogar/OneTrainer#558", "kohya-ss/sd-scripts#1653",
    right="a warm-up given as a share of the run is refused",
    hit="Cosine(warmup=0.1) ran without any warm-up, unsaid",
)  # fmt: skip
@pytest.mark.parametrize("kind", [Cosine, Linear, Constant, WSD, Noam])
def test_a_warmup_is_a_number_of_steps(kind):
    for wrong in (0.1, 2.5, -1):
        with pytest.raises(ConfigError, match=r"schedule\.warmup=.*whole number of steps"):
            unchecked(kind(), warmup=wrong)(BASE)
    for name in ("steps", "batch_size", "accumulation", "log_every", "eval_every"):  # as counts are
        with pytest.raises(ConfigError, match=f"{name}=2.0: must be a whole number, such as 2"):
            unchecked(BASE, **{name: 2.0}).__post_init__()


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/torchtitan#1261", "pytorch/torchtitan#1010",
    right="a plateau schedule that decays for 0 of the run does not decay, and divides by nothing",
    hit="WSD(decay=0) had rate 0 at the last step",
)  # fmt: skip
def test_a_decay_of_no_length():
    np.testing.assert_array_equal(rates(WSD(warmup=2, decay=0.0), 6), [0.5, 1, 1, 1, 1, 1])
    assert np.isfinite(rates(WSD(decay=1e-9), 5)).all()


@pytest.mark.report(
    "pytorch/torchtitan#1284",
    right=(
        "warm-up rises by 1 / w a step and reaches the peak; decay falls in equal steps to `final`"
    ),
)
def test_plateau_and_decay_have_their_lengths():
    found = rates(WSD(warmup=2, decay=0.4, final=0.2), 10)
    np.testing.assert_allclose(found, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2], atol=1e-6)


@pytest.mark.report(
    "meta-pytorch/torchtune#2010", "deepspeedai/DeepSpeed#5287",
    right="the first step trains, and the warm-up rises at every step",
)  # fmt: skip
@pytest.mark.parametrize("kind", [Cosine, Linear, Constant, WSD, Noam])
def test_the_first_step_trains(kind):
    for warmup in (0, 1, 4):
        found = rates(kind(warmup=warmup), 12)
        assert found[0] > 0 and (np.diff(found[: max(warmup, 1)]) > 0).all()
        assert np.argmax(found) == max(warmup, 1) - 1


@pytest.mark.thorough
@pytest.mark.report(
    "mlc-ai/pith-train#55",
    right="without a warm-up the run starts at the peak, not at the least rate",
)  # fmt: skip
def test_no_warmup_starts_at_the_peak():
    for kind in (Cosine, Linear, Constant, WSD):
        assert rates(kind(warmup=0), 9)[0] == 1
    assert rates(Cosine(), 1)[0] == 1  # a run of one step


@pytest.mark.report(
    "InternLM/xtuner#1285", "PrimeIntellect-ai/prime-rl#968",
    right="a warm-up as long as the run is refused in one line; one that is one step shorter runs",
)  # fmt: skip
def test_a_warmup_as_long_as_the_run():
    for kind in (Cosine, Linear, Constant, WSD):
        for warmup in (6, 7):
            with pytest.raises(
                ConfigError, match=f"schedule.warmup={warmup}: must be below steps=6"
            ):
                rates(kind(warmup=warmup), 6)
    assert np.isfinite(rates(Cosine(warmup=5), 6)).all()


@pytest.mark.thorough
@pytest.mark.report(
    "PaddlePaddle/PaddleDetection#4611", "facebookresearch/ParlAI#4384",
    right="the decay begins at the peak, with the step after the warm-up, for peaks below 1 too",
)  # fmt: skip
def test_no_jump_between_warmup_and_decay():
    for kind in (Cosine, Linear):
        small = replace(BASE, steps=100, optimizer=AdamW(learning_rate=1e-5))
        found = np.asarray(jax.vmap(kind(warmup=10)(small))(jnp.arange(100))) / 1e-5
        np.testing.assert_allclose(found[9], 1, rtol=1e-6)
        assert (np.diff(found[9:]) < 0).all() and (np.abs(np.diff(found)) < 0.11).all()


@pytest.mark.report(
    "Nerogar/OneTrainer#1604", "Tencent-Hunyuan/UniRL#223",
    right="behind its last step a schedule stays at `final`; it never rises again",
)  # fmt: skip
def test_nothing_rises_behind_the_end():
    for kind in (Cosine, Linear, WSD):
        found = rates(kind(warmup=2, final=0.1), 10, beyond=30)
        np.testing.assert_allclose(found[9:], 0.1, atol=1e-6)


@pytest.mark.report(
    "mlfoundations/open_clip#413", "mosaicml/composer#1384",
    right="another number of steps is another run: no schedule is stretched in the middle of one",
)  # fmt: skip
def test_more_steps_are_another_run():
    assert config.fingerprint(BASE) != config.fingerprint(replace(BASE, steps=BASE.steps + 1))


@pytest.mark.report(
    "ooples/AiDotNet.Tensors#349",
    right="rates of very long runs are those of float64 to 1e-6, also beyond 2^24 steps",
)  # fmt: skip
def test_rates_far_out():
    steps = 40_000_000
    rate = Cosine(warmup=2000, final=0.0)(replace(BASE, steps=steps))
    for step in (1, 1999, 2**24 + 1, steps // 2, steps - 1):
        done = np.clip((step - 1999) / (steps - 2000), 0, 1)
        expected = min((step + 1) / 2000, 1) * (1 + np.cos(np.pi * done)) / 2
        assert abs(float(rate(step)) - expected) < 1e-6
    assert float(Noam(warmup=4000)(BASE)(2**31 - 2)) == pytest.approx(
        64**-0.5 * (2**31 - 1) ** -0.5, rel=1e-6
    )


@pytest.mark.report(
    "vllm-project/speculators#900",
    "facebookresearch/deit#145",
    "HomebrewML/HeavyBall#29",
    right=(
        "a rate is a function of the step alone: a resumed run has that of the next step, and no "
        "step has rate 0"
    ),
)
def test_a_rate_is_a_function_of_the_step_alone():
    experiment = replace(BASE, schedule=Cosine(warmup=4), steps=12)
    whole, resumed = (experiment.schedule(experiment) for _ in range(2))
    first = [float(whole(step)) for step in range(12)]
    assert first[5:] == [float(resumed(step)) for step in range(5, 12)]
    assert min(first) > 0
    assert first.index(max(first)) == 3
