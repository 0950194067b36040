"""Our decoding beside `transformers.generate`, greedy and with beams, and their memory bandwidth.

Both run on the NVIDIA GPU if there is one, unless JAX_PLATFORMS=cpu. On a GPU `generate` itself
compiles the step of a static cache.

Each runs in its own process, in turns. A ratio compares our best with their best (over precision,
cache, eager or compiled), by the median over rounds. Above 1 we are faster. Weights are random: no
figure depends on them. "Bandwidth" is a share of the bytes that this machine can read in a second:
the bytes of weights and filled cache that a token needs, times steps a second. First come two
ratios of ours alone: beams beside greedy decoding, and a first token beside a forward pass.

Command: make bench WHAT=decode
         python -m experiments.bench.decode --rounds 3 --models gpt2 --rows 1 --prompts 32
The first use sets up .venv-bench with CPU builds of torch and transformers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from experiments.bench.compare import measure, platform, torch_python

NEW = 64
ROWS = {"cpu": [1, 8], "gpu": [1, 64]}
OURS = {
    "gpt2": ("float32", "bfloat16", "int8"),
    "llama": ("float32", "bfloat16", "int8"),
    "t5": ("float32", "bfloat16"),
}
EVERY = tuple(
    f"{precision} {cache}"
    for cache in ("dynamic", "static", "compiled")
    for precision in ("float32", "bfloat16")
)
THEIRS = {"gpt2": EVERY, "llama": EVERY, "t5": EVERY[:2]}
LLAMA = dict(vocab=32_000, width=768, inner=3072, layers=12, heads=12)  # 162M parameters
T5_BEAMS = 4


def bandwidth() -> float:
    """Bytes a second that this machine reads, from products of a vector with 1 GiB of matrices."""
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda x, matrices: [matrix @ x for matrix in matrices])
    arguments = jnp.ones(8192), [jnp.ones((8192, 8192)) for _ in range(4)]
    call = lambda: product(*arguments)
    times = [measure(call, jax.block_until_ready, 10, 1)["ms"] for _ in range(5)]
    return 2**30 / (1e-3 * min(times))


def timed(generate, count: int = 3) -> float:
    """Median seconds of a call, after one call that does not count."""
    generate()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        generate()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def prompts(model: str, rows: int, length: int) -> list[list[int]]:
    """Random prompts, the same for both sides."""
    import random

    draw = random.Random(0)
    return [[draw.randrange(2, 30_000) for _ in range(length)] for _ in range(rows)]


def ours(model: str, mode: str, rows: int, length: int):
    """A call of `decoding.generate`, or of its beam search."""
    import jax

    from jaxformer import decoding, models
    from jaxformer.models import PRESETS

    dtype = jax.numpy.dtype("float32" if mode == "int8" else mode)
    config: Any = {"gpt2": PRESETS["gpt2_small"], "llama": llama(), "t5": PRESETS["t5_small"]}[
        model
    ]
    params = jax.jit(models.init, static_argnums=0)(config, jax.random.key(0))
    if mode == "int8":
        params = decoding.quantize(config, params)
    params = jax.block_until_ready(decoding.prepare(config, params, dtype))
    texts = prompts(model, rows, length)
    greedy = decoding.Sampling(temperature=0.0)
    if model == "t5":
        beams = decoding.Beams(T5_BEAMS)
        return lambda: decoding.search(
            config, params, [[0]] * rows, NEW, sources=texts, beams=beams, dtype=dtype
        )
    return lambda: decoding.generate(
        config, params, texts, NEW, sampling=greedy, rows=rows, dtype=dtype
    )


def llama() -> Any:
    from jaxformer.models.presets import llama_7b

    shape = dict(
        num_layers=LLAMA["layers"],
        d_model=LLAMA["width"],
        num_heads=LLAMA["heads"],
        d_ff=LLAMA["inner"],
    )
    return replace(llama_7b, vocab_size=LLAMA["vocab"], context_length=1024, **shape)


def theirs(model: str, mode: str, rows: int, length: int):
    """A call of `transformers.generate` on a model of the same shape."""
    import torch  # pyrefly: ignore[missing-import]
    import transformers  # pyrefly: ignore[missing-import]

    precision, cache = mode.split()
    if model == "gpt2":
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    elif model == "llama":
        network = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=LLAMA["vocab"],
                hidden_size=LLAMA["width"],
                intermediate_size=LLAMA["inner"],
                num_hidden_layers=LLAMA["layers"],
                num_attention_heads=LLAMA["heads"],
                max_position_embeddings=1024,
            )
        )
    else:
        network = transformers.T5ForConditionalGeneration(
            transformers.T5Config(decoder_start_token_id=0)
        )
    device = {"cpu": "cpu", "gpu": "cuda"}[platform()]
    network = network.eval().to(device, getattr(torch, precision))
    ids = torch.tensor(prompts(model, rows, length), device=device)
    options: dict[str, Any] = dict(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    options |= dict(num_beams=T5_BEAMS) if model == "t5" else {}
    options |= {} if cache == "dynamic" else dict(cache_implementation="static")
    if cache == "compiled":
        network.forward = torch.compile(network.forward)

    @torch.inference_mode()
    def generate():
        # .cpu() waits for a GPU
        return network.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu()

    return generate


def needed(model: str, mode: str, rows: int, length: int) -> float:
    """The bytes that a step must read: weights, and the cache after half of the new tokens."""
    from jaxformer import models, params
    from jaxformer.models import PRESETS

    config: Any = PRESETS["gpt2_small"] if model == "gpt2" else llama()
    table = 0 if config.tie_embeddings else config.vocab_size * config.d_model  # rows are looked up
    # bytes of a weight, bytes of a number in the cache
    sizes = {"float32": (4, 4), "bfloat16": (2, 2), "int8": (1, 4)}
    weight_bytes, cache_bytes = sizes[mode.split()[0]]
    cache = 2 * config.num_layers * config.kv_heads * config.head_size * (length + NEW / 2) * rows
    return (params.count(models.spec(config)) - table) * weight_bytes + cache * cache_bytes


def compare_with_ourselves(rounds: int) -> None:
    """Prints two ratios of GPT-2 small in float32, with batch 1.

    4 beams beside greedy decoding, and a first token beside a forward pass of 512 tokens.
    """
    import jax

    from jaxformer import decoding, models
    from jaxformer.models import PRESETS

    config = PRESETS["gpt2_small"]
    params = jax.jit(models.init, static_argnums=0)(config, jax.random.key(0))
    prepared = jax.block_until_ready(decoding.prepare(config, params))
    (short,), (long,) = prompts("gpt2", 1, 32), prompts("gpt2", 1, 512)
    tokens = jax.device_put(jax.numpy.array([long]))
    forward = jax.jit(lambda params, tokens: models.apply(config, params, tokens).logits)
    greedy = decoding.Sampling(temperature=0.0)
    calls = {
        "greedy": lambda: decoding.generate(config, prepared, [short], NEW, sampling=greedy),
        "4 beams": lambda: decoding.search(config, prepared, [short], NEW, beams=decoding.Beams(4)),
        "first token": lambda: next(decoding.stream(config, prepared, long, NEW, sampling=greedy)),
        "forward": lambda: jax.block_until_ready(forward(params, tokens)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, 1))
    median = {name: statistics.median(each) for name, each in times.items()}
    print(
        f"ours alone, {rounds} rounds: "
        + ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in median.items())
    )
    print(f"  ratio 4 beams / greedy, of {NEW} tokens: {median['4 beams'] / median['greedy']:.2f}")
    print(
        (
            "  ratio first token of 512 / forward pass: "
            f"{median['first token'] / median['forward']:.2f}"
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS[platform()])
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 512])
    parser.add_argument("--modes", nargs="+", help="only these of ours and theirs")
    parser.add_argument(
        "--one", nargs=5, metavar=("WHO", "MODEL", "MODE", "ROWS", "LENGTH"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.one:
        who, model, mode, rows, length = options.one
        print(
            json.dumps(
                timed({"ours": ours, "theirs": theirs}[who](model, mode, int(rows), int(length)))
            )
        )
        return
    # this process also uses the GPU, between the others, so it must not reserve 3/4 of the memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "gpt2" in options.models:
        compare_with_ourselves(max(3, options.rounds))
    interpreters = {"ours": sys.executable, "theirs": torch_python("transformers>=5.23")}
    for model in options.models:
        for rows in options.rows:
            for length in options.prompts if model != "t5" else options.prompts[:1]:
                compare(options, interpreters, model, rows, length)


def compare(options, interpreters: dict[str, str], model: str, rows: int, length: int) -> None:
    """One case: runs all modes of both sides in turns, and prints speeds and ratios."""
    seconds: dict[tuple[str, str], list[float]] = {("ours", mode): [] for mode in OURS[model]}
    seconds |= {("theirs", mode): [] for mode in THEIRS[model]}
    seconds = {run: [] for run in seconds if options.modes is None or run[1] in options.modes}
    reads = []
    for _ in range(options.rounds):
        reads.append(bandwidth())
        for (who, mode), times in list(seconds.items()):
            command = [
                interpreters[who],
                "-m",
                "experiments.bench.decode",
                "--one",
                who,
                model,
                mode,
                str(rows),
                str(length),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["failed"])[-1][:100]
                print(f"  {who} {mode}: {reason}", flush=True)
                del seconds[who, mode]
            else:
                times.append(json.loads(done.stdout.splitlines()[-1]))
    speed = statistics.median(reads)
    search = f", {T5_BEAMS} beams" if model == "t5" else ""
    print(
        (
            f"{model}{search}: {rows} rows, prompt {length} + {NEW}; "
            f"memory {speed / 1e9:.1f} GB/s, {options.rounds} rounds"
        ),
        flush=True,
    )
    rates = {run: rows * NEW / statistics.median(times) for run, times in seconds.items()}
    for (who, mode), rate in rates.items():
        share = (
            ""
            if model == "t5"
            else f"   bandwidth {needed(model, mode, rows, length) * rate / rows / speed:5.0%}"
        )
        print(
            f"  {who:6} {mode:18} {rate:8.1f} tokens/s{share}   all "
            f"{[round(t, 2) for t in seconds[who, mode]]} s"
        )
    peer = max((rate for (who, _), rate in rates.items() if who == "theirs"), default=0)
    for name, modes in (("16 or 32 bit", ("float32", "bfloat16")), ("int8 weights", ("int8",))):
        best = max((rates["ours", mode] for mode in modes if ("ours", mode) in rates), default=0)
        if best and peer:
            print(f"  ratio ours / theirs, best of each, {name}: {best / peer:.2f}", flush=True)


if __name__ == "__main__":
    main()
