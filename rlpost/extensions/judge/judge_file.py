"""The file of a judge (TOML): what it is asked, and which verdicts it may give.

    kind = "grade"                  or "pair", which compares two answers
    system = "..."                  a system message (optional)
    template = \"\"\"...\"\"\"            the question, with fields in braces
    repairs = 1                     times to ask for the verdict line alone after a reply without one

    [verdict]
    scale = [1, 10]                 or words = {yes = 1.0, no = 0.0}; a pair has A, B and tie
    marker = "Verdict:"
    refusal = "none"

    [pair]
    against = "group"               the other answers to the prompt; or "label"
    opponents = 3                   of each answer, on one side; default: all

Fields: ``{prompt}``, ``{label}``, ``{metadata.KEY}``, and of an answer ``{response}``, or
``{answer}``, which is what follows ``</think>``; of a pair ``{response_a}``, ``{answer_a}``, ...
``{{`` is a brace. A value is inserted once, so braces in an answer have no effect.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlpost.errors import ConfigError, DataError, suggestion
from rlpost.extensions.judge.verdicts import PAIR_WORDS, Grammar
from rlpost.tasks.number_text import plain_text

METADATA = "metadata."
OF_PROMPT = ("prompt", "label")
OF_GRADE = ("response", "answer")
OF_PAIR = tuple(f"{name}_{side}" for side in "ab" for name in OF_GRADE)
KEYS = ("kind", "system", "template", "repairs", "verdict", "pair")
VERDICT_KEYS = ("scale", "words", "marker", "refusal")
PAIR_KEYS = ("against", "opponents")
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}\n]*)\}|[{}]")


@dataclass(frozen=True)
class JudgeFile:
    """A judge, as its file describes it."""

    path: str
    kind: Literal["grade", "pair"]
    template: str
    grammar: Grammar
    system: str = ""
    repairs: int = 1
    against: Literal["group", "label"] = "group"
    opponents: int | None = None

    @property
    def compares_answers(self) -> bool:
        """Whether a reward depends on the other answers to the prompt."""
        return self.kind == "pair" and self.against == "group"

    def messages(self, values: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the conversation that asks for a verdict.

        ``values``: by the name of the field. Raises DataError for one that is missing.
        """

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return match[0][0]
            if name not in values:
                raise DataError(f"{self.path}: template has {{{name}}}, which the row lacks")
            return values[name]

        question = {"role": "user", "content": _FIELD.sub(value, self.template)}
        return [*([{"role": "system", "content": self.system}] if self.system else []), question]


def read_judge(path: str | Path) -> JudgeFile:
    """Read a judge's file.

    Raises:
        ConfigError: the file cannot be read, has no template, or a key or field that is unknown.
    """
    where = str(path)
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{where}: cannot read the judge: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a TOML file: {error}") from error
    _refuse_unknown(where, "", values, KEYS)
    kind = values.get("kind", "grade")
    if kind not in ("grade", "pair"):
        raise ConfigError(f'{where}: kind = {kind!r}; use "grade" or "pair"')
    pair = _table(where, values, "pair", PAIR_KEYS)
    against, opponents = pair.get("against", "group"), pair.get("opponents")
    if pair and kind != "pair":
        raise ConfigError(f'{where}: [pair] needs kind = "pair"')
    if against not in ("group", "label"):
        raise ConfigError(f'{where}: [pair] against = {against!r}; use "group" or "label"')
    if opponents is not None and (type(opponents) is not int or opponents < 1):
        raise ConfigError(
            f"{where}: [pair] opponents = {opponents!r}; use 1 or more, or leave it out"
        )
    repairs = values.get("repairs", 1)
    if type(repairs) is not int or repairs < 0:
        raise ConfigError(f"{where}: repairs = {repairs!r}; use 0 or more")
    return JudgeFile(
        where,
        kind,
        _template(where, values.get("template"), kind),
        _grammar(where, _table(where, values, "verdict", VERDICT_KEYS), kind),
        system=str(values.get("system", "")),
        repairs=repairs,
        against=against,
        opponents=opponents,
    )


def _table(
    where: str, values: Mapping[str, object], name: str, keys: Iterable[str]
) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} = {table!r}; write a table [{name}]")
    _refuse_unknown(where, f"[{name}] ", table, keys)
    return table


def _refuse_unknown(where: str, table: str, values: Iterable[str], known: Iterable[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{where}: {table}has no key {key!r}{suggestion(key, known)}; known: {', '.join(known)}"
            )


def _template(where: str, template: object, kind: str) -> str:
    if not isinstance(template, str) or not template.strip():
        raise ConfigError(
            f'{where}: a judge needs a template, the question to it: template = """... {{prompt}} ... '
            f'{{{"answer" if kind == "grade" else "answer_a"}}} ..."""'
        )
    grammar = OF_GRADE if kind == "grade" else OF_PAIR
    known = (*OF_PROMPT, *grammar)
    names = set[str]()
    for match in _FIELD.finditer(template):
        name = match[1]
        if name is None and match[0] in ("{{", "}}"):
            continue
        if name is None:
            raise ConfigError(f"{where}: template has a single {match[0]!r}; write {match[0] * 2}")
        if name not in known and not (name.startswith(METADATA) and name != METADATA):
            raise ConfigError(
                f"{where}: template has no field {{{name}}}{suggestion(name, known)}; known: "
                f"{', '.join(known)}, metadata.KEY; a brace is written twice"
            )
        names.add(name)
    sides = ("",) if kind == "grade" else ("_a", "_b")
    for side in sides:
        if not {f"{name}{side}" for name in OF_GRADE} & names:
            raise ConfigError(
                f"{where}: template shows no answer; add {{answer{side}}} or {{response{side}}}"
            )
    return template


def _grammar(where: str, table: Mapping[str, Any], kind: str) -> Grammar:
    scale, words = table.get("scale"), table.get("words")
    marker, refusal = str(table.get("marker", "Verdict:")), str(table.get("refusal", "none"))
    if not marker.strip() or "\n" in marker or not refusal.strip():
        raise ConfigError(f"{where}: [verdict] marker and refusal must be words of one line")
    if kind == "pair":
        if scale is not None or words is not None:
            raise ConfigError(
                f"{where}: a pair has the verdicts A, B and tie; leave out scale and words"
            )
        words = PAIR_WORDS
    elif (scale is None) == (words is None):
        raise ConfigError(
            f"{where}: [verdict] needs scale = [LOWEST, HIGHEST] or words = {{WORD = REWARD, ...}}, one of both"
        )
    if words is not None:
        rewards = {str(word).lower(): value for word, value in words.items()}
        if refusal.lower() in rewards:
            raise ConfigError(
                f"{where}: [verdict] refusal = {refusal!r} is a word with a reward, too"
            )
        if not rewards or not all(_is_number(value) for value in rewards.values()):
            raise ConfigError(f"{where}: [verdict] words needs a number for each word")
        numbers = {word: float(value) for word, value in rewards.items()}
        return Grammar(marker.strip(), words=numbers, refusal=refusal.lower())
    if not (
        isinstance(scale, list)
        and len(scale) == 2
        and all(_is_number(end) for end in scale)
        and scale[0] < scale[1]
    ):
        raise ConfigError(
            f"{where}: [verdict] scale = {scale!r}; write [LOWEST, HIGHEST], two numbers that grow"
        )
    return Grammar(
        marker.strip(), scale=(float(scale[0]), float(scale[1])), refusal=refusal.lower()
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def prompt_values(prompt: str, label: str | None, metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the fields of a row; an object of the metadata is JSON."""
    values = {"prompt": prompt} | ({} if label is None else {"label": label})
    for key, value in metadata.items():
        is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        text = plain_text(value) if is_plain else json.dumps(value, default=str)
        values[f"{METADATA}{key}"] = text
    return values


def answer_values(text: str, side: str = "") -> dict[str, str]:
    """Return the fields of an answer; ``side`` is "", or "_a" or "_b" for one of a pair."""
    return {f"response{side}": text, f"answer{side}": text.rpartition("</think>")[2].strip()}
