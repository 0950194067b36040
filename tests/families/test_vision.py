"""Vision families and towers: published sizes, parts of whole models, what is special in each."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.families import Tokens
from jaxformer.models import Learned
from jaxformer.zoo import masked_autoencoder
from tests import golden, witnesses
from tests.families import golden_runs as runs
from tests.witnesses import vision_counts

COUNTS = witnesses.load("vision_counts")


@pytest.mark.parametrize("name", sorted(vision_counts.settings()))
def test_published_sizes_are_read(name):
    model_type, architecture, settings = vision_counts.settings()[name]
    c = settings | {"architectures": [architecture], "num_labels": settings.get("num_labels", 2)}
    defaults = dict(mlp_ratio=4, num_channels=3)
    config = families.FAMILIES[model_type].read(defaults | c, ())
    assert params.count(params.abstract(models.spec(config))) == COUNTS[name]
    if name in zoo.PRESETS:
        assert not families.differences(config, zoo.PRESETS[name])


def whole(folder, kind: str, vision: str, text: str, **entries):
    """A folder of two towers: those of two golden models."""
    arrays, config = {}, {"model_type": kind, "architectures": [f"{kind}Model"]} | entries
    for entry, name in (("vision_config", vision), ("text_config", text)):
        prefix = f"{entry.removesuffix('_config')}_model."
        for key, array in runs.tensors(golden.folder(name)).items():
            inside = "projection" in key or key.startswith(prefix)
            arrays[key if inside else prefix + key] = array
        config[entry] = golden.config(name)
    arrays["logit_scale"] = np.float32(2.5).reshape(())
    return runs.write(folder, config, arrays)


TOWERS = {
    "clip": ("clip_vision_projection", "clip_text_projection", dict(projection_dim=7)),
    "siglip": ("siglip_vision", "siglip_text", {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TOWERS)
def test_a_whole_model_is_read_by_parts(kind, tmp_path):
    vision, text, entries = TOWERS[kind]
    folder = whole(tmp_path / "whole", kind, vision, text, **entries)
    for part, name in (("vision", vision), ("text", text)):
        tower, alone = families.load(folder, part=part), families.load(golden.folder(name))
        assert tower.config == alone.config == families.read_config(folder, part=part)
        jax.tree.map(np.testing.assert_array_equal, tower.params, alone.params)
        families.save(tmp_path / part, tower)
        assert families.load(tmp_path / part).config == tower.config
        assert families.HuggingFace(str(folder), part).differences(tower.config) == []
    for options, said in (
        ({}, "load.folder, part='vision'. or load.folder, part='text'."),
        ({"part": "audio"}, "part='audio' of a '.*expected 'vision', 'text'"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            families.load(folder, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="part='text' of a 'vit': it has no parts"):
        families.load(golden.folder("vit"), part="text")


def test_older_settings_of_a_part_go_before_the_others(tmp_path):
    """As in transformers, which then ignores `text_config`."""
    vision, text, entries = TOWERS["clip"]
    folder = whole(tmp_path / "whole", "clip", vision, text, **entries)
    config = json.loads((folder / "config.json").read_text())
    config["text_config_dict"] = config["text_config"] | {"hidden_act": "gelu", "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    tower = families.read_config(folder, part="text")
    assert tower.feedforward == "gelu" and tower.heads[0].end == 3
    del config["text_config_dict"], config["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="text_config=None"):
        families.read_config(folder, part="text")


def test_a_folder_of_text_and_images_says_what_can_be_read(tmp_path):
    settings = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    folder = runs.write(tmp_path / "llava", settings, {"a": np.zeros(2, np.float32)})
    with pytest.raises(ConfigError, match="'llava' is not supported; its text_config is a 'llama'"):
        families.load(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dinov2", "clip_vision", "siglip_vision"])
def test_pixels_that_fill_no_patch_are_not_read(name):
    checkpoint = families.load(golden.folder(name))
    assert checkpoint.config.embedding.unread == (2, 2)
    images = golden.witness(name)["inputs/pixel_values"].transpose(0, 2, 3, 1)
    changed = images.copy()
    changed[:, 8:], changed[:, :, 8:] = 1e3, -1e3
    run = jax.jit(lambda x: models.apply(checkpoint.config, checkpoint.params, x).hidden)
    np.testing.assert_array_equal(run(images), run(changed))


def test_dinov2_refuses_what_its_file_cannot_say():
    c = golden.config("dinov2")
    read = families.FAMILIES["dinov2"].read
    with pytest.raises(ConfigError, match=r"image_size=\[8, 12\]"):
        read(c | {"image_size": [8, 12]}, ())
    config = read(c, ())
    with pytest.raises(ConfigError, match="d_ff=37"):
        families.FAMILIES["dinov2"].write(replace(config, d_ff=37))
    plain = zoo.dinov2.dinov2_small
    assert families.FAMILIES["dinov2"].write(plain)["layerscale_value"] == 1.0


def test_the_end_token_of_clip_is_that_of_its_head(tmp_path):
    checkpoint = families.load(golden.folder("clip_text"))
    assert checkpoint.config.heads[0].end == 20 and checkpoint.tokens.eos == (20,)
    with pytest.raises(ConfigError, match=r"tokens.eos=\(3,\)"):
        families.save(tmp_path / "out", replace(checkpoint, tokens=Tokens(eos=(3,))))
    older = families.load(golden.folder("clip_text_projection")).config
    assert older.heads[0].end is None
    written = families.FAMILIES["clip_text_model"].write(older)
    assert written["eos_token_id"] == 2
    for end in (None, [1, 2]):
        with pytest.raises(ConfigError, match="eos_token_id="):
            families.FAMILIES["clip_text_model"].read(written | {"eos_token_id": end}, ())


@pytest.mark.thorough
def test_names_of_published_masked_autoencoders(tmp_path):
    """transformers 5 writes `decoder_encoder.layer` where the published files have
    `decoder_layers`."""

    def published(arrays):
        return {
            name.replace("decoder_encoder.layer.", "decoder_layers."): array
            for name, array in arrays.items()
        }

    checkpoint = families.load(golden.folder("vit_mae"))
    older = families.load(runs.altered(tmp_path, "vit_mae", published))
    jax.tree.map(np.testing.assert_array_equal, older.params, checkpoint.params)
    families.save(tmp_path / "saved", checkpoint)
    theirs = published(runs.tensors(golden.folder("vit_mae")))
    assert runs.tensors(tmp_path / "saved").keys() == theirs.keys()


@pytest.mark.thorough
def test_with_all_patches_in_their_order_it_is_a_vit():
    checkpoint = families.load(golden.folder("vit_mae_encoder"))
    config, tree = checkpoint.config, checkpoint.params
    everything = replace(config, embedding=replace(config.embedding, ratio=0.0), context_length=10)
    patches = config.embedding.patches
    vit = replace(config, embedding=patches, context_length=patches.length, positions=Learned())
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 12, 3)), jnp.float32)
    noise = jnp.broadcast_to(jnp.arange(9.0)[None], (2, 9))
    ours = models.apply(everything, tree, images, inputs={"noise": noise}).hidden
    np.testing.assert_allclose(ours, models.apply(vit, tree, images).hidden, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="noise"):
        models.apply(everything, tree, images)
    assert [path for path in params.variables(models.spec(config))] == ["embedding/positions"]


def test_the_fixed_positions_of_a_masked_autoencoder():
    table = masked_autoencoder.sines((2, 3), 8)
    assert table.shape == (7, 8) and not table[0].any()
    for line in range(2):
        for column in range(3):
            row = table[1 + 3 * line + column]
            for k in range(2):
                angles = [number * 10_000.0 ** (-k / 2) for number in (column, line)]
                expected = [f(angle) for angle in angles for f in (np.sin, np.cos)]
                np.testing.assert_allclose(row[k::2], expected, atol=1e-12)
    with pytest.raises(ConfigError, match="multiple of four"):
        masked_autoencoder.sines((2, 3), 6)


def test_a_teachers_heads_beside_the_class_of_a_file_are_left_out(caplog):
    bare = families.load(golden.folder("deit_teacher"), heads=())
    assert bare.config.heads == () and "heads" not in bare.params
    assert "distillation_classifier" in caplog.text
    assert bare.config.embedding.extra_tokens == 1


BARE = (
    "clip_text",
    "clip_text_projection",
    "clip_vision",
    "dinov2",
    "dinov2_swiglu",
    "siglip_text",
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BARE)
def test_a_model_without_heads_is_saved(name, tmp_path):
    """It reads back as the bare class; a head without tensors is there again."""
    bare = families.load(golden.folder(name), heads=())
    families.save(tmp_path / "bare", bare)
    again = families.load(tmp_path / "bare")
    assert "heads" not in again.params
    jax.tree.map(np.testing.assert_array_equal, again.params, bare.params)
    once_more = families.load(tmp_path / "bare", heads=())
    assert once_more.config == bare.config and once_more.tokens == bare.tokens
    families.save(tmp_path / "new", replace(bare, tokens=Tokens()))
    assert families.load(tmp_path / "new", heads=()).config == bare.config


def test_stochastic_depth_is_read_and_changes_no_answer(tmp_path):
    config = golden.config("dinov2") | {"drop_path_rate": 0.25}
    folder = runs.write(tmp_path / "one", config, runs.tensors(golden.folder("dinov2")))
    checkpoint, plain = families.load(folder), families.load(golden.folder("dinov2"))
    assert checkpoint.config.block.drop_path_rate == 0.25
    assert not families.differences(checkpoint.config, plain.config)
    families.save(tmp_path / "two", checkpoint)
    assert json.loads((tmp_path / "two/config.json").read_text())["drop_path_rate"] == 0.25
