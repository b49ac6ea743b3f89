"""Weights from shard to shard: what the driver tells engines and trainer, in which order."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.config.plan.shard_plan import SentTensor, Unit
from rlpost.config.plan.shard_roles import RankPlan
from rlpost.engines.engine_side_weights import Receiver
from rlpost.engines.shard_mover import Colocation, Meeting, ShardMover
from rlpost.errors import EngineDied, SlicesRefused, SyncError, WeightError
from rlpost.models.regions import Box, Region, contiguous, group_to_json, grouped, whole

TENSORS = [SentTensor(f"t{number}", (4, 8), "float32") for number in range(4)]
UNITS = tuple(Unit(0, (tensor,)) for tensor in TENSORS)
NUMBERS = {tensor.name: number for number, tensor in enumerate(TENSORS)}
MEETING = Meeting("10.0.0.1", 20010, "rlpost-0-1", "gloo", 30.0, 60.0)
MAX_BYTES = 128
VERSION = 7


def rows(half: int) -> list[Region]:
    """Half of the rows of every tensor."""
    return [contiguous(Box(one.name, (2 * half, 0), (2, 8)), "p") for one in TENSORS]


ALL = [whole(tensor.name, tensor.shape) for tensor in TENSORS]


class Engine:
    """The client of an engine whose ranks need the given regions, and have a parameter for each tensor."""

    lacks = ""
    """A key that its answers do not have."""

    def __init__(self, ranks: Sequence[Sequence[Region]], refuses: str = "") -> None:
        self.ranks, self.refuses = ranks, refuses
        self.messages: list[tuple[list[dict[str, Any]], int | None]] = []

    @property
    def log(self) -> list[str]:
        return [messages[0]["do"] for messages, _ in self.messages]

    async def send_to_loader(self, payloads: Sequence[str], *, version: int | None = None) -> None:
        messages = [json.loads(pickle.loads(base64.b64decode(one))[0][0]) for one in payloads]
        self.messages.append((messages, version))
        assert len(messages) == len(self.ranks)
        await asyncio.sleep(0)
        if messages[0]["do"] == self.refuses:
            raise EngineDied("the engine is gone")
        if messages[0]["do"] == "record":
            for message, regions in zip(messages, self.ranks, strict=True):
                boxes = [group_to_json(one, NUMBERS) for one in grouped(regions)]
                held = {one.tensor for one in regions}
                filled = {
                    f"0:of_{name}": [number] if name in held else []
                    for name, number in NUMBERS.items()
                }
                answer = {"boxes": boxes, "together": [], "reasons": {}, "filled": filled}
                answer.pop(self.lacks, None)
                Path(message["answer"]).write_text(json.dumps(answer))


class Trainer:
    """Two ranks, each with half of the rows."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.plans: Sequence[RankPlan] = ()

    async def describe(self) -> Sequence[Any]:
        return [(UNITS, grouped(rows(0)), frozenset()), ((), grouped(rows(1)), frozenset())]

    async def use(self, plans: Sequence[RankPlan]) -> None:
        self.plans = plans

    async def connect(self, num_engine_ranks: int, meeting: Meeting) -> None:
        self.log.append(("connect", num_engine_ranks, meeting.name))

    async def pack(self, index: int) -> None:
        self.log.append(("pack", index))

    async def send(self, index: int) -> None:
        self.log.append(("send", index))

    async def share(self, index: int, message: Mapping[str, object]) -> Sequence[str]:
        self.log.append(("share", index))
        handle = base64.b64encode(pickle.dumps([(json.dumps(message), b"")])).decode()
        return [handle, handle]


def receivers(*engines: Engine) -> list[Receiver]:
    return [
        Receiver(SimpleNamespace(num_gpus=len(one.ranks), url=f"http://e{number}"), one)
        for number, one in enumerate(engines)
    ]


def mover(trainer: Trainer, where: Meeting | Colocation, folder: Path) -> ShardMover:
    return ShardMover(trainer, where, folder=folder / "slices", max_bytes=MAX_BYTES)


def test_engines_record_once_and_then_only_receive(tmp_path):
    trainer, engines = Trainer(), [Engine([rows(0), rows(1)]), Engine([ALL])]
    one = mover(trainer, MEETING, tmp_path)

    async def twice() -> None:
        await one.move(receivers(*engines), VERSION)
        await one.move(receivers(*engines), VERSION + 1)

    asyncio.run(twice())
    count = len(trainer.plans[0].outgoing)
    assert count == sum(one.num_bytes for one in TENSORS) // MAX_BYTES
    for engine in engines:
        assert engine.log == ["record", "plan", "connect", *["receive"] * 2 * count]
        versions = [version for _, version in engine.messages]
        update = [None] * (count - 1)
        assert versions == [None] * 3 + [*update, VERSION, *update, VERSION + 1]
        buckets = [messages[0]["bucket"] for messages, _ in engine.messages[3:]]
        assert buckets == 2 * list(range(count))
    sends = [(do, index) for index in range(count) for do in ("pack", "send")]
    assert trainer.log == [("connect", 3, MEETING.name), *sends, *sends]
    joined = [message for engine in engines for message in engine.messages[2][0]]
    assert [message["rank"] for message in joined] == [2, 3, 4], "after the trainer's ranks"
    assert {message["world_size"] for message in joined} == {5}
    ids = [messages[0]["id"] for messages, _ in engines[0].messages]
    assert len(set(ids)) == len(ids), "the loader tells messages apart by it"


def test_ranks_of_an_engine_on_the_trainers_gpus_get_the_handles_of_these(tmp_path):
    trainer, engine = Trainer(), Engine([rows(1), rows(0)])
    asyncio.run(mover(trainer, Colocation([(1, 0)]), tmp_path).move(receivers(engine), VERSION))
    assert engine.log[:2] == ["record", "plan"] and set(engine.log[2:]) == {"apply"}
    assert engine.messages[-1][1] == VERSION
    # each rank has what its engine rank needs: no bytes between ranks
    for rank, plan in enumerate(trainer.plans):
        assert {to for bucket in plan.outgoing for to, _ in bucket} == {rank}


def test_an_engine_that_answers_as_another_version_gets_all_weights_instead(tmp_path):
    """Before, an answer had no ``filled``."""
    engine = Engine([ALL])
    engine.lacks = "filled"
    with pytest.raises(SlicesRefused, match=r"http://e0 does not say what it loads.*'filled'"):
        asyncio.run(mover(Trainer(), MEETING, tmp_path).move(receivers(engine), VERSION))
    assert engine.log == ["record"]


LARGER = [contiguous(Box("t1", (0, 0), (5, 8)), "p")]
NARROWER = [[contiguous(Box("t2", (0, first), (4, 3)), "p")] for first in (0, 3)]


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([[*LARGER, ALL[0], *ALL[2:]]], r"t1: engine rank 0 .*\(5, 8\).*\(4, 8\)"),
        ([ALL[:2], NARROWER[0], ALL[3:]], r"t2: the ranks of engine \S+ need 12 .*\(4, 8\)"),
        (
            [ALL, [*ALL[:2], ALL[3]]],
            "t2: rank 1 of engine http://e0 has a parameter of_t2 and does not load it there",
        ),
        ([ALL[:2]], "t2: the ranks of engine \\S+ load nothing of it, the first of 2 tensors"),
    ],
)
def test_an_engine_with_another_model_is_refused_before_the_first_byte(ranks, problem, tmp_path):
    trainer, engine = Trainer(), Engine(ranks)
    with pytest.raises(WeightError, match=problem):
        asyncio.run(mover(trainer, MEETING, tmp_path).move(receivers(engine), VERSION))
    assert engine.log == ["record"] and not trainer.log


@pytest.mark.parametrize("where", [MEETING, Colocation([(0,), (1,)])])
@pytest.mark.parametrize("refuses", ["record", "plan", "receive", "apply"])
def test_an_engine_that_fails_is_an_error_of_the_update(where, refuses, tmp_path):
    if refuses == ("apply" if where is MEETING else "receive"):
        return  # not sent there
    trainer, bad = Trainer(), Engine([ALL], refuses)
    with pytest.raises(SyncError, match="the engine is gone"):
        asyncio.run(mover(trainer, where, tmp_path).move(receivers(Engine([ALL]), bad), VERSION))
