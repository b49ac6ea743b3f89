"""Rules for when a request extends a trajectory or starts a new one, one rule per test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.episode import OpenEpisode
from rlpost.extensions.agents.openai_format import chat_request
from rlpost.extensions.agents.policy import EpisodeLimits, Policy
from rlpost.extensions.agents.requests import Completion
from rlpost.extensions.agents.trajectory import to_samples
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.harness import TOOLS
from tests.unit.agents.sampled import ROUTES, SampledTokens, check

USER = {"role": "user", "content": "How is the weather?"}
MORE = {"role": "user", "content": "And tomorrow?"}
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
UNTIDY_CALL = '<tool_call>\n{"arguments":{"city":"Paris"},"name":"weather"}</tool_call>'
GLM_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
Body = dict[str, Any]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return {
        kind: Policy(ChatTemplate(write_model(tmp_path_factory.mktemp(kind), kind)))
        for kind in ("qwen", "glm")
    }


class Talk:
    """An episode whose policy gives prepared answers: pairs of (text, end-of-turn token)."""

    def __init__(
        self, policy: Policy, *answers: tuple[str, str], limits: EpisodeLimits | None = None
    ) -> None:
        self.policy = policy
        texts: Iterator[str] = iter([text for text, _ in answers])
        self._ends = iter([end for _, end in answers])
        self.engine = SampledTokens(
            policy.template, lambda: next(texts), [""], random.Random(0), split_share=0.0
        )
        self.engine._stop_token = self._end  # type: ignore[method-assign]
        self._limits = limits or EpisodeLimits()
        self.sampling = SamplingParams(max_new_tokens=500)
        self.episode: OpenEpisode

    def _end(self) -> list[int]:
        return list(self.policy.template.encode(next(self._ends)))

    async def __aenter__(self) -> Talk:
        self.episode = OpenEpisode(
            Prompt(7, "", ()),
            self.sampling,
            index=2,
            connection=self.engine,  # type: ignore[arg-type]
            policy=self.policy,
            url="http://127.0.0.1",
            api_key="sk-rlpost-0-0123456789",
            limits=self._limits,
        )
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        if error is None:
            check(self.episode.trajectories(), self.engine)

    async def ask(self, messages: list[Body], **fields: Any) -> list[Body]:
        """Send messages; return them with the first answer appended."""
        completion = await self.complete(messages, **fields)
        return [*messages, completion.choices[0].message.for_openai()]

    async def complete(self, messages: list[Body], **fields: Any) -> Completion:
        return await self.episode.answer(chat_request({"messages": messages, **fields}))

    def seen(self, number: int) -> str:
        """Return the input of the n-th engine request as text."""
        import numpy as np

        return self.policy.template.decode_all(np.frombuffer(self.engine.inputs[number], np.int32))

    def turns(self) -> list[int]:
        """The number of turns of each trajectory; a request that extends none begins another."""
        return [len(trajectory.turns) for trajectory in self.episode.trajectories()]


@pytest.mark.parametrize(
    ("kind", "call", "ends"),
    [
        ("qwen", QWEN_CALL, ["<|im_end|>", "<|im_end|>"]),
        ("qwen", UNTIDY_CALL, ["<|im_end|>", "<|im_end|>"]),
        ("qwen", "<think>\nHm.\n</think>\n\n" + QWEN_CALL, ["<|im_end|>", "<|im_end|>"]),
        ("glm", "\n<think></think>\n" + GLM_CALL, ["<|observation|>", "<|user|>"]),
        ("glm", "\n<think>Hm.</think>\nLet me see.\n" + GLM_CALL, ["<|observation|>", "<|user|>"]),
        ("glm", "\n<think>Hm.</think> " + GLM_CALL, ["<|observation|>", "<|user|>"]),
    ],
)
@pytest.mark.parametrize("keeps_reasoning", [True, False])
async def test_tool_outputs_extend_the_sampled_tokens(
    policies: dict[str, Policy], kind: str, call: str, ends: list[str], keeps_reasoning: bool
) -> None:
    """There is one trajectory for any spelling of the call, with or without the reasoning kept."""
    final = "\n<think></think>\nFine." if kind == "glm" else "Fine."
    talk = Talk(policies[kind], (call, ends[0]), (final, ends[1]))
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        (returned,) = messages[-1]["tool_calls"]
        assert returned["function"]["name"] == "weather"
        if not keeps_reasoning:
            messages[-1].pop("reasoning_content", None)
        output = {"role": "tool", "content": "sunny", "tool_call_id": returned["id"]}
        await talk.ask([*messages, output], tools=TOOLS)
    (trajectory,) = talk.episode.trajectories()
    first, second = talk.seen(0), talk.seen(1)
    header = "<|im_start|>user" if kind == "qwen" else ""
    between = "\n" if kind == "qwen" else ""
    tail = "<|im_end|>\n<|im_start|>assistant\n" if kind == "qwen" else "<|assistant|>"
    added = f"{between}{header}\n<tool_response>\nsunny\n</tool_response>{tail}"
    assert second == first + call + ends[0] + added
    assert [turn.request for turn in trajectory.turns] == [0, 1]


@pytest.mark.parametrize("kind", ["qwen", "glm"])
async def test_a_template_that_drops_reasoning_gives_separate_trajectories(
    policies: dict[str, Policy], kind: str
) -> None:
    """After a user message the engine must see no reasoning, as in production."""
    thought = "<think>\nHm.\n</think>\n\nFine." if kind == "qwen" else "\n<think>Hm.</think>\nFine."
    end = "<|im_end|>" if kind == "qwen" else "<|user|>"
    talk = Talk(policies[kind], (thought, end), (thought, end))
    async with talk:
        messages = await talk.ask([USER])
        assert messages[-1]["reasoning_content"] == "Hm."
        await talk.ask([*messages, MORE])
    assert "Hm." not in talk.seen(1)
    assert "Fine." in talk.seen(1)
    assert talk.turns() == [1, 1]


@pytest.mark.parametrize(
    ("kind", "answer", "end", "added"),
    [
        ("qwen", "Fine. \n", "<|im_end|>", "\n<|im_start|>user\n"),
        # a sampled stop token stays, although the template does not write it
        ("qwen", "Fine.", "<|endoftext|>", "<|im_end|>\n<|im_start|>user\n"),
        ("glm", "\n<think></think>\nFine.", "<|user|>", "\n"),
        ("glm", "\nFine.", "<|endoftext|>", "<|user|>\n"),
    ],
)
async def test_a_stop_token_is_not_repeated_and_never_removed(
    policies: dict[str, Policy], kind: str, answer: str, end: str, added: str
) -> None:
    talk = Talk(policies[kind], (answer, end), ("", end))
    async with talk:
        messages = await talk.ask([USER])
        messages[-1]["content"] = messages[-1]["content"].strip()  # harnesses do this
        await talk.ask([*messages, MORE])
    assert talk.seen(1).startswith(talk.seen(0) + answer + end + added + "And tomorrow?")
    assert len(talk.episode.trajectories()) == 1


async def test_a_truncated_answer_is_closed_by_masked_tokens(policies: dict[str, Policy]) -> None:
    talk = Talk(policies["qwen"], ("Fine and sunny.", "<|im_end|>"), ("Rain.", "<|im_end|>"))
    async with talk:
        completion = await talk.complete([USER], max_tokens=2)
        assert completion.choices[0].ended_by == "length"
        message = completion.choices[0].message.for_openai()
        await talk.ask([USER, message, MORE])
        content = message["content"]
    assert talk.seen(1).startswith(f"{talk.seen(0)}{content}<|im_end|>\n<|im_start|>user\n")
    assert len(talk.episode.trajectories()) == 1


async def test_a_stop_string_ends_the_turn_and_its_tokens_stay(policies: dict[str, Policy]) -> None:
    talk = Talk(policies["qwen"], ("Fine. Observation: x", "<|im_end|>"), ("Rain.", "<|im_end|>"))
    async with talk:
        completion = await talk.complete([USER], stop="Observation:")
        assert completion.choices[0].message.content == "Fine. "
        assert completion.choices[0].stop == "Observation:"
        messages = [USER, completion.choices[0].message.for_openai()]
        await talk.ask([*messages, MORE])
    assert "Fine. Observation:" in talk.seen(1)
    assert len(talk.episode.trajectories()) == 1


async def test_an_edited_answer_is_context_and_the_original_keeps_its_own_trajectory(
    policies: dict[str, Policy],
) -> None:
    talk = Talk(policies["qwen"], ("Fine.", "<|im_end|>"), ("Rain.", "<|im_end|>"))
    async with talk:
        await talk.ask([USER])
        await talk.ask([USER, {"role": "assistant", "content": "Bad."}, MORE])
    first, second = talk.episode.trajectories()
    assert "Bad.<|im_end|>" in talk.seen(1)
    assert len(first.turns) == len(second.turns) == 1


async def test_branches_share_tokens_that_are_trained_once(policies: dict[str, Policy]) -> None:
    answers = [(text, "<|im_end|>") for text in ("Fine.", "Rain.", "Snow.")]
    talk = Talk(policies["qwen"], *answers)
    async with talk:
        messages = await talk.ask([USER])
        await talk.ask([*messages, MORE])
        await talk.ask([*messages, {"role": "user", "content": "And in June?"}])
    first, second = talk.episode.trajectories()
    assert [turn.is_trained for turn in first.turns] == [True, True]
    assert [turn.is_trained for turn in second.turns] == [False, True]
    assert second.sampled.total() > second.loss_mask.total()
    samples = to_samples((first, second), 7, 2)
    assert samples[1].prompt_ids == second.token_ids[: second.turns[1].start]
    assert samples[0].text == "Fine.\nRain."


async def test_n_answers_are_n_trajectories_and_each_can_be_continued(
    policies: dict[str, Policy],
) -> None:
    answers = [(text, "<|im_end|>") for text in ("A.", "B.", "C.", "D.")]
    talk = Talk(policies["qwen"], *answers)
    async with talk:
        completion = await talk.complete([USER], n=3)
        assert len(completion.choices) == 3
        await talk.ask([USER, completion.choices[1].message.for_openai(), MORE])
    assert [len(one.turns) for one in talk.episode.trajectories()] == [1, 2, 1]


async def test_other_tools_start_a_new_trajectory(policies: dict[str, Policy]) -> None:
    """Tools are part of the first tokens of the prompt, so nothing can be extended."""
    talk = Talk(policies["qwen"], ("Fine.", "<|im_end|>"), ("Rain.", "<|im_end|>"))
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        await talk.ask([*messages, MORE])
    assert talk.turns() == [1, 1]


async def test_calls_with_changed_ids_are_recognised_by_their_content(
    policies: dict[str, Policy],
) -> None:
    talk = Talk(policies["qwen"], (QWEN_CALL, "<|im_end|>"), ("Fine.", "<|im_end|>"))
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        messages[-1]["tool_calls"][0]["id"] = "toolu_1"
        output = {"role": "tool", "content": "sunny", "tool_call_id": "toolu_1"}
        await talk.ask([*messages, output], tools=TOOLS)
    assert len(talk.episode.trajectories()) == 1


NUMBERS = """<tool_call>
{"name": "weather", "arguments": {"a": 1000.0, "b": -0.0, "c": 12345678901234567890, "d": 1e3}}
</tool_call>"""


async def test_a_call_whose_numbers_were_rewritten_by_javascript_is_recognised(
    policies: dict[str, Policy],
) -> None:
    """The text beside the call may be missing, as its ids are those that were issued."""
    talk = Talk(policies["qwen"], ("Look:\n" + NUMBERS, "<|im_end|>"), ("Fine.", "<|im_end|>"))
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        (call,) = messages[-1]["tool_calls"]
        call["function"]["arguments"] = '{"a":1000,"b":0,"c":12345678901234567000,"d":1000}'
        messages[-1]["content"] = None
        output = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
        await talk.ask([*messages, output], tools=TOOLS)
    assert talk.turns() == [2]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"arguments": '{"city": "Rome"}'}, "message 1 has other tool calls than the answer given"),
        ({"content": "Other."}, "message 1 has other text than the answer given here"),
    ],
)
async def test_an_edit_under_the_same_ids_is_an_edit_and_its_cause_is_recorded(
    policies: dict[str, Policy], change: Body, cause: str
) -> None:
    talk = Talk(policies["qwen"], ("A.\n" + QWEN_CALL, "<|im_end|>"), ("B.", "<|im_end|>"))
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        (call,) = messages[-1]["tool_calls"]
        if "content" in change:
            messages[-1] |= change
        else:
            call["function"] |= change
        output = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
        await talk.ask([*messages, output], tools=TOOLS)
    first, second = talk.episode.trajectories()
    assert first.cause == "first request" and second.cause.startswith(cause)


async def test_outputs_are_written_in_the_order_of_their_calls(policies: dict[str, Policy]) -> None:
    """Templates write no ids, so another order would swap what the tools said."""
    calls = QWEN_CALL + QWEN_CALL.replace("Paris", "Rome")
    talk = Talk(policies["qwen"], (calls, "<|im_end|>"), ("Fine.", "<|im_end|>"))
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        paris, rome = (call["id"] for call in messages[-1]["tool_calls"])
        outputs = [
            {"role": "tool", "content": text, "tool_call_id": call}
            for text, call in (("ROME 25", rome), ("PARIS 15", paris))
        ]
        for wrong in ([outputs[0], {**outputs[1], "tool_call_id": "x"}], [outputs[0]] * 2):
            with pytest.raises(BadRequest, match="call"):
                await talk.ask([*messages, *wrong], tools=TOOLS)
        await talk.ask([*messages, *outputs], tools=TOOLS)
    assert talk.seen(1).index("PARIS 15") < talk.seen(1).index("ROME 25")
    assert talk.turns() == [2]


async def test_an_empty_thought_is_not_kept_where_the_template_leaves_it_out(
    policies: dict[str, Policy],
) -> None:
    answer = ("<think>\n\n</think>\n\nHello", "<|im_end|>")
    talk = Talk(policies["qwen"], answer, ("Fine.", "<|im_end|>"))
    async with talk:
        await talk.ask([*await talk.ask([USER]), MORE])
    assert "<think>" not in talk.seen(1) and talk.turns() == [1, 1]
    assert (
        talk.episode.trajectories()[1].cause == "the chat template rewrites the answer in message 1"
    )


async def test_the_bytes_of_log_probs_are_those_of_the_text(policies: dict[str, Policy]) -> None:
    """Clients join them, and a token may end inside a character."""
    talk = Talk(policies["qwen"], ("Röm 天", "<|im_end|>"))
    async with talk:
        completion = await talk.complete([USER])
    (choice,) = completion.choices
    pieces = [talk.episode.token_bytes(token_id) for token_id in choice.token_ids[:-1]]
    assert b"".join(pieces).decode() == "Röm 天"
    assert any(piece.decode("utf-8", "replace") == "\ufffd" for piece in pieces)


@pytest.mark.parametrize(
    ("limits", "code", "reached"),
    [
        (EpisodeLimits(max_requests=1), "episode_requests_limit", "requests"),
        (EpisodeLimits(max_tokens=3), "episode_tokens_limit", "tokens"),
    ],
)
async def test_limits_truncate_answers_or_refuse_requests(
    policies: dict[str, Policy], limits: EpisodeLimits, code: str, reached: str
) -> None:
    talk = Talk(policies["qwen"], ("Fine and sunny.", "<|im_end|>"), limits=limits)
    async with talk:
        messages = await talk.ask([USER])
        with pytest.raises(BadRequest) as refused:
            await talk.ask([*messages, MORE])
        assert refused.value.code == code
    assert talk.episode.limit_reached == reached
    assert talk.episode.num_tokens <= (limits.max_tokens or 100)


async def test_parallel_requests_do_not_exceed_the_limit(policies: dict[str, Policy]) -> None:
    answers = [("Fine.", "<|im_end|>")] * 2
    talk = Talk(policies["qwen"], *answers, limits=EpisodeLimits(max_requests=2))
    async with talk:
        asked = [talk.ask([USER]) for _ in range(4)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, BadRequest) for one in outcomes) == 2
    assert talk.episode.num_requests == 2


@pytest.mark.parametrize("of_model", [True, False])
async def test_a_conversation_beyond_the_context_is_refused_with_openais_code(
    policies: dict[str, Policy], of_model: bool
) -> None:
    """A refusal by the engine would fail the run, so the gateway checks the limit first.

    The last tokens of its context are those of an answer, which no engine reads again.
    """
    template = policies["qwen"].template
    talk = Talk(
        Policy(template, longest_request=60 if of_model else None),
        ("Fine. " * 40, "<|im_end|>"),
    )
    talk.sampling = SamplingParams(max_new_tokens=500, max_context_len=None if of_model else 60)
    async with talk:
        messages = await talk.ask([USER])  # truncated at the end of the context
        with pytest.raises(BadRequest) as refused:
            await talk.ask([*messages, MORE])
        assert refused.value.code == "context_length_exceeded"
        for words in ("prompt is too long: ", "this model's maximum context length is 60 tokens"):
            assert words in str(refused.value)
    assert len(talk.episode.trajectories()[0].token_ids) == 60
    assert talk.episode.limit_reached == "context"


async def test_after_a_halt_requests_are_refused_and_the_episode_is_marked_as_halted(
    policies: dict[str, Policy],
) -> None:
    talk = Talk(policies["qwen"], ("Fine.", "<|im_end|>"))
    async with talk:
        messages = await talk.ask([USER])
        assert not talk.episode.halted
        talk.engine.halted = True
        assert talk.episode.halted
        talk.engine.halted = False  # the rollout resumes, this episode does not
        with pytest.raises(BadRequest) as refused:
            await talk.ask([*messages, MORE])
        assert (refused.value.status, refused.value.code) == (503, "rollout_halted")
    assert talk.episode.halted


async def test_messages_that_the_template_rejects_are_a_bad_request(
    policies: dict[str, Policy], tmp_path_factory: pytest.TempPathFactory
) -> None:
    strict = "{{ raise_exception('no system messages') if messages[0].role == 'system' }}x"
    folder = write_model(tmp_path_factory.mktemp("strict"), "qwen", strict)
    talk = Talk(Policy(ChatTemplate(folder)))
    async with talk:
        with pytest.raises(BadRequest, match="no system messages"):
            await talk.ask([{"role": "system", "content": "x"}, USER])


async def test_the_routes_of_all_turns_are_recorded_and_those_of_tool_outputs_left_to_the_trainer(
    policies: dict[str, Policy],
) -> None:
    answers = [(text, "<|im_end|>") for text in (QWEN_CALL, "Fine.", "Rain.")]
    talk = Talk(policies["qwen"], *answers)
    talk.engine.routes = ROUTES
    async with talk:
        messages = await talk.ask([USER], tools=TOOLS)
        (call,) = messages[-1]["tool_calls"]
        output = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
        await talk.ask([*messages, output], tools=TOOLS)
        await talk.ask([*messages, {**output, "content": "rainy"}], tools=TOOLS)  # a branch
    for trajectory in talk.episode.trajectories():
        assert trajectory.routes is not None
        first, last = trajectory.turns
        of_tools = range(first.end, last.start)
        known = [place not in of_tools for place in range(len(trajectory.token_ids) - 1)]
        assert trajectory.routes.known.tolist() == known
