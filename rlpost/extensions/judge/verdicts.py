"""The verdict of a judge: grammar of its reply, parser, agreement with labels of people. Pure.
    reply    = { line } , verdict ;                      the last line that is not blank
    verdict  = marker , value , [ "." ] ;                Markdown emphasis around it is ignored
    value    = number , [ "/" , highest ] | word | refusal ;

Only the last line counts, so a verdict that an answer contains, or that the judge quotes, has no
effect. Text up to ``</think>`` is not part of the reply, nor is a thought behind it that never
closes. Case is ignored in words.

A reply without such a line has no verdict: it is *refused* if the server filtered it or it begins
with one of REFUSALS, else *unparsable*. Neither is a reward of 0.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlpost.algorithm.evaluation_statistics import wilson
from rlpost.tasks.reward.answer_extraction import behind_thought

PAIR_WORDS: Mapping[str, float] = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Score of the answer A by the word of a comparison."""
REFUSALS = (
    *("i'm sorry", "i am sorry", "sorry,", "i can't", "i cannot", "i won't", "i will not"),
    *("i'm unable", "i am unable", "i'm not able", "i am not able"),
)
_EMPHASIS = re.compile(r"[*_`#>]+")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class Grammar:
    """The verdicts that a judge may give: numbers of a scale, or words.

    Attributes:
        scale: lowest and highest number; the reward is 0 at the one and 1 at the other.
        words: reward by word, in lower case; without a scale.
        refusal: the word with which the judge declines, in lower case.
    """

    marker: str = "Verdict:"
    scale: tuple[float, float] | None = None
    words: Mapping[str, float] = field(default_factory=dict)
    refusal: str = "none"

    @property
    def form(self) -> str:
        """The line that a reply has to end with, for people and for the judge."""
        values = [word.upper() if len(word) == 1 else word for word in self.words]
        if self.scale is not None:
            lowest, highest = self.scale
            values = [f"a number from {lowest:g} to {highest:g}"]
        return f"{self.marker} followed by {', '.join(values)} or {self.refusal}"


@dataclass(frozen=True)
class Verdict:
    """A verdict: the word or number as given, and the reward."""

    value: str | float
    reward: float


@dataclass(frozen=True)
class NoVerdict:
    """A reply without a verdict."""

    kind: Literal["refused", "unparsable"]
    why: str


def parse_verdict(reply: str, grammar: Grammar, finish_reason: str = "stop") -> Verdict | NoVerdict:
    """Return the verdict of a reply, by the grammar of this module.

    ``finish_reason``: ``length`` means that the reply was truncated, ``content_filter`` that the
    server withheld it.
    """
    if finish_reason == "content_filter":
        return NoVerdict("refused", "the server filtered the reply")
    if finish_reason == "length":
        return NoVerdict("unparsable", "the reply was truncated before its end")
    text = behind_thought(reply).strip()
    line = _EMPHASIS.sub("", text.rpartition("\n")[2]).strip()
    marker = grammar.marker.lower()
    if not line.lower().startswith(marker):
        if _EMPHASIS.sub("", text).lower().replace("\u2019", "'").startswith(REFUSALS):
            return NoVerdict("refused", f"the reply begins with {text[:80]!r}")
        return NoVerdict(
            "unparsable", f"the last line is {line[:80]!r}, without {grammar.marker!r}"
        )
    value = line[len(marker) :].strip().removesuffix(".").strip().lower()
    if value == grammar.refusal:
        return NoVerdict("refused", f"the verdict is {grammar.refusal!r}")
    verdict = (
        _of_word(value, grammar) if grammar.scale is None else _of_number(value, grammar.scale)
    )
    if verdict is None:
        return NoVerdict("unparsable", f"the verdict is {value[:80]!r}, not {grammar.form}")
    return verdict


def _of_word(value: str, grammar: Grammar) -> Verdict | None:
    return Verdict(value, grammar.words[value]) if value in grammar.words else None


def _of_number(value: str, scale: tuple[float, float]) -> Verdict | None:
    lowest, highest = scale
    number, slash, of = (part.strip() for part in value.partition("/"))
    if not _NUMBER.fullmatch(number) or (slash and of != f"{highest:g}"):
        return None
    given = float(number)
    if not math.isfinite(given) or not lowest <= given <= highest:
        return None
    return Verdict(given, (given - lowest) / (highest - lowest))


@dataclass(frozen=True)
class Agreement:
    """The result over all rows.

    Attributes:
        agreed: rows whose verdict equals the label.
        judged: rows with a verdict.
        kappa: agreement beyond chance, 1 at most; nan when labels and verdicts are one value.
        mean_difference: of numbers, absolute; None for words.
        rank_correlation: Spearman's, of numbers; None for words, nan when one side is constant.
        flipped: pairs on which the judge chose the same position in both orders.
    """

    rows: int
    judged: int
    agreed: int
    refused: int
    unparsable: int
    kappa: float
    mean_difference: float | None = None
    rank_correlation: float | None = None
    flipped: int | None = None

    @property
    def share(self) -> float:
        """Rows that agree, of those with a verdict; nan without any."""
        return self.agreed / self.judged if self.judged else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of ``share``."""
        return wilson(self.agreed, self.judged)


def agreement(
    labels: Sequence[str | float],
    verdicts: Sequence[str | float | NoVerdict],
    *,
    flipped: int | None = None,
) -> Agreement:
    """Compare labels with verdicts, which are both words or both numbers."""
    pairs = [
        (label, verdict)
        for label, verdict in zip(labels, verdicts, strict=True)
        if not isinstance(verdict, NoVerdict)
    ]
    kinds = Counter(verdict.kind for verdict in verdicts if isinstance(verdict, NoVerdict))
    numbers = [
        (one, other)
        for one, other in pairs
        if not isinstance(one, str) and not isinstance(other, str)
    ]
    are_numbers = bool(pairs) and len(numbers) == len(pairs)
    differences = [abs(one - other) for one, other in numbers]
    return Agreement(
        rows=len(labels),
        judged=len(pairs),
        agreed=sum(label == verdict for label, verdict in pairs),
        refused=kinds["refused"],
        unparsable=kinds["unparsable"],
        kappa=cohen_kappa(pairs),
        mean_difference=sum(differences) / len(differences) if are_numbers else None,
        rank_correlation=spearman(numbers) if are_numbers else None,
        flipped=flipped,
    )


def cohen_kappa(pairs: Sequence[tuple[object, object]]) -> float:
    """Return (p_o - p_e) / (1 - p_e) (Cohen 1960); nan when chance alone gives agreement 1."""
    if not pairs:
        return math.nan
    total = len(pairs)
    observed = sum(one == other for one, other in pairs) / total
    ours, theirs = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    expected = sum(ours[value] * theirs[value] for value in ours) / total**2
    return math.nan if expected == 1 else (observed - expected) / (1 - expected)


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the correlation of ranks, ties with their mean rank; nan when one side is constant."""
    one, other = _ranks([pair[0] for pair in pairs]), _ranks([pair[1] for pair in pairs])
    middle = (len(pairs) + 1) / 2
    top = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
    bottom = math.sqrt(sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in other))
    return top / bottom if bottom else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(rank)
    return [sum(places[value]) / len(places[value]) for value in values]
