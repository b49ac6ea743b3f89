"""The response builder: collects an answer from turns of the model and outputs of tools.

Input: a prompt, sampling parameters, and a partial answer that was aborted earlier. Output: a
``Sample`` with one token id, log-prob, loss mask entry and version per token, and the routes of
experts where engines return them. A function of --custom-generate-function-path receives a builder,
a prompt and the sampling parameters; the default is ``write_answer``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

from rlpost.columns import FloatColumn, IntColumn, RunColumn, TokenSetColumn
from rlpost.engines.answer import MASK_FIELD, Answer
from rlpost.engines.answer_routes import AnswerRoutes
from rlpost.engines.connection import Connection
from rlpost.errors import DataError, RolloutError
from rlpost.images.tokens import MARK, KnownImage
from rlpost.rollout.answer_log import AnswerLog
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.vocabulary import unknown_id
from rlpost.types import FinishReason, ImageSpan, Prompt, Sample

CHARS_PER_TOKEN = 4
"""Of a text that may exceed the limit."""
SLICE_CHARS = 16384
"""Of a long text, which is tokenised in slices until the limit is exceeded."""
TOKENS_ACROSS = 64
"""A slice may have so many tokens more than its part of the whole text has."""
SEED_FIELD = "sampling_seed"
"""Field of ``sampling_params``; only deterministic engines read it."""
MAX_EMPTY_ANSWERS = 100  # consecutive responses that were aborted before the first token


class Codec(Protocol):
    """Text to ids and back, without special tokens.

    With an attribute ``marks_thoughts`` that is true, ``decode`` has marks that the text of an
    engine lacks (``rlpost.tasks.tokenizer.PromptTokenizer``).
    """

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens that one request or one tool added to an answer."""

    token_ids: IntColumn
    logprobs: FloatColumn
    mask: RunColumn
    sampled_from: TokenSetColumn | None = None  # None: the whole vocabulary

    @property
    def token_sets(self) -> TokenSetColumn:
        """The ids that each token was sampled from."""
        return self.sampled_from or TokenSetColumn.whole(len(self.token_ids))

    @classmethod
    def joined(cls, pieces: Sequence[_Piece]) -> Self:
        """Concatenate pieces."""
        return cls(
            IntColumn.joined(piece.token_ids for piece in pieces),
            FloatColumn.joined(piece.logprobs for piece in pieces),
            RunColumn(run for piece in pieces for run in piece.mask.runs),
            TokenSetColumn.joined(piece.token_sets for piece in pieces)
            if any(piece.sampled_from is not None for piece in pieces)
            else None,
        )

    def first(self, count: int) -> _Piece:
        """Return the first ``count`` tokens."""
        sets = None if self.sampled_from is None else self.sampled_from[:count]
        return _Piece(self.token_ids[:count], self.logprobs[:count], self.mask[:count], sets)


class ResponseBuilder:
    """An answer in progress.

    ``response_ids`` holds all its tokens so far; ``finish_reason`` says how the last turn ended,
    ``stopped_at`` is the token id or string that ended it.
    """

    def __init__(
        self,
        connection: Connection,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        index: int = 0,
        codec: Codec | None = None,
        vocab_size: int | None = None,
        so_far: Sample | None = None,
        conversation: Hashable = None,
        log: AnswerLog | None = None,
    ) -> None:
        """
        Args:
            vocab_size: number of ids that the model knows; None if it is not known.
            conversation: the same for builders that write turns of one conversation.
            log: what an earlier attempt has recorded of this answer, and where it is recorded.
        """
        self.conversation = conversation or object()
        self.log = log or AnswerLog.off(prompt, index)
        self.prompt, self.sampling, self.index = prompt, sampling, index
        self.connection, self._codec = connection, codec
        self._vocab_size = vocab_size
        self._pieces: list[_Piece] = []
        if so_far:
            columns = (so_far.response_ids, so_far.rollout_logprobs, so_far.mask)
            self._pieces.append(_Piece(*columns, so_far.sampling_mask))
        self._spans = list(so_far.versions.runs) if so_far else []
        self._routes = _routes(connection, so_far)
        self.text = so_far.text if so_far else ""
        self.images = tuple(prompt.images if so_far is None else so_far.images)
        """The images of prompt and answer so far."""
        self._is_full = False  # an image of a tool did not fit
        self._unversioned = 0  # tokens of tools before the model's first
        self._turn_at = 0  # start of the current turn in the ids
        self._before = ""  # the text before it
        self._texts = [so_far.text] if so_far else []  # texts of the current turn, one per request
        self.finish_reason: FinishReason = "stop"
        self.stopped_at: int | str | None = None

    def again(self) -> ResponseBuilder:
        """Return a builder for the same answer without a token: the next attempt."""
        return ResponseBuilder(
            self.connection,
            self.prompt,
            self.sampling,
            index=self.index,
            codec=self._codec,
            vocab_size=self._vocab_size,
            log=self.log,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        assert self._codec is not None, "the text of tokens needs a tokenizer"
        return self._codec.decode(token_ids)

    @property
    def response_ids(self) -> IntColumn:
        """All tokens so far."""
        return self._joined().token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return sum(len(piece.token_ids) for piece in self._pieces)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be added.

        None after a sampled token of an image, or the text of one: an engine would look for the
        image. None after an image that did not fit, which is not cut.
        """
        if self._is_full or self._has_image_mark():
            return 0
        remaining = self.sampling.max_new_tokens - self.num_tokens
        if self.sampling.max_context_len is not None:
            in_context = len(self.prompt.token_ids) + self.num_tokens
            remaining = min(remaining, self.sampling.max_context_len - in_context)
        return max(0, remaining)

    async def write(self, *, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> str:
        """Generate one turn and return its text, without the stop string.

        The turn ends when the model ends it, at one of ``stop`` or of the configured stop strings,
        or after ``max_new_tokens``. A request that an engine aborts for new weights is resumed.
        When no tokens remain, nothing is generated and ``finish_reason`` is "length".

        Raises:
            Halted: generation is suspended; do not catch this, the rollout keeps the partial
                answer.
            RolloutError: the request failed.
        """
        if not self._texts:  # else a turn that was suspended (Halted) is resumed
            self._turn_at, self._before = self.num_tokens, self.text
        end = self.num_tokens + (
            self.remaining_tokens
            if max_new_tokens is None
            else min(self.remaining_tokens, max_new_tokens)
        )
        what, empty = f"prompt {self.prompt.prompt_id}, sample {self.index}", 0
        self.finish_reason, self.stopped_at = "length", None
        stops = tuple(one for one in (*self.sampling.stop, *stop) if one)
        while self.num_tokens < end:
            limited = replace(self.sampling, stop=stops, max_new_tokens=end - self.num_tokens)
            params = limited.to_sglang()
            input_ids = self.prompt.token_ids + self.response_ids
            fields = {} if self._routes is None else self._routes.fields()
            if self.sampling.returns_mask:
                fields |= {MASK_FIELD: True}
            ask = partial(
                self.connection.generate,
                what,
                input_ids,
                {SEED_FIELD: self.log.next_seed(self.sampling.seed), **params},
                images=self.images,
                fields=fields,
                prompt=self.prompt.prompt_id,
                turn_of=self.conversation,
            )
            answer = await self.log.respond(input_ids, params, ask, images=self.images)
            ended_by = self._add(answer)
            if self._truncate_at_spanning_stop(stops) or ended_by != "abort":
                break
            if self._has_image_mark():
                break
            empty = 0 if answer.token_ids else empty + 1
            if empty == MAX_EMPTY_ANSWERS:
                raise RolloutError(
                    f"an engine aborted {what} {empty} times before the first token; is it paused?"
                )
        self._texts = []
        return self.text[len(self._before) :]

    def insert(self, output: str | Sequence[str | KnownImage]) -> None:
        """Add the output of a tool, a text or texts and stored images, masked out of the loss.

        Tokens beyond the limit are truncated, and the text of the answer with them. An image that
        does not fit is left out whole, and ends the answer. In the text an image is ``<image>``.

        Raises:
            DataError: the model does not know an id of the text.
        """
        assert self._codec is not None, "the output of a tool needs a tokenizer"
        parts = (output,) if isinstance(output, str) else output
        pieces, images = list[IntColumn](), list[ImageSpan]()
        start = len(self.prompt.token_ids) + self.num_tokens
        for part in parts:
            spans: tuple[ImageSpan, ...] = ()
            if isinstance(part, str):
                ids = IntColumn.of(self._codec.encode(self._beginning(part)))
            else:
                assert self.connection.images is not None, "an image for a model that reads text"
                tokens, frame = self.connection.images.tokens, self.connection.images.frame
                ids, spans = tokens.expand(frame, [part], start=start)
            pieces.append(ids)
            images += spans
            start += len(ids)
        token_ids, before = IntColumn.joined(pieces), self.num_tokens
        self.insert_ids(token_ids, images)
        kept = token_ids[: self.num_tokens - before]
        whole = "".join(part if isinstance(part, str) else MARK for part in parts)
        self.text += whole if len(kept) == len(token_ids) else self._codec.decode(kept)

    def _beginning(self, text: str) -> str:
        """Return a text, or of one far beyond the limit a beginning that exceeds it, too.

        An environment's server may answer with megabytes, which take seconds to tokenise.
        """
        assert self._codec is not None
        remaining, count = self.remaining_tokens, 0
        if len(text) <= max(CHARS_PER_TOKEN * remaining, SLICE_CHARS):
            return text
        for end in range(SLICE_CHARS, len(text), SLICE_CHARS):
            ids = self._codec.encode(text[end - SLICE_CHARS : end])
            count += max(0, len(ids) - TOKENS_ACROSS)
            if count > remaining:
                return text[:end]
        return text

    def insert_ids(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> None:
        """Like ``insert``, with token ids; the text of the answer does not contain them.

        ``images``: those in ``ids``, with positions in prompt and answer.
        """
        start, remaining = len(self.prompt.token_ids) + self.num_tokens, self.remaining_tokens
        unfit = next((span for span in images if span.end - start > remaining), None)
        if unfit is not None:
            remaining, self._is_full = min(remaining, unfit.start - start), True
        token_ids = IntColumn.of(ids)[:remaining]
        self.images += tuple(span for span in images if span.end - start <= remaining)
        unknown = unknown_id(token_ids, self._vocab_size)
        if unknown is not None:
            raise DataError(
                f"prompt {self.prompt.prompt_id}: the id {unknown} was inserted into an answer, and the "
                f"model has vocab_size = {self._vocab_size}; use the tokenizer of this model"
            )
        length = len(token_ids)
        if self._routes is not None:
            self._routes.inserted(range(start, start + length))
        self._pieces.append(_Piece(token_ids, FloatColumn.zeros(length), RunColumn([(0, length)])))
        if self._spans:
            self._extend_spans(self._spans[-1][0], length)
        else:
            self._unversioned += length

    def sample(self) -> Sample:
        """Return the current answer."""
        whole = self._joined()
        masks_some = any(value == 0 for value, _ in whole.mask.runs)
        return Sample(
            prompt_id=self.prompt.prompt_id,
            index=self.index,
            prompt_ids=self.prompt.token_ids,
            response_ids=whole.token_ids,
            rollout_logprobs=whole.logprobs,
            text=self.text,
            finish_reason=self.finish_reason,
            policy_version=self._spans[-1][0] if self._spans else 0,
            label=self.prompt.label,
            loss_mask=whole.mask if masks_some else None,
            version_spans=tuple(self._spans) if len(self._spans) > 1 else (),
            routes=None if self._routes is None else self._routes.column(),
            sampling_mask=whole.sampled_from,
            images=self.images,
        )

    def _has_image_mark(self) -> bool:
        """Whether engines would take a part of the answer for an image or a video."""
        images, answer = self.connection.images, self.response_ids
        if images is None or not answer:
            return False
        own = [span for span in self.images if span.start >= len(self.prompt.token_ids)]
        if images.tokens.count(answer) != sum(span.num_tokens for span in own):
            return True
        return not images.is_readable(self.prompt.token_ids + answer, self.images)

    def _joined(self) -> _Piece:
        """Return the whole answer as one piece."""
        if len(self._pieces) != 1:
            self._pieces = [_Piece.joined(self._pieces)]
        (whole,) = self._pieces
        return whole

    def _add(self, answer: Answer) -> str:
        """Append one response of an engine; return its finish reason."""
        reason = answer.finish_reason
        if (
            reason["type"] not in ("stop", "length", "abort")
            or reason.get("status_code") is not None
        ):
            raise RolloutError(
                f"an engine ended prompt {self.prompt.prompt_id}, sample {self.index} by {reason['type']!r} "
                f"({reason.get('message')}): unexpected finish reason"
            )
        unknown = unknown_id(answer.token_ids, self._vocab_size)
        if unknown is not None:
            raise RolloutError(
                f"an engine answered prompt {self.prompt.prompt_id} with the id {unknown}, and the model has "
                f"vocab_size = {self._vocab_size}; it serves another model"
            )
        if self.sampling.returns_mask and answer.token_ids and answer.sampling_mask is None:
            raise RolloutError(
                "an engine returned no meta_info.output_token_sampling_mask, which "
                "--use-rollout-sampling-mask needs; use engines of SGLang 0.5.21 or later"
            )
        generated = _Piece(
            answer.token_ids,
            answer.logprobs,
            RunColumn([(1, len(answer.token_ids))]),
            answer.sampling_mask,
        )
        self._pieces = [*self._pieces, generated] if self.num_tokens else [generated]
        for version, count in answer.version_spans:
            self._extend_spans(version, count)
        if self._routes is not None and answer.token_ids:
            self._routes.add(answer, num_read=len(self.prompt.token_ids) + self.num_tokens - 1)
        self._texts.append(answer.text)
        self.stopped_at = reason.get("matched")
        self.text = self._before + self._turn(self.stopped_at)
        self.finish_reason = "length" if reason["type"] == "abort" else reason["type"]
        return reason["type"]

    def _truncate_at_spanning_stop(self, stops: Sequence[str]) -> bool:
        """Truncate the turn after its stop string; return whether it went on behind one.

        An engine searches for stop strings only in the tokens of its request, so it continues past
        one that spans an abort. One that samples several tokens at once (speculative decoding) may
        return tokens after the string that it reports.
        """
        is_complete = len(self._texts) == 1 and not isinstance(self.stopped_at, str)
        if is_complete or self._codec is None or not stops:
            return False
        codec, ids = self._codec, self._joined().token_ids[self._turn_at :]

        def found(count: int) -> str | None:
            text = codec.decode(ids[:count])
            return next((stop for stop in stops if stop in text), None)

        # Of one request, the stop string usually ends with the last token.
        if found(len(ids)) is None or (len(self._texts) == 1 and found(len(ids) - 1) is None):
            return False
        count = bisect_left(range(len(ids)), True, key=lambda number: found(number) is not None)
        end = self._turn_at + count
        self._pieces = [self._joined().first(end)]
        if self._routes is not None:
            self._routes.truncate(len(self.prompt.token_ids) + end)
        self._spans = list(RunColumn(self._spans)[:end].runs)
        self.finish_reason, self.stopped_at = "stop", found(count)
        self.text = self._before + self._turn(self.stopped_at)
        return True

    def _extend_spans(self, version: int, count: int) -> None:
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1] + count)
        elif count:
            self._spans.append((version, count + self._unversioned))
            self._unversioned = 0

    def _turn(self, matched: object) -> str:
        """Return the text of the current turn.

        Several pieces are decoded together: an abort may split a character, and an engine removes
        only a stop string of its request. So is one whose thought special tokens mark, which an
        engine's text lacks.
        """
        is_plain = not getattr(self._codec, "marks_thoughts", False)
        if self._codec is None or (len(self._texts) == 1 and is_plain):
            return "".join(self._texts)
        ids = self._joined().token_ids[self._turn_at :]
        ends_with_token = isinstance(matched, int) and len(ids) > 0 and ids[-1] == matched
        text = self._codec.decode(ids[:-1] if ends_with_token else ids)
        return text[: text.rfind(matched)] if isinstance(matched, str) and matched in text else text


Written = Sample | Sequence[Sample]
GenerateFunction = Callable[[ResponseBuilder, Prompt, SamplingParams], Awaitable[Written]]


async def write_answer(
    builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
) -> Sample:
    """Generate one turn, until the model ends it."""
    await builder.write()
    return builder.sample()


def without_older(sample: Sample) -> Sample:
    """Mask tokens of versions older than the last one out of the loss."""
    if not sample.version_spans:
        return sample
    fresh = RunColumn(
        (int(version == sample.policy_version), count) for version, count in sample.version_spans
    )
    return replace(sample, loss_mask=RunColumn.of(fresh.array * sample.mask.array))


def _routes(connection: Connection, so_far: Sample | None) -> AnswerRoutes | None:
    """The routes of an answer, where the engines return some."""
    if connection.routes is None:
        return None
    if so_far is None or not so_far.response_ids:
        return AnswerRoutes(connection.routes)
    num_read = len(so_far.prompt_ids) + len(so_far.response_ids) - 1
    return AnswerRoutes(connection.routes, so_far.routes, num_read=num_read)
