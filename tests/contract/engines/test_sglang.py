"""Two real SGLang engines, compared with transformers on the same weights.

The last test kills an engine. It must remain the last, and this file the last of its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rlpost.config.engine_groups import teacher_url_group
from rlpost.config.plan.shard_plan import SentTensor, Unit
from rlpost.config.plan.shard_roles import RankPlan
from rlpost.config.server_arg_values import server_arg_table
from rlpost.driver.engines.engine_life import EngineLife, check_engine
from rlpost.driver.engines.engine_settings import num_slots
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Connection, RunEngines, Watch
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import (
    BroadcastMover,
    DiskMover,
    SharingMover,
    WeightUpdate,
    num_engine_ranks,
    stage_group,
)
from rlpost.engines.group_client import GroupClient
from rlpost.engines.load_check import CheckedMover, LoadCheck
from rlpost.engines.places import Place, Places
from rlpost.engines.shard_mover import Colocation, Meeting, ShardMover
from rlpost.engines.shards.messages import serialised
from rlpost.errors import (
    ConfigError,
    EngineDied,
    Preempted,
    RolloutError,
    SyncError,
    WeightError,
)
from rlpost.models.regions import Box, contiguous, whole_box
from rlpost.rollout.evaluate import evaluate
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.sampling import SamplingParams
from rlpost.rollout.teacher import TeacherServer
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.prompts import PromptFields, PromptSet
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.tasks.reward.registry import exact_match
from rlpost.tasks.tokenizer import PromptTokenizer, eos_token_ids
from rlpost.trainer.weights.engine_group import TrainerRank
from rlpost.trainer.weights.shard_transport import ShardTransport
from rlpost.trainer.weights.trainer_side import Broadcast, Sharing
from rlpost.types import Bucket, Prompt, Sample, SampleGroup, ScoredSample
from tests.contract.engines.conftest import Sglang
from tests.ports import free_ports
from tests.unit.rollout.fake_engine import generate_groups

logger = logging.getLogger(__name__)
MAX_NEW = 6
GROUP = "contract"
GREEDY = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0, stop_token_ids=(1,))


def held_out(model: Path, count: int) -> list[Prompt]:
    fields = PromptFields("prompt", "label")
    prompts = PromptSet(model / "heldout.jsonl", tokenize=PromptTokenizer(model), fields=fields)
    return PromptCursor(prompts).take(count)


def load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # more threads would compete with the engines
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def groups_of(
    sglang: Sglang, prompts: list[Prompt], sampling: SamplingParams, n: int
) -> list[SampleGroup]:
    return asyncio.run(
        generate_groups(
            prompts,
            sampling,
            n=n,
            engines=sglang.serving,
            grader=InlineGrader(exact_match),
            stop_requested=lambda: False,
        )
    )


@torch.no_grad()
def hf_logprobs(model: Any, sample: Sample, temperature: float) -> list[float]:
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / temperature
    return (
        torch.log_softmax(logits, -1)
        .gather(-1, ids[0, len(sample.prompt_ids) :, None])
        .flatten()
        .tolist()
    )


@torch.no_grad()
def hf_greedy(model: Any, prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """Greedy answers, each up to and including its end token. All prompts have the same length."""
    ids = torch.tensor([prompt.token_ids for prompt in prompts])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW, do_sample=False
    )
    answers = made[:, ids.shape[1] :].tolist()
    return [tuple(row[: row.index(1) + 1] if 1 in row else row) for row in answers]


def greedy_of_engine(url: str, key: str, prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """Greedy answers of one engine."""
    address = RunEngines.of([url], key, capacity=64)
    groups = asyncio.run(
        generate_groups(
            prompts,
            GREEDY,
            n=1,
            engines=address,
            grader=InlineGrader(exact_match),
            stop_requested=lambda: False,
        )
    )
    return [group.samples[0].sample.response_ids for group in groups]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_transformers(sglang: Sglang, temperature: float) -> None:
    """They are log_softmax(logits / temperature) over the whole vocabulary, at sampled tokens."""
    model, sampling = load(sglang.model), SamplingParams(MAX_NEW, temperature, stop_token_ids=(1,))
    groups = groups_of(sglang, held_out(sglang.model, 4), sampling, n=4)
    for group in groups:
        for scored in group.samples:
            wanted = hf_logprobs(model, scored.sample, temperature)
            assert scored.sample.rollout_logprobs == pytest.approx(wanted, abs=1e-4)


def test_sampling_masks_and_log_probs_over_them_are_those_of_transformers(sglang: Sglang) -> None:
    """top-p and top-k each apply to the whole distribution; each sampled token is in its mask."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    model = load(sglang.model)
    sampling = SamplingParams(
        MAX_NEW, 1.3, top_p=0.8, top_k=12, stop_token_ids=(1,), returns_mask=True
    )
    groups = groups_of(sglang, held_out(sglang.model, 3), sampling, n=3)
    sizes = set()
    for sample in (scored.sample for group in groups for scored in group.samples):
        assert sample.sampling_mask is not None
        ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / 1.3
        removed = (
            TopKLogitsWarper(12)(None, rows).isinf() | TopPLogitsWarper(0.8)(None, rows).isinf()
        )
        rows = rows.masked_fill(removed, -torch.inf)
        sizes |= set(sample.sampling_mask.sizes)
        for row, token, kept, logprob in zip(
            rows, sample.response_ids, sample.sampling_mask, sample.rollout_logprobs, strict=True
        ):
            assert token in kept
            assert sorted(kept) == row.isfinite().nonzero()[:, 0].tolist()
            assert logprob == pytest.approx(row.log_softmax(0)[token].item(), abs=1e-4)
    assert len(sizes) > 1 and max(sizes) <= 12


@pytest.mark.parametrize("ending", ["length", "abort"])
def test_a_streamed_answer_is_the_one_in_one_piece(sglang: Sglang, ending: str) -> None:
    """Its events have all its tokens with their log-probs, also up to an abort."""
    (prompt,), length = held_out(sglang.model, 1), 200
    params = SamplingParams(length, temperature=0.0).to_sglang() | {"ignore_eos": True}
    seen: list[Answer] = []

    async def ask() -> tuple[Answer, Answer]:
        engines = RunEngines.of([sglang.addresses[0].url], sglang.api_key, capacity=64)

        def add(new: Answer) -> None:
            seen.append(new)
            if ending == "abort" and len(seen) == 2:
                aborting.append(asyncio.ensure_future(engines.abort_all()))

        aborting: list[asyncio.Future[None]] = []
        async with Connection(engines) as connection:
            whole = await connection.generate("one piece", prompt.token_ids, params)
            watch = Watch(0.2, seen.clear, add)
            while True:  # an answer may end before its abort arrives
                seen.clear()
                one = await connection.generate("s", prompt.token_ids, params, watch=watch)
                if ending != "abort" or one.finish_reason["type"] == "abort":
                    return whole, one

    whole, streamed = asyncio.run(asyncio.wait_for(ask(), 120))
    assert streamed.finish_reason["type"] == ending and len(seen) > 1
    count = len(streamed.token_ids)
    assert count == length if ending == "length" else 0 < count < length
    assert streamed.token_ids == whole.token_ids[:count]
    assert [token for new in seen for token in new.token_ids] == list(streamed.token_ids)
    assert streamed.logprobs == pytest.approx(list(whole.logprobs[:count]), abs=1e-4)
    assert streamed.version_spans == ((whole.version_spans[0][0], count),)
    assert whole.text.startswith(streamed.text) or ending == "abort"


def test_an_engine_as_a_teacher_scores_given_tokens_as_transformers_does(sglang: Sglang) -> None:
    """It also scores answers that its own policy would not give, and checks its tokenizer."""
    model, tokenizer = load(sglang.model), PromptTokenizer(sglang.model)
    groups = groups_of(sglang, held_out(sglang.model, 2), SamplingParams(MAX_NEW, 1.5), n=2)
    graded = [scored for group in groups for scored in group.samples]

    async def act() -> tuple[ScoredSample, ...]:
        url = sglang.addresses[0].url
        group, places = teacher_url_group(url, 60.0), Places()
        places.set_own([Place(group.settings.url[0], sglang.api_key, 64)])
        client = GroupClient(group, places)
        teacher = TeacherServer(client, top_k=5)
        try:
            await teacher.check_tokenizer(tokenizer.encode_whole)
            with pytest.raises(ConfigError, match="the teacher's tokenizer is not that"):
                await teacher.check_tokenizer(lambda text: tokenizer.encode_whole(text)[1:])
            return await teacher.scored(graded)
        finally:
            await client.close()

    found = asyncio.run(act())
    assert len(found) == 4
    for scored in found:
        wanted = hf_logprobs(model, scored.sample, 1.0)
        assert scored.sample.teacher_logprobs == pytest.approx(wanted, abs=1e-4)
        ids = torch.tensor([*scored.sample.prompt_ids, *scored.sample.response_ids])
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(scored.sample.prompt_ids) - 1 : -1]
        top = rows.log_softmax(-1).topk(5, dim=1)
        assert scored.sample.teacher_top_ids == top.indices.flatten().tolist()
        expected = top.values.flatten().tolist()
        assert scored.sample.teacher_top_logprobs == pytest.approx(expected, abs=1e-4)


def test_groups_are_complete_and_answers_end_where_they_should(sglang: Sglang) -> None:
    """Ids, text, finish reason and reward of a sample agree."""
    prompts, digit = held_out(sglang.model, 16), 5 + 3
    assert eos_token_ids(sglang.model) == (1,)
    sampling = SamplingParams(max_new_tokens=MAX_NEW, stop_token_ids=(1, digit))
    groups = groups_of(sglang, list(reversed(prompts)), sampling, n=8)
    assert [group.prompt_id for group in groups] == list(range(16))
    reasons = set()
    for prompt, group in zip(prompts, groups, strict=True):
        assert [scored.sample.index for scored in group.samples] == list(range(8))
        for scored in group.samples:
            sample = scored.sample
            reasons.add(sample.finish_reason)
            assert not {1, digit} & set(sample.response_ids[:-1])
            ended = sample.response_ids[-1] in (1, digit)
            assert (sample.finish_reason == "stop") == ended
            assert ended or len(sample.response_ids) == MAX_NEW
            assert sample.policy_version == 0
            assert scored.reward == float(sample.text == prompt.label)
    assert "stop" in reasons
    texts = [scored.sample.text for group in groups for scored in group.samples]
    assert len(set(texts)) > 16, "sampling at temperature 1 gives different answers"


def test_greedy_evaluation_is_that_of_transformers(sglang: Sglang) -> None:
    prompts = held_out(sglang.model, 100)
    tokenize = PromptTokenizer(sglang.model)
    wanted = hf_greedy(load(sglang.model), prompts)
    right = sum(
        answer == (*tokenize(prompt.label)[1], 1)
        for answer, prompt in zip(wanted, prompts, strict=True)
    )

    async def evaluated() -> dict[str, float]:
        async with Connection(sglang.serving) as connection:
            writer = GroupWriter(connection, GREEDY, n=1, grader=InlineGrader(exact_match))
            return await evaluate(writer, prompts, lambda: False)

    said = asyncio.run(evaluated())
    assert said["reward_mean"] == pytest.approx(right / 100)
    assert said["response_length_mean"] == pytest.approx(sum(map(len, wanted)) / 100)


def test_a_stop_is_obeyed_and_the_engines_are_free_afterwards(sglang: Sglang) -> None:
    endless = SamplingParams(max_new_tokens=400, temperature=1.0)
    unending = [Prompt(i, "", (5, 6, 7)) for i in range(40)]
    started = time.monotonic()
    with pytest.raises(Preempted):
        asyncio.run(
            generate_groups(
                unending,
                endless,
                n=8,
                engines=sglang.serving,
                grader=InlineGrader(exact_match),
                stop_requested=lambda: time.monotonic() > started + 0.5,
            )
        )
    assert time.monotonic() - started < 10

    async def settle() -> None:
        for address in sglang.addresses:
            await EngineClient(address.url, sglang.api_key).request(
                "POST", "/flush_cache?timeout=20", None
            )

    asyncio.run(settle())  # the engine refuses to flush its cache while requests run
    groups_of(sglang, held_out(sglang.model, 2), GREEDY, n=1)


def test_an_engine_reports_when_each_request_ran(sglang: Sglang) -> None:
    """Each request has one span within the time that the caller waited; health checks have none.

    Only this test asks for the model's info, so its count is exact.
    """
    client = EngineClient(sglang.addresses[0].url, sglang.api_key)
    before = time.time()
    asyncio.run(
        client.request("POST", "/generate", {"text": "1", "sampling_params": {"max_new_tokens": 2}})
    )
    asyncio.run(client.request("GET", "/model_info", None))
    asyncio.run(client.request("GET", "/health", None))
    now, spans = asyncio.run(client.request("GET", f"/spans?since={before}", None))
    after = time.time()
    assert {name for name, _, _, _ in spans if not name.startswith("v1/")} == {
        "generate",
        "model_info",
    }, spans
    ((begin, end),) = [(begin, end) for name, _, begin, end in spans if name == "model_info"]
    assert before - 0.1 <= begin < end <= now <= after + 0.1


def test_an_engine_says_how_many_requests_it_runs_at_once(sglang: Sglang) -> None:
    info = asyncio.run(EngineClient(sglang.addresses[0].url, sglang.api_key).server_info())
    (state,) = info["internal_states"]
    assert state["effective_max_running_requests_per_dp"] >= 1
    assert num_slots(info, 1 << 20) > state["effective_max_running_requests_per_dp"]


def test_wrong_api_keys_are_refused(sglang: Sglang) -> None:
    url = sglang.addresses[0].url
    for key in ("wrong", ""):
        with pytest.raises(RolloutError, match="401"):
            asyncio.run(EngineClient(url, key).weight_version())
        with pytest.raises(RolloutError, match="401"):
            asyncio.run(EngineClient(url, key).request("GET", "/spans?since=0", None))
        stranger = RunEngines.of([url], key, capacity=1)
        with pytest.raises(RolloutError, match="401"):
            asyncio.run(
                generate_groups(
                    held_out(sglang.model, 1),
                    GREEDY,
                    n=1,
                    engines=stranger,
                    grader=InlineGrader(exact_match),
                    stop_requested=lambda: False,
                )
            )


def test_the_key_is_in_no_command_line_and_no_log(sglang: Sglang) -> None:
    family = [psutil.Process(engine.pid) for engine in sglang.engines]
    family += [child for process in family for child in process.children(recursive=True)]
    assert len(family) >= 4
    for process in family:
        assert sglang.api_key not in " ".join(process.cmdline())
    for log in sglang.logs.iterdir():
        assert sglang.api_key not in log.read_text()


def test_no_file_of_another_model_is_imported(sglang: Sglang) -> None:
    """SGLang logs a warning for each that needs a package that is not installed."""
    for log in sglang.logs.glob("*.log"):
        assert "Ignore import error" not in log.read_text()


def test_the_settings_read_from_the_source_are_those_of_the_server(sglang: Sglang) -> None:
    info = asyncio.run(EngineClient(sglang.addresses[0].url, sglang.api_key).server_info())
    names = server_arg_table().args.keys()
    assert names - info.keys() <= {"api_key", "admin_api_key"}
    assert len(names) > 100
    assert sglang.api_key not in str(info)


def in_buckets(weights: dict[str, torch.Tensor], count: int) -> list[Bucket]:
    names = list(weights)
    return buckets_of(weights, [names[at::count] for at in range(count)])


def buckets_of(weights: dict[str, torch.Tensor], parts: list[list[str]]) -> list[Bucket]:
    """Return one bucket for each list of names."""
    return [
        Bucket(
            tuple(part),
            tuple(tuple(weights[name].shape) for name in part),
            tuple(str(weights[name].dtype).removeprefix("torch.") for name in part),
        )
        for part in parts
    ]


class InOneProcess:
    """An unsharded model with the interface of the trainer's ``Buckets``."""

    stage = 0

    def __init__(self, weights: dict[str, torch.Tensor], buckets: list[Bucket]) -> None:
        self.weights, self.buckets = weights, buckets

    def __len__(self) -> int:
        return len(self.buckets)

    def stage_of(self, index: int) -> int:
        return 0

    def gather(self, index: int, *, on_all_stages: bool) -> dict[str, torch.Tensor]:
        return {name: self.weights[name] for name in self.buckets[index].names}

    def largest_bytes(self) -> int:
        return max(
            sum(self.weights[name].nbytes for name in bucket.names) for bucket in self.buckets
        )


class WholeSources:
    """An unsharded model with the interface of the trainer's ``ShardSources``."""

    gathered: frozenset[str] = frozenset()
    inventory = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        sent = [SentTensor(name, tuple(one.shape), "float32") for name, one in weights.items()]
        self.units = [Unit(0, (one,)) for one in sent]
        self.regions = [contiguous(whole_box(one.name, one.shape), one.name) for one in sent]

    def prepare(self, names: Sequence[str]) -> None:
        pass

    def release(self) -> None:
        pass

    def read(self, box: Box) -> torch.Tensor:
        at = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
        return self.weights[box.tensor][at]


class ShardSenders:
    """Trainer ranks that each hold all weights, in this process."""

    def __init__(self, weights: dict[str, torch.Tensor], count: int, *, secret: str) -> None:
        self.ranks = [
            ShardTransport(
                WholeSources(weights),
                rank=TrainerRank(rank, count),
                backend="gloo",
                timeout_s=600,
                secret=secret,
            )
            for rank in range(count)
        ]

    async def describe(self) -> list[Any]:
        return [rank.describe() for rank in self.ranks]

    async def use(self, plans: Sequence[RankPlan]) -> None:
        for rank, plan in zip(self.ranks, plans, strict=True):
            rank.use(plan)

    async def connect(self, num_engine_ranks: int, meeting: Meeting) -> None:
        place = (meeting.host, meeting.port, num_engine_ranks, meeting.name, meeting.join_s)
        await asyncio.to_thread(self.ranks[0].connect, *place)
        await asyncio.to_thread(self.ranks[0].meet, meeting.join_s)

    async def pack(self, index: int) -> None:
        await asyncio.to_thread(self.ranks[0].pack, index)

    async def send(self, index: int) -> None:
        await asyncio.to_thread(self.ranks[0].send, index)

    async def share(self, index: int, message: Mapping[str, object]) -> list[str]:
        return [rank.share(index, message) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.release()
            rank.disconnect()


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "sent"])
def test_slices_of_weights_reach_every_engine(sglang: Sglang, tmp_path: Path, shares: bool) -> None:
    """After two updates in slices, greedy answers are those of transformers.

    The second has other weights and the plan of the first.
    """
    old, prompts = load(sglang.model), held_out(sglang.model, 12)
    torch.manual_seed(37 + shares)
    new = type(old)(old.config).eval()
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    weights = {
        name: torch.zeros_like(tensor)
        for name, tensor in new.state_dict().items()
        if name != "lm_head.weight"
    }
    whole = WeightUpdate(sglang.addresses, api_key=sglang.api_key, timeout_s=600)
    meeting = Meeting("127.0.0.1", free_ports(1)[0], f"slices-{shares}", "gloo", 60, 600)
    senders = ShardSenders(weights, 2 if shares else 1, secret=sglang.api_key)
    where = Colocation(((0,), (1,))) if shares else meeting
    total = sum(tensor.nbytes for tensor in weights.values())
    mover = ShardMover(senders, where, folder=tmp_path / "slices", max_bytes=total // 3)

    async def update_twice() -> None:
        assert await whole.without_shard_loader() == []
        await whole.update(30, mover)
        for name, tensor in weights.items():
            tensor.copy_(new.state_dict()[name])
        await whole.update(31, mover)

    asyncio.run(update_twice())
    senders.close()
    wanted = hf_greedy(new, prompts)
    for address in sglang.addresses:
        assert greedy_of_engine(address.url, sglang.api_key, prompts) == wanted
    groups = groups_of(sglang, prompts, SamplingParams(MAX_NEW, 1.0, stop_token_ids=(1,)), n=1)
    assert {scored.sample.policy_version for group in groups for scored in group.samples} == {31}


class Sender:
    """The trainer's side of a broadcast, without its actors."""

    def __init__(
        self, weights: dict[str, torch.Tensor], buckets: list[Bucket], *, secret: str
    ) -> None:
        own = InOneProcess(weights, buckets)
        self.broadcast = Broadcast(
            own, gathers=True, is_source=True, backend="gloo", timeout_s=60, secret=secret
        )
        self.mover = BroadcastMover(buckets, self.send, group_name=GROUP)

    async def send(self, index: int) -> None:
        await asyncio.to_thread(self.broadcast.send, index)

    async def meet(self, whole: WeightUpdate) -> None:
        port, ranks = free_ports(1)[0], num_engine_ranks(whole.receivers)
        joining = self.mover.connect(whole.receivers, [("127.0.0.1", port)], backend="gloo")
        own = asyncio.to_thread(
            self.broadcast.connect, "127.0.0.1", port, ranks, stage_group(GROUP, 0), 60.0
        )
        await asyncio.gather(joining, own)

    async def part(self, whole: WeightUpdate) -> None:
        self.broadcast.disconnect()
        await whole.leave_groups(GROUP, 1)


def test_new_weights_reach_every_engine(sglang: Sglang) -> None:
    """After an update, both engines answer as transformers does with the new weights.

    Every sample has the new version.
    """
    old = load(sglang.model)
    torch.manual_seed(11)
    new = type(old)(old.config).eval()
    with torch.no_grad():  # far from uniform, so that greedy answers do not depend on rounding
        for weight in new.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    weights = {
        name: tensor for name, tensor in new.state_dict().items() if name != "lm_head.weight"
    }
    prompts = held_out(sglang.model, 24)
    wanted = hf_greedy(new, prompts)
    assert wanted != hf_greedy(old, prompts)

    whole = WeightUpdate(sglang.addresses, api_key=sglang.api_key, timeout_s=60)
    sender = Sender(weights, buckets := in_buckets(weights, 3), secret=sglang.api_key)

    async def move() -> None:
        await sender.meet(whole)
        started = time.monotonic()
        await whole.update(7, sender.mover)
        logger.info("update of %d buckets: %.3f s", len(buckets), time.monotonic() - started)

    asyncio.run(move())
    for address in sglang.addresses:
        assert greedy_of_engine(address.url, sglang.api_key, prompts) == wanted
    groups = groups_of(sglang, prompts, SamplingParams(MAX_NEW, 1.0, stop_token_ids=(1,)), n=2)
    assert {scored.sample.policy_version for group in groups for scored in group.samples} == {7}
    for group in groups:
        for scored in group.samples:
            assert scored.sample.rollout_logprobs == pytest.approx(
                hf_logprobs(new, scored.sample, 1.0), abs=1e-4
            )

    async def again() -> None:
        """Reuse the group for a second update, then leave it."""
        await whole.update(8, sender.mover)
        clients = [EngineClient(address.url, sglang.api_key) for address in sglang.addresses]
        assert [await client.weight_version() for client in clients] == ["8", "8"]
        await sender.part(whole)

    asyncio.run(again())


async def checksums(whole: WeightUpdate, folder: Path) -> list[dict[str, str]]:
    """Digests of all tensors of each engine."""
    sums = []
    for one in whole.receivers:
        message = {"do": "checksum", "id": secrets.token_hex(8), "answer": str(folder / "sums")}
        await one.client.begin_weight_update()
        await one.client.send_to_loader([serialised(message)])
        await one.client.end_weight_update()
        sums.append(json.loads((folder / "sums").read_text()))
    return sums


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_weights_reach_every_engine_without_a_process_group(
    sglang: Sglang, tmp_path: Path, way: str
) -> None:
    """After an update through shared memory or files, greedy answers are those of transformers.

    With a tensor that SGLang would skip it is refused before the first byte.
    """
    old = load(sglang.model)
    torch.manual_seed(29 if way == "disk" else 31)
    new = type(old)(old.config).eval()
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    weights = {
        name: tensor for name, tensor in new.state_dict().items() if name != "lm_head.weight"
    }
    prompts, version = held_out(sglang.model, 12), 20 if way == "disk" else 21
    whole = WeightUpdate(sglang.addresses, api_key=sglang.api_key, timeout_s=60)
    buckets = in_buckets(weights, 3)
    ranks = [Sharing(InOneProcess(weights, buckets)) for _ in sglang.addresses]

    async def share(index: int) -> list[str]:
        return [rank.share(index) for rank in ranks]

    async def write(version: int) -> str:
        new.save_pretrained(tmp_path)
        return str(tmp_path)

    movers = {
        "memory": SharingMover(buckets, share, ranks_of=((0,), (1,))),
        "disk": DiskMover(write),
    }
    sent = [SentTensor(name, tuple(one.shape), "float32") for name, one in weights.items()]
    lacks = SentTensor("model.layers.0.self_attn.no_such_norm.weight", (4,), "float32")
    units = [Unit(0, (one,)) for one in sent]

    async def update() -> None:
        before = await checksums(whole, tmp_path)
        folder = tmp_path / "slices"
        mover = CheckedMover(movers[way], LoadCheck(), [*units, Unit(0, (lacks,))], folder)
        with pytest.raises(WeightError, match=f"{lacks.name}: the ranks of engine http"):
            await whole.update(version, mover)
        assert await checksums(whole, tmp_path) == before, "the recording changed a value"
        await whole.update(version, CheckedMover(movers[way], LoadCheck(), units, folder))

    asyncio.run(update())
    for rank in ranks:
        rank.release()
    wanted = hf_greedy(new, prompts)
    for address in sglang.addresses:
        assert greedy_of_engine(address.url, sglang.api_key, prompts) == wanted


def test_an_engine_releases_its_memory_and_restores_it(sglang: Sglang) -> None:
    """SGLang exits if a busy engine is asked to release memory, so the client pauses it first."""
    prompts = held_out(sglang.model, 8)
    client = EngineClient(sglang.addresses[0].url, sglang.api_key)

    async def away_and_back() -> list[SampleGroup]:
        sampling = SamplingParams(max_new_tokens=400, temperature=1.0, stop_token_ids=())
        address = RunEngines.of([client.url], sglang.api_key, capacity=64)
        busy = asyncio.ensure_future(
            generate_groups(
                prompts,
                sampling,
                n=2,
                engines=address,
                grader=InlineGrader(exact_match),
                stop_requested=lambda: False,
            )
        )
        await asyncio.sleep(0.3)
        await client.release_memory(["kv_cache", "weights"])
        await client.restore_memory(["weights"])
        await client.restore_memory(["kv_cache"])
        await client.resume()
        return await busy

    before = greedy_of_engine(client.url, sglang.api_key, prompts)
    groups = asyncio.run(away_and_back())
    assert len(groups) == len(prompts)
    assert greedy_of_engine(client.url, sglang.api_key, prompts) == before


@contextlib.contextmanager
def slowed_ten_times(process: psutil.Process) -> Iterator[None]:
    """Let a process run a tenth of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            process.suspend()
            time.sleep(0.18)
            process.resume()
            time.sleep(0.02)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_slow_engine_is_busy_during_a_long_prefill_and_a_stopped_one_is_dead(
    sglang: Sglang, caplog: pytest.LogCaptureFixture
) -> None:
    engine, url = sglang.engines[0], sglang.addresses[0].url
    below = psutil.Process(engine.pid).children(recursive=True)
    (scheduler,) = [each for each in below if "scheduler" in "".join(each.cmdline())]
    rng = random.Random(1)

    async def prefill(client: EngineClient, life: EngineLife, num_prompts: int) -> None:
        prompts = [[rng.randrange(2, 20) for _ in range(500)] for _ in range(num_prompts)]
        body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}}
        answering = asyncio.create_task(client.request("POST", "/generate", body))
        while not answering.done():
            assert await check_engine(replace(client, timeout_s=1.5), life) is None
        assert len(await answering) == num_prompts

    async def run() -> str | None:
        client = EngineClient(url, sglang.api_key, timeout_s=240.0)
        checking, num_prompts = replace(client, timeout_s=1.5), 4
        with slowed_ten_times(scheduler):
            while "is busy" not in caplog.text:  # a fast machine needs more prompts
                num_prompts *= 2
                await prefill(client, EngineLife(url, 30.0), num_prompts)
        scheduler.suspend()
        try:
            return await check_engine(checking, EngineLife(url, 30.0))
        finally:
            scheduler.resume()

    problem = asyncio.run(run())
    assert "is busy and is not restarted" in caplog.text
    assert problem is not None and "CPU use 0.00 cores" in problem


def test_a_killed_engine_is_named(sglang: Sglang) -> None:
    """Process, client and update name it; the other engine still answers."""
    killed, survivor = sglang.engines
    os.kill(killed.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while killed.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(
        EngineDied, match=f"engine {killed.url} ended by itself .signal SIGKILL.; the end of"
    ):
        killed.check_alive()
    survivor.check_alive()
    with pytest.raises(EngineDied, match=killed.url):
        asyncio.run(EngineClient(killed.url, sglang.api_key).weight_version())

    async def send(index: int) -> None:
        raise AssertionError("nothing may be sent")

    whole = WeightUpdate(sglang.addresses, api_key=sglang.api_key, timeout_s=20)
    with pytest.raises(SyncError, match=killed.url):
        asyncio.run(
            whole.update(
                9, BroadcastMover([Bucket(("a",), ((1,),), ("float32",))], send, group_name=GROUP)
            )
        )
    asyncio.run(EngineClient(survivor.url, sglang.api_key).resume())
    assert len(groups_of(sglang, held_out(sglang.model, 6), GREEDY, n=1)) == 6
