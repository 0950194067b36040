"""What a step costs: FLOPs and MFU, memory of states and evaluation, and how a lack of memory is
recognised."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxformer import models, params, sharding
from jaxformer.data.sources import Text
from jaxformer.models import ModelConfig, cost, presets
from jaxformer.models.adaptation import Lora
from jaxformer.models.mixture import Mixture
from jaxformer.parallel.mesh import AXES
from jaxformer.tools.planning import out_of_memory, search
from jaxformer.training import optimizers
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import trained_weights

STACK = ModelConfig(
    vocab_size=100, num_layers=3, d_model=16, num_heads=2, context_length=8, use_bias=False
)
BASE = Experiment("any", STACK, Text("nowhere.txt"))


def products(model):
    return {path: size * share for path, (size, share) in cost.products(model).items()}


def flops(experiment, length=0):
    return cost.training_flops(experiment.model, length, trained=trained_weights(experiment))


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA-NeMo/Automodel#786",
    "MrYxJ/calculate-flops.pytorch#30",
    right="a frozen weight counts 4 FLOPs a token: no gradient of it is computed",
    hit="MFU of LoRA runs counted 6 for each",
)
def test_lora_counts_what_is_computed():
    lora = replace(BASE, adaptation=Lora(), initial=lambda spec, key: params.init(spec, key))
    adapted = {path for path in products(STACK) if "query" in path or "value" in path}
    expected = sum((6 if path in adapted else 4) * size for path, size in products(STACK).items())
    assert len(adapted) == 2 and flops(lora) == expected < flops(BASE)
    attention = 12 * 3 * 16 * 8  # gradients pass through all layers
    assert flops(lora, 8) - flops(lora) == flops(BASE, 8) - flops(BASE) == attention


@pytest.mark.thorough
@pytest.mark.report(
    "ByteDance-Seed/VeOmni#983",
    right=(
        "where nothing trains below, no gradient passes: 2 FLOPs a weight, 4 L N H T of attention"
    ),
    hit="a run that trains its head alone had the MFU of one that trains all",
)
def test_a_head_alone_has_no_backward_pass_below():
    untied = replace(
        BASE, model=replace(STACK, tie_embeddings=False), frozen="^(embedding|layers)/"
    )
    head = {path for path in products(untied.model) if path.startswith("heads/")}
    expected = sum(
        (6 if path in head else 2) * size for path, size in products(untied.model).items()
    )
    assert head and flops(untied) == expected
    assert flops(untied, 8) - flops(untied) == 4 * 3 * 16 * 8
    # its table trains, so gradients pass through all layers
    tied = replace(BASE, frozen="^layers/")
    assert flops(tied) == sum(
        (4 if path.startswith("layers/") else 6) * size for path, size in products(STACK).items()
    )


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#678",
    "PrimeIntellect-ai/prime-rl#778",
    right="of experts those count that a token goes to",
)
def test_experts_that_a_token_does_not_meet_cost_nothing():
    of = lambda experts: cost.training_flops(
        replace(STACK, feedforward=Mixture(experts, 2, d_ff=32)), 0
    )
    assert of(64) - of(4) == 6 * 3 * 16 * (64 - 4)  # the router alone


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#4017", right="a shared expert counts with its own width"
)
def test_a_shared_expert_has_its_own_width():
    of = lambda shared: cost.training_flops(
        replace(STACK, feedforward=Mixture(4, 2, d_ff=32, shared=shared)), 0
    )
    assert of(48) - of(0) == 6 * 3 * 3 * 16 * 48


@pytest.mark.report(
    "pytorch/torchtitan#280",
    "huggingface/trl#5698",
    right="a table that is looked up costs nothing, one that is a head counts once",
)
def test_tables_count_as_products_alone():
    tied, untied = (
        cost.training_flops(replace(STACK, tie_embeddings=flag), 0) for flag in (True, False)
    )
    assert (
        tied == untied == 6 * (100 * 16 + params.count(models.spec(STACK)["layers"]) - 2 * 3 * 16)
    )


@pytest.mark.report(
    "pytorch/torchtitan#4366",
    "modular/modular#5557",
    right="attention has two products: 12 L N H T, by the widths of its heads",
)
def test_attention_counts_both_products():
    wide = replace(STACK, head_width=40)
    assert cost.training_flops(wide, 100) - cost.training_flops(wide, 0) == 12 * 3 * 2 * 40 * 100


@pytest.mark.report(
    "awslabs/sockeye#897",
    "jax-ml/jax#17217",
    right="a lack of memory is recognised under the names of CUDA's libraries, too",
    hit="CUDNN_STATUS_ALLOC_FAILED and the like ended with a traceback, without advice",
)
@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5520758552 bytes.",
        (
            "INTERNAL: Failed to allocate 126257359472 bytes for new constant: "
            "CUDA_ERROR_OUT_OF_MEMORY: out of memory"
        ),
        "INTERNAL: cublas error: CUBLAS_STATUS_ALLOC_FAILED",
        "FAILED_PRECONDITION: DNN library initialization failed. CUDNN_STATUS_ALLOC_FAILED",
        (
            "INTERNAL: NCCL operation ncclCommInitRank failed: unhandled cuda error. Last NCCL "
            "warning(error) 'out of memory'."
        ),
    ],
)
def test_a_lack_of_memory_has_many_names(text):
    assert out_of_memory.is_out_of_memory(jax.errors.JaxRuntimeError(text))
    assert not out_of_memory.is_out_of_memory(ValueError(text))


@pytest.mark.report(
    "grpc/grpc-java#2906",
    "Kubedex/exporter#6",
    right="a message that is too long is no lack of the device's memory",
    hit="RESOURCE_EXHAUSTED of the network got the advice to recompute layers",
)
def test_a_message_too_long_is_no_lack_of_memory():
    text = "RESOURCE_EXHAUSTED: Received message larger than max (5308389 vs. 4194304)"
    assert not out_of_memory.is_out_of_memory(jax.errors.JaxRuntimeError(text))
    assert not out_of_memory.is_out_of_memory(
        jax.errors.JaxRuntimeError("INTERNAL: NCCL: remote process exited")
    )


@pytest.mark.report(
    "meta-pytorch/torchrec#685",
    "rohitg00/ai-engineering-from-scratch#17",
    right=(
        "the memory of an optimizer is that of the one that is used, and frozen parameters have "
        "none"
    ),
)
def test_the_optimizers_memory_is_that_of_the_one_in_use():
    moments = lambda optimizer, frozen=None: search._moments(optimizer, STACK, frozen)
    assert moments(optimizers.AdamW()) == pytest.approx(2, abs=1e-3)
    assert moments(optimizers.Lion()) == pytest.approx(1, abs=1e-3)
    assert moments(optimizers.AdamW(), "^layers/") < 1.2


@pytest.mark.report(
    "NVIDIA-NeMo/Megatron-Bridge#3910",
    right="a device of `expert` holds its share of the experts and all of what is not split",
)
def test_experts_are_shared_out_in_memory():
    model = replace(STACK, feedforward=Mixture(8, 2, d_ff=32))
    mesh = AbstractMesh(tuple(4 if axis == "expert" else 1 for axis in AXES), AXES)
    sizes, whole = sharding.shard_bytes(models.spec(model), mesh), params.paths(models.spec(model))
    for path, leaf in whole.items():
        assert sizes[path] == 4 * params.count(leaf) // (4 if "expert" in leaf.axes else 1), path
    assert sizes["layers/feedforward/up/kernel"] * 4 == 4 * params.count(
        whole["layers/feedforward/up/kernel"]
    )


@pytest.mark.report(
    "OpenAgentsInc/psionic#1103",
    listed="third 05",
    right=(
        "a fit of runs that do not determine it is refused, and so is a best size outside of them"
    ),
    hit=(
        "a best size ten times below the smallest run, and exponents of runs of one size, with "
        "intervals of width 0"
    ),
)
def test_laws_need_runs_that_determine_them():
    from jaxformer.errors import ConfigError
    from jaxformer.tools.analysis import scaling

    N, true = np.geomspace(1e5, 1e6, 6), scaling.HOFFMANN
    with pytest.raises(ConfigError, match="cannot be told apart"):
        scaling.fit(true.loss(N, 20 * N), N, 20 * N)
    with pytest.raises(ConfigError, match="outside of them"):
        scaling.isoflop([1e15] * 3, [1e7, 2e7, 4e7], 2 + 0.02 * np.log(np.array([10, 20, 40])) ** 2)


@pytest.mark.report(
    "pytorch/torchtitan#2577",
    "huggingface/transformers#48307",
    listed="first 27",
    right=(
        "more devices of `tensor` than key heads are one line that names the heads and sizes "
        "that do"
    ),
)
def test_more_devices_than_key_heads_are_one_line(capsys):
    from jaxformer import cli

    words = [
        "show",
        "preset:qwen2_05b",
        "--sharding",
        "--devices",
        "4",
        "--mesh.tensor=4",
        "--mesh.data=1",
        "--mesh.fsdp=1",
    ]
    assert presets.qwen2_05b.kv_heads == 2 and cli.main(words) == 2
    error = capsys.readouterr().err
    assert (
        "kv_heads=2 does not divide among mesh.tensor=4; sizes that do: 4" in error
        and error.count("\n") == 1
    )


@pytest.mark.report(
    "vllm-project/vllm#440",
    listed="second 39",
    right="a size that a mesh does not divide is refused with sizes that do",
)
@pytest.mark.parametrize(
    "model, axis, said",
    [
        (replace(STACK, vocab_size=50257), {"tensor": 4}, "vocab=50257 .* 50256 or 50260"),
        (replace(STACK, feedforward=Mixture(3, 2)), {"expert": 2}, "expert=3 .* 2 or 4"),
        (replace(STACK, num_layers=5), {"stage": 2}, "layers=5 .* 4 or 6"),
    ],
    ids=str,
)
def test_sizes_that_a_mesh_does_not_divide(model, axis, said):
    from jaxformer.errors import ConfigError

    with pytest.raises(ConfigError, match=said):
        sharding.partition_specs(
            models.spec(model), AbstractMesh(tuple(axis.get(name, 1) for name in AXES), AXES)
        )


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#5335",
    "mosaicml/composer#1417",
    listed="second 19",
    right="a plan counts the memory of an evaluation, too",
    hit="it said that a run fits which ended at its first evaluation",
)
@pytest.mark.thorough
def test_a_plan_counts_the_memory_of_an_evaluation():
    from jaxformer.parallel import Mesh
    from jaxformer.tools.planning import compile as planned

    found = []
    for rows in (8, 64):
        model = replace(STACK, num_layers=1, vocab_size=512, context_length=64)
        traced = planned.trace(
            replace(BASE, model=model, batch_size=rows, mesh=Mesh(data=1)), jax.devices()[:1]
        )
        found.append(
            planned.evaluation_bytes(traced, jax.devices()[:1], fast=True) - traced.argument_bytes
        )
    stream = 64 * 16 * 4  # of a row: what a layer adds to
    assert found[0] >= 8 * stream and found[1] - found[0] >= 56 * stream
