"""Engines change their weights together while paused, or stay paused."""

import asyncio
from dataclasses import replace

import pytest

from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import (
    BroadcastMover,
    DiskMover,
    Receiver,
    SharingMover,
    WeightUpdate,
    num_bytes,
)
from rlpost.errors import EngineDied, RolloutError, SyncError
from rlpost.types import Bucket, EngineAddress
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving

BUCKETS = (
    Bucket(("a", "b"), ((2, 3), (4,)), ("float32", "bfloat16")),
    Bucket(("c",), ((1,),), ("float32",)),
)
TAKE = "update_weights_from_distributed"


async def update(engines: list[FakeEngine], send=None, *, version: int = 7) -> list[int]:
    sent: list[int] = []

    async def note(index: int) -> None:
        sent.append(index)

    async with serving(*engines) as urls:
        whole = WeightUpdate([EngineAddress(url) for url in urls], api_key=KEY, timeout_s=5)
        await whole.update(version, BroadcastMover(BUCKETS, send or note, group_name="rlpost"))
    return sent


def test_the_order_is_pause_begin_receive_end_flush_check_resume() -> None:
    engines = [FakeEngine(), FakeEngine()]
    assert asyncio.run(update(engines)) == [0, 1]
    for engine in engines:
        assert engine.log == [
            *("pause_generation", "begin_weight_update", TAKE, TAKE),
            *("end_weight_update", "flush_cache", "model_info", "continue_generation"),
        ]
        assert engine.version == "7"
    first, second = (
        body for path, body in zip(engine.log, engine.bodies, strict=True) if path == TAKE
    )
    assert first["names"] == ["a", "b"]
    assert first["shapes"] == [[2, 3], [4]]
    assert first["dtypes"] == ["float32", "bfloat16"]
    assert first["load_format"] == "flattened_bucket"
    assert first["weight_version"] is None, "the version may only appear when all weights are there"
    assert second["weight_version"] == "7"


def test_every_message_with_weights_names_the_models_that_it_fills() -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with serving(engine) as (url,):
            client = EngineClient(url, KEY, selector="target")
            await client.begin_weight_update()
            await client.update_weights(BUCKETS[0], group_name="rlpost")
            await client.update_weights_from_handles(["handle"])
            await client.send_to_loader(["message"])

    asyncio.run(run())
    assert [body["selector"] for body in engine.bodies] == ["target"] * 4


def test_a_session_left_open_by_a_failed_update_is_closed_before_the_next_one() -> None:
    """Such a session is left when another engine dies while all are opening theirs."""
    engine = FakeEngine(in_session=True)
    asyncio.run(update([engine]))
    begin = "begin_weight_update"
    assert engine.log[1:4] == [begin, "end_weight_update", begin]
    assert engine.log[-1] == "continue_generation" and not engine.in_session


@pytest.mark.parametrize(
    "path", ["pause_generation", "begin_weight_update", TAKE, "end_weight_update", "flush_cache"]
)
def test_an_engine_that_refuses_is_named_and_none_resumes(path: str) -> None:
    good, bad = FakeEngine(), FakeEngine(refuses=path)
    with pytest.raises(SyncError) as error:
        asyncio.run(update([good, bad]))
    assert bad.url in str(error.value)
    assert path in str(error.value)
    assert "continue_generation" not in good.log + bad.log


def test_a_refusal_ends_the_wait_for_an_incomplete_broadcast() -> None:
    ended = []

    async def never(index: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)

    with pytest.raises(SyncError, match=TAKE):
        asyncio.run(
            asyncio.wait_for(update([FakeEngine(), FakeEngine(refuses=TAKE)], never), timeout=20)
        )
    assert ended == [0]


def test_a_sender_that_fails_leaves_the_engines_paused() -> None:
    async def broken(index: int) -> None:
        raise RuntimeError("the trainer's half broke")

    engine = FakeEngine()
    with pytest.raises(RuntimeError, match="the trainer's half broke"):
        asyncio.run(update([engine], broken))
    assert "continue_generation" not in engine.log


def test_an_engine_with_another_version_is_named_and_none_resumes() -> None:
    good, bad = FakeEngine(), FakeEngine(ignores_version=True)
    with pytest.raises(SyncError) as error:
        asyncio.run(update([good, bad]))
    assert f"engine {bad.url} has '0'" in str(error.value)
    assert good.url not in str(error.value)
    assert "continue_generation" not in good.log + bad.log


def test_ranks_of_the_group_follow_the_gpus_of_the_engines() -> None:
    """Rank 0 sends; engine ranks are disjoint and leave no gap."""

    async def connect(engines: list[FakeEngine]) -> None:
        async with serving(*engines) as urls:
            addresses = [
                EngineAddress(url, num_gpus) for url, num_gpus in zip(urls, (2, 1, 4), strict=True)
            ]
            whole = WeightUpdate(addresses, api_key=KEY)
            mover = BroadcastMover(BUCKETS, note, group_name="g")
            await mover.connect(
                whole.receivers, [("10.0.0.1", 4444), ("10.0.0.2", 4445)], backend="gloo"
            )
            await whole.leave_groups("g", 2)

    async def note(index: int) -> None:
        raise AssertionError("nothing is sent here")

    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    asyncio.run(connect(engines))
    assert [engine.bodies[0]["rank_offset"] for engine in engines] == [1, 3, 4]
    assert {engine.bodies[0]["world_size"] for engine in engines} == {8}
    assert (
        engines[0].log == ["init_weights_update_group"] * 2 + ["destroy_weights_update_group"] * 2
    )
    first, second = engines[0].bodies[:2]
    assert (first["master_address"], first["master_port"], first["group_name"]) == (
        "10.0.0.1",
        4444,
        "g-0",
    )
    assert (second["master_address"], second["master_port"], second["group_name"]) == (
        "10.0.0.2",
        4445,
        "g-1",
    )


def test_a_bucket_travels_in_the_group_of_its_stage() -> None:
    buckets = (BUCKETS[0], replace(BUCKETS[1], stage=1))

    async def move(engine: FakeEngine) -> None:
        async with serving(engine) as urls:
            whole = WeightUpdate([EngineAddress(urls[0])], api_key=KEY)
            await whole.update(
                1, BroadcastMover(buckets, lambda index: asyncio.sleep(0), group_name="g")
            )

    engine = FakeEngine()
    asyncio.run(move(engine))
    taken = [
        body["group_name"]
        for path, body in zip(engine.log, engine.bodies, strict=True)
        if path == TAKE
    ]
    assert taken == ["g-0", "g-1"]


def test_each_engine_gets_the_handles_of_the_ranks_on_its_gpus() -> None:
    shared = []

    async def share(index: int) -> list[str]:
        shared.append(index)
        return [f"bucket {index} of rank {rank}" for rank in range(4)]

    async def move(engines: list[FakeEngine]) -> None:
        async with serving(*engines) as urls:
            whole = WeightUpdate([EngineAddress(url, 2) for url in urls], api_key=KEY)
            await whole.update(3, SharingMover(BUCKETS, share, ranks_of=((0, 1), (2, 3))))

    engines = [FakeEngine(), FakeEngine()]
    asyncio.run(move(engines))
    assert shared == [0, 1]
    for engine, ranks in zip(engines, ((0, 1), (2, 3)), strict=True):
        taken = [
            body
            for path, body in zip(engine.log, engine.bodies, strict=True)
            if "from_tensor" in path
        ]
        for index, body in enumerate(taken):
            assert body["serialized_named_tensors"] == [
                f"bucket {index} of rank {rank}" for rank in ranks
            ]
            assert body["load_format"] == "flattened_bucket"
        assert [body["weight_version"] for body in taken] == [None, "3"]


async def test_a_bucket_is_gathered_while_the_engines_load_the_previous_one_and_not_earlier() -> (
    None
):
    """It reuses the memory of the bucket before the last, which all engines have loaded by then."""
    happened: list[str] = []

    class Receiving(EngineClient):
        async def update_weights_from_handles(self, handles, *, version=None) -> None:
            happened.append(f"load {handles[0]}")
            await asyncio.wait_for(shared[min(int(handles[0]) + 1, 3)].wait(), 20)
            happened.append(f"loaded {handles[0]}")

    async def share(index: int) -> list[str]:
        happened.append(f"gather {index}")
        shared[index].set()
        return [str(index)]

    shared = [asyncio.Event() for _ in range(4)]
    receiver = Receiver(
        EngineAddress("http://engine"), Receiving("http://engine", KEY, timeout_s=5)
    )
    await SharingMover(BUCKETS * 2, share, ranks_of=((0,),)).move([receiver], 3)
    assert happened == [
        "gather 0",
        *("load 0", "gather 1", "loaded 0"),
        *("load 1", "gather 2", "loaded 1"),
        *("load 2", "gather 3", "loaded 2"),
        *("load 3", "loaded 3"),
    ]


@pytest.mark.parametrize("error", [EngineDied("engine b is gone"), RolloutError("refused")])
async def test_an_engines_failure_is_raised_when_the_others_have_read_their_bucket(error) -> None:
    """The trainer then frees the memory that they read."""
    happened: list[str] = []
    has_failed = asyncio.Event()

    class Receiving(EngineClient):
        async def update_weights_from_handles(self, handles, *, version=None) -> None:
            if self.url == "http://b":
                has_failed.set()
                raise error
            await asyncio.wait_for(has_failed.wait(), 20)
            await asyncio.sleep(0.01)
            happened.append("loaded")

    async def share(index: int) -> list[str]:
        return ["of a", "of b"]

    with pytest.raises(SyncError, match=f"2 weights starting with a; {error}"):
        receivers = [
            Receiver(EngineAddress(url), Receiving(url, KEY, timeout_s=5))
            for url in ("http://a", "http://b")
        ]
        await SharingMover(BUCKETS, share, ranks_of=((0,), (1,))).move(receivers, 3)
    assert happened == ["loaded"]


def test_with_files_no_session_is_opened_and_the_version_is_sent() -> None:
    async def write(version: int) -> str:
        return f"/shared/version-{version}"

    async def move(engine: FakeEngine) -> None:
        async with serving(engine) as urls:
            await WeightUpdate([EngineAddress(urls[0])], api_key=KEY).update(5, DiskMover(write))

    engine = FakeEngine()
    asyncio.run(move(engine))
    assert engine.log == [
        *(
            "pause_generation",
            "update_weights_from_disk",
            "flush_cache",
            "model_info",
            "continue_generation",
        ),
    ]
    assert engine.bodies[1]["model_path"] == "/shared/version-5" and engine.version == "5"


async def test_requests_in_flight_may_wait_during_an_update() -> None:
    """Retracted requests are recomputed with the new weights; ``ready`` runs before the resume."""
    order = []

    async def ready() -> None:
        order.append(list(engine.log))

    engine = FakeEngine()
    async with serving(engine) as urls:
        whole = WeightUpdate([EngineAddress(urls[0])], api_key=KEY)
        mover = BroadcastMover(BUCKETS, lambda index: asyncio.sleep(0), group_name="g")
        await whole.update(1, mover, pause="retract", ready=ready)
    assert engine.bodies[0] == {"mode": "retract"}
    assert order[0][-1] == "end_weight_update" and "continue_generation" not in order[0]


def test_the_bytes_of_a_bucket_are_those_of_torchs_tensors() -> None:
    torch = pytest.importorskip("torch")
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    tensors = [torch.empty(3, 5, dtype=getattr(torch, dtype)) for dtype in dtypes]
    bucket = Bucket(names=dtypes, shapes=((3, 5),) * 5, dtypes=dtypes)
    assert num_bytes(bucket) == sum(tensor.nbytes for tensor in tensors)
