"""What the journal has of one answer in generation, and how an answer continues from there.

Input: the requests of an answer and the responses of engines; what an environment returned. Output:
the same responses after a crash, so that only the turn in progress is generated again.

A response belongs to its request: the tokens that the engine read, with the sampling parameters. A
function or an environment that does the same again asks the same requests and gets the recorded
responses, as many times as there are some; from the first other request on, engines generate. Two
kinds of environments continue so:

    deterministic           is run again, on recorded responses
    with save and restore   gets its newest state; the steps before it are taken from the journal

All others begin the answer again, with another sample of it. Where engines stream (``every_s``), the
tokens of a response in progress are recorded, too, and a resume continues behind them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import defaultdict, deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlpost.columns import IntColumn
from rlpost.durable.group_records import Column
from rlpost.durable.journal import Journal
from rlpost.durable.journal_format import BEGUN, STATE, STEP, TOKENS, TURN, Part
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Watch
from rlpost.engines.streamed_answer import joined
from rlpost.types import ImageSpan, Prompt, sequence_digest


class Ask(Protocol):
    """Sends a request to an engine."""

    def __call__(self, *, watch: Watch | None) -> Awaitable[Answer]:
        """Return the response; ``watch`` gets its tokens while they are generated."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of an environment after ``steps``, the first of which is that of ``reset``."""

    steps: tuple[Mapping[str, Any], ...]
    data: bytes


class AnswerLog:
    """The log of one answer."""

    def __init__(
        self,
        journal: Journal,
        prompt: Prompt,
        index: int,
        parts: Sequence[Part] = (),
        *,
        resumes: bool = True,
        keeps_last: bool = True,
        every_s: float | None = None,
    ) -> None:
        """
        Args:
            parts: what the journal has of the answer.
            resumes: the answer continues from its parts; otherwise only its beginning is recorded.
            keeps_last: record responses that end a turn. The last response of an answer of one turn
                is recorded with the answer.
            every_s: seconds between records of a response in progress; None for none.
        """
        self._journal, self._prompt, self.index = journal, prompt, index
        self._resumes, self._keeps_last, self._every_s = resumes, keeps_last, every_s
        self._responses: defaultdict[str, deque[Answer]] = defaultdict(deque)
        for part in parts:
            if part.kind == TURN:
                self._responses[part.value["request"]].append(_response(part))
        for request, answer in _in_progress(parts):
            self._responses[request].append(answer)
        self._num_events = max(
            (part.number + 1 for part in parts if part.kind == TOKENS), default=0
        )
        self.saved = _saved_state(parts)
        """The state that the environment continues from; None if there is none."""
        self._num_turns = max((part.number + 1 for part in parts if part.kind == TURN), default=0)
        self._has_begun = False
        self._num_requests = 0

    @classmethod
    def off(cls, prompt: Prompt, index: int = 0) -> AnswerLog:
        """A log that records nothing."""
        return cls(Journal.off(), prompt, index)

    def next_seed(self, base: int) -> int:
        """Return the seed of the answer's next request, of which no other one has the same.

        A deterministic engine (0.5.21: ``sampling_batch_info.py``) draws by the seed and the position
        of a token alone, and takes 42 for a request without a seed: all answers to a prompt would be
        the same. Replayed requests count, so the next one has the same seed as without a crash, except
        after a response that was recorded in progress: what continues it is one more request.
        """
        self._num_requests += 1
        text = f"{base} {self._prompt.prompt_id} {self.index} {self._num_requests}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    async def respond(
        self,
        input_ids: IntColumn,
        params: Mapping[str, object],
        ask: Ask,
        *,
        images: Sequence[ImageSpan] = (),
    ) -> Answer:
        """Return the recorded response to a request; without one call ``ask``, and record it."""
        request = request_digest(input_ids, params, images)
        if recorded := self._responses.get(request):
            return recorded.popleft()
        answer = await ask(watch=self._watch(request))
        is_whole = answer.finish_reason["type"] != "abort"
        if answer.token_ids and (self._keeps_last or not is_whole):
            self._record(request, answer)
        return answer

    @property
    def records(self) -> bool:
        return self._journal.is_written

    def add_step(self, number: int, step: Mapping[str, object], state: bytes | None = None) -> None:
        """Record what an environment returned, and its state after that.

        ``number`` is 0 for ``reset``, n for the n-th turn.
        """
        self._add(STEP, number, value=step)
        if state is not None:
            self._add(STATE, 0, value={"steps": number + 1}, data=state)

    def forget(self) -> None:
        """Begin the answer again: nothing that is recorded so far is used."""
        self._responses.clear()
        self.saved = None
        self._num_turns, self._has_begun = 0, False
        self._journal.drop_parts(self._prompt.prompt_id, self.index)

    def _watch(self, request: str) -> Watch | None:
        """Return what records the tokens of a response in progress."""
        if self._every_s is None or not self._resumes:
            return None
        stream = _Stream()

        def add(new: Answer) -> None:
            value = {"stream": stream.name, "before": stream.num_tokens}
            part = turn_part(self._prompt.prompt_id, self.index, self._num_events, request, new)
            self._num_events += 1
            stream.num_tokens += len(new.token_ids)
            part = replace(part, kind=TOKENS, value={**part.value, **value})
            self._journal.add_part(part, self._prompt)

        return Watch(self._every_s, stream.begin, add)

    def _record(self, request: str, answer: Answer) -> None:
        if not self._resumes:
            if not self._has_begun:
                self._has_begun = True
                self._add(BEGUN, 0)
            return
        part = turn_part(self._prompt.prompt_id, self.index, self._num_turns, request, answer)
        self._num_turns += 1
        self._journal.add_part(part, self._prompt)

    def _add(
        self,
        kind: str,
        number: int,
        *,
        value: Mapping[str, object] | None = None,
        data: bytes = b"",
    ) -> None:
        part = Part(self._prompt.prompt_id, self.index, kind, number, value=value or {}, data=data)
        self._journal.add_part(part, self._prompt)


class _Stream:
    """One attempt of a request that streams; a retry generates other tokens."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.name, self.num_tokens = secrets.token_hex(4), 0


def request_digest(
    input_ids: IntColumn, params: Mapping[str, object], images: Sequence[ImageSpan] = ()
) -> str:
    """Digest of a request: what the engine reads, images included, and how it samples."""
    digest = sequence_digest(input_ids, images, size=12)
    digest.update(json.dumps(params, sort_keys=True).encode())
    return digest.hexdigest()


def turn_part(prompt_id: int, index: int, number: int, request: str, answer: Answer) -> Part:
    """Return the response to a request as a part of an answer."""
    columns: dict[str, Column | None] = {
        "token_ids": answer.token_ids,
        "logprobs": answer.logprobs,
        "routes": answer.routes,
        "sampling_mask": answer.sampling_mask,
    }
    reason = {name: answer.finish_reason.get(name) for name in ("type", "matched")}
    return Part(
        prompt_id,
        index,
        TURN,
        number,
        spans=answer.version_spans,
        columns={name: column for name, column in columns.items() if column is not None},
        value={"request": request, "text": answer.text, "finish_reason": reason},
    )


def _response(part: Part) -> Answer:
    """The inverse of ``turn_part``."""
    columns: dict[str, Any] = dict(part.columns)
    return Answer(
        text=part.value["text"],
        finish_reason=part.value["finish_reason"],
        version_spans=part.spans,
        meta_info={},
        **columns,
    )


def _in_progress(parts: Sequence[Part]) -> Iterator[tuple[str, Answer]]:
    """Yield the request of each stream, with its tokens up to the first that are missing."""
    streams: defaultdict[tuple[str, str], list[Part]] = defaultdict(list)
    for part in parts:
        if part.kind == TOKENS:
            stream = streams[part.value["request"], part.value["stream"]]
            if part.value["before"] == sum(len(each.columns["token_ids"]) for each in stream):
                stream.append(part)
    for (request, _), stream in streams.items():
        if stream:
            yield request, joined([_response(part) for part in stream])


def _saved_state(parts: Sequence[Part]) -> SavedState | None:
    """Return the newest state with the steps before it; None if a step or a response is missing."""
    steps = {part.number: part.value for part in parts if part.kind == STEP}
    responses = {part.number: part for part in parts if part.kind == TURN}
    is_complete = all(number in responses for number in range(len(responses)))
    num_turns = sum(part.value["finish_reason"]["type"] != "abort" for part in responses.values())
    for part in parts:
        if part.kind == STATE and is_complete:
            count = part.value["steps"]
            if num_turns >= count - 1 and all(number in steps for number in range(count)):
                return SavedState(tuple(steps[number] for number in range(count)), part.data)
    return None
