"""One episode at the gateway: its limits, its requests and its sampled tokens.

Input: requests of the harness, a connection to the engines. Output: answers; at the end the
trajectories and a record of the requests.

Requests are answered in the gateway's thread. Only the exchange with the engines runs in the event
loop that opened the episode, because the connection belongs to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from rlpost.engines.connection import Connection, Halted
from rlpost.errors import DataError, RolloutError
from rlpost.extensions.agents import request_images
from rlpost.extensions.agents.aside import run_aside
from rlpost.extensions.agents.chat_messages import BadRequest, Message, Tool, halted, over
from rlpost.extensions.agents.chat_template import TooLong
from rlpost.extensions.agents.conversation import (
    FIRST,
    Conversation,
    MessageNode,
    RequestPlan,
)
from rlpost.extensions.agents.policy import EpisodeLimits, Policy, largest_body
from rlpost.extensions.agents.requests import (
    TOKEN_CHARS,
    ChatRequest,
    Completion,
    Earlier,
)
from rlpost.extensions.agents.trajectory import Trajectory
from rlpost.extensions.agents.unread_answers import UnreadAnswers
from rlpost.extensions.agents.written_answer import WrittenAnswer, read_answer, write_answer
from rlpost.rollout.answer_log import AnswerLog
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt

logger = logging.getLogger(__name__)

Limit = Literal["tokens", "requests", "context", "images"]
UNLIMITED = 2**31 - 1
MODEL = "policy"  # the name of the only model
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A request with its input, the files of its images, and its answer that its client lost."""

    request: ChatRequest
    plan: RequestPlan
    files: tuple[bytes, ...]
    repeated: Completion | None


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
        log: AnswerLog | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """Create it in the event loop of ``connection``; harnesses need ``Gateway.open``.

        ``url``: address of the gateway.
        """
        self.prompt, self.index = prompt, index
        self.base_url, self.anthropic_url = f"{url}/v1", url
        self.api_key, self.model, self.is_closed = api_key, MODEL, False
        # The same in every attempt, because a template may render ids of tool calls.
        name = f"{prompt.prompt_id} {index}".encode()
        self._name = hashlib.blake2b(name, digest_size=8).hexdigest()
        self._limits, self._policy, self._connection = limits, policy, connection
        # Each request has its own limit, because the builder's limit would count earlier turns too.
        self._turn_limit = sampling.max_new_tokens
        # The refusal of an engine would end the run, so the gateway refuses such a request itself.
        context = policy.longest(sampling.max_context_len)
        self._sampling = replace(sampling, max_new_tokens=UNLIMITED, max_context_len=context)
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._conversation = Conversation(
            policy.template, longest=context, images=connection.images
        )
        self._builder = partial(
            ResponseBuilder,
            connection,
            sampling=self._sampling,
            index=index,
            codec=policy.template,
            conversation=object(),  # all requests go to one engine while it serves
            log=log or AnswerLog.off(prompt, index),
        )
        # A plan reads the conversation in a thread, so changes wait for it; the other lock only
        # guards the lines against ``trajectories``, which the driver's loop calls.
        self._changing = asyncio.Lock()
        self._lock = threading.Lock()
        self._parallel = asyncio.Semaphore(limits.max_parallel)
        self._running: set[asyncio.Future[Any]] = set()
        self._numbers, self._answer_numbers = itertools.count(), itertools.count()
        self._unread, self._stored = UnreadAnswers(), request_images.StoredImages()
        self._answered: dict[str, tuple[MessageNode, ChatRequest]] = {}  # by id, without messages
        self.num_requests = self.num_tokens = self._num_in_flight = 0
        self._was_halted = False
        self.error: Exception | None = None
        self.limit_reached: Limit | None = None

    @property
    def halted(self) -> bool:
        """Whether generation was halted during the episode (a preemption, or the end of a rollout).

        Requests are refused from then on. End the harness and raise
        ``rlpost.engines.connection.Halted``: the episode is generated again from its prompt,
        because only the harness knows the state of its tools.
        """
        self._was_halted = self._was_halted or self._connection.halted
        return self._was_halted

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return what was sampled so far, in the order in which their first own answers ended.

        Empty when the harness made no request. See ``rlpost.extensions.agents.trajectory.to_samples``.
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

    async def answer(
        self,
        request: ChatRequest,
        *,
        on_begin: Callable[[str], object] = lambda _: None,
        before_recording: Callable[[Completion], object] = lambda _: None,
        is_repeated: bool = False,
    ) -> Completion:
        """Answer a request of the harness, and record the answer.

        ``on_begin`` is called with the ID of the completion when its generation begins.
        ``before_recording``: what it raises is raised here, and nothing is recorded. The answer must
        not fail after it was recorded, or the harness would repeat a request that is trained.
        ``is_repeated``: the client says that it received no answer to this request; if one was
        recorded, it is returned again.

        Raises:
            BadRequest: it is refused: a limit, halted, closed, or rejected by the template.
            RolloutError: an engine failed.
        """
        self._refuse_ended()
        async with self._changing:
            size = request_images.work_size(request)
            planned = await run_aside(lambda: self._plan(request, is_repeated), num_bytes=size)
            plan = planned.plan
            self._conversation.hold(plan)
        try:
            if planned.repeated is not None:
                await self._before_recording(before_recording, planned.repeated, request)
                return planned.repeated
            return await self._answer(planned, on_begin, before_recording)
        except BaseException as error:  # cancelled if the client disconnects
            if planned.repeated is None:  # else its answer is still recorded
                self._unread.add_failed(plan.node, planned.request, error)
            raise
        finally:
            self._conversation.release(plan)

    async def _answer(
        self,
        planned: _Planned,
        on_begin: Callable[[str], object],
        before_recording: Callable[[Completion], object],
    ) -> Completion:
        plan, request = planned.plan, planned.request
        limit = self._admit(request)
        number = next(self._numbers)
        longest = self._sampling.max_context_len
        if longest is not None and plan.num_tokens >= longest:
            raise self._too_long(f"{plan.num_tokens} tokens > {longest - 1} maximum", longest)
        completion_id = f"{self._name}_{number}"
        writing = list[asyncio.Future[WrittenAnswer]]()
        self._num_in_flight += request.n
        try:
            if problem := await self._stored.add(self._connection.images, planned.files):
                raise self._limited("images", problem)
            on_begin(completion_id)
            writing += [
                asyncio.ensure_future(self._write(plan, request, number, limit))
                for _ in range(request.n)
            ]
            answers = await asyncio.gather(*writing)
            choices = tuple(answer.choice for answer in answers)
            completion = Completion(completion_id, number, choices, plan.num_tokens)
            async with self._changing:
                await self._before_recording(before_recording, completion, request)
                self._record(plan, request, completion, answers)
        finally:
            self._num_in_flight -= request.n
            while writing:  # emptied as in ``run_aside``: their errors refer to this frame
                writing.pop().cancel()
        return completion

    async def retract(self, completion: Completion) -> None:
        """Forget an answer that could not be delivered, unless a request has continued it."""
        async with self._changing:
            self._retract(completion)

    def _retract(self, completion: Completion) -> None:
        with self._lock:
            nodes = self._unread.pop(completion)
            if nodes is None:
                return
            for node, answer in nodes.items():
                for name in (completion.id, *answer.call_ids):
                    self._answered.pop(name, None)
                if self._conversation.remove(node):
                    self.num_requests -= 1
                    self.num_tokens -= len(answer.choice.token_ids)

    def _record(
        self,
        plan: RequestPlan,
        request: ChatRequest,
        completion: Completion,
        answers: Sequence[WrittenAnswer],
    ) -> None:
        if self.is_closed:
            raise over()
        if plan.cause not in ("", FIRST):
            self._policy.log_once(f"an episode begins another trajectory: {plan.cause}")
        with self._lock:
            nodes: dict[MessageNode, WrittenAnswer] = {}
            for each in answers:
                if each.turn.end > each.turn.start:
                    message = each.choice.message
                    node = self._conversation.add(
                        plan,
                        message,
                        each.sample,
                        each.turn,
                        answer_text=each.answer_text,
                        stop_text=each.stop_text,
                    )
                    nodes[node] = each
            without = replace(request, messages=())
            for node, each in reversed(nodes.items()):  # the id of all is that of the first
                self._answered |= dict.fromkeys((completion.id, *each.call_ids), (node, without))
            self._unread.add(completion, request, plan.node, nodes)
            self.num_requests += request.n
            self.num_tokens += completion.num_tokens

    def _refuse_ended(self) -> None:
        if self.is_closed:
            raise over()
        if self.halted:
            raise halted()

    def check_size(self, num_bytes: int, *, may_have_images: bool = False) -> None:
        """Raise BadRequest if the body of a request is too large to be parsed.

        ``may_have_images``: of a body that was not read; its images are bounded by themselves.
        """
        longest = self._sampling.max_context_len
        if longest is None or (may_have_images and self._connection.images is not None):
            return
        most = largest_body(longest)
        if num_bytes > most:
            raise self._too_long(f"the body has {num_bytes} bytes, more than {most}", longest)

    def _plan(self, request: ChatRequest, is_repeated: bool) -> _Planned:
        """Return a request with its input, and its answer that was lost. Raises BadRequest."""
        request, files = self._with_images(request)
        plan = self._render(request, self._conversation.plan)
        self._unread.forget_continued(plan.node)
        lost = self._unread.lost(plan.node, request) if is_repeated else None
        return _Planned(request, plan, files, lost)

    def _with_images(self, request: ChatRequest) -> tuple[ChatRequest, tuple[bytes, ...]]:
        """Return a request with decoded images, and their files. Raises BadRequest."""
        longest, images = self._sampling.max_context_len, self._connection.images
        try:
            read = request_images.read_images(request.messages, images, longest=longest)
        except TooLong as error:
            assert longest is not None
            raise self._too_long(str(error), longest) from error
        return replace(request, messages=read.messages), read.files

    @staticmethod
    async def _before_recording(
        act: Callable[[Completion], object], completion: Completion, request: ChatRequest
    ) -> None:
        size = completion.size(with_logprobs=request.with_logprobs)
        await run_aside(lambda: act(completion), num_bytes=size)

    def _render(
        self,
        request: ChatRequest,
        render: Callable[[Sequence[Message], Sequence[Tool]], T],
    ) -> T:
        """Render a request whose texts may fit the context.

        Raises:
            BadRequest: they do not, no format of calls is known, or the template rejects them.
        """
        self._policy.check_tools(request)
        template, longest = self._policy.template, self._sampling.max_context_len
        try:
            # Before the texts are rendered. A message has at least one token.
            template.check_length(request.written_texts(), longest)
            if longest is not None and len(request.messages) > longest:
                raise TooLong(f"{len(request.messages)} messages")
            return render(request.messages, request.tools)
        except TooLong as error:
            assert longest is not None
            raise self._too_long(str(error), longest) from error
        except request_images.UnreadableImages as error:
            # The policy may have caused it, so the episode is scored.
            if not request_images.answers_spell_mark(self._connection.images, request.messages):
                self._policy.log_once(f"no text of an answer has a mark, yet {error}")
            raise self._limited("images", str(error)) from error
        except DataError as error:
            raise BadRequest(str(error), param="messages") from error

    def _too_long(self, what: str, longest: int) -> BadRequest:
        # Claude Code and LiteLLM know a full context by these words, and shorten it then.
        return self._limited(
            "context",
            f"prompt is too long: {what}; this model's maximum context length is {longest} tokens "
            "with the answer",
            code="context_length_exceeded",
        )

    def recall(self, name: str) -> Earlier | None:
        """Return the first answer of a completion, or the one with a call, by its id."""
        node, request = self._answered.get(name, (None, None))
        if node is None or request is None:
            return None
        messages = [each.message for each in node.path() if each.message is not None]
        return Earlier(
            tuple(messages[:-1]),
            request.tools,
            request.has_instructions,
            messages[-1],
            request.found_tools,
            request.namespaces,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, for log-probs."""
        return self._policy.template.token_bytes(token_id)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's input. Raises BadRequest."""
        template, longest = self._policy.template, self._sampling.max_context_len

        def count(messages: Sequence[Message], tools: Sequence[Tool]) -> int:
            text = template.render(messages, tools)
            template.check_length([text], longest)
            ids, images = template.encode(text), self._connection.images
            if images is not None:
                ids, _ = request_images.with_images(images, None, ids, messages)
            return len(ids)

        def count_read() -> int:
            read, _ = self._with_images(request)
            return self._render(read, count)

        async with self._changing:  # one at a time, or an episode could keep all threads busy
            return await run_aside(count_read, num_bytes=request_images.work_size(request))

    def _admit(self, request: ChatRequest) -> int:
        """Return the limit of tokens for each answer. Raises BadRequest."""
        limits, limit = self._limits, self._turn_limit
        most = UNLIMITED if limits.max_requests is None else limits.max_requests
        if self.num_requests + self._num_in_flight + request.n > most:
            raise self._limited("requests", f"the episode may have {most} answers")
        if limits.max_tokens is not None:
            limit = min(limit, limits.max_tokens - self.num_tokens)
            if limit <= 0:
                raise self._limited("tokens", f"the episode may have {limits.max_tokens} tokens")
        return limit if request.max_tokens is None else min(limit, request.max_tokens)

    def _limited(self, limit: Limit, text: str, *, code: str | None = None) -> BadRequest:
        self.limit_reached = self.limit_reached or limit
        return BadRequest(text, code=code or f"episode_{limit}_limit")

    async def _write(
        self, plan: RequestPlan, request: ChatRequest, number: int, limit: int
    ) -> WrittenAnswer:
        """Generate one answer."""
        async with self._parallel:
            self._refuse_ended()  # while it waited
            began_at = time.time()
            base = plan.base
            so_far = None if base is None else replace(base.line.beginning(base.length), text="")
            builder = await self._exchange(
                lambda: write_answer(
                    self._builder, self.prompt, plan, so_far, stop=request.stop, limit=limit
                )
            )
        ended_at = time.time()
        num_new = len(builder.prompt.token_ids) + builder.num_tokens - plan.num_tokens
        call_ids = f"call_{self._name}_{next(self._answer_numbers)}"
        return await run_aside(
            lambda: read_answer(
                builder,
                plan,
                request,
                self._policy,
                number=number,
                call_ids=call_ids,
                times=(began_at, ended_at),
            ),
            num_bytes=TOKEN_CHARS * num_new,
        )

    async def _exchange(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run ``work`` in the connection's event loop. Raises BadRequest and RolloutError."""

        async def run_tracked() -> T:
            if self.is_closed:
                raise over()
            task = asyncio.ensure_future(work())
            self._running.add(task)
            try:
                return await task
            finally:
                self._running.discard(task)
                task.cancel()
                del task  # as in ``run_aside``

        try:
            if asyncio.get_running_loop() is self._loop:
                return await run_tracked()
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(run_tracked(), self._loop)
            )
        except Halted as error:
            self._was_halted = True
            raise halted() from error
        except RolloutError as error:
            self.error = self.error or error
            raise
        except asyncio.CancelledError:
            if self.is_closed:
                raise over() from None
            raise
