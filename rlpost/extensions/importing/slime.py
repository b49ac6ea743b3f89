"""Flags of slime, Megatron-LM and SGLang as answers: they are flags here too.

Input: the words of a command line from ``train.py`` on. Output: an answer for each flag, and for a
program that generates during training. Each flag is parsed alone, so that one that is refused does
not hide another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from rlpost.cli.secret_file import KEY_FLAGS
from rlpost.config import flags
from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.extensions.importing.peers.row import Answer, Settings, replaced
from rlpost.extensions.importing.shell_words import Word
from rlpost.extensions.importing.yaml_file import scalar

DEFAULTS: Settings = {
    "kl_loss_type": "k1",
    "lr_decay_style": "linear",
    "mtp_loss_scaling_factor": 0.2,
}
"""Defaults of slime at 624b824 and of Megatron-LM that are others here."""
_METADATA = (
    "prompt.metadata has all other keys of a row; where rows have a key metadata, use --metadata-key "
    "metadata"
)
ASYNCHRONOUS = "train_async.py"
"""slime's program that generates the next batch while the current one is trained."""
_FUNCTION = "--rollout-function-path"
_SECRET = "a secret: export {name}, or give {flag} to rlpost submit"


def answers(words: Sequence[Word], reason: Callable[[str], str | None]) -> Iterator[Answer]:
    """Yield an answer for each flag; ``reason`` says why a word is not known.

    The last occurrence of a flag counts, as in argparse.
    """
    parser = flags.make_parser("rlpost import", "")
    groups = [(*_parted(head, values), head) for head, values in _grouped(words[1:])]
    last = {_canonical(name): head for name, _, head in groups}
    yield from _modes(
        words[0],
        [text for name, texts, _ in groups if _canonical(name) == _FUNCTION for text in texts],
    )
    for name, texts, head in groups:
        key, line = name.removeprefix("--"), head.line
        shown = " ".join(texts) if texts else True
        if name.startswith("--") and last[_canonical(name)] is not head:
            value = "***" if name in KEY_FLAGS else shown
            yield replaced(Answer(key, value, line), last[_canonical(name)].line)
            continue
        unknown = next((why for text in (name, *texts) if (why := reason(text))), None)
        if unknown is not None:
            yield Answer(key if name.startswith("--") else "a word", "", line, why=unknown)
        elif name in KEY_FLAGS:
            why = _SECRET.format(name=KEY_FLAGS[name], flag=name)
            yield Answer(key, "***", line, why=why)
        elif not name.startswith("--"):
            yield Answer(head.text, "", line, why="no flag, and no value of one")
        else:
            yield _answer(parser, [name, *texts], Answer(key, shown, line))


def _parted(head: Word, values: Sequence[Word]) -> tuple[str, list[str]]:
    """Return the name of a flag and its values."""
    name, equals, inline = head.text.partition("=")
    return name, [inline] if equals else [word.text for word in values]


def _canonical(name: str) -> str:
    return name.replace("_", "-")


def _modes(program: Word, values: Sequence[str]) -> Iterator[Answer]:
    """Yield when batches are generated: the program and --rollout-function-path say it."""
    name = PurePosixPath(program.text).name
    if any("fully_async" in value for value in values):
        yield Answer(name, True, program.line, {"rollout_mode": "fully_async"})
    elif name == ASYNCHRONOUS:
        yield Answer(name, True, program.line, {"rollout_mode": "one_step_off"})


def defaults(given: Sequence[Answer]) -> Iterator[Answer]:
    """Yield slime's defaults that are others here, for flags that are not given."""
    known = {answer.key.replace("-", "_") for answer in given}
    for key, value in DEFAULTS.items():
        if key not in known:
            yield Answer(key.replace("_", "-"), value, 0, {key: value}, is_default=True)
    if "metadata_key" not in known:
        yield Answer("metadata-key", "metadata", 0, why=_METADATA, is_default=True)


def _grouped(words: Sequence[Word]) -> Iterator[tuple[Word, list[Word]]]:
    head: Word | None = None
    values: list[Word] = []
    for word in words:
        if not word.text.startswith("--") and head is not None and head.text.startswith("--"):
            values.append(word)
            continue
        if head is not None:
            yield head, values
        head, values = word, []
    if head is not None:
        yield head, values


def _typed(table: str, key: str, value: object) -> object:
    """Return a value of the command line as TOML writes it: a number where it is the same setting."""
    typed = (
        [scalar(one) if isinstance(one, str) else one for one in value]
        if isinstance(value, list)
        else (scalar(value) if isinstance(value, str) else value)
    )
    try:
        same = load([], {table: {key: typed}}).config == load([], {table: {key: value}}).config
    except ConfigError:
        return value
    return typed if same and typed is not None else value


def _answer(parser: argparse.ArgumentParser, words: list[str], blank: Answer) -> Answer:
    try:
        namespace, tables = flags.parse(parser, words)
    except ConfigError as error:
        return Answer(blank.key, blank.value, blank.line, why=str(error).splitlines()[0])
    settings = {
        key: _typed(table, key, value)
        for table, entries in tables.items()
        for key, value in entries.items()
    }
    notes = namespace.flag_notes
    if not settings:
        why = notes[0].partition(": ")[2] if notes else "it sets nothing here"
        return Answer(blank.key, blank.value, blank.line, why=why, is_needless=True)
    return Answer(blank.key, blank.value, blank.line, settings)
