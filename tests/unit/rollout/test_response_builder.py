"""Answers over several turns with tools, aborts and new weights have one entry per token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
import pytest

from rlpost.engines.answer import parse, version_spans
from rlpost.engines.connection import Connection, RunEngines
from rlpost.errors import ConfigError, DataError, RolloutError
from rlpost.rollout.examples.calculator import generate, result
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.response_builder import ResponseBuilder, without_older
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Prompt, Sample, SampleGroup, Unfinished
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

PROMPT = Prompt(3, "Q:12+30", tuple(b"Q:12+30"), label="42")
SAMPLING = SamplingParams(max_new_tokens=20, stop=("!",), stop_token_ids=(1,))


class Bytes:
    """A codec with one id per UTF-8 byte."""

    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def drafting(
    engine: FakeEngine,
    work: Callable[[ResponseBuilder], Awaitable[Any]],
    so_far: Sample | None = None,
    vocab_size: int | None = None,
    **more: Any,
) -> Any:
    sampling = SamplingParams(**{"max_new_tokens": 20, "stop": ("!",), **more})

    async def whole() -> Any:
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=4)) as connection,
        ):
            builder = ResponseBuilder(
                connection,
                PROMPT,
                sampling,
                codec=Bytes(),
                so_far=so_far,
                vocab_size=vocab_size,
            )
            return await work(builder)

    return asyncio.run(whole())


def says(*answers: tuple[str, str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a reply function that gives answers (text, finish reason, matched stop) in order.

    A matched stop string is part of the ids, but not of the text.
    """
    left = list(answers)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        text, reason, matched = left.pop(0)
        ids = list((text + matched if isinstance(matched, str) else text).encode()) + [
            matched
        ] * isinstance(matched, int)
        made = generated(ids, version="2", text=text, reason=reason)
        made["meta_info"]["finish_reason"]["matched"] = matched
        return made

    return answer


@pytest.mark.parametrize(("size", "is_known"), [(126, False), (127, True), (None, True)])
def test_an_id_that_the_model_lacks_ends_the_run_with_the_engine_named(
    size: int | None, is_known: bool
) -> None:
    """rllm-org/rllm#751, NVIDIA-NeMo/RL#237. Over ranks of tensor parallelism it would read zeros."""
    engine = FakeEngine(answer=says(("a~", "length", None)))
    if is_known:
        assert drafting(engine, lambda one: one.write(), vocab_size=size) == "a~"
    else:
        with pytest.raises(RolloutError, match="the id 126, and the model has vocab_size = 126"):
            drafting(engine, lambda one: one.write(), vocab_size=size)


def test_of_an_output_far_beyond_the_limit_the_beginning_alone_is_tokenised() -> None:
    """A server of an environment may answer with megabytes: seconds in which no request is sent."""
    num_encoded = []

    class Counting(Bytes):
        def encode(self, text: str) -> Sequence[int]:
            num_encoded.append(len(text))
            return super().encode(text)

    async def work(builder: ResponseBuilder) -> Sample:
        builder._codec = Counting()
        builder.insert("abcd" * (4 << 20))
        return builder.sample()

    sample = drafting(FakeEngine(), work, max_new_tokens=50_000)
    assert bytes(sample.response_ids) == b"abcd" * 12_500
    assert sample.text == "abcd" * 12_500
    assert sum(num_encoded) < 200_000


def test_the_calculators_digits_are_left_out_of_the_loss() -> None:
    async def work(builder: ResponseBuilder) -> Sample:
        return await generate(builder, PROMPT, SAMPLING)

    engine = FakeEngine(answer=says(("", "stop", "="), (".", "stop", 1)))
    sample = drafting(engine, work)
    assert bytes(sample.response_ids[:-1]) == b"=42."
    assert sample.mask == (1, 0, 0, 1, 1)
    assert sample.rollout_logprobs == (-0.5, 0.0, 0.0, -0.5, -1.0)
    assert (sample.text, sample.finish_reason) == ("42.", "stop")
    assert engine.bodies[0]["sampling_params"]["stop"] == ["!", "="]
    assert engine.bodies[1]["input_ids"] == list(b"Q:12+30=42")
    assert engine.bodies[1]["sampling_params"]["max_new_tokens"] == 17


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Q:07+31", "38"),
        ("so 2*(3+4)", "14"),
        ("1/3", "0.333333"),
        ("10-4.5", "5.5"),
        ("what", "?"),
        ("1/0", "?"),
        ("9**9", "?"),
        ("(2", "?"),
    ],
)
def test_the_calculator_reads_the_expression_at_the_end(text: str, value: str) -> None:
    assert result(text) == value


def test_a_tool_output_beyond_the_remaining_tokens_ends_the_answer() -> None:
    async def work(builder: ResponseBuilder) -> Sample:
        await builder.write()
        builder.insert("x" * 100)
        assert await builder.write() == ""
        return builder.sample()

    sample = drafting(FakeEngine(answer=says(("ab", "stop", "!"))), work, max_new_tokens=8)
    assert (len(sample.response_ids), sum(sample.mask), sample.finish_reason) == (8, 3, "length")


def test_prompt_and_answer_together_have_a_limit_too() -> None:
    async def work(builder: ResponseBuilder) -> int:
        await builder.write()
        return builder.remaining_tokens

    engine = FakeEngine(answer=says(("ab", "stop", 1)))
    assert drafting(engine, work, max_context_len=len(PROMPT.token_ids) + 5) == 2
    assert engine.bodies[0]["sampling_params"]["max_new_tokens"] == 5


def test_an_answer_aborted_within_a_character_has_its_text() -> None:
    """The abort is between the two bytes of a letter."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if len(engine.bodies) == 1:
            return generated([195], version="2", text="", reason="abort")
        made = generated([182, 33], version="3", text="\ufffd", reason="stop")
        made["meta_info"]["finish_reason"]["matched"] = "!"
        return made

    async def work(builder: ResponseBuilder) -> Sample:
        assert await builder.write() == "ö"
        return builder.sample()

    engine = FakeEngine(answer=answer)
    sample = drafting(engine, work)
    assert (sample.text, sample.version_spans, sample.policy_version) == ("ö", ((2, 1), (3, 2)), 3)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [("op>cd", "length"), ("op>cd</st", "abort"), ("op>cd</stop>", "stop"), ("op>", "length")],
)
def test_a_stop_string_split_by_an_abort_ends_the_answer_as_without_the_abort(
    rest: str, reason: str
) -> None:
    """No engine detects such a stop, because each one searches only its own output."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if len(engine.bodies) == 1:
            return generated(list(b"ab</st"), version="2", text="ab</st", reason="abort")
        made = generated(
            list(rest.encode()), version="3", text=rest.removesuffix("</stop>"), reason=reason
        )
        made["meta_info"]["finish_reason"]["matched"] = "</stop>" if reason == "stop" else None
        return made

    async def work(builder: ResponseBuilder) -> Sample:
        assert await builder.write(stop=("</stop>",)) == "ab"
        assert builder.stopped_at == "</stop>"
        return builder.sample()

    engine = FakeEngine(answer=answer)
    sample = drafting(engine, work)
    assert (bytes(sample.response_ids), sample.text, sample.finish_reason) == (
        b"ab</stop>",
        "ab",
        "stop",
    )
    assert (len(sample.rollout_logprobs), len(sample.mask)) == (9, 9)
    assert sample.version_spans == ((2, 6), (3, 3)) and len(engine.bodies) == 2


def test_tokens_that_an_engine_returns_after_a_stop_string_are_cut() -> None:
    """Engines with speculative decoding sample several tokens at once."""

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        made = generated(list(b"abc</stop> and"), version="2", text="abc", reason="stop")
        made["meta_info"]["finish_reason"]["matched"] = "</stop>"
        return made

    async def work(builder: ResponseBuilder) -> Sample:
        assert await builder.write(stop=("</stop>",)) == "abc"
        return builder.sample()

    sample = drafting(FakeEngine(answer=answer), work)
    assert (bytes(sample.response_ids), sample.text) == (b"abc</stop>", "abc")
    assert len(sample.rollout_logprobs) == len(sample.mask) == 10


def test_a_stop_string_after_an_abort_is_detected_by_the_engine() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if len(engine.bodies) == 1:
            return generated(list(b"ab"), version="2", text="ab", reason="abort")
        made = generated(list(b"c</stop>"), version="2", text="c", reason="stop")
        made["meta_info"]["finish_reason"]["matched"] = "</stop>"
        return made

    async def work(builder: ResponseBuilder) -> Sample:
        await builder.write(stop=("</stop>",))
        return builder.sample()

    engine = FakeEngine(answer=answer)
    sample = drafting(engine, work)
    assert (bytes(sample.response_ids), sample.text, sample.finish_reason) == (
        b"abc</stop>",
        "abc",
        "stop",
    )


def test_a_full_answer_that_was_aborted_is_not_requested_again() -> None:
    so_far = Sample(3, 0, PROMPT.token_ids, (1,) * 20, (-0.5,) * 20, "x", "abort", 2)

    async def work(builder: ResponseBuilder) -> Sample:
        await builder.write()
        return builder.sample()

    engine = FakeEngine()
    sample = drafting(engine, work, so_far=so_far)
    assert (sample.finish_reason, sample.response_ids, engine.log) == (
        "length",
        so_far.response_ids,
        [],
    )


def test_versions_are_read_from_spans_or_from_the_final_version() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 7}]
    assert version_spans({"weight_versions": spans, "weight_version": "5"}, 7) == ((4, 2), (5, 5))
    assert version_spans({"weight_version": "5"}, 7) == ((5, 7),)
    with pytest.raises(RolloutError, match="version 'default'"):
        version_spans({"weight_version": "default"}, 7)


def test_a_tool_output_before_the_first_turn_has_the_version_of_the_first_sampled_token() -> None:
    """Otherwise the answer would count as older than any other and exceed a staleness bound."""

    async def work(builder: ResponseBuilder) -> Sample:
        builder.insert("xy")
        await builder.write()
        return builder.sample()

    sample = drafting(FakeEngine(answer=says(("ab", "stop", "!"))), work)
    assert (sample.mask, sample.oldest_version, sample.policy_version) == ((0, 0, 1, 1, 1), 2, 2)


def test_a_request_aborted_in_the_queue_has_no_tokens() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if len(engine.bodies) == 1:
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            return {"text": "", "meta_info": {"id": "r", "finish_reason": reason}}
        return generated([97], version="2", text="a")

    async def work(builder: ResponseBuilder) -> Sample:
        await builder.write()
        return builder.sample()

    engine = FakeEngine(answer=answer)
    assert drafting(engine, work).response_ids == (97,)


def test_tool_tokens_stay_masked_when_tokens_of_older_weights_are_masked() -> None:
    sample = Sample(
        0, 0, (1,), (5, 6, 7, 8), (-0.1,) * 4, "", "stop", 3, None, (1, 0, 1, 0), ((2, 2), (3, 2))
    )
    assert without_older(sample).mask == (0, 0, 1, 0)


@pytest.mark.parametrize("returned", [None, [], ["text"], "text"])
def test_a_function_that_does_not_return_an_answer_is_named(returned: Any) -> None:
    async def forgets(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Any:
        return returned

    grader = InlineGrader(lambda text, label, metadata: 1.0)
    connection = Connection(RunEngines.of(["http://127.0.0.1:9"], KEY, capacity=4))
    writer = GroupWriter(connection, SAMPLING, n=2, grader=grader, function=forgets)
    with pytest.raises(
        ConfigError, match=r"--custom-generate-function-path: .* for prompt 3; it has to return"
    ):
        asyncio.run(writer.write(Unfinished(PROMPT)))


def test_a_function_that_generates_nothing_is_named_before_training() -> None:
    async def says_nothing(
        builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
    ) -> Sample:
        return builder.sample()

    grader = InlineGrader(lambda text, label, metadata: 1.0)
    connection = Connection(RunEngines.of(["http://127.0.0.1:9"], KEY, capacity=4))
    writer = GroupWriter(connection, SAMPLING, n=2, grader=grader, function=says_nothing)
    with pytest.raises(ConfigError, match="an answer without a token for prompt 3"):
        asyncio.run(writer.write(Unfinished(PROMPT)))


def test_an_id_that_the_model_does_not_know_is_refused_where_it_enters() -> None:
    def writer(function: Any) -> GroupWriter:
        connection = Connection(RunEngines.of(["http://nowhere"], KEY, capacity=4))
        grader = InlineGrader(lambda text, label, metadata: 1.0)
        return GroupWriter(
            connection,
            SAMPLING,
            n=2,
            grader=grader,
            function=function,
            codec=Bytes(),
            vocab_size=128,
        )

    async def of_a_tool(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Any:
        builder.insert("ab\u00e9")
        return builder.sample()

    with pytest.raises(DataError, match=r"prompt 3: the id 195 was inserted .* vocab_size = 128"):
        asyncio.run(writer(of_a_tool).write(Unfinished(PROMPT)))

    for prompt_ids, ids, words in (
        ((1,), (5, 128), "returned the id 128 in response_ids"),
        ((-1, 1), (5, 127), "returned the id -1 in prompt_ids"),
    ):

        async def of_a_function(*_: Any, tokens: Any = (prompt_ids, ids)) -> Sample:
            return Sample(3, 0, *tokens, (0.0, 0.0), "", "stop", 0)

        with pytest.raises(DataError, match=rf"of_a_function {words} .* prompt 3"):
            asyncio.run(writer(of_a_function).write(Unfinished(PROMPT)))


class Marking(Bytes):
    """A codec whose text has marks that the text of an engine lacks."""

    marks_thoughts = True

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).replace("\x01", "").replace("\x02", "</think>")


def test_the_text_of_an_answer_is_that_of_its_ids_where_special_tokens_mark_thoughts() -> None:
    """The engine leaves out the mark, as a special token, and the stop string."""

    async def work(builder: ResponseBuilder) -> Sample:
        builder._codec = Marking()
        first = await builder.write()
        builder.insert("[2]")
        assert first == "hm</think>2"
        await builder.write()
        return builder.sample()

    first = generated([*b"hm\x022"], text="hm2")
    second = generated([*b"x\x02y!\x01"], text="xy")
    second["meta_info"]["finish_reason"]["matched"] = "!"
    answers = [first, second]
    sample = drafting(FakeEngine(answer=lambda body: answers.pop(0)), work)
    assert sample.text == "hm</think>2[2]x</think>y"


@pytest.mark.parametrize("limit", range(9))
def test_text_of_a_tool_is_cut_where_its_ids_are(limit: int) -> None:
    async def work(builder: ResponseBuilder) -> Sample:
        builder.insert("abc")
        builder.insert("d\u00e9f")
        return builder.sample()

    sample = drafting(FakeEngine(), work, max_new_tokens=limit)
    assert sample.response_ids == list("abcd\u00e9f".encode()[:limit])
    assert sample.text == Bytes().decode(sample.response_ids)


def test_a_function_may_return_several_samples_per_call() -> None:
    async def two(
        builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
    ) -> list[Sample]:
        await builder.write()
        return [builder.sample(), builder.sample()]

    async def whole() -> SampleGroup | Unfinished:
        engine = FakeEngine()
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=4)) as connection,
        ):
            grader = InlineGrader(lambda text, label, metadata: 1.0)
            writer = GroupWriter(connection, SAMPLING, n=2, grader=grader, function=two)
            return await writer.write(Unfinished(PROMPT))

    group = asyncio.run(whole())
    assert isinstance(group, SampleGroup)
    assert [scored.sample.index for scored in group.samples] == [0, 0, 1, 1]


def masked(ids: list[int], sets: list[list[int]] | None, reason: str = "stop") -> dict[str, Any]:
    """Return an engine's answer to a request with ``return_sampling_mask``."""
    made = generated(ids, version="2", text=bytes(ids).decode(), reason=reason)
    if sets is not None:
        made["meta_info"]["output_token_sampling_mask"] = sets
        made["meta_info"]["output_token_sampling_logprobs"] = [-0.125] * len(ids)
        made["meta_info"]["output_token_sampling_mask_length"] = len(ids)
    return made


async def in_two_turns(builder: ResponseBuilder) -> Sample:
    await builder.write()
    builder.insert("xy")
    await builder.write()
    return builder.sample()


def test_sampling_masks_and_their_log_probs_are_collected_across_aborts_and_tools() -> None:
    answers = [
        masked([97], [[97, 5]], "abort"),
        masked([98], [[98]]),
        masked([99, 100], [[99, 1, 2], [100]]),
    ]
    engine = FakeEngine(answer=lambda body: answers.pop(0))
    sample = drafting(engine, in_two_turns, returns_mask=True)
    assert all(body["return_sampling_mask"] for body in engine.bodies)
    assert sample.sampling_mask is not None
    assert list(sample.sampling_mask) == [(97, 5), (98,), (), (), (99, 1, 2), (100,)]
    assert sample.rollout_logprobs == (-0.125, -0.125, 0, 0, -0.125, -0.125)

    async def resumed(builder: ResponseBuilder) -> Sample:
        await builder.write()
        return builder.sample()

    engine = FakeEngine(answer=lambda body: masked([101], [[101, 7]]))
    longer = drafting(engine, resumed, so_far=sample, returns_mask=True)
    assert list(longer.sampling_mask) == [*sample.sampling_mask, (101, 7)]


def test_masks_are_not_requested_without_the_setting_and_missing_ones_are_an_error() -> None:
    engine = FakeEngine(answer=lambda body: masked([97], None))
    assert drafting(engine, in_two_turns).sampling_mask is None
    assert all("return_sampling_mask" not in body for body in engine.bodies)
    with pytest.raises(RolloutError, match="--use-rollout-sampling-mask needs"):
        drafting(engine, in_two_turns, returns_mask=True)


def test_a_mask_of_another_number_of_tokens_is_refused() -> None:
    made = masked([97, 98], [[97]])
    with pytest.raises(ValueError, match="sampling masks of 1 tokens for 2 tokens"):
        parse(orjson.dumps(made))
