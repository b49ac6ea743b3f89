"""Aborted, resumed and interrupted responses on real engines.

After any interruption, the log-probs of a whole answer are those of transformers for its token ids,
and mask and version spans cover each id exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.engines.connection import Connection
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import DiskMover, PauseMode, WeightUpdate
from rlpost.extensions.agents.gateway import Gateway, OpenEpisode
from rlpost.extensions.agents.trajectory import Trajectory
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Choices, Collector
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, Unfinished
from tests.contract.engines.conftest import Sglang
from tests.e2e.plugins import asks_by_a_digit

LONG = SamplingParams(max_new_tokens=300)
N = 4


class Endless:
    """Prompts to which the model has not learned to end its answers."""

    at = 0

    def take(self, n: int) -> list[Prompt]:
        self.at += n
        return [Prompt(i, "", (5 + i % 40, 6, 7)) for i in range(self.at - n, self.at)]

    def state(self) -> dict[str, int]:
        return {"offset": self.at}


def collecting(
    sglang: Sglang, rules: Rules, work: Callable[[Collector, RolloutBuffer], Awaitable[Any]]
) -> Any:
    async def whole() -> Any:
        async with Connection(sglang.serving) as connection:
            grader = InlineGrader(lambda text, label, metadata: 1.0)
            writer = GroupWriter(
                connection, LONG, n=N, grader=grader, codec=PromptTokenizer(sglang.model)
            )
            buffer = RolloutBuffer(rules, Backlog(), step=0)
            collector = Collector(
                buffer, Endless(), writer, choices=Choices(), stop_requested=lambda: False
            )
            async with asyncio.timeout(120):
                return await work(collector, buffer)

    return asyncio.run(whole())


@torch.no_grad()
def assert_logprobs_are_those_of_transformers(folder: Path, samples: list[Sample]) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sample in samples[:12]:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logprobs = torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1], -1)
        wanted = logprobs.gather(-1, ids[0, len(sample.prompt_ids) :, None]).flatten().tolist()
        assert sample.rollout_logprobs == pytest.approx(wanted, abs=1e-4)


def samples_of(groups: list[SampleGroup]) -> list[Sample]:
    return [scored.sample for group in groups for scored in group.samples]


def test_aborted_answers_are_resumed(sglang: Sglang) -> None:
    async def batch(collector: Collector, buffer: RolloutBuffer) -> list[SampleGroup]:
        groups = await collector.batch()
        collector.mark_trained()
        collector.mark_synced(buffer.step)
        return groups

    async def work(
        collector: Collector, buffer: RolloutBuffer
    ) -> tuple[list[SampleGroup], dict[tuple[int, int], Any]]:
        partial: list[Sample] = []
        while not any(sample.response_ids for sample in partial):  # all may have ended by then
            await batch(collector, buffer)
            partial = [
                sample
                for entry in buffer.waiting
                for sample in entry.samples
                if sample.finish_reason == "abort"
            ]
        aborted = {(sample.prompt_id, sample.index): sample.response_ids for sample in partial}
        groups: list[SampleGroup] = []
        while {prompt_id for prompt_id, _ in aborted} - {group.prompt_id for group in groups}:
            groups += await batch(collector, buffer)
        return groups, aborted

    groups, aborted = collecting(
        sglang, Rules(batch_size=2, start_size=8, num_steps=99, keep_partial=True), work
    )
    continued = [
        sample for sample in samples_of(groups) if (sample.prompt_id, sample.index) in aborted
    ]
    assert any(aborted.values()), "some were aborted in the middle"
    for sample in continued:
        before = aborted[sample.prompt_id, sample.index]
        assert sample.response_ids[: len(before)] == before
    for sample in samples_of(groups):
        # an answer may also stop at exactly the last token, so 0 is allowed for both
        room = LONG.max_new_tokens - len(sample.response_ids)
        assert (
            room == 0
            if sample.finish_reason == "length"
            else (sample.finish_reason == "stop" and room >= 0)
        )
    assert_logprobs_are_those_of_transformers(sglang.model, continued)


def test_a_stop_string_split_by_an_abort_ends_an_answer_as_without_the_abort(
    sglang: Sglang,
) -> None:
    codec, text = PromptTokenizer(sglang.model), "Q:12+30"
    prompt, greedy = (
        Prompt(0, text, codec(text)[1]),
        SamplingParams(max_new_tokens=8, temperature=0.0),
    )

    async def written(so_far: Sample | None = None, *, stop: tuple[str, ...] = ()) -> Sample:
        async with Connection(sglang.serving) as connection:
            builder = ResponseBuilder(connection, prompt, greedy, codec=codec, so_far=so_far)
            await builder.write(stop=stop)
            return builder.sample()

    whole = asyncio.run(written())
    ids = whole.response_ids
    cut, stop = next(
        (at, pair)
        for at in range(1, len(ids))
        if len(pair := codec.decode(ids[at - 1 : at + 1])) > 1
        and codec.decode(ids).find(pair) == len(codec.decode(ids[: at - 1]))
    )
    uncut = asyncio.run(written(stop=(stop,)))
    partial = replace(
        whole,
        response_ids=ids[:cut],
        rollout_logprobs=whole.rollout_logprobs[:cut],
        text=codec.decode(ids[:cut]),
    )
    gone_on_with = asyncio.run(written(replace(partial, finish_reason="abort"), stop=(stop,)))
    assert (uncut.response_ids, uncut.finish_reason) == (ids[: cut + 1], "stop")
    assert gone_on_with.rollout_logprobs == pytest.approx(uncut.rollout_logprobs, abs=1e-4)
    assert replace(gone_on_with, rollout_logprobs=uncut.rollout_logprobs) == uncut


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_new_weights_arrive_in_the_middle_of_answers(sglang: Sglang, pause: PauseMode) -> None:
    """The weights stay the same under new versions, so log-probs show lost or repeated tokens."""
    update = WeightUpdate(sglang.addresses, api_key=sglang.api_key, timeout_s=60)

    async def write(version: int) -> str:
        return str(sglang.model)

    async def work(collector: Collector, buffer: RolloutBuffer) -> list[Sample]:
        met: list[Sample] = []
        while not met:  # all answers of a batch may end before the test sees a running request
            batch = asyncio.create_task(collector.batch())
            while not batch.done() and not await running(sglang):
                await asyncio.sleep(0.01)
            await update.update(buffer.version + 1, DiskMover(write), pause=pause)
            collector.mark_synced(buffer.version + 1)
            met = [sample for sample in samples_of(await batch) if len(sample.version_spans) > 1]
            collector.mark_trained()
        return met

    try:
        met = collecting(sglang, Rules(8, 8, 99, max_staleness=1), work)
    finally:
        for (
            address
        ) in sglang.addresses:  # other tests know these engines awake, and with their first weights
            engine = EngineClient(address.url, sglang.api_key)
            asyncio.run(engine.resume())
            asyncio.run(engine.rename_weights(0))
    for sample in met:
        versions, lengths = zip(*sample.version_spans, strict=True)
        assert sorted(set(versions)) == list(versions)
        assert sum(lengths) == len(sample.response_ids) and all(lengths)
    assert_logprobs_are_those_of_transformers(sglang.model, met)


async def running(sglang: Sglang) -> int:
    """Return the number of running requests."""
    loads = [
        await EngineClient(one.url, sglang.api_key).request("GET", "/v1/loads", None)
        for one in sglang.addresses
    ]
    return sum(load["num_running_reqs"] for one in loads for load in one["loads"])


def test_a_tools_output_is_read_and_not_trained(sglang: Sglang) -> None:
    """The sum is part of the answer, and the mask keeps only what the model wrote."""
    tokenizer, text = PromptTokenizer(sglang.model), "Q:12+30"

    async def whole() -> SampleGroup | Unfinished:
        async with Connection(sglang.serving) as connection:
            sampling = SamplingParams(max_new_tokens=8, temperature=1.5, stop_token_ids=(1,))
            grader = InlineGrader(lambda text, label, metadata: 1.0)
            writer = GroupWriter(
                connection, sampling, n=32, grader=grader, function=asks_by_a_digit, codec=tokenizer
            )
            return await writer.write(Unfinished(Prompt(0, text, tokenizer(text)[1])))

    group = asyncio.run(whole())
    assert isinstance(group, SampleGroup)
    asked = [
        sample for sample in samples_of([group]) if 0 in sample.mask and sample.mask.index(0) == 1
    ]
    assert asked
    for sample in asked:
        told = tokenizer.decode(sample.response_ids[1:3])
        assert (told, sample.mask[:3]) == ("42", (1, 0, 0)), sample


def test_the_gateway_trains_what_the_openai_client_sampled(sglang: Sglang) -> None:
    """Every log-prob is that of transformers after the same tokens.

    The conversation has several turns, two answers, a stream and new weight versions.
    """
    openai = pytest.importorskip("openai")
    user = {"role": "user", "content": "Q:12+30="}

    async def renamed(version: int) -> None:
        for address in sglang.addresses:
            await EngineClient(address.url, sglang.api_key).rename_weights(version)

    async def talk(episode: OpenEpisode) -> None:
        client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        wrong = openai.AsyncOpenAI(base_url=episode.base_url, api_key="sk-rlpost-0-0")
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        assert [model.id async for model in client.models.list()] == [episode.model]
        ask = client.chat.completions.create
        first = await ask(model="any", messages=[user], max_tokens=6, logprobs=True)
        assert first.usage.completion_tokens == len(first.choices[0].logprobs.content)
        await renamed(3)
        messages = [user, first.choices[0].message.model_dump(exclude_none=True), user]
        second = await ask(model="any", messages=messages, n=2, temperature=0.0)
        assert len(second.choices) == 2
        messages += [{"role": "assistant", "content": second.choices[1].message.content}, user]
        stream = await ask(model="any", messages=messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        longest = max(episode.trajectories(), key=lambda one: len(one.turns))
        assert "".join(pieces) == longest.turns[-1].text
        await client.close()
        await wrong.close()

    async def whole() -> tuple[Trajectory, ...]:
        sampling = SamplingParams(max_new_tokens=12, temperature=1.0, stop_token_ids=(1,))
        prompt = Prompt(0, "", ())
        async with (
            Connection(sglang.serving) as connection,
            Gateway(str(sglang.model)) as gateway,
            await gateway.open(prompt, sampling, connection=connection) as episode,
        ):
            try:
                await talk(episode)
            finally:
                await renamed(0)
            return episode.trajectories()

    trajectories = asyncio.run(whole())
    # the two answers may finish in any order
    assert sorted(len(one.turns) for one in trajectories) == [2, 3]
    assert [one.turns[0].is_trained for one in trajectories] == [True, False]
    assert all(turn.is_trained for one in trajectories for turn in one.turns[1:])
    for trajectory in trajectories:
        of_turns = [trajectory.versions[turn.start] for turn in trajectory.turns]
        assert of_turns == [0, 3, 3][: len(of_turns)]
        assert_sampled_logprobs_are_those_of_transformers(sglang.model, trajectory)


@torch.no_grad()
def assert_sampled_logprobs_are_those_of_transformers(folder: Path, one: Trajectory) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([list(one.token_ids)])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])
    mask = torch.tensor(list(one.sampled))[1:] == 1
    wanted = logprobs.flatten()[mask].tolist()
    assert torch.tensor(list(one.logprobs))[1:][mask].tolist() == pytest.approx(wanted, abs=1e-4)
