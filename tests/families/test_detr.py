"""DETR: folders whose backbone is timm's, published settings, and what is refused."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import families, zoo
from jaxformer.errors import ConfigError
from jaxformer.families import detr
from jaxformer.families.tensors import plan
from jaxformer.families.tied_head import names_in_file
from jaxformer.zoo import resnet
from tests import golden
from tests.families import golden_runs as runs

FAMILY = families.FAMILIES["detr"]
# what facebook/detr-resnet-50 says, but for the loss and the names of its 91 classes
PUBLISHED = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["DetrForObjectDetection"],
    "attention_dropout": 0.0,
    "auxiliary_loss": False,
    "backbone": "resnet50",
    "classifier_dropout": 0.0,
    "d_model": 256,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "dilation": False,
    "dropout": 0.1,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "id2label": {str(i): "N/A" for i in range(91)},
    "init_std": 0.02,
    "init_xavier_std": 1.0,
    "is_encoder_decoder": True,
    "label2id": {"N/A": 83},
    "max_position_embeddings": 1024,
    "model_type": "detr",
    "num_channels": 3,
    "num_hidden_layers": 6,
    "num_queries": 100,
    "position_embedding_type": "sine",
    "scale_embedding": False,
    "use_timm_backbone": True,
}


class Names:
    """A file of which only the names are asked."""

    def __init__(self, names):
        self.names = names


def of_torchvision(depths, convolutions: int) -> list[str]:
    """The names of torchvision's ResNet, which timm has too, without the classifier."""
    norm = ("weight", "bias", "running_mean", "running_var")
    names = ["conv1.weight", *(f"bn1.{one}" for one in norm)]
    for stage, depth in enumerate(depths, 1):
        for block in range(depth):
            inside = f"layer{stage}.{block}"
            for i in range(1, convolutions + 1):
                names += [f"{inside}.conv{i}.weight", *(f"{inside}.bn{i}.{one}" for one in norm)]
            if block == 0 and (stage > 1 or convolutions == 3):
                names += [f"{inside}.downsample.0.weight"]
                names += [f"{inside}.downsample.1.{one}" for one in norm]
    return names


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", detr.TIMM)
def test_names_of_timm_are_ours_one_by_one(name):
    backbone = detr.TIMM[name]
    convolutions = 2 if backbone.block is resnet.basic else 3
    prefix = "model.backbone.conv_encoder.model."
    theirs = [prefix + each for each in of_torchvision(backbone.depths, convolutions)]
    config = zoo.detr.detr_r50
    config = replace(config, encoder=replace(config.encoder, embedding=zoo.FeatureMap(backbone)))
    ours = [each for each in plan(FAMILY, config) if each.startswith(prefix)]
    found = names_in_file(Names(theirs), FAMILY, ours)
    assert sorted(found) == sorted(ours) and sorted(found.values()) == sorted(theirs)


def as_timm(arrays: dict) -> dict:
    """The tensors under timm's names."""
    renamed = {}
    for name, array in arrays.items():
        name = name.replace("embedder.embedder.convolution", "conv1")
        name = name.replace("embedder.embedder.normalization", "bn1")
        inside = r"encoder\.stages\.(\d)\.layers\.(\d+)\."
        if "shortcut" in name:
            name = re.sub(r"shortcut\.convolution", "downsample.0", name)
            name = re.sub(r"shortcut\.normalization", "downsample.1", name)
        else:
            for theirs, kind in (("convolution", "conv"), ("normalization", "bn")):
                number = lambda match, kind=kind: f"{kind}{int(match[1]) + 1}"
                name = re.sub(rf"layer\.(\d)\.{theirs}", number, name)
        name = re.sub(inside, lambda match: f"layer{int(match[1]) + 1}.{match[2]}.", name)
        renamed[name] = array
        if name.endswith("running_var"):
            count = name.replace("running_var", "num_batches_tracked")
            renamed[count] = np.zeros((), np.int64)
    return renamed


TINY = {
    "detr": (resnet.bottleneck, 1),
    "detr_basic": (resnet.basic, 2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("older", [True, False])
def test_a_folder_of_timm_is_the_same_model(name, older, tmp_path, monkeypatch):
    block, stride = TINY[name]
    tiny = resnet.ResNet((2, 1), (8, 12), block, stem=6, first_stride=stride)
    monkeypatch.setitem(detr.TIMM, "resnet_tiny", tiny)
    if older:
        entries = dict(backbone_config=..., backbone="resnet_tiny", use_timm_backbone=True)
        entries["backbone_kwargs"] = {"in_chans": 3, "out_indices": [1, 2, 3, 4]}
    else:
        own = dict(model_type="timm_backbone", backbone="resnet_tiny.a1_in1k", num_channels=3)
        entries = dict(backbone_config=own | dict(features_only=True, out_indices=[1, 2, 3, 4]))
    folder = runs.altered(tmp_path, name, as_timm, **entries)
    names = runs.tensors(folder)
    assert "model.backbone.conv_encoder.model.layer2.0.downsample.1.running_mean" in names
    found, expected = families.load(folder), families.load(golden.folder(name))
    assert found.config == expected.config and found.labels == expected.labels
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    families.save(tmp_path / "saved", found)
    again = families.load(tmp_path / "saved")
    assert again.config == found.config
    assert runs.tensors(tmp_path / "saved").keys() == runs.tensors(golden.folder(name)).keys()


def test_published_settings_are_those_of_the_preset():
    for name, preset in (("resnet50", "detr_r50"), ("resnet101", "detr_r101")):
        found = FAMILY.read(PUBLISHED | {"backbone": name}, ())
        assert not families.differences(found, zoo.PRESETS[preset])
        assert found == FAMILY.read(FAMILY.write(found), ())


def test_the_backbone_that_transformers_takes_if_none_is_named():
    c = PUBLISHED | {"use_timm_backbone": False, "backbone": None}
    assert FAMILY.read(c, ()) == FAMILY.read(PUBLISHED, ())
    # what a backbone of transformers' own ignores
    assert FAMILY.read(c | {"dilation": True}, ()) == FAMILY.read(PUBLISHED, ())


TIMM = {"model_type": "timm_backbone", "backbone": "resnet50"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dilation": True}, "dilation=True"),
        ({"auxiliary_loss": True}, "auxiliary_loss=True"),
        ({"position_embedding_type": "learned"}, "position_embedding_type='learned'"),
        ({"d_model": 264 + 2, "encoder_attention_heads": 2}, "d_model=266"),
        ({"backbone": "resnet50d"}, "backbone='resnet50d': expected one of resnet18"),
        ({"backbone": "x/y", "use_timm_backbone": False}, "backbone='x/y'"),
        ({"backbone_kwargs": {"output_stride": 16}}, "output_stride=16"),
        ({"backbone_kwargs": {"out_indices": [1, 2]}}, r"out_indices=\[1, 2\]"),
        ({"backbone_config": TIMM | {"output_stride": 16}}, "output_stride=16"),
        ({"backbone_config": {"model_type": "swin"}}, "model_type='swin'"),
        ({"backbone_config": {"model_type": "resnet", "depths": [1, 2]}}, r"depths=\(1, 2\)"),
        ({"backbone_config": {"model_type": "resnet", "layer_type": "wide"}}, "layer_type='wide'"),
        (
            {"backbone_config": {"model_type": "resnet", "out_features": ["stage3"]}},
            r"out_features=\['stage3'\]: only the last stage is read, 'stage4'",
        ),
        ({"architectures": ["DetrForSegmentation"]}, "'DetrForSegmentation'"),
    ],
)
def test_other_settings_are_refused_by_name(change, said):
    with pytest.raises(ConfigError, match=said) as caught:
        FAMILY.read(PUBLISHED | change, ())
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_a_backbone_of_ones_own_is_not_written():
    config = zoo.detr.detr_r50
    backbone = resnet.ResNet(first_stride=3)
    other = replace(config, encoder=replace(config.encoder, embedding=zoo.FeatureMap(backbone)))
    with pytest.raises(ConfigError, match="model_type='detr': cannot express"):
        families.known.write_settings(other, "detr", families.FAMILIES)


@pytest.mark.thorough
def test_labels_are_those_of_the_file(tmp_path):
    names = {str(i): name for i, name in enumerate(("cat", "dog", "N/A", "N/A"))}
    folder = runs.altered(tmp_path, "detr", id2label=names)
    checkpoint = families.load(folder)
    assert checkpoint.labels == ("cat", "dog", "N/A", "N/A")
    assert checkpoint.config.decoder.heads[0].classes == 4
    families.save(tmp_path / "saved", checkpoint)
    assert families.load(tmp_path / "saved").labels == checkpoint.labels
