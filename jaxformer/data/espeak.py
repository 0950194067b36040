"""Speech from text, spoken by espeak-ng: many voices, no network, the same samples each time.

The package `espeakng-loader` ships the library and its data. `speak` is the function to read.
The library keeps a state from one utterance to the next (the flutter of a voice, its breath), so
new processes speak: this file is also the program that they run, and imports nothing of ours at
its head.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

TOGETHER = 100  # utterances of a process
# constants of espeak-ng's speak_lib.h
SYNCHRONOUS = 2  # samples go to the callback, and the call returns after the last one
UTF8 = 1
SPEED, PITCH = 1, 3

# the accents of English that espeak-ng speaks
ENGLISH = (
    *("en", "en-029", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-gb-x-rp"),
    *("en-us", "en-us-nyc"),
)


class Utterance(NamedTuple):
    """What is spoken, and by whom."""

    text: str
    # LANGUAGE or LANGUAGE+VARIANT, such as en-us+f2: espeak-ng's documentation lists them
    voice: str = "en-us"
    speed: int = 175  # words a minute, from 80 to 450
    pitch: int = 50  # from 0 to 99


def speak(utterances: Sequence[Utterance]) -> list[Any]:
    """The wave of each utterance: float32 from -1 to 1, 16,000 samples a second.

    A function of the list: each process speaks 100 utterances, in order, from a new state. The
    first n waves do not depend on later utterances. Raises ConfigError for a voice or a variant
    that espeak-ng has not, for numbers outside of their range, for a text without sound, and for a
    missing package.
    """
    paths = _paths()
    known = variants()
    utterances = list(utterances)
    for each in utterances:
        _check(each, known)
    groups = [utterances[i : i + TOGETHER] for i in range(0, len(utterances), TOGETHER)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        spoken = pool.map(lambda group: _in_a_new_process(group, paths), groups)
        return [wave for of_group in spoken for wave in of_group]


def version() -> str:
    """The version of the package that speaks. Another one may speak otherwise."""
    from importlib import metadata

    from jaxformer.errors import package_of

    with package_of("speech"):
        return metadata.version("espeakng-loader")


def variants() -> list[str]:
    """The names of all variants, such as f2: voices in which each language can be spoken."""
    return sorted(os.listdir(os.path.join(_paths()[1], "voices", "!v")))


def _paths() -> tuple[str, str]:
    """The paths of the library and of its data."""
    from jaxformer.errors import package_of

    with package_of("speech"):
        import espeakng_loader
    return espeakng_loader.get_library_path(), espeakng_loader.get_data_path()


def _check(utterance: Utterance, known: Sequence[str]) -> None:
    """Raises ConfigError for what espeak-ng would replace in silence."""
    from jaxformer.errors import ConfigError, did_you_mean

    text, voice, speed, pitch = utterance
    if not 80 <= speed <= 450:
        raise ConfigError(f"speak: speed={speed}: expected 80 to 450 words a minute")
    if not 0 <= pitch <= 99:
        raise ConfigError(f"speak: pitch={pitch}: expected 0 to 99")
    if "\0" in text or not any(map(str.isalnum, text)):
        raise ConfigError(f"speak: {text!r}: expected a text with a letter or a digit")
    variant = voice.partition("+")[2]
    if "+" in voice and variant not in known:
        raise ConfigError(
            f"speak: voice={voice!r}: espeak-ng has no variant {variant!r}"
            f"{did_you_mean(variant, known)}"
        )


def _in_a_new_process(utterances: Sequence[Utterance], paths: Sequence[str]) -> list[Any]:
    import numpy as np

    from jaxformer.data.speech import resampled
    from jaxformer.errors import ConfigError

    # -P: modules beside this file have names of packages
    process = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps([*paths, utterances]).encode(),
        capture_output=True,
    )
    if process.returncode:
        words = process.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"speak: {words[-1] if words else f'exit code {process.returncode}'}")
    head, _, samples = process.stdout.partition(b"\n")
    rate, lengths = json.loads(head)
    waves = np.split(np.frombuffer(samples, np.int16), np.cumsum(lengths)[:-1])
    return [resampled(wave / np.float32(2**15), rate) for wave in waves]


def main() -> None:
    """Reads [library, data, utterances]; writes [rate, lengths], a new line, and 16-bit samples."""
    library_path, data, utterances = json.load(sys.stdin)
    library = ctypes.CDLL(library_path)
    rate = library.espeak_Initialize(SYNCHRONOUS, 0, data.encode(), 0)
    if rate <= 0:
        sys.exit(f"espeak-ng cannot read its data in {data}")
    parts: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def collect(samples: int | None, count: int, events: int | None) -> int:
        if samples and count > 0:
            parts.append(ctypes.string_at(samples, 2 * count))
        return 0  # go on

    library.espeak_SetSynthCallback(collect)
    library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # else the noise of breath follows the clock
    waves = []
    for text, voice, speed, pitch in utterances:
        parts.clear()
        if library.espeak_SetVoiceByName(voice.encode()):
            sys.exit(f"voice={voice!r}: espeak-ng has no such voice; en-us and en are two")
        library.espeak_SetParameter(SPEED, speed, 0)
        library.espeak_SetParameter(PITCH, pitch, 0)
        raw = text.encode() + b"\0"
        if library.espeak_Synth(raw, ctypes.c_size_t(len(raw)), 0, 0, 0, UTF8, None, None):
            sys.exit(f"{text!r}: espeak-ng cannot speak it")
        waves.append(b"".join(parts))
        if not waves[-1]:
            sys.exit(f"{text!r}: espeak-ng makes no sound of it")
    head = [rate, [len(wave) // 2 for wave in waves]]
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + b"".join(waves))


if __name__ == "__main__":
    main()
