"""The command line: one subcommand a verb. Nothing heavy is imported before a command runs.

Every config field is a flag, ``--section.key value``; exit codes are those of `t2t.train.signals`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from t2t import __version__, config
from t2t.config import Config
from t2t.errors import InputError, did_you_mean
from t2t.train import launch
from t2t.train.signals import EXIT_BAD_INPUT, EXIT_CRASH, EXIT_DIVERGED, EXIT_DONE, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from t2t.data.sources import Reader
    from t2t.data.tasks import Messages

DESCRIPTION = "Text in, a tuned Hugging Face-compatible model out."
EPILOG = """examples:
  t2t quickstart                                        watch a small T5 learn, offline, in three minutes
  t2t train --model.path M --data.train pairs.jsonl     tune a model on your own file
  t2t evaluate runs/t2t/model test.jsonl                figures on held-out text
  echo "a text" | t2t generate runs/t2t/model           JSON lines out
"""
DOCTOR = """Check the environment, and training and validation data in one pass over them.
Exit code 0: nothing wrong; 1: something to look at (bad lines, validation sources that are in the training data, over
1% repeated examples, unknown tokens, over 5% of a side cut); 2: a file cannot be used."""
PREPARATION = ("prefix", "max_source_length", "source_transforms")  # of sources; travels inside a model folder
# The config keys that mean something to a finished model, and those that its targets add.
OF_INPUTS = (
    *("run.seed", "run.device", "run.threads", "data.format", "data.source", "data.on_bad_line", "data.max_bad_lines"),
    *(f"data.{name}" for name in PREPARATION),
    "generate",
)
OF_TEXT = tuple(f"data.{name}" for name in ("format", "source", "target", "on_bad_line", "max_bad_lines"))
OF_TARGETS = tuple(
    f"data.{name}"
    for name in (
        *("target", "target_transforms", "piece", "max_target_length", "max_validation_samples"),
        *("objective", "block", "whole_words", "max_predictions"),
    )
)
OF_TASKS = "One task of a mixture: what it does not set, as in --data.mix.NAME.train FILE, is as in [data]."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give back its exit code.

    >>> main(["train", "--train.bach", "8"])
    2
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        parsed, rest = _parser(words).parse_known_args(words)
        if rest:
            name = rest[0].partition("=")[0]
            raise InputError(f"{name}: unknown argument{did_you_mean(name, parsed.flags())}")
        parsed.arguments = words
        return parsed.run(parsed)
    except InputError as error:
        _tell_error(error)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _tell_error(error: Exception) -> None:
    """One line, and where there are several ranks whose it is."""
    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print(f"error: {rank}{error}", file=sys.stderr)


def _quickstart(parsed: argparse.Namespace) -> int:
    from t2t import quickstart

    chosen = config.load("quickstart", _overrides(parsed))
    return _trained(lambda: quickstart.quickstart(chosen))


def _train(parsed: argparse.Namespace) -> int:
    chosen = config.load(parsed.recipe, _overrides(parsed))
    if parsed.launch is not None and not parsed.dry_run:
        return _launch(parsed.launch, parsed.arguments)
    if launch.LAUNCHED in os.environ:
        launch.end_with_parent()
    from t2t.train import run

    if parsed.dry_run:
        print(run.summary(run.build(chosen)))
        return EXIT_DONE
    return _trained(lambda: run.train(chosen))


def _prepare(parsed: argparse.Namespace) -> int:
    chosen = config.load(parsed.recipe, _overrides(parsed))
    from t2t.terminal import human_bytes, table
    from t2t.train.prepare import prepare

    told = []
    for task, made in prepare(chosen, parsed.processes).items():
        size = sum(file.stat().st_size for file in made.folder.iterdir())
        tokens = [(name, f"{made.column(name).total:,} tokens") for name in made.manifest["columns"]]
        told += [("task", task)] if task else []
        told += [("records", f"{len(made):,}"), *tokens, ("disk", human_bytes(size)), ("store", str(made.folder))]
    print(table(told))
    return EXIT_DONE


def _launch(count: int, arguments: Sequence[str]) -> int:
    if count < 1:
        raise InputError(f"--launch: must be 1 or more, got {count}")
    if "RANK" in os.environ:
        raise InputError("--launch: this process is a rank already, as RANK in its environment says")
    at = next(i for i, word in enumerate(arguments) if word.partition("=")[0] == "--launch")
    rest = arguments[at + (1 if "=" in arguments[at] else 2) :]
    return launch.launch(count, [*arguments[:at], *rest])


def _trained(work: typing.Callable[[], object]) -> int:
    from t2t.parallel import Elsewhere, Lost
    from t2t.train.run import Interrupted
    from t2t.train.step import Diverged

    first = os.environ.get("RANK", "0") == "0"  # what all ranks know, one tells
    try:
        work()
    except Interrupted as error:
        if first:
            print(error, file=sys.stderr)
        return EXIT_INTERRUPTED
    except Diverged as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_DIVERGED
    except Elsewhere as error:
        return EXIT_BAD_INPUT if error.bad_input else EXIT_CRASH
    except Lost as error:
        _tell_error(error)
        return EXIT_CRASH
    return EXIT_DONE


def _evaluate(parsed: argparse.Namespace) -> int:
    from t2t.train import evaluate

    output = Path(parsed.output) if parsed.output else None
    if output and not output.parent.is_dir():  # before the work, not after it
        raise InputError(f"--output: no such folder: {output.parent}")
    figures = evaluate.evaluate(parsed.model, parsed.data, parsed.metrics, _overrides(parsed), output, parsed.task)
    if parsed.json:
        print(json.dumps(figures))
    else:
        from t2t.terminal import table

        print(table([(name, f"{value:.4f}") for name, value in figures.items()]))
    return EXIT_DONE


def _generate(parsed: argparse.Namespace) -> int:
    from t2t import device, generate

    chosen = config.load(None, _overrides(parsed))
    texts = _input_texts(parsed.input, chosen)
    device.use_threads(chosen.run.threads)
    loaded = generate.load(parsed.model, chosen.run.device).task(parsed.task)
    for note in loaded.settings.notes:
        print(f"note: {note}", file=sys.stderr)
    given = {key: config.flat(chosen)[key] for key in _overrides(parsed)}
    prepared = {name: given[f"data.{name}"] for name in PREPARATION if f"data.{name}" in given}
    loaded = dataclasses.replace(loaded, settings=dataclasses.replace(loaded.settings, **prepared))
    settings = {key.removeprefix("generate."): given[key] for key in given if key.startswith("generate.")}
    inputs: list[str | Messages] = []

    def kept() -> Iterator[str | Messages]:
        for text in texts:
            inputs.append(text)
            yield text

    def cut(number: int) -> None:
        longest = loaded.settings.max_source_length
        print(f"note: input {number + 1} is longer than {longest} tokens and was cut", file=sys.stderr)

    with _opened(parsed.output) as out:
        for text in loaded.stream(kept(), seed=chosen.run.seed, on_cut=cut, **settings):
            line = {"input": inputs.pop(0), "output": text}
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
    return EXIT_DONE


def _opened(name: str | None) -> AbstractContextManager[TextIO]:
    """The file to write, or standard output."""
    try:
        return open(name, "w", encoding="utf-8") if name else nullcontext(sys.stdout)
    except OSError as error:
        raise InputError(f"--output: {name}: {error.strerror}") from None


def _input_texts(name: str, chosen: Config) -> Iterator[str | Messages]:
    """The texts or chats of a file, by its format and source column, or the lines of standard input."""
    if name == "-":
        return _lines(sys.stdin.buffer)
    from t2t.data.sources import Reader, resolve

    data = chosen.data
    files = resolve([name], "--input")
    return _file_texts(Reader(files, data.format, data.on_bad_line, data.max_bad_lines, (data.source,)), data.source)


def _lines(stream: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input:{number}: invalid UTF-8 at byte {error.start + 1} of the line") from None


def _file_texts(reader: Reader, column: str) -> Iterator[str | Messages]:
    from t2t.data.tasks import source_texts

    yield from source_texts(reader, column)
    if reader.bad_count:
        print(f"note: {reader.bad_count} bad lines skipped, the first: {reader.bad[0]}", file=sys.stderr)


def _tokenizer(parsed: argparse.Namespace) -> int:
    chosen = config.load(None, _overrides(parsed))
    from t2t.data import vocabulary

    folder = Path(parsed.out)
    settings = (parsed.size, parsed.kind, parsed.style, parsed.sentinels, parsed.lowercase)
    trained = vocabulary.train(parsed.files, folder, *settings, chosen.data, lambda line: print(line, file=sys.stderr))
    print(f"tokenizer of {trained.vocab_size:,} tokens: {folder}")
    return EXIT_DONE


def _merge(parsed: argparse.Namespace) -> int:
    from t2t import generate

    generate.merge(parsed.model, Path(parsed.out))
    print(parsed.out)
    return EXIT_DONE


def _recipes(parsed: argparse.Namespace) -> int:
    if parsed.name:
        print(config.find_recipe(parsed.name).read_text(encoding="utf-8"), end="")
        return EXIT_DONE
    from t2t.terminal import table

    folder = config.find_recipe("quickstart").parent
    rows = []
    for file in sorted(folder.glob("*.toml")):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        rows.append((file.stem, first.removeprefix("# ")))
    print(table(rows, header=("recipe", "what it trains")))
    print("\nt2t recipes NAME shows one; t2t train NAME --section.key value runs it.")
    return EXIT_DONE


def _doctor(parsed: argparse.Namespace) -> int:
    from t2t import doctor

    if parsed.tokens_per_s < 0:
        raise InputError(f"--tokens-per-s: must be above 0, got {parsed.tokens_per_s:g}")
    chosen = config.load(parsed.recipe, _overrides(parsed))
    return doctor.run(parsed.data, chosen, parsed.json, parsed.tokens_per_s)


def _overrides(parsed: argparse.Namespace) -> dict[str, str | list[str]]:
    """The config flags that were given, by dotted key."""
    return {name: value for name, value in vars(parsed).items() if "." in name and value is not None}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        """All that may be given by name."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(action.choices)
            raise InputError(f"{value}: unknown verb{did_you_mean(value, known)}; verbs: {', '.join(known)}")


def _parser(words: Sequence[str]) -> _Parser:
    """The parser of a command line, whose own words tell which tasks it has flags for."""
    mix = config.task_names(word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--"))
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="t2t", description=DESCRIPTION, epilog=EPILOG, formatter_class=keep_lines, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"t2t {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Any, help: str, keys: Sequence[str]) -> _Parser:
        sub = verbs.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run, flags=sub.flags)
        _add_config(sub, keys, mix)
        return sub

    every = [field.name for field in dataclasses.fields(Config)]
    verb("quickstart", _quickstart, "Tune the package's small T5 on its own text and show what it learned.", every)
    train = verb("train", _train, "Train a model, or go on with a run.", every)
    train.add_argument("recipe", nargs="?", help="a TOML file, or the name of a recipe")
    train.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    prepare = verb("prepare", _prepare, "Tokenize training data into a store that runs read from.", every)
    prepare.add_argument("recipe", nargs="?", help="a TOML file, or the name of a recipe")
    prepare.add_argument("--processes", type=int, help="that tokenize; 0: this one alone (default: one a core)")
    train.add_argument("--launch", type=int, metavar="N", help="train by N processes on this machine")
    evaluate = verb("evaluate", _evaluate, "Loss and text metrics of a model on held-out data.", OF_INPUTS + OF_TARGETS)
    evaluate.add_argument("model", help="model folder")
    evaluate.add_argument("data", nargs="+", help="files with sources and targets")
    evaluate.add_argument("--metrics", nargs="+", help="metrics to compute (default: all)")
    evaluate.add_argument("--output", help="write predictions beside references to this file")
    evaluate.add_argument("--task", default="", help="of a model of several tasks, the one to prepare sources for")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    generate = verb("generate", _generate, "Generate a text for each input, as JSON lines.", OF_INPUTS)
    generate.add_argument("model", help="model folder")
    generate.add_argument("--input", default="-", help="file of inputs; -: lines of standard input (default)")
    generate.add_argument("--output", help="file to write; default: standard output")
    generate.add_argument("--task", default="", help="of a model of several tasks, the one to prepare sources for")
    tokenizer = verb("tokenizer", _tokenizer, "Train a vocabulary on text; a Hugging Face folder comes out.", OF_TEXT)
    tokenizer.add_argument("files", nargs="+", metavar="FILE", help="text, or pairs, of which both columns count")
    tokenizer.add_argument("--out", required=True, metavar="FOLDER", help="new folder to write")
    tokenizer.add_argument(
        "--size", type=int, default=32000, help="tokens, T5's sentinels not counted (default: 32000)"
    )
    tokenizer.add_argument("--kind", default="", help="unigram, bpe or wordpiece (default: the style's)")
    tokenizer.add_argument(
        "--style", default="", help="whose special tokens and ids: t5, gpt2 or bert (default: the kind's, or t5)"
    )
    tokenizer.add_argument("--sentinels", type=int, help="t5: how many <extra_id_N> tokens (default: 100)")
    tokenizer.add_argument("--lowercase", action="store_true", help="t5, bert: tokens know no upper case")
    merge = verbs.add_parser("merge", help="Fold an adapter into its base model.", allow_abbrev=False)
    merge.add_argument("model", help="folder with a LoRA adapter, which names its base")
    merge.add_argument("--out", required=True, help="folder to write, in Hugging Face layout")
    merge.set_defaults(run=_merge, flags=merge.flags)
    recipes = verbs.add_parser("recipes", help="List the recipes, or show one.", allow_abbrev=False)
    recipes.add_argument("name", nargs="?", help="recipe to show")
    recipes.set_defaults(run=_recipes, flags=recipes.flags)
    keys = ["run", "model", "data", "train.batch"]
    doctor = verb("doctor", _doctor, "Check the environment and data files.", keys)
    doctor.description = DOCTOR
    doctor.add_argument("data", nargs="*", help="training files or globs (default: those of data.train)")
    doctor.add_argument("--recipe", help="a TOML file, or the name of a recipe, to take settings from")
    doctor.add_argument("--tokens-per-s", type=float, default=0.0, metavar="N", help="training speed, to tell time by")
    doctor.add_argument(
        "--json", action="store_true", help="print one JSON object; its keys are in t2t/doctor/__init__.py"
    )
    return parser


def _add_config(parser: argparse.ArgumentParser, names: Sequence[str], mix: Sequence[str]) -> None:
    """Make flags of config keys, given by name or by whole sections, and where there is [data] of its tasks.

    The help shows of a task's keys only those that [data] has not.
    """
    shared = {field.name for field in dataclasses.fields(config.Data)}
    for section, keys in groupby(config.keys(dict.fromkeys(["NAME", *mix])), lambda key: key.name.rpartition(".")[0]):
        about = OF_TASKS if section == "data.mix.NAME" and "data" in names else None
        group = parser.add_argument_group(f"[{section}]", about)
        for key in keys:
            if section.partition(".")[0] not in names and key.name not in names:
                continue
            several = typing.get_origin(key.type) is tuple
            default = "" if key.default in (None, "", ()) else f" (default: {key.default})"
            extra: dict[str, Any] = {"nargs": "+"} if several else {}
            if key.type is bool:
                extra = {"nargs": "?", "const": "true"}
            flag, leaf = f"--{key.name}", key.name.rpartition(".")[2]
            help = (key.help + default).replace("%", "%%")
            if "." in section and (section != "data.mix.NAME" or leaf in shared):
                help = argparse.SUPPRESS
            group.add_argument(flag, dest=key.name, metavar=leaf.upper(), help=help, **extra)


if __name__ == "__main__":
    sys.exit(main())
