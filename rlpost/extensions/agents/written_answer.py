"""Read what engines wrote for a request: the text, the calls, and how it ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rlpost.extensions.agents.answer_parsing import Parsed, parse_answer
from rlpost.extensions.agents.chat_messages import Message, ToolCall
from rlpost.extensions.agents.conversation import RequestPlan
from rlpost.extensions.agents.policy import Policy
from rlpost.extensions.agents.requests import AnswerEnd, ChatChoice, ChatRequest
from rlpost.extensions.agents.trajectory import AnsweredTurn
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Sample

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
    own = sample.response_ids[start - len(sample.prompt_ids) :]
    own_logprobs = sample.rollout_logprobs[start - len(sample.prompt_ids) :]
    stopped_at = builder.stopped_at
    ended_by_token = isinstance(stopped_at, int) and len(own) > 0 and own[-1] == stopped_at
    answer_text = policy.template.decode_all(own[:-1] if ended_by_token else own)
    stop_text = policy.template.decode_all(own[-1:]) if ended_by_token else ""
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
    ended_by: AnswerEnd = "length" if builder.finish_reason == "length" else "stop"
    if calls:
        ended_by = "tool_calls"
    turn = AnsweredTurn(
        start=start,
        end=start + len(own),
        request=number,
        text=text,
        finish_reason=builder.finish_reason,
        is_trained=True,
        began_at=times[0],
        ended_at=times[1],
    )
    message = Message("assistant", parsed.content, parsed.reasoning, calls)
    stop = stopped_at if isinstance(stopped_at, str) else None
    choice = ChatChoice(message, ended_by, stop, own, own_logprobs)
    return WrittenAnswer(choice, sample, turn, answer_text, stop_text)


def _parse(text: str, policy: Policy, request: ChatRequest, *, opens_thinking: bool) -> Parsed:
    """Parse an answer. A parser that fails must not lose the turn, which stays a text."""
    try:
        tools = (*request.tools, *request.found_tools) if request.allows_calls else ()
        return parse_answer(text, policy.format, tools, opens_thinking=opens_thinking)
    except Exception:
        logger.exception("an answer of %d characters could not be parsed", len(text))
        return Parsed("", text, ())
