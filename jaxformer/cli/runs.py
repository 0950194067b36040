"""Commands that read run folders."""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from jaxformer import config
from jaxformer.cli.arguments import (
    Parser,
    check_needs,
    folder_of,
    output_file,
    parser_of,
    place,
    positive,
    run_of,
    run_parser,
)
from jaxformer.errors import ConfigError


def evaluate(argv: list[str]) -> int:
    parser = run_parser("evaluate")
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument("--int8", action="store_true", help="also with weights in 8 bits")
    exclusive.add_argument(
        "--stored", metavar="FORM", help="also with weights in NF4(), Int4() or Int8() blocks"
    )
    exclusive.add_argument(
        "--replay", action="store_true", help="the bad step that ended the run, computed again"
    )
    options, overrides = parser.parse_known_args(argv)
    if options.replay and (options.step is not None or options.average != 1):
        raise ConfigError(
            "evaluate: --replay takes the parameters of the bad step; "
            "leave out --step and --average"
        )
    run = run_of(options, overrides)

    from jaxformer.runs import reproduction

    if options.replay:
        scores = reproduction.replay(run)
    else:
        scores = run.evaluate(options.int8, form_of(options.stored))
    print(config.to_json({"run": str(run.folder.path), **scores}))
    return 0


def form_of(text: str | None) -> Any:
    """The format of blocks that `--stored` names. Raises ConfigError for anything else."""
    from jaxformer.ops import quantised

    if text is None:
        return None
    names = {name: getattr(quantised, name) for name in ("NF4", "Int4", "Int8")}
    form = config.expressions.evaluate(text, names)
    form = form() if form in names.values() else form
    if not hasattr(form, "levels"):
        raise ConfigError(f"evaluate: --stored {text}: expected NF4(), Int4() or Int8()")
    return form


def generate(argv: list[str]) -> int:
    parser = generate_parser()
    options, overrides = parser.parse_known_args(argv)
    check_needs(options, "chat", "system")
    sources = options.prompt is not None, options.prompts is not None, options.chat
    if sum(sources) > 1 or (options.prompts is None) != (options.out is None):
        raise ConfigError(PROMPTS)
    run = run_of(options, overrides)

    from jaxformer.runs import own_answers

    if own_answers.generator_of(run.experiment.data) is not None:
        refuse_options_of_text(parser, options)
        for line in own_answers.generate(run, options.seed, options.prompt):
            print(line)
        return 0
    if options.prompt is None and options.prompts is None and not options.chat:
        raise ConfigError(PROMPTS)
    arguments = generation_arguments(options)
    if options.chat:
        _talk(run, options.system, sys.stdin, **arguments)
    elif options.prompts is not None:
        _generate_file(run, options.prompts, options.out, **arguments)
    elif options.n_best is not None:
        for text in run.continue_all([options.prompt], **arguments)[0]:
            print(run.opening(options.prompt) + text)
    else:
        pieces = run.stream(options.prompt, **arguments)
        # in one print: a log message may come before the first piece
        print(run.opening(options.prompt) + next(pieces, ""), end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def generate_parser() -> Parser:
    parser = run_parser("generate")
    parser.add_argument("--prompt")
    parser.add_argument("--chat", action="store_true", help="answers each line of the input")
    parser.add_argument("--system", help="what the system says first in a conversation")
    parser.add_argument("--prompts", type=place, help='a file of lines {"prompt": "..."}')
    parser.add_argument("--out", type=output_file, help="where the lines with their texts go")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("tokens", "top-k", "beams", "n-best"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("temperature", "top-p", "min-p", "typical", "length-penalty"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--filter", action="append", default=[])
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        type=unescaped,
        help=r"a string that ends a text; \n is a line end",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help=(
            "control tokens in a prompt, such as <|im_start|>, are these tokens; "
            "not for prompts of strangers"
        ),
    )
    return parser


def generation_arguments(options: Any) -> dict[str, Any]:
    """The arguments of `Run.stream` and `Run.continue_all` that the options name."""
    from jaxformer.decoding import Beams, Sampling, filters

    def named(*names: str) -> dict[str, Any]:
        values = {name: getattr(options, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    arguments = named("seed", "tokens", "stop", "special_tokens")
    filter_names = {name: getattr(filters, name) for name in filters.__all__}
    arguments["filters"] = [
        config.expressions.evaluate(text, filter_names) for text in options.filter
    ]
    sampling = named("temperature", "top_k", "top_p", "min_p", "typical")
    search = named("beams", "n_best", "length_penalty")
    if sampling and search:
        both = ", ".join(f"--{name.replace('_', '-')}" for name in [*search, *sampling])
        raise ConfigError(
            f"generate: {both}: a beam search draws nothing; "
            "give options of the one or of the other"
        )
    if search:
        arguments["sampling"] = Beams(**search)
    elif sampling:
        sampling.setdefault("temperature", 0.8)
        arguments["sampling"] = Sampling(**sampling)
    return arguments  # without "sampling" the experiment's own applies


PROMPTS = "generate: give --prompt TEXT, --chat, or --prompts FILE.jsonl with --out FILE.jsonl"
# options of `generate` that do not belong to the generation of text
NOT_OF_TEXT = ("name", "help", "runs", "step", "average", "trust", "seed", "prompt")


def refuse_options_of_text(parser: Parser, options: Any) -> None:
    """Raises ConfigError for an option of text generation: the run's data generate no text."""
    set_options = [
        name
        for name, value in vars(options).items()
        if name not in NOT_OF_TEXT and value != parser.get_default(name)
    ]
    if set_options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in set_options)
        raise ConfigError(
            f"generate: {names}: chooses how a text is written, "
            "but the data of this run make their own answers"
        )


ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def unescaped(text: str) -> str:
    r"""The text with the escapes \n, \t, \r and \\ replaced by the characters that they name."""
    return re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), text, flags=re.DOTALL)


def _talk(run, system: str | None, lines: Iterable[str], **arguments) -> None:
    """Answers each line as a user's message, until the lines end or a line is /end."""
    if arguments.pop("special_tokens", None):
        raise ConfigError("--special-tokens: goes with --prompt; in a message a name stays text")
    messages = [] if system is None else [{"role": "system", "content": system}]
    is_terminal = sys.stdin.isatty()
    print("> " if is_terminal else "", end="", flush=True)
    for line in lines:
        if line.strip() == "/end":
            break
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        said = ""
        for piece in run.chat(messages, **arguments):
            said += piece
            print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": said})
        print("\n> " if is_terminal else "\n", end="", flush=True)


def _generate_file(run, source: str, target: str, **arguments) -> None:
    """Continues the prompts of a JSONL file and writes their texts to another JSONL file.

    {"prompt": ...} becomes {"prompt": ..., "texts": [...]}.
    """
    from etils import epath

    path = config.regular_file(source)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors write a byte order mark
        prompts = [json.loads(line)["prompt"] for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f'{source}: {error!r}; each line must be {{"prompt": "..."}}') from error
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(
                f'{source}: the prompt {prompt!r} is no text; each line must be {{"prompt": "..."}}'
            )
    if not prompts:
        raise ConfigError(
            f'{source}: holds no prompt; expected a line {{"prompt": "..."}} for each'
        )
    lines = zip(prompts, run.continue_all(prompts, **arguments), strict=True)
    config.write_atomically(
        epath.Path(target),
        "".join(json.dumps({"prompt": p, "texts": texts}) + "\n" for p, texts in lines),
    )
    print(f"{len(prompts)} prompts continued in {target}")


def run_harness(argv: list[str]) -> int:
    parser = run_parser("harness")
    parser.add_argument("--tasks", required=True, help="names, with commas between them")
    parser.add_argument("--include", type=place, help="a folder with YAML files of tasks")
    parser.add_argument("--limit", type=positive, help="only so many examples of each task")
    options, overrides = parser.parse_known_args(argv)
    run = run_of(options, overrides)

    from jaxformer import models
    from jaxformer.evaluation import harness

    if run.tokenizer is None:
        raise ConfigError(f"{run.folder.path}: has no tokenizer, so there is no text to score")
    # a corpus of documents ends each document with this token
    end = [run.tokenizer.end_of_text] if hasattr(run.experiment.data, "end_of_text") else []
    with run.on_mesh():
        model = models.evaluation(run.experiment.model)
        lm = harness.model(
            model, run.params, run.tokenizer, end=end, precision=run.experiment.activation_dtype
        )
        results, table = harness.evaluate(
            lm, options.tasks.split(","), options.include, options.limit
        )
    print(table)
    path = run.folder.path / "harness.json"
    record = {"step": run.checkpoint[0], "limit": options.limit, **results}
    run.folder.write(path, config.to_json(record, default=str, indent=2))
    print(f"all results: {path}")
    return 0


def export(argv: list[str]) -> int:
    parser = run_parser("export")
    parser.add_argument("folder", type=place, help="a new folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--model-type", help="a family, such as llama; by default one that fits")
    parser.add_argument(
        "--program", action="store_true", help="a StableHLO program instead of transformers' files"
    )
    options = parser.parse_args(argv)
    run = run_of(options)

    from jaxformer.tools import run_export

    with run.on_mesh():
        if options.program:
            run_export.export_program(run, options.folder, dtype=options.dtype)
        else:
            kind = options.model_type
            run_export.export(run, options.folder, dtype=options.dtype, model_type=kind)
    print(f"exported step {run.checkpoint[0]:,} of {run.folder.path} to {options.folder}")
    return 0


def inspect(argv: list[str]) -> int:
    parser = run_parser("inspect")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--html", type=output_file, help="a file for a page with pictures")
    options = parser.parse_args(argv)

    import shutil

    from jaxformer.tools.analysis import inspection

    run = run_of(options)
    if run.tokenizer is None:
        raise ConfigError(f"{run.folder.path}: has no tokenizer, so there is no text to look into")
    with run.on_mesh():
        report = inspection.inspect(run.experiment.model, run.params, run.tokenizer, options.prompt)
    print(inspection.table(report, shutil.get_terminal_size((120, 24)).columns))
    if options.html is not None:
        config.write_atomically(options.html, inspection.page_of(report, run.folder.path.name))
        print(f"page: {options.html}")
    return 0


def write_report(argv: list[str]) -> int:
    parser = parser_of("report", "RUN", nargs="+")
    parser.add_argument("--runs", default="runs", type=place)
    parser.add_argument("--out", type=output_file)
    parser.add_argument("--trust", action="store_true")
    options = parser.parse_args(argv)
    folders = [folder_of(name, options.runs) for name in options.name]

    from jaxformer.runs import run_folder
    from jaxformer.tools.analysis import gallery, report

    for folder in folders if options.trust else ():
        run_folder.allow(folder)
    path = options.out or folders[0].path / "report.html"
    pictures = [gallery.run_pictures(folder) for folder in folders]
    print(f"report: {report.write(path, folders, pictures)}")
    return 0


def runs(argv: list[str]) -> int:
    parser = parser_of("runs", "EXPERIMENT", nargs="?")
    parser.add_argument("--runs", default="runs", type=place)
    options = parser.parse_args(argv)

    from jaxformer.runs.run_folder import runs_of

    trouble: OSError | None = None
    for folder in runs_of(options.name, options.runs):
        try:
            print(f"{folder.path}  {_scores(folder)}")
        # a run that cannot be read must not hide the others
        except ConfigError as error:
            print(f"{folder.path}  cannot be read: {error}")
        except OSError as error:
            print(f"{folder.path}  cannot be read: {error}")
            trouble = error
    if trouble is not None:  # the command ends like every command that met such an error
        raise trouble
    return 0


def _scores(folder) -> str:
    """The progress of a run and its last validation scores, in words."""
    from jaxformer.runs.comparison import part_scored
    from jaxformer.runs.metrics import read_records, steps_done
    from jaxformer.runs.reporter import UNRECORDED

    steps = folder.description().get("steps")
    last = folder.last_scores()
    numbers = {
        name: value for name, value in last.items() if not isinstance(value, str) and name != "step"
    }
    words = [
        f"validation_{name} {_short(value)}"
        for name, value in numbers.items()
        if name not in UNRECORDED
    ]
    scored = f", {', '.join(words)} ({part_scored(folder)})" if words else ""
    return f"{steps_done(read_records(folder.metrics))}/{steps} steps{scored}"


def _short(value: Any) -> str:
    """A score with four digits. A user's result.json may hold null, which is shown as it is."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def compare(argv: list[str]) -> int:
    parser = parser_of("compare", "RUN", nargs=2)
    parser.add_argument("--runs", default="runs", type=place)
    options = parser.parse_args(argv)

    from jaxformer.runs import comparison, run_folder

    folders = [folder_of(name, options.runs) for name in options.name]
    for folder in folders:
        print(f"{folder.path}  {_scores(folder)}")
    if warning := comparison.incomparable(folders):
        print(warning)
    one, other = (folder.description() for folder in folders)
    print("\n".join(run_folder.compare(one, other)) or "the same experiment")
    return 0
