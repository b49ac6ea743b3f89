"""Ask a judge about the answers to a prompt.

Input: a judge's file, a client with ``chat``, the fields of a prompt, texts of answers. Output: for
each answer a reward, or the reason why there is none. A *pair* is asked twice, with the answers in
both orders, so that a judge that prefers a position gives both the same reward.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlpost.errors import RolloutError
from rlpost.extensions.judge.judge_file import OF_GRADE, OF_PAIR, JudgeFile, answer_values
from rlpost.extensions.judge.special_text import SpecialText
from rlpost.extensions.judge.verdicts import NoVerdict, Verdict, parse_verdict

REQUESTS, REFUSED, UNPARSABLE, FLIPPED, FORGED = COUNTED = (
    "rollout/judge_requests",
    "rollout/judge_refused",
    "rollout/judge_unparsable",
    "rollout/judge_flipped",
    "rollout/judge_forged",
)
OF_ANSWER = (*OF_GRADE, *OF_PAIR)


class ChatClient(Protocol):
    """A model that answers a conversation: engines of the run, or a server."""

    async def chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Return the text of the reply; ``finish_reason``, an attribute of it, may be missing.

        Raises:
            GradingLost: nothing answered in time.
            RolloutError: the request was refused.
        """


@dataclass(frozen=True)
class Comparison:
    """The verdicts on a pair, in both orders; ``score`` is that of its first answer, 0 to 1."""

    score: float
    first: Verdict
    swapped: Verdict

    @property
    def is_flipped(self) -> bool:
        """Whether the judge chose the same position twice."""
        return {self.first.value, self.swapped.value} <= {"a", "b"} and (
            self.first.value == self.swapped.value
        )


class Judge:
    """One judge; its calls may be concurrent."""

    def __init__(
        self, file: JudgeFile, client: ChatClient, special: SpecialText | None = None
    ) -> None:
        """``special``: the special tokens of the judge's model; None: the usual ones."""
        self.file, self._client = file, client
        self._special = special or SpecialText()
        self._counts: Counter[str] = Counter()

    async def rewards(
        self, prompt: Mapping[str, str], texts: Sequence[str]
    ) -> list[float | NoVerdict]:
        """Return the reward of each answer to a prompt.

        ``prompt``: the fields of its row (``judge_file.prompt_values``). Raises GradingLost, and
        DataError for a field that the row lacks.
        """
        if self.file.compares_answers:
            return await self._tournament(prompt, texts)
        if self.file.kind == "grade":
            verdicts = await asyncio.gather(*(self.grade(prompt, text) for text in texts))
            return [each.reward if isinstance(each, Verdict) else each for each in verdicts]
        label = prompt.get("label")
        if label is None:
            return [NoVerdict("unparsable", "the prompt has no label to compare with")] * len(texts)
        compared = await asyncio.gather(*(self.compare(prompt, text, label) for text in texts))
        return [each.score if isinstance(each, Comparison) else each for each in compared]

    async def _tournament(
        self, prompt: Mapping[str, str], texts: Sequence[str]
    ) -> list[float | NoVerdict]:
        """Return the share of comparisons with other answers that each one wins."""
        pairs = opponents(len(texts), self.file.opponents)
        compared = await asyncio.gather(
            *(self.compare(prompt, texts[one], texts[other]) for one, other in pairs)
        )
        scores: list[list[float]] = [[] for _ in texts]
        reasons: dict[int, NoVerdict] = {}
        for (one, other), result in zip(pairs, compared, strict=True):
            if isinstance(result, NoVerdict):
                reasons |= {one: result, other: result}
                continue
            scores[one].append(result.score)
            scores[other].append(1.0 - result.score)
        alone = NoVerdict("unparsable", "there is no other answer to compare with")
        return [
            sum(each) / len(each) if each else reasons.get(number, alone)
            for number, each in enumerate(scores)
        ]

    async def grade(self, prompt: Mapping[str, str], text: str) -> Verdict | NoVerdict:
        """Return the verdict on one answer."""
        return await self._ask({**prompt, **answer_values(text)})

    async def compare(
        self, prompt: Mapping[str, str], text: str, other: str
    ) -> Comparison | NoVerdict:
        """Compare two answers in both orders; without a verdict in one order there is none."""
        first, swapped = await asyncio.gather(
            self._ask({**prompt, **answer_values(text, "_a"), **answer_values(other, "_b")}),
            self._ask({**prompt, **answer_values(other, "_a"), **answer_values(text, "_b")}),
        )
        for verdict in (first, swapped):
            if isinstance(verdict, NoVerdict):
                return verdict
        assert isinstance(first, Verdict) and isinstance(swapped, Verdict)
        comparison = Comparison((first.reward + 1.0 - swapped.reward) / 2, first, swapped)
        self._counts[FLIPPED] += comparison.is_flipped
        return comparison

    async def _ask(self, values: Mapping[str, str]) -> Verdict | NoVerdict:
        # Before the template is filled, which is the user's own and may hold special tokens.
        self._counts[FORGED] += any(
            self._special.is_in(value) for name, value in values.items() if name in OF_ANSWER
        )
        values = {name: self._special.defuse(value) for name, value in values.items()}
        messages: list[Mapping[str, object]] = [*self.file.messages(values)]
        grammar = self.file.grammar
        for attempt in range(self.file.repairs + 1):
            self._counts[REQUESTS] += 1
            try:
                reply = await self._client.chat(messages)
            except RolloutError as error:  # one answer may be too long for the judge
                verdict: Verdict | NoVerdict = NoVerdict("refused", str(error))
                break
            verdict = parse_verdict(reply, grammar, getattr(reply, "finish_reason", "stop"))
            if isinstance(verdict, Verdict) or verdict.kind == "refused":
                break
            if attempt < self.file.repairs:
                again = f"Reply with one line, nothing else: {grammar.form}."
                said = {"role": "assistant", "content": self._special.defuse(str(reply))}
                messages = [*messages, said, {"role": "user", "content": again}]
        if isinstance(verdict, NoVerdict):
            self._counts[REFUSED if verdict.kind == "refused" else UNPARSABLE] += 1
        return verdict

    def counters(self) -> dict[str, float]:
        """Return counts since the last call, by metric name."""
        counts = {name: float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return counts


def opponents(num_answers: int, each: int | None) -> list[tuple[int, int]]:
    """Return the pairs of answers to compare, each pair once.

    With ``each``, an answer meets that many of those after it in a ring, and as many before it.

    >>> opponents(4, 1)
    [(0, 1), (1, 2), (2, 3), (3, 0)]
    >>> opponents(3, None)
    [(0, 1), (0, 2), (1, 2)]
    """
    if each is None or 2 * each >= num_answers - 1:
        return [(i, j) for i in range(num_answers) for j in range(i + 1, num_answers)]
    return [
        (i, (i + step) % num_answers) for step in range(1, each + 1) for i in range(num_answers)
    ]
