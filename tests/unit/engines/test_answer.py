"""Engines' answers: exact parsing of JSON into columns, off the event loop, in little memory."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.columns import FloatColumn
from rlpost.engines import connection as connection_module
from rlpost.engines.answer import parse
from rlpost.engines.connection import Connection, RunEngines
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

COMPACT, SPACED = (",", ":"), (", ", ": ")
TRICKY = ['"output_token_logprobs":[[1.5,7,null]]', "],[", ",null],[", "]]", '\\"', "\u2028é", ""]


def body_of(made: dict[str, Any], separators: tuple[str, str] = COMPACT) -> bytes:
    return json.dumps(made, separators=separators).encode()


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e6, 0)), max_size=20),
    text=st.lists(
        st.one_of(st.sampled_from(TRICKY), st.text(st.characters(codec="utf-8"))), max_size=4
    ).map("".join),
    separators=st.sampled_from([COMPACT, SPACED]),
    of_token=st.sampled_from([None, "]]", "a,null],["]),
)
def test_an_answer_is_parsed_exactly_in_any_json_formatting(
    tokens: list[tuple[int, float]], text: str, separators: tuple[str, str], of_token: str | None
) -> None:
    ids, logprobs = [token for token, _ in tokens], [logprob for _, logprob in tokens]
    made = generated(ids, version="4", text=text)
    made["meta_info"]["output_token_logprobs"] = [
        [value, token, of_token] for token, value in tokens
    ]
    made["meta_info"]["note"] = text  # after the list
    answer = parse(body_of(made, separators))
    assert answer.token_ids == ids
    assert np.array_equal(answer.logprobs.array, np.array(logprobs, dtype=np.float32))
    assert (answer.text, answer.finish_reason) == (text, {"type": "stop"})
    assert answer.version_spans == (((4, len(ids)),) if ids else ())
    assert answer.meta_info["note"] == text and "output_token_logprobs" not in answer.meta_info


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@pytest.mark.parametrize("others", [[8, 9, 9], [7, 8, 8], [6, 7, 8]])
def test_log_probs_of_other_tokens_are_no_answer(
    others: list[int], separators: tuple[str, str]
) -> None:
    """eval-protocol/python-sdk#457: the lists differ by a position. sgl-project/sglang#17240: ids that
    begin with tokens of the prompt. Their lengths may be equal."""
    made = generated([7, 8, 9], version="4")
    made["meta_info"]["output_token_logprobs"] = [[-0.5, token, None] for token in others]
    with pytest.raises(ValueError, match="log-probs of other tokens"):
        parse(body_of(made, separators))


@pytest.mark.parametrize("logprob", [0.7, 0.0011, 1e30])
def test_a_log_prob_above_zero_is_no_answer(logprob: float) -> None:
    made = generated([7, 8], version="4")
    made["meta_info"]["output_token_logprobs"][1][0] = logprob
    with pytest.raises(ValueError, match="which is no probability"):
        parse(body_of(made))
    made["meta_info"]["output_token_logprobs"][1][0] = 1e-6
    assert parse(body_of(made)).token_ids == [7, 8]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(4, 0, 2), (5, 2, 3)], ((4, 2), (5, 1))),
        ([(4, 0, 2), (5, 2, 9)], ((4, 2), (5, 1))),
        ([(4, 0, 3), (5, 3, 4)], ((4, 3), (5, 0))),
        ([(4, 0, 1), (5, 2, 3)], None),  # no version of token 1
        ([(4, 0, 2), (5, 1, 3)], None),  # two of it
        ([(5, 1, 3)], None),
        ([(4, 2, 3), (5, 0, 2)], None),
    ],
)
def test_each_token_has_one_version_or_there_is_no_answer(
    spans: list[tuple[int, int, int]], expected: tuple[tuple[int, int], ...] | None
) -> None:
    made = generated([7, 8, 9], version="5")
    made["meta_info"]["weight_versions"] = [
        {"version": str(version), "start": start, "end": end} for version, start, end in spans
    ]
    if expected is not None:
        assert parse(body_of(made)).version_spans == expected
    else:
        with pytest.raises(ValueError, match="weight versions of"):
            parse(body_of(made))


def test_an_answer_aborted_before_its_first_token_is_empty() -> None:
    answer = parse(body_of({"text": None, "meta_info": {"finish_reason": {"type": "abort"}}}))
    assert (answer.token_ids, answer.logprobs, answer.text) == ((), (), "")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"meta_info": None}, "not an answer of SGLang"),
        ({"meta_info": {}}, "not an answer of SGLang: KeyError: 'finish_reason'"),
        ({"output_ids": [1, 2, 3]}, "2 log-probs for 3 tokens"),
        ({"output_ids": [1, 2**31]}, "not an answer of SGLang: OverflowError"),
        ({"output_ids": [1, "two"]}, "invalid literal"),
    ],
)
def test_a_malformed_answer_is_reported_with_the_problem(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(body_of(generated([1, 2]) | changed))


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
def test_a_token_without_a_log_prob_is_refused(separators: tuple[str, str]) -> None:
    """JSON has no NaN, so an engine writes null instead."""
    made = generated([5, 6])
    made["meta_info"]["output_token_logprobs"] = [[-0.5, 5, None], [None, 6, None]]
    with pytest.raises(ValueError, match="a token without a log-prob"):
        parse(body_of(made, separators))


def test_answers_are_parsed_in_another_thread_than_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def watched(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*given)

    monkeypatch.setattr(connection_module, "parse", watched)

    async def whole() -> list[Any]:
        engine = FakeEngine()
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=4)) as connection,
        ):
            sampling = SamplingParams(max_new_tokens=3).to_sglang()
            return await asyncio.gather(
                *(connection.generate("p", [1, 2, at], sampling) for at in range(3))
            )

    answers = asyncio.run(whole())
    assert [answer.token_ids for answer in answers] == [(0, 2, 1), (1, 2, 1), (2, 2, 1)]
    assert len(threads) == 3 and threading.get_ident() not in threads


@pytest.mark.parametrize(("length", "most_bytes"), [(1024, 9.0), (4096, 8.5)])
def test_a_sample_takes_eight_bytes_per_token_and_its_text(length: int, most_bytes: float) -> None:
    """A tuple of Python numbers took 68 bytes per token in addition to the text."""
    made = generated([100000 + at for at in range(length)], text="word" * length)
    body, prompt, sampling = (
        body_of(made),
        Prompt(0, "p", (1, 2)),
        SamplingParams(max_new_tokens=length),
    )

    class Prepared:
        routes = images = None

        async def generate(self, *given: Any, **where: Any) -> Any:
            return parse(body)

    async def sample() -> Sample:
        builder = ResponseBuilder(Prepared(), prompt, sampling)  # type: ignore[arg-type]
        await builder.write()
        return builder.sample()

    async def held() -> tuple[list[Sample], int]:
        await sample()
        gc.freeze()  # otherwise the collection scans all that this worker has imported
        tracemalloc.start()
        try:
            samples = [await sample() for _ in range(50)]
            gc.collect()
            return samples, tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    samples, num_bytes = asyncio.run(held())
    assert all(isinstance(each.rollout_logprobs, FloatColumn) for each in samples)
    num_tokens = length * len(samples)
    of_text = sum(sys.getsizeof(each.text) for each in samples)
    assert of_text / num_tokens < 4.1
    assert (num_bytes - of_text) / num_tokens < most_bytes
