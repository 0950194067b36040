"""Every parser of ours, fed with damaged input: a value, or the error that it documents; nothing
else, soon, in little memory.

`TARGETS` are used twice: by hypothesis in test_fuzz.py, and by atheris, which is led by the
branches that an input takes: `python tests/faults/fuzz.py SECONDS [TARGET ...]` (pip install
--group fuzz). What breaks a target is left as crash-TARGET-*.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))


@dataclass(frozen=True)
class Target:
    """A parser, and inputs that it accepts. `Damaged`, which `manifest` documents, counts as
    ConfigError does."""

    parse: Callable[[bytes], Any]
    seeds: tuple[bytes, ...]

    def __call__(self, data: bytes) -> None:
        from jaxformer.errors import ConfigError
        from jaxformer.runs.manifest import Damaged

        try:
            self.parse(data)
        except (ConfigError, Damaged) as error:
            assert "\n" not in str(error) and len(str(error)) < 500 + 2 * len(data), error


@functools.cache
def scratch() -> Path:
    import atexit

    path = Path(tempfile.mkdtemp(prefix="jaxformer-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def with_file(name: str, parse: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """A parser of files as one of bytes."""

    def parse_bytes(data: bytes) -> Any:
        path = scratch() / name
        path.write_bytes(data)
        return parse(path)

    return parse_bytes


def text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


@functools.cache
def experiment() -> Any:
    from jaxformer.data.sources import Text
    from jaxformer.models import ModelConfig
    from jaxformer.training import Experiment

    model = ModelConfig(vocab_size=256, num_layers=1, d_model=16, num_heads=2, context_length=16)
    return Experiment(name="tiny", model=model, data=Text(path="text.txt"))


@functools.cache
def names() -> dict[str, Any]:
    from jaxformer.runs.names import NAMES

    return {name: value for group in NAMES.values() for name, value in group.items()}


def evaluate(data: bytes) -> None:
    from jaxformer import config

    config.expressions.evaluate(text(data), names())


def override(data: bytes) -> None:
    from jaxformer import config
    from jaxformer.runs.names import NAMES

    made = config.override(experiment(), text(data).split("\n"), NAMES)
    config.fingerprint(made)
    config.diff(config.describe(experiment()), config.describe(made))


def masks(data: bytes) -> None:
    from jaxformer import config
    from jaxformer.masks import Mask
    from jaxformer.runs.names import MODEL

    mask = config.expressions.evaluate(text(data), MODEL)
    if isinstance(mask, Mask):
        assert repr(mask) and isinstance(hash(mask), int) and config.describe(mask)


def description(path: Path) -> None:
    from jaxformer import config
    from jaxformer.runs import run_folder

    found = config.read_json(path)
    run_folder.compare(found, config.describe(experiment()))
    run_folder.differences(found, experiment())


def source(path: Path) -> None:
    from jaxformer import config

    facts = config.read_json(path, path=str, overrides=list, imports=dict)
    copy = path.with_name("experiment.py")
    copy.write_text("from jaxformer.training import Checkpoints\nexperiment = Checkpoints()\n")
    before = list(sys.path)
    try:
        config.again(copy, facts)
    finally:
        sys.path[:] = before


def metrics(path: Path) -> None:
    from jaxformer.runs import metrics

    records, damaged = metrics._parse(path)
    assert all(type(record["step"]) is int for record in records) and all(
        number > 0 for number in damaged
    )


def unseal(data: bytes) -> None:
    from jaxformer.runs import manifest

    manifest.unseal(manifest._with_checksum(data.decode(errors="replace")), 3)


def sealed(data: bytes) -> None:
    from jaxformer.runs import manifest

    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    manifest.unseal(value, 3)


def tensors(path: Path) -> None:
    from jaxformer.interop import safetensors

    for name, file in safetensors.open_file(path).items():
        file.get_tensor(name)


def weights(data: bytes) -> None:
    """A folder with config.json, an index and a file; the index is damaged."""
    from jaxformer.interop import safetensors

    folder = scratch() / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(WEIGHTS)
    (folder / safetensors.INDEX).write_bytes(data)
    found = safetensors.open_checkpoint(folder)
    for name in found.names:
        found.read(name)


def hugging_face(data: bytes) -> None:
    """A folder with weights of other names; its config.json is damaged."""
    from jaxformer import families
    from jaxformer.interop import safetensors

    folder = scratch() / "hugging_face"
    folder.mkdir(exist_ok=True)
    (folder / safetensors.SINGLE).write_bytes(WEIGHTS)
    (folder / "config.json").write_bytes(data)
    families.load(folder)


def tokenizer(path: Path) -> None:
    from jaxformer.data import tokenizers

    found = tokenizers.load(path)
    assert isinstance(found.digest, str)
    found.decode(found.encode("the quick fox"))


def labelled(path: Path) -> None:
    from jaxformer.data.labelled import Labelled, open_labelled

    rows = path.with_name("rows.jsonl")
    rows.write_bytes(path.read_bytes())
    for policy in ("error", "skip"):
        open_labelled(Labelled(str(rows), str(rows), tokenizer="characters", bad_rows=policy), 8, 2)


def pairs(path: Path) -> None:
    from jaxformer.data.pairs import Pairs
    from jaxformer.models import EncoderDecoder, ModelConfig

    size = dict(vocab_size=256, num_layers=1, d_model=16, num_heads=2, context_length=64)
    model = EncoderDecoder(ModelConfig(**size), ModelConfig(**size))
    for policy in ("error", "skip"):
        Pairs(str(path), str(path), tokenizer="bytes", vocab_size=None, bad_rows=policy).open(model)


def topology(data: bytes) -> None:
    from experiments.launch import slices

    found = slices.parse_slice(text(data))
    assert found.chips > 0 and found.hosts > 0


def planned(data: bytes) -> None:
    from jaxformer.tools.planning import topology

    topology.devices(text(data))


def grid(data: bytes) -> None:
    from jaxformer.cli import trials

    value = text(data)
    if value.count(",") < 12:  # their product is what was asked for
        trials.combinations(value)


def stops(data: bytes) -> None:
    from jaxformer.evaluation import generation
    from jaxformer.runs import run

    first, *strings = text(data).split("\n")
    strings = [string for string in strings if string]
    shown = generation.before_stop(first, strings)
    assert first.startswith(shown) and not any(string in shown for string in strings)
    assert 0 <= run._held_back(first, strings) <= max(1, *map(len, strings), 1)
    decode = lambda tokens: bytes(tokens).decode(errors="replace")
    if stop := generation.stop_strings(decode, strings):
        stop(list(data))


WEIGHTS = (lambda header: len(header).to_bytes(8, "little") + header + bytes(32))(
    json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "BF16", "shape": [8], "data_offsets": [16, 32]},
        }
    ).encode()
)
BPE = {
    "type": "bpe",
    "tokenizer": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {
                "id": 4,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "fuse_unk": False,
            "end_of_word_suffix": None,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {"t": 0, "h": 1, "e": 2, "th": 3},
            "merges": [["t", "h"]],
        },
    },
}
_SIZES = dict(
    vocab_size=32, num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=16
)
_BERT = _SIZES | dict(
    max_position_embeddings=16, hidden_act="gelu", layer_norm_eps=1e-12, type_vocab_size=2
)
HUGGING_FACE = [
    dict(
        model_type="gpt2",
        vocab_size=32,
        n_layer=2,
        n_embd=8,
        n_head=2,
        n_positions=16,
        n_inner=None,
        activation_function="gelu_new",
        architectures=["GPT2LMHeadModel"],
        bos_token_id=1,
        eos_token_id=[2, 3],
    ),
    _SIZES
    | dict(
        model_type="llama",
        max_position_embeddings=16,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            original_max_position_embeddings=8,
        ),
    ),
    _SIZES
    | dict(
        model_type="mixtral",
        max_position_embeddings=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_key_value_heads=2,
    ),
    _BERT
    | dict(
        model_type="bert",
        architectures=["BertForSequenceClassification"],
        id2label={"0": "no", "1": "yes"},
    ),
    _BERT | dict(model_type="longformer", attention_window=[4, 4], pad_token_id=1),
    dict(
        model_type="reformer",
        vocab_size=32,
        hidden_size=8,
        num_attention_heads=2,
        feed_forward_size=16,
        num_buckets=[2, 2],
        attention_head_size=4,
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[4, 4],
        max_position_embeddings=16,
        is_decoder=True,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
    ),
    _SIZES
    | dict(
        model_type="vit",
        image_size=8,
        patch_size=4,
        num_channels=3,
        qkv_bias=True,
        hidden_act="gelu",
    ),
    dict(
        model_type="t5",
        vocab_size=32,
        num_layers=2,
        d_model=8,
        num_heads=2,
        d_kv=4,
        d_ff=16,
        feed_forward_proj="gated-gelu",
        num_decoder_layers=1,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    ),
]
_row = lambda **fields: json.dumps(fields).encode() + b"\n"
TARGETS: dict[str, Target] = {
    "expression": Target(
        evaluate,
        (
            b"AdamW(learning_rate=1e-3, b2=0.95)",
            b"(1, 2.5, 'a', None, True, -3)",
            b"ModelConfig(vocab_size=256, num_layers=2)",
            b"Mixed((Text('a'), Text('b')), (1, 2))",
            b"{'a': 1, 'b': (2,)}",
            b"Lora(rank=4) & Lora() | ~causal()",
            b"inf",
        ),
    ),
    "override": Target(
        override,
        (
            b"--steps=3\n--model.d-model=64",
            b"--optimizer\nLion(weight_decay=0.1)",
            b"--model.masks=causal() & window(8)",
            b"--data=Stdlib()\n--seed=1\n--mesh.fsdp=2",
            b"--model.positions=Rope(base=10000.0)\n--sample.prompt=a b",
        ),
    ),
    "masks": Target(
        masks,
        (
            b"causal() & window(8) | prefix(2)",
            b"~(causal() | full())",
            b"bigbird(4, 3, 2, 3)",
            b"longformer(8, (1, 2))",
            b"by_head(causal(), full())",
            b"block_sparse(((1, 0), (0, 1)), 4)",
            b"random_blocks(2, 4, 0, 64)",
            b"chunked(4, 1, 1)",
        ),
    ),
    "config.json": Target(
        with_file("config.json", description),
        (b'{"type": "Experiment", "name": "x", "model": {"d": 3}}',),
    ),
    "source.json": Target(
        with_file("source.json", source),
        (b'{"path": "/tmp/x.py", "overrides": ["--steps=3"], "imports": {"/a": "b"}}',),
    ),
    "metrics": Target(
        with_file("metrics.jsonl", metrics),
        (
            _row(step=0, loss=1.5) + _row(step=2, validation_loss=3.0, loss=float("nan")),
            _row(step=1) * 3,
        ),
    ),
    "manifest": Target(
        unseal,
        (
            json.dumps(
                {
                    "step": 3,
                    "metric": 1.0,
                    "metadata": {"data_digest": "ab", "config": {}},
                    "leaves": {
                        "params/a": {
                            "shape": [2],
                            "dtype": "float32",
                            "fingerprint": "0" * 16,
                            "key": "threefry2x32",
                        }
                    },
                }
            ).encode(),
        ),
    ),
    "sealed": Target(sealed, (b'{"manifest": "{}", "sha256": "44136f"}',)),
    "safetensors": Target(with_file("a.safetensors", tensors), (WEIGHTS,)),
    "weights": Target(
        weights,
        (
            (
                b'{"metadata": {"total_size": 32}, "weight_map": {"a": "a.safetensors", "b": '
                b'"a.safetensors"}}'
            ),
            b'{"weight_map": {"a": "../../etc/passwd", "b": "/etc/passwd"}}',
        ),
    ),
    "Hugging Face config.json": Target(
        hugging_face, tuple(json.dumps(fields).encode() for fields in HUGGING_FACE)
    ),
    "tokenizer": Target(
        with_file("tokenizer.json", tokenizer),
        (
            b'{"type": "bytes"}',
            '{"type": "characters", "characters": " cefhikoqtux\u00e9"}'.encode(),
            json.dumps(BPE).encode(),
        ),
    ),
    "labelled": Target(
        with_file("labelled", labelled),
        (
            _row(text="good", label=1) + _row(text="bad", label=0),
            _row(text="a b", label="x") + b"\n" + _row(text="c", label="y"),
        ),
    ),
    "pairs": Target(
        with_file("pairs.jsonl", pairs),
        (_row(source="ein", target="one") + _row(source="zwei", target="two"),),
    ),
    "topology": Target(topology, (b"v5e:4x4", b"v5p:4x4x8", b"v4:2x2x1", b"v6e:16x16")),
    "planned topology": Target(planned, (b"v5e:2x2", b"h200:1x4x8", b"tpu7x:4x4x8")),
    "grid": Target(
        grid,
        (
            b"--a=1,2 --b=x,y",
            b"--m=\"causal() & f(1, 2)\",'b c' --seed=0,1",
        ),
    ),
    "stop strings": Target(stops, (b"the text\nx\nte", "caf\u00e9\n\u00e9".encode())),
}


def fuzz(name: str, seconds: int) -> int:
    """Runs atheris on one target in this process, which atheris ends."""
    import atheris

    parsers = (
        "config",
        "data",
        "interop",
        "masks",
        "runs.metrics",
        "runs.manifest",
        "runs.run_folder",
    )
    with atheris.instrument_imports(include=[f"jaxformer.{name}" for name in parsers]):
        from jaxformer import config  # noqa: F401
        from jaxformer.data import labelled, pairs, tokenizers  # noqa: F401
        from jaxformer.interop import safetensors  # noqa: F401
        from jaxformer.runs import names as offered, run_folder  # noqa: F401
    corpus = Path(tempfile.mkdtemp(prefix="jaxformer-corpus-"))
    for number, seed in enumerate(TARGETS[name].seeds):
        (corpus / str(number)).write_bytes(seed)
    crash = f"-artifact_prefix=crash-{name.replace(' ', '-')}-"
    limits = [
        f"-max_total_time={seconds}",
        "-timeout=20",
        "-rss_limit_mb=4000",
        "-max_len=4096",
        crash,
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], TARGETS[name])
    atheris.Fuzz()
    return 0


def main(argv: list[str]) -> int:
    """A process for each target. 1 where one of them broke."""
    if argv[0] == "--one":
        return fuzz(argv[1], int(argv[2]))
    broken = []
    for name in argv[1:] or TARGETS:
        command = [sys.executable, __file__, "--one", name, argv[0]]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=int(argv[0]) + 900
        )
        count = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        print(f"{name}: exit code {done.returncode}, {count[1] if count else 0} inputs", flush=True)
        if done.returncode:
            broken.append(name)
            print(f"  {shlex.join(command)}\n{done.stderr[-2500:]}", flush=True)
    print(f"broken: {', '.join(broken) or 'none'}")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
