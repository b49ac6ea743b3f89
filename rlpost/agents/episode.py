"""One episode at the gateway: its limits, its requests and its sampled tokens.

Input: requests of the harness, a connection to the engines. Output: answers; at the end the
trajectories and a record of the requests.

Requests are answered in the gateway's thread. Only the exchange with the engines runs in the event
loop that opened the episode, because the connection belongs to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from rlpost.agents.answer_parsing import MARKS, format_of, parse_answer
from rlpost.agents.chat_messages import THINK, BadRequest, Message, ToolCall
from rlpost.agents.chat_template import ChatTemplate
from rlpost.agents.conversation import Conversation, RequestPlan
from rlpost.agents.requests import (
    AnswerEnd,
    ChatChoice,
    ChatRequest,
    Completion,
)
from rlpost.agents.trajectory import AnsweredTurn, Trajectory
from rlpost.errors import DataError, RolloutError
from rlpost.rollout.connection import Connection, Halted
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample

logger = logging.getLogger(__name__)

Limit = Literal["tokens", "requests", "context"]
UNLIMITED = 2**31 - 1
MODEL = "policy"  # the name of the only model
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of the harness of one episode; None means no limit.

    Attributes:
        max_tokens: sampled tokens over all requests. A turn is truncated there, and later requests
            are refused. Parallel requests are not counted before they end.
        max_requests: answers of engines; ``n`` answers count as ``n``.
        max_parallel: answers that are generated at once; further ones wait.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    max_parallel: int = 16


class Policy:
    """Template, formats and limits of the model, shared by all episodes."""

    def __init__(self, template: ChatTemplate, *, context_length: int | None = None) -> None:
        """``context_length``: the engines refuse requests with more tokens, the answer included."""
        self.template, self.context_length = template, context_length
        self.format = format_of(template.source)
        # Engines omit special tokens from their texts, so such marks are read from the ids.
        self.marks_are_special = any(template.is_special(mark) for mark in MARKS)


class OpenEpisode:
    """An episode that a harness may talk to, from ``Gateway.open`` until ``close``.

    An asynchronous context manager; leaving it closes the episode. Use it in the event loop that
    opened it.

    Attributes:
        base_url: address for OpenAI clients (``OPENAI_BASE_URL``), ends with ``/v1``.
        anthropic_url: address for Anthropic clients (``ANTHROPIC_BASE_URL``).
        api_key: the only key that reaches this episode, valid until it is closed.
        model: the name of the model that answers; any name in a request is accepted.
        num_requests: answers of engines so far.
        num_tokens: sampled tokens so far.
        error: the failure of an engine that a request met (``RolloutError``); the harness got a
            500.
        limit_reached: the first limit that a request was refused for, or None.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        index: int,
        connection: Connection,
        policy: Policy,
        url: str,
        api_key: str,
        limits: EpisodeLimits,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """Create it in the event loop of ``connection``; harnesses need ``Gateway.open``.

        ``url``: address of the gateway.
        """
        self.prompt, self.index = prompt, index
        self.base_url, self.anthropic_url = f"{url}/v1", url
        self.api_key, self.model = api_key, MODEL
        self.is_closed = False
        self._limits, self._policy, self._connection = limits, policy, connection
        # Each request has its own limit, because the builder's limit would count earlier turns too.
        self._turn_limit = sampling.max_new_tokens
        # The refusal of an engine would end the run, so the gateway refuses such a request itself.
        contexts = [sampling.max_context_len, policy.context_length]
        context = min((each for each in contexts if each is not None), default=None)
        self._sampling = replace(sampling, max_new_tokens=UNLIMITED, max_context_len=context)
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._conversation = Conversation(policy.template)
        self._lock = threading.Lock()  # guards the conversation
        self._parallel = asyncio.Semaphore(limits.max_parallel)
        self._running: set[asyncio.Future[Any]] = set()
        self._numbers, self._call_numbers = itertools.count(), itertools.count()
        self.num_requests = self.num_tokens = self._num_in_flight = 0
        self._was_halted = False
        self.error: Exception | None = None
        self.limit_reached: Limit | None = None

    @property
    def halted(self) -> bool:
        """Whether generation was halted during the episode (a preemption, or the end of a rollout).

        Requests are refused from then on. End the harness and raise
        ``rlpost.rollout.connection.Halted``: the episode is generated again from its prompt,
        because only the harness knows the state of its tools.
        """
        self._was_halted = self._was_halted or self._connection.halted
        return self._was_halted

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return what was sampled so far, in the order in which their first own answers ended.

        Empty when the harness made no request. See ``rlpost.agents.trajectory.to_samples``.
        """
        with self._lock:
            return self._conversation.trajectories()

    async def close(self) -> None:
        """Refuse the key from now on, and cancel requests in flight. Safe to call again."""
        if self.is_closed:
            return
        self.is_closed = True
        self._on_close()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def __aenter__(self) -> OpenEpisode:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def answer(self, request: ChatRequest) -> Completion:
        """Answer a request of the harness.

        Raises:
            BadRequest: it is refused: a limit, halted, closed, or rejected by the template.
            RolloutError: an engine failed.
        """
        limit = self._admit(request)
        number = next(self._numbers)
        try:
            with self._lock:
                plan = self._conversation.plan(request.messages, request.tools)
        except DataError as error:
            raise BadRequest(str(error), param="messages") from error
        longest = self._sampling.max_context_len
        if longest is not None and plan.num_tokens >= longest:
            raise self._limited(
                "context",
                f"the messages have {plan.num_tokens} tokens; the context of this model holds "
                f"{longest} with the answer",
                code="context_length_exceeded",
            )
        writing = [
            asyncio.ensure_future(self._write(plan, request, number, limit))
            for _ in range(request.n)
        ]
        self._num_in_flight += request.n
        for task in writing:
            task.add_done_callback(self._no_longer_in_flight)
        try:
            choices = await asyncio.gather(*writing)
        finally:
            for task in writing:
                task.cancel()
        return Completion(number, tuple(choices), plan.num_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for log-probs."""
        return self._policy.template.decode_all([token_id])

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's input. Raises BadRequest."""
        try:
            text = self._policy.template.render(request.messages, request.tools)
        except DataError as error:
            raise BadRequest(str(error), param="messages") from error
        return len(self._policy.template.encode(text))

    def _admit(self, request: ChatRequest) -> int:
        """Return the limit of tokens for each answer. Raises BadRequest."""
        if self.is_closed:
            raise _closed()
        if self.halted:
            raise _halted()
        limits, limit = self._limits, self._turn_limit
        most = UNLIMITED if limits.max_requests is None else limits.max_requests
        if self.num_requests + self._num_in_flight + request.n > most:
            raise self._limited("requests", f"the episode may have {most} answers")
        if limits.max_tokens is not None:
            limit = min(limit, limits.max_tokens - self.num_tokens)
            if limit <= 0:
                raise self._limited("tokens", f"the episode may have {limits.max_tokens} tokens")
        return limit if request.max_tokens is None else min(limit, request.max_tokens)

    def _no_longer_in_flight(self, task: asyncio.Future[Any]) -> None:
        self._num_in_flight -= 1

    def _limited(self, limit: Limit, text: str, *, code: str | None = None) -> BadRequest:
        self.limit_reached = self.limit_reached or limit
        return BadRequest(text, code=code or f"episode_{limit}_limit")

    async def _write(
        self, plan: RequestPlan, request: ChatRequest, number: int, limit: int
    ) -> ChatChoice:
        """Generate and record one answer."""
        async with self._parallel:
            began_at = time.time()
            base = plan.base
            so_far = None if base is None else replace(base.line.beginning(base.length), text="")
            builder = await self._exchange(
                lambda: self._generate(plan, so_far, request.stop, limit)
            )
            if self.is_closed:
                raise _closed()
        sample, start = builder.sample(), plan.num_tokens
        own = sample.response_ids[start - len(sample.prompt_ids) :]
        own_logprobs = sample.rollout_logprobs[start - len(sample.prompt_ids) :]
        stopped_at = builder.stopped_at
        ended_by_token = isinstance(stopped_at, int) and len(own) > 0 and own[-1] == stopped_at
        template = self._policy.template
        text = builder.text
        if self._policy.marks_are_special:
            text = template.decode_all(own[:-1] if ended_by_token else own)
            if isinstance(stopped_at, str) and stopped_at in text:
                text = text[: text.rfind(stopped_at)]
        message, ended_by = self._message(text, builder, plan, request)
        turn = AnsweredTurn(
            start=start,
            end=start + len(own),
            request=number,
            text=text,
            finish_reason=builder.finish_reason,
            is_trained=True,
            began_at=began_at,
            ended_at=time.time(),
        )
        with self._lock:
            if len(own):
                stop_text = template.decode_all(own[-1:]) if ended_by_token else ""
                self._conversation.add(plan, message, sample, turn, stop_text)
            self.num_requests += 1
            self.num_tokens += len(own)
        stop = stopped_at if isinstance(stopped_at, str) else None
        return ChatChoice(message, ended_by, stop, own, own_logprobs)

    async def _generate(
        self, plan: RequestPlan, so_far: Sample | None, stop: tuple[str, ...], limit: int
    ) -> ResponseBuilder:
        """Generate one answer in the connection's event loop."""
        prompt_ids = plan.added_ids if so_far is None else so_far.prompt_ids
        builder = ResponseBuilder(
            self._connection,
            replace(self.prompt, token_ids=prompt_ids),
            self._sampling,
            index=self.index,
            codec=self._policy.template,
            so_far=so_far,
        )
        if so_far is not None:
            # Ends the earlier turn, which is complete: the next ``write`` would continue it.
            await builder.write(max_new_tokens=0)
            builder.insert_ids(plan.added_ids)
        await builder.write(stop=stop, max_new_tokens=limit)
        return builder

    async def _exchange(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run ``work`` in the connection's event loop. Raises BadRequest and RolloutError."""

        async def tracked() -> T:
            task = asyncio.ensure_future(work())
            self._running.add(task)
            try:
                return await task
            finally:
                self._running.discard(task)
                task.cancel()

        try:
            if asyncio.get_running_loop() is self._loop:
                return await tracked()
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(tracked(), self._loop)
            )
        except Halted as error:
            self._was_halted = True
            raise _halted() from error
        except RolloutError as error:
            self.error = self.error or error
            raise
        except asyncio.CancelledError:
            if self.is_closed:
                raise _closed() from None
            raise

    def _message(
        self, text: str, builder: ResponseBuilder, plan: RequestPlan, request: ChatRequest
    ) -> tuple[Message, AnswerEnd]:
        """Return the answer as a message, and how it ended."""
        opens_thinking = plan.text.rstrip().endswith(THINK)
        parsed = parse_answer(
            text, self._policy.format, request.tools, opens_thinking=opens_thinking
        )
        calls = tuple(
            ToolCall(
                f"call_{next(self._call_numbers)}_{self.api_key[-8:]}", each.name, each.arguments
            )
            for each in parsed.calls
        )
        message = Message("assistant", parsed.content, parsed.reasoning, calls)
        if calls:
            return message, "tool_calls"
        return message, "length" if builder.finish_reason == "length" else "stop"


def _closed() -> BadRequest:
    return BadRequest("the episode is over", status=401, code="invalid_api_key")


def _halted() -> BadRequest:
    return BadRequest("generation is halted", status=503, code="rollout_halted")
