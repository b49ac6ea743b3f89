"""An answer while it is written: by the model, and by tools between its turns.

Input: a prompt, how to sample, an answer that was aborted earlier. Output: a ``Sample`` whose ids, log-probs, loss mask
and version spans have one entry a token. A function of --custom-generate-function-path gets a builder, a prompt and the
sampling parameters; ``write_answer`` is the one that is used without it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlpost.errors import RolloutError
from rlpost.rollout.connection import Connection
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import FinishReason, Prompt, Sample

MOST_EMPTY_ANSWERS = 100  # in a row, each cut off before its first token


class Codec(Protocol):
    """Text to ids and back, without special tokens."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""


class ResponseBuilder:
    """An answer under way. ``response_ids`` is all of it so far; ``finish_reason`` how the last turn ended, and
    ``stopped_at`` the token id or the string that ended it."""

    def __init__(
        self,
        connection: Connection,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        index: int = 0,
        codec: Codec | None = None,
        so_far: Sample | None = None,
    ) -> None:
        self.prompt, self.sampling, self.index = prompt, sampling, index
        self.connection, self._codec = connection, codec
        self.response_ids = list(so_far.response_ids) if so_far else []
        self._logprobs = list(so_far.rollout_logprobs) if so_far else []
        self._mask = list(so_far.mask) if so_far else []
        self._spans = list(_spans(so_far)) if so_far else []
        self.text = so_far.text if so_far else ""
        self._unversioned = 0  # tokens of tools before the model's first
        self._turn_at, self._before = 0, ""  # where the turn under way begins: in the ids, and the text up to it
        self._pieces = [so_far.text] if so_far else []  # of its text, one an answer of an engine
        self.finish_reason: FinishReason = "stop"
        self.stopped_at: int | str | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the answer may still have."""
        remaining = self.sampling.max_new_tokens - len(self.response_ids)
        if self.sampling.max_context_len is not None:
            remaining = min(
                remaining, self.sampling.max_context_len - len(self.prompt.token_ids) - len(self.response_ids)
            )
        return max(0, remaining)

    async def write(self, *, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> str:
        """Let the model go on until it ends, writes one of ``stop`` (beside the stops of the settings), or has written
        ``max_new_tokens``. Returns the text that it added, without what it stopped at.

        An answer that an engine aborts because new weights arrive is resumed. When no tokens remain, nothing is written
        and the builder ends with "length".

        Raises:
            Halted: generation was ended for now; leave it alone, the rollout sees to the builder.
            RolloutError: the request failed.
        """
        if not self._pieces:
            self._turn_at, self._before = len(self.response_ids), self.text
        end = len(self.response_ids) + (
            self.remaining_tokens if max_new_tokens is None else min(self.remaining_tokens, max_new_tokens)
        )
        what, empty = f"prompt {self.prompt.prompt_id}, sample {self.index}", 0
        self.finish_reason, self.stopped_at = "length", None
        stops = tuple(one for one in (*self.sampling.stop, *stop) if one)
        while len(self.response_ids) < end:
            params = replace(self.sampling, stop=stops, max_new_tokens=end - len(self.response_ids))
            answer = await self.connection.generate(
                what, [*self.prompt.token_ids, *self.response_ids], params.to_sglang()
            )
            ended_by = self._add(answer)
            if self._stops_across_a_cut(stops) or ended_by != "abort":
                break
            empty = 0 if answer.get("output_ids") else empty + 1
            if empty == MOST_EMPTY_ANSWERS:
                raise RolloutError(f"an engine ended {what} by 'abort' {empty} times before a token; is it paused?")
        self._pieces = []
        return self.text[len(self._before) :]

    def insert(self, text: str) -> None:
        """Add a tool's text: the model reads its tokens, the loss does not. Text beyond the limit is truncated."""
        assert self._codec is not None, "no tokenizer to write a tool's text with"
        token_ids = list(self._codec.encode(text))[: self.remaining_tokens]
        self.response_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        self._mask += [0] * len(token_ids)
        if self._spans:
            self._extend_spans(self._spans[-1][0], len(token_ids))
        else:
            self._unversioned += len(token_ids)
        self.text += text

    def sample(self) -> Sample:
        """The answer as it is now."""
        return Sample(
            prompt_id=self.prompt.prompt_id,
            index=self.index,
            prompt_ids=self.prompt.token_ids,
            response_ids=tuple(self.response_ids),
            rollout_logprobs=tuple(self._logprobs),
            text=self.text,
            finish_reason=self.finish_reason,
            policy_version=self._spans[-1][0] if self._spans else 0,
            label=self.prompt.label,
            loss_mask=None if all(self._mask) else tuple(self._mask),
            version_spans=tuple(self._spans) if len(self._spans) > 1 else (),
        )

    def _add(self, answer: Any) -> str:
        """Take over one answer of an engine; returns what ended it."""
        # A request that was aborted before its first token has a text and a reason, and little else.
        meta, token_ids = answer["meta_info"], answer.get("output_ids") or []
        reason = meta["finish_reason"]
        if reason["type"] not in ("stop", "length", "abort") or reason.get("status_code") is not None:
            raise RolloutError(
                f"an engine ended prompt {self.prompt.prompt_id}, sample {self.index} by {reason['type']!r} "
                f"({reason.get('message')}); nobody here asked for that"
            )
        self.response_ids += token_ids
        self._logprobs += [logprob for logprob, _, _ in meta.get("output_token_logprobs") or []]
        self._mask += [1] * len(token_ids)
        for version, count in version_spans(meta, len(token_ids)):
            self._extend_spans(version, count)
        self._pieces.append(answer.get("text") or "")
        self.stopped_at = reason.get("matched")
        self.text = self._before + self._turn(self.stopped_at)
        self.finish_reason = "length" if reason["type"] == "abort" else reason["type"]
        return reason["type"]

    def _stops_across_a_cut(self, stops: Sequence[str]) -> bool:
        """Whether the turn has a stop string that begins before a cut and ends behind it. An engine looks for it only
        in what it writes itself and went on; the turn ends there all the same, and what follows is dropped."""
        codec, ids = self._codec, self.response_ids[self._turn_at :]
        if len(self._pieces) == 1 or codec is None or not stops:
            return False

        def found(count: int) -> str | None:
            text = codec.decode(ids[:count])
            return next((stop for stop in stops if stop in text), None)

        if found(len(ids)) is None:
            return False
        count = bisect_left(range(len(ids)), True, key=lambda number: found(number) is not None)
        left = end = self._turn_at + count
        for of_tokens in (self.response_ids, self._logprobs, self._mask):
            del of_tokens[end:]
        spans, self._spans = self._spans, []
        for version, length in spans:
            self._extend_spans(version, min(length, left))
            left -= min(length, left)
        self.finish_reason, self.stopped_at = "stop", found(count)
        self.text = self._before + self._turn(self.stopped_at)
        return True

    def _extend_spans(self, version: int, count: int) -> None:
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1] + count)
        elif count:
            self._spans.append((version, count + self._unversioned))
            self._unversioned = 0

    def _turn(self, matched: Any) -> str:
        """The text of the turn under way. In several pieces it is decoded as a whole: a cut may go through a character,
        and an engine takes off only what it stopped at itself."""
        if len(self._pieces) == 1 or self._codec is None:
            return "".join(self._pieces)
        ids = self.response_ids[self._turn_at :]
        text = self._codec.decode(ids[:-1] if ids[-1:] == [matched] else ids)
        return text[: text.rfind(matched)] if isinstance(matched, str) and matched in text else text


Written = Sample | Sequence[Sample]
GenerateFunction = Callable[[ResponseBuilder, Prompt, SamplingParams], Awaitable[Written]]


async def write_answer(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Sample:
    """One turn, until the model ends it."""
    await builder.write()
    return builder.sample()


def version_spans(meta: Any, length: int) -> list[tuple[int, int]]:
    """(version, number of tokens) of one answer in order: from SGLang 0.5.19 on by ``weight_versions``, before that
    the one version that the engine had at its end.

    Raises:
        RolloutError: a version is not a whole number: somebody else set it.
    """
    if not length:
        return []
    said = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    for span in said:
        if not str(span["version"]).isdecimal():
            raise RolloutError(
                f"an engine generates with weights of version {span['version']!r}; a whole number is needed"
            )
    ends = [*(min(span["end"], length) for span in said[:-1]), length]
    return [(int(span["version"]), end - span["start"]) for span, end in zip(said, ends, strict=True)]


def without_older(sample: Sample) -> Sample:
    """The same answer with the tokens of older weights than its last left out of the loss."""
    if not sample.version_spans:
        return sample
    fresh = [int(version == sample.policy_version) for version, count in sample.version_spans for _ in range(count)]
    return replace(sample, loss_mask=tuple(a * b for a, b in zip(fresh, sample.mask, strict=True)))


def _spans(sample: Sample) -> tuple[tuple[int, int], ...]:
    if sample.version_spans or not sample.response_ids:
        return sample.version_spans
    return ((sample.policy_version, len(sample.response_ids)),)
