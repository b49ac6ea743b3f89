"""Have engines write the answer to a request, and read it: the text, the calls, how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlpost.extensions.agents.answer_parsing import Parsed, parse_answer
from rlpost.extensions.agents.chat_messages import Message, ToolCall
from rlpost.extensions.agents.conversation import RequestPlan
from rlpost.extensions.agents.policy import Policy
from rlpost.extensions.agents.requests import AnswerEnd, ChatChoice, ChatRequest
from rlpost.extensions.agents.trajectory import AnsweredTurn
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Prompt, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer before it is recorded.

    ``answer_text`` and ``stop_text``: of its tokens, see
    ``Conversation.add``.
    """

    choice: ChatChoice
    sample: Sample
    turn: AnsweredTurn
    answer_text: str
    stop_text: str

    @property
    def call_ids(self) -> list[str]:
        """The ids of its calls."""
        return self.choice.message.call_ids


async def write_answer(
    make_builder: Callable[..., ResponseBuilder],
    prompt: Prompt,
    plan: RequestPlan,
    so_far: Sample | None,
    *,
    stop: tuple[str, ...],
    limit: int,
) -> ResponseBuilder:
    """Generate one answer, in the event loop of the connection.

    ``make_builder`` takes a prompt and the keyword ``so_far``. ``prompt`` names the episode;
    ``so_far`` is the sequence that ``plan`` extends. ``limit``: tokens of the answer.
    """
    prompt_ids, images = plan.added_ids, plan.added_images
    if so_far is not None:
        prompt_ids, length = so_far.prompt_ids, len(so_far.prompt_ids)
        images = tuple(span for span in so_far.images if span.end <= length)
    builder = make_builder(replace(prompt, token_ids=prompt_ids, images=images), so_far=so_far)
    if so_far is not None:
        # Ends the earlier turn, which is complete: the next ``write`` would continue it.
        await builder.write(max_new_tokens=0)
        builder.insert_ids(plan.added_ids, plan.added_images)
    await builder.write(stop=stop, max_new_tokens=limit)
    return builder


def read_answer(
    builder: ResponseBuilder,
    plan: RequestPlan,
    request: ChatRequest,
    policy: Policy,
    *,
    number: int,
    call_ids: str,
    times: tuple[float, float],
) -> WrittenAnswer:
    """Return an answer with its text and calls.

    ``number``: of the request. ``call_ids``: prefix of the ids of its calls. ``times``: when it
    began and ended, in Unix seconds.
    """
    sample, start = builder.sample(), plan.num_tokens
    turn_ids = sample.response_ids[start - len(sample.prompt_ids) :]
    own_logprobs = sample.rollout_logprobs[start - len(sample.prompt_ids) :]
    stopped_at = builder.stopped_at
    ended_by_token = (
        isinstance(stopped_at, int) and len(turn_ids) > 0 and turn_ids[-1] == stopped_at
    )
    answer_text = policy.template.decode_all(turn_ids[:-1] if ended_by_token else turn_ids)
    stop_text = policy.template.decode_all(turn_ids[-1:]) if ended_by_token else ""
    text = builder.text
    if policy.marks_are_special:
        text = answer_text
        if isinstance(stopped_at, str) and stopped_at in text:
            text = text[: text.rfind(stopped_at)]
    parsed = _parse(text, policy, request, opens_thinking=plan.opens_thinking)
    calls = tuple(
        ToolCall(f"{call_ids}_{place}", each.name, each.arguments)
        for place, each in enumerate(parsed.calls)
    )
    ended_by: AnswerEnd = "tool_calls" if calls else "stop"
    if builder.finish_reason == "length":  # the calls may be half of those that were meant
        ended_by = "length"
    turn = AnsweredTurn(
        start=start,
        end=start + len(turn_ids),
        request=number,
        text=text,
        finish_reason=builder.finish_reason,
        is_trained=True,
        began_at=times[0],
        ended_at=times[1],
    )
    message = Message("assistant", parsed.content, parsed.reasoning, calls)
    stop = stopped_at if isinstance(stopped_at, str) else None
    choice = ChatChoice(message, ended_by, stop, turn_ids, own_logprobs)
    return WrittenAnswer(choice, sample, turn, answer_text, stop_text)


def _parse(text: str, policy: Policy, request: ChatRequest, *, opens_thinking: bool) -> Parsed:
    """Parse an answer. A parser that fails must not lose the turn, which stays a text."""
    try:
        tools = (*request.tools, *request.found_tools) if request.allows_calls else ()
        return parse_answer(text, policy.format, tools, opens_thinking=opens_thinking)
    except Exception:
        logger.exception("an answer of %d characters could not be parsed", len(text))
        return Parsed("", text, ())
