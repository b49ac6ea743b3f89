"""A teacher on engines or servers: log-probs of given tokens, for on-policy distillation.

Input: a group of engines with SGLang's ``POST /generate``, and samples. Output: the samples with
``teacher_logprobs``, and with ``top_k`` its most likely tokens at each response token.

A request has the tokens of prompt and response and asks for no new token. SGLang answers with
``meta_info.input_token_logprobs``, entries [log-prob, token id, text] from token
``logprob_start_len`` on; the first has no log-prob. Its log-probs of given tokens are those at
temperature 1. With ``top_logprobs_num``, ``meta_info.input_top_logprobs`` has such entries of the
most likely tokens at each given token, by falling log-prob, or null.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import orjson

from rlpost.columns import FloatColumn, IntColumn
from rlpost.engines.group_client import GroupClient
from rlpost.errors import ConfigError, GradingLost, RolloutError
from rlpost.types import Sample, ScoredSample, refuse_images

logger = logging.getLogger(__name__)

MAX_LOST_IN_A_ROW = 64
PROBES = (
    "def add(a, b):\n    return a + b  # 12345678 0x1F",
    "The quick brown fox; jumps over 3.14159 lazy dogs?!",
    "\u6570\u5b66\u7684\u7b54\u6848\u662f\u4e8c\u3002 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \U0001f600",
    "\\frac{1}{2} \\boxed{42}\n\n\tend",
)
"""Texts whose tokens differ between tokenizers: code, digits, other scripts, white space."""

Entry = tuple[float | None, int]
"""Log-prob and id of a token."""
Encode = Callable[[str], Sequence[int]]


class TeacherServer:
    """The teacher of a group of engines."""

    def __init__(self, client: GroupClient, *, top_k: int | None = None) -> None:
        """``top_k`` is --opd-top-k."""
        self._client, self._where, self._top_k = client, client.where, top_k
        self._lost_in_a_row = 0

    async def check_tokenizer(self, encode: Encode, *, special: Sequence[str] = ()) -> None:
        """Compare the server's tokens of some texts with those of ``encode``.

        ``special``: the tokens that the chat template writes. A teacher that lacks one scores an
        entry of its vocabulary that it was never trained on.

        Raises:
            ConfigError: they differ, or the server has no tokenizer.
            RolloutError: the server does not answer.
        """
        for text in (*PROBES, *special):
            try:
                entries, _ = await self._scores({"text": text, "logprob_start_len": 0})
            except GradingLost as lost:
                raise RolloutError(f"{lost}; start the teacher before the run") from lost
            theirs, ours = [entry[1] for entry in entries], list(encode(text))
            if not _are_same(theirs, ours):
                raise ConfigError(
                    f"{self._where}: the teacher's tokenizer is not that of "
                    f"--hf-checkpoint: {text[:20]!r} is {theirs[:8]} there and {ours[:8]} here; "
                    "distillation needs a teacher with the same tokenizer"
                )

    async def scored(self, graded: Sequence[ScoredSample]) -> tuple[ScoredSample, ...]:
        """Return the samples with the teacher's log-probs; one that cannot be scored is left out.

        Raises:
            RolloutError: the server refuses a request, or MAX_LOST_IN_A_ROW samples in a row could
                not be scored.
        """
        found = await asyncio.gather(*(self._one(each) for each in graded))
        return tuple(each for each in found if each is not None)

    async def _one(self, graded: ScoredSample) -> ScoredSample | None:
        try:
            sample = await self.score(graded.sample)
        except GradingLost as lost:
            self._lost_in_a_row += 1
            logger.warning("prompt %d: an answer is left out: %s", graded.sample.prompt_id, lost)
            if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
                raise RolloutError(
                    f"{self._lost_in_a_row} consecutive answers were not scored; the last: {lost}"
                ) from lost
            return None
        self._lost_in_a_row = 0
        return replace(graded, sample=sample)

    async def score(self, sample: Sample) -> Sample:
        """Return the sample with the teacher's log-probs of its response, at temperature 1.

        Raises:
            GradingLost: the server did not answer in time.
            RolloutError: it refused the request, or its response is not SGLang's.
            ConfigError: the sample has images.
        """
        refuse_images(sample.images, "a teacher")
        prompt, response = list(sample.prompt_ids), list(sample.response_ids)
        body: dict[str, object] = {
            "input_ids": prompt + response,
            "logprob_start_len": len(prompt) - 1,
        }
        if self._top_k is not None:
            body["top_logprobs_num"] = self._top_k
        entries, top = await self._scores(body)
        # A slice from -len(response) would be everything for an empty response.
        entries = entries[max(0, len(entries) - len(response)) :]
        if not _are_same([entry[1] for entry in entries], response):
            raise RolloutError(
                f"{self._where} returned {len(entries)} log-probs that are not those "
                f"of the {len(response)} tokens of the response; it must have SGLang's /generate"
            )
        scored = replace(sample, teacher_logprobs=self._column(entries))
        if self._top_k is None:
            return scored
        positions = top[max(0, len(top) - len(response)) :]
        flat = [entry for position in positions for entry in position]
        if len(flat) != len(response) * self._top_k:
            raise RolloutError(
                f"{self._where} returned {len(flat)} most likely tokens for "
                f"{len(response)} tokens and --opd-top-k {self._top_k}; it must support "
                "top_logprobs_num of SGLang's /generate"
            )
        return replace(
            scored,
            teacher_top_ids=IntColumn([token for _, token in flat]),
            teacher_top_logprobs=self._column(flat),
        )

    def _column(self, entries: Sequence[Entry]) -> FloatColumn:
        values = [value for value, _ in entries if value is not None and math.isfinite(value)]
        if len(values) < len(entries):
            raise RolloutError(f"{self._where} returned a log-prob that is not a finite number")
        return FloatColumn(values)

    async def _scores(self, body: dict[str, object]) -> tuple[list[Entry], list[list[Entry]]]:
        """Return the given tokens from ``logprob_start_len`` on, and the most likely ones there."""
        request = body | {
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
        }
        return self._parsed(await self._client.post("/generate", orjson.dumps(request)))

    def _parsed(self, answer: bytes) -> tuple[list[Entry], list[list[Entry]]]:
        try:
            meta = orjson.loads(answer)["meta_info"]
            positions = meta.get("input_top_logprobs") or ()
            top = [_entries(position or ()) for position in positions]
            return _entries(meta["input_token_logprobs"]), top
        except (ValueError, KeyError, TypeError, IndexError):
            raise RolloutError(
                f"{self._where} returned no meta_info.input_token_logprobs; it must "
                "have SGLang's /generate"
            ) from None


def _are_same(theirs: Sequence[int], own: Sequence[int]) -> bool:
    """Whether a server's tokens equal ``own``.

    SGLang 0.5.21 reports the last id of the vocabulary as 0
    (``managers/scheduler_components/logprob_result_processor.py``), so a 0 matches every id.
    """
    if len(theirs) != len(own):
        return False
    return all(one in (0, other) for one, other in zip(theirs, own, strict=True))


def _entries(given: Iterable[tuple[float | None, int, object]]) -> list[Entry]:
    """Return token and log-prob of each entry, whose third field is the text."""
    return [(entry[0], entry[1]) for entry in given]
