"""Words of a shell script: how values are split, trimmed and compared. Pure."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MOST_NUMBERS = 100_000
OTHER_HARDWARE = ("torch_npu", "npu-smi", "rocm-smi")
"""Probes for hardware that rlpost does not run on: they fail."""


@dataclass(frozen=True, slots=True)
class Word:
    """An expanded word, and the line that has its text."""

    text: str
    line: int


Value = str | list[Word]
"""The value of a variable: a text, or the elements of an array."""


@dataclass(slots=True)
class Builder:
    """Words under construction: unquoted values are split at blanks."""

    line: int
    is_split: bool
    done: list[Word] = field(default_factory=list)
    current: list[str] | None = None
    current_line: int = 0

    def add(self, text: str, line: int | None = None) -> None:
        """Append to the current word; its line is that of its first part."""
        if self.current is None:
            self.current, self.current_line = [], self.line if line is None else line
        self.current.append(text)

    def end(self) -> None:
        """End the current word."""
        if self.current is not None:
            self.done.append(Word("".join(self.current), self.current_line))
            self.current = None

    def value(self, value: Value, *, is_quoted: bool) -> None:
        """Append the value of a variable: elements of an array, and unquoted blanks, end a word."""
        words = value
        if isinstance(words, str):
            if is_quoted or not self.is_split:
                self.add(words)
                return
            if words[:1].isspace():
                self.end()
            words = [Word(part, self.line) for part in words.split()]
        for index, word in enumerate(words):
            if index:
                self.end()
            self.add(word.text, word.line)

    def words(self) -> list[Word]:
        """Return all words."""
        self.end()
        return self.done


def sequence(texts: Sequence[str]) -> str | None:
    """Return what ``seq`` prints, or None for words that are no whole numbers."""
    try:
        numbers = [int(text) for text in texts]
    except ValueError:
        return None
    first, step, last = {1: (1, 1, numbers[0]), 2: (numbers[0], 1, numbers[-1])}.get(
        len(numbers), (numbers[0], numbers[len(numbers) // 2], numbers[-1])
    )
    if not step or abs(last - first) // abs(step) > MOST_NUMBERS:
        return None
    return "\n".join(map(str, range(first, last + (1 if step > 0 else -1), step)))


def formatted(template: str, values: Sequence[str]) -> str:
    """Return what ``printf`` prints for ``%s`` and ``%d``."""
    left = list(values)
    return re.sub(r"%[sd]", lambda _: left.pop(0) if left else "", template).replace("\\n", "\n")


def trimmed(text: str, operator: str, pattern: str) -> str:
    """Return ``${text#pattern}`` and its siblings."""
    lengths = range(len(text) + 1)
    order = lengths if len(operator) == 1 else reversed(lengths)
    for length in order:
        part = text[:length] if operator[0] == "#" else text[len(text) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return text[length:] if operator[0] == "#" else text[: len(text) - length]
    return text


COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
"""Operators of ``[`` between whole numbers."""


def decide(texts: Sequence[str]) -> bool | None:
    """Return what ``[`` says of words without its brackets, or None if that is not known."""
    for operator, is_any in (("-o", True), ("||", True), ("-a", False), ("&&", False)):
        if operator in texts:
            at = texts.index(operator)
            pair = decide(texts[:at]), decide(texts[at + 1 :])
            if is_any in pair:
                return is_any
            return None if None in pair else not is_any
    if texts[:1] == ["!"]:
        result = decide(texts[1:])
        return None if result is None else not result
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2:
        return {"-z": not texts[1], "-n": bool(texts[1])}.get(texts[0])
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (operator != "!=")
    try:
        return COMPARISONS[operator](int(left), int(right))
    except (KeyError, ValueError):
        return None


def printed(texts: Sequence[str], folder: str) -> str | None:
    """Return what a command prints that only handles words and names of folders, or None.

    ``cd`` counts as printing its folder, for ``pwd`` behind it; ``folder`` is that of the script.
    """
    name, arguments = texts[0], [text for text in texts[1:] if not text.startswith("-")]
    if name == "echo":
        return " ".join(text for text in texts[1:] if text not in ("-n", "-e"))
    if name == "printf" and arguments:
        return formatted(arguments[0], arguments[1:])
    if name == "seq" and 1 <= len(arguments) <= 3:
        return sequence(texts[1:])
    if not arguments:
        return None
    path = arguments[0]
    if name == "cd":
        return posixpath.normpath(posixpath.join(folder, path)) if path.startswith(".") else path
    if name == "dirname":
        return posixpath.dirname(path) or "."
    if name == "basename":
        return posixpath.basename(path).removesuffix("".join(arguments[1:2]))
    return posixpath.normpath(path) if name in ("realpath", "readlink") else None


def printed_by(
    commands: Sequence[Sequence[str]], folder: str, unknown: Callable[[str], object]
) -> str | None:
    """Return what commands print, the last alone, or None where one is not known."""
    output = None
    for texts in commands:
        if texts != ["pwd"] or output is None:  # pwd behind cd prints its folder
            output = None if any(map(unknown, texts)) else printed(texts, folder)
        if output is None:
            break
    return output


def joined(value: Value | None) -> str:
    """Return a value as one text, its elements with blanks between."""
    return value if isinstance(value, str) else " ".join(word.text for word in value or [])


def shortened(text: str) -> str:
    """Return a text for a message, at most 40 letters."""
    return text if len(text) <= 40 else text[:37] + "..."


def texts_of(value: Value | None) -> object:
    """Return a value without its lines, to be compared."""
    return [word.text for word in value] if isinstance(value, list) else value
