"""Optimizers and weight decay: what users of others reported, tried here."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from jaxformer import config, models, params, zoo
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import Classification, Mixture, ModelConfig, Patches, TokenClassification
from jaxformer.models.adaptation import Lora
from jaxformer.models.mup import MuP
from jaxformer.params import Spec
from jaxformer.runs.run_folder import RunFolder, as_it_began, differences
from jaxformer.training import Adafactor, Adam, AdamW, Experiment, Lion, Muon, optimizers
from jaxformer.training.step import clip

D = 8
TINY = ModelConfig(vocab_size=11, num_layers=2, d_model=D, num_heads=2, context_length=6)
DECAYING = (AdamW(), Lion(), Adafactor(weight_decay=0.1), Muon(weight_decay=0.1))


def matrix(*shape, axes=("embed", "mlp")):
    """A declared matrix that sums over its first axis but for layers."""
    return Spec(shape, axes, jax.nn.initializers.ones, ("embed",))


def one_update(optimizer, spec, gradient, value=1.0, frozen=None):
    """Updates of rate 1 from the first step, by path; each gradient is one number or an array."""
    tree = jax.tree.map(lambda leaf: jnp.full(leaf.shape, value), spec)
    transform = optimizers.build(optimizer, spec, frozen)
    gradients = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(gradient), leaf.shape), spec)
    return params.paths(transform.update(gradients, transform.init(tree), tree)[0])


@pytest.mark.report(
    "karpathy/minGPT#23",
    "Lightning-AI/lit-llama#254",
    "facebookresearch/deit#60",
    listed="second 20",
    right="only matrices of products and the table of tokens decay by default",
    hit="T5's relative biases, class tokens, position tables and mixing weights decayed",
)
def test_only_matrices_and_tokens_decay():
    cases = [zoo.PRESETS[name] for name in ("gpt2_small", "bert_base", "t5_small", "vit_base")]
    cases += [
        TINY,
        *(
            ModelConfig(**{**vars(TINY), "mixer": mixer})
            for mixer in (zoo.differential.differential,)
        ),
    ]
    for model in cases:
        spec = models.spec(model)
        decayed = params.paths(optimizers.decayed(AdamW(), spec))
        for path, leaf in params.paths(spec).items():
            assert decayed[path] == (bool(leaf.contracts) or path.endswith("embedding/tokens")), (
                path
            )
    # a module of Flax declares no contraction
    assert optimizers.is_matrix(
        "layers/mixer/kernel", Spec((2, 3), (None, None), jax.nn.initializers.ones)
    )


@pytest.mark.report(
    "karpathy/minGPT#23", listed="second 20",
    right="a run goes on with the decay list and the average with which it began",
)  # fmt: skip
def test_a_run_goes_on_with_the_defaults_that_it_began_with(tmp_path):
    now = Experiment(name="old", model=TINY, data=Copy(vocab_size=8, length=2), ema_decay=0.9)
    described = config.describe(now)
    del described["ema_warmup"]  # what runs were before these defaults
    described["optimizer"]["not_decayed"] = "(bias|scale)$"
    folder = RunFolder(epath.Path(tmp_path))
    folder.config.write_text(json.dumps(described))
    then = as_it_began(folder, now)
    assert (then.ema_warmup, then.optimizer.not_decayed) == (1, "(bias|scale)$")
    assert differences(folder.description(), then) == []
    assert differences(folder.description(), now)
    folder.config.write_text(json.dumps(config.describe(now)))
    assert as_it_began(folder, now) == now
    assert as_it_began(RunFolder(epath.Path(tmp_path / "none")), now) == now


@pytest.mark.report(
    "pytorch/pytorch#5147", "ml-explore/mlx#4310", "tinygrad/tinygrad#15725",
    right="a decay of moments of 1, or none in [0, 1), is refused",
    hit="AdamW(b2=1.0) was accepted; its first step divides by 1 - b2^1 = 0",
)  # fmt: skip
@pytest.mark.parametrize("kind", [Adam, AdamW, Lion, Muon])
def test_decays_of_moments_are_in_range(kind):
    for name in ("b1", "b2", *(["momentum"] if kind is Muon else [])):
        for wrong in (1.0, -0.1, 1.5, float("nan")):
            with pytest.raises(ConfigError, match=rf"optimizer\.{name}=.*\[0, 1\)"):
                kind(**{name: wrong})
        assert getattr(kind(**{name: 0.0}), name) == 0


@pytest.mark.report(
    "ml-explore/mlx#4361",
    right="an eps that is not positive, or a decay that is no finite number, is refused",
    hit="eps=0 gave 0 / 0 for a row without a gradient; weight_decay=nan passed `< 0`",
)  # fmt: skip
def test_eps_and_decay_are_checked():
    for wrong in (0.0, -1e-4, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"optimizer\.eps"):
            AdamW(eps=wrong)
    with pytest.raises(ConfigError, match="clipping_threshold"):
        Adafactor(clipping_threshold=0.0)
    for optimizer in DECAYING:
        for wrong in (float("nan"), float("inf"), -1.0):
            with pytest.raises(ConfigError, match="weight_decay"):
                type(optimizer)(weight_decay=wrong)


@pytest.mark.report(
    "KellerJordan/Muon#13", "kohya-ss/musubi-tuner#386", "deepspeedai/DeepSpeed#7641",
    right="Muon has the hidden matrices; the first and the last layer have AdamW",
    hit="heads of classes and the patches of images went to Muon",
)  # fmt: skip
def test_muon_takes_hidden_matrices_only():
    patches = Patches(image=(4, 4), patch=(2, 2), channels=1, class_token=True)
    image = ModelConfig(
        vocab_size=0,
        num_layers=1,
        d_model=D,
        num_heads=2,
        context_length=patches.length,
        embedding=patches,
        masks=(full(),),
        heads=(Classification(3), TokenClassification(2)),
    )
    for model in (image, TINY, zoo.PRESETS["bert_base"]):
        for path, route in optimizers.routes(Muon(), models.spec(model)).items():
            hidden = path.endswith("kernel") and (
                "layers/" in path or "pooler" in path or "transform" in path
            )
            assert route.startswith("Muon" if hidden else "AdamW"), (path, route)


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#4843",
    right="each layer's and each expert's matrix is orthogonalised by itself",
)  # fmt: skip
def test_muon_sees_each_expert_as_a_matrix():
    spec = models.spec(
        ModelConfig(**{**vars(TINY), "feedforward": Mixture(experts=3, top_k=1, normalise=False)})
    )
    leaf = params.paths(spec)["layers/feedforward/up/kernel"]
    assert leaf.axes[:2] == ("layers", "expert")
    dimensions = optimizers.muon_dimensions(leaf)
    assert (dimensions.reduction_axis, dimensions.output_axis) == ((2,), (3,))


@pytest.mark.thorough
@pytest.mark.report(
    "google-deepmind/optax#1249",
    right="the update of a matrix [in, out] has the factor sqrt(max(1, out / in))",
)  # fmt: skip
def test_muon_scales_by_outputs_over_inputs():
    draw = lambda *shape: jax.random.normal(jax.random.key(0), shape)
    norms = {}
    for inputs, outputs in ((4, 16), (16, 4)):
        gradient = draw(inputs, outputs)
        spec = {"kernel": matrix(inputs, outputs)}
        update = one_update(Muon(momentum=0.0), spec, gradient)["kernel"]
        norms[inputs] = float(jnp.linalg.norm(update, 2))
    # the iteration brings singular values near to one, within some 30 %
    assert 1.3 < norms[4] < 2.6 and 0.65 < norms[16] < 1.3


@pytest.mark.thorough
@pytest.mark.report(
    "kozistr/pytorch_optimizer#517",
    "bitsandbytes-foundation/bitsandbytes#1992",
    right=(
        "with gradients of 0 a step of rate 1 takes away weight_decay times a matrix, and "
        "nothing else"
    ),
)
@pytest.mark.parametrize("optimizer", DECAYING, ids=lambda o: type(o).__name__)
def test_decay_is_applied_and_decoupled(optimizer):
    spec = {"kernel": matrix(4, 4), "bias": Spec((4,), ("mlp",), jax.nn.initializers.ones)}
    updates = one_update(optimizer, spec, 0.0, value=2.0)
    np.testing.assert_allclose(updates["kernel"], -2.0 * optimizer.weight_decay, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0)


@pytest.mark.report(
    "bitsandbytes-foundation/bitsandbytes#1992",
    right="Lion's sign is that of the momentum alone; decay does not enter it",
)  # fmt: skip
def test_decay_does_not_turn_lions_sign():
    # a decay inside of the sign would win: 100 against 1e-3
    update = one_update(Lion(weight_decay=0.5), {"kernel": matrix(2, 2)}, -1e-3, value=100.0)[
        "kernel"
    ]
    np.testing.assert_allclose(update, 1.0 - 50.0)


@pytest.mark.thorough_after(1)
@pytest.mark.report(
    "ahrefs/ocannl#673", "OPTML-Group/Unlearn-Saliency#32", "KellerJordan/Muon#54",
    right="a frozen parameter has no decay, no momentum and no state",
)  # fmt: skip
@pytest.mark.parametrize("optimizer", DECAYING, ids=lambda o: type(o).__name__)
def test_frozen_parameters_do_not_decay(optimizer):
    spec = {"old": {"kernel": matrix(4, 4)}, "new": {"kernel": matrix(4, 4)}}
    updates = one_update(optimizer, spec, 1.0, frozen="^old/")
    np.testing.assert_array_equal(updates["old/kernel"], 0)
    assert (updates["new/kernel"] < 0).all()


@pytest.mark.report(
    "NVIDIA/Megatron-LM#3715",
    right="muP's rates are not applied on top of Muon's own scale: the pair is refused",
)  # fmt: skip
def test_mup_with_muon_is_refused():
    spec = models.spec(ModelConfig(**{**vars(TINY), "d_model": 16, "init_std": MuP(base_width=8)}))
    with pytest.raises(ConfigError, match="MuP"):
        optimizers.build(Muon(), spec)


@pytest.mark.report(
    "google-deepmind/optax#1752", "PaddlePaddle/Paddle#30777", "tensorflow/tensorflow#22048",
    right="gradients of 0 stay 0 when they are clipped",
)  # fmt: skip
def test_clipping_of_no_gradient():
    for largest in (1e-30, 1.0, float("inf"), None):
        clipped, norm = clip({"a": jnp.zeros(3)}, largest)
        assert float(norm) == 0
        np.testing.assert_array_equal(clipped["a"], 0)


@pytest.mark.report(
    "keras-team/keras-hub#2629",
    right="LoRA's factors and their moments are float32, also in bfloat16 runs",
)  # fmt: skip
def test_moments_are_float32():
    adapted = Lora(rank=2)(models.spec(TINY))
    state = jax.eval_shape(
        optimizers.build(AdamW(), adapted.spec, adapted.frozen).init, params.abstract(adapted.spec)
    )
    kinds = {
        leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert kinds == {jnp.dtype("float32")}


@pytest.mark.thorough
@pytest.mark.report(
    "google-deepmind/optax#424",
    right="the schedule's rate reaches every optimizer: twice the rate, twice the update",
)  # fmt: skip
def test_optimizers_have_rate_one():
    spec = {"kernel": matrix(2, 2)}
    for optimizer in (Adam, AdamW, Lion, Adafactor):
        few, many = (
            one_update(optimizer(learning_rate=rate), spec, 1.0)["kernel"] for rate in (1e-5, 1.0)
        )
        # the train step multiplies, and logs what it multiplied by
        np.testing.assert_array_equal(few, many)
    assert isinstance(optimizers.build(Adam(), spec), optax.GradientTransformation)
