"""Engines change their weights together, while paused, or stay paused."""

import asyncio

import pytest

from rlpost.errors import SyncError
from rlpost.rollout.weight_update import WeightUpdate
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
        await whole.update(BUCKETS, version, send or note)
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
    first, second = (body for path, body in zip(engine.log, engine.bodies, strict=True) if path == TAKE)
    assert first["names"] == ["a", "b"]
    assert first["shapes"] == [[2, 3], [4]]
    assert first["dtypes"] == ["float32", "bfloat16"]
    assert first["load_format"] == "flattened_bucket"
    assert first["weight_version"] is None, "the version may only appear when all weights are there"
    assert second["weight_version"] == "7"


def test_an_engine_without_sessions_is_updated_without_them() -> None:
    """SGLang up to 0.5.20 answers 404; both kinds may serve side by side."""
    old, new = FakeEngine(has_sessions=False), FakeEngine()
    asyncio.run(update([old, new]))
    assert "end_weight_update" not in old.log
    assert "end_weight_update" in new.log
    assert old.log[-1] == new.log[-1] == "continue_generation"


@pytest.mark.parametrize("path", ["pause_generation", "begin_weight_update", TAKE, "end_weight_update", "flush_cache"])
def test_an_engine_that_refuses_is_named_and_none_resumes(path: str) -> None:
    good, bad = FakeEngine(), FakeEngine(refuses=path)
    with pytest.raises(SyncError) as error:
        asyncio.run(update([good, bad]))
    assert bad.url in str(error.value)
    assert path in str(error.value)
    assert "continue_generation" not in good.log + bad.log


def test_a_refusal_ends_the_wait_for_a_broadcast_that_cannot_complete() -> None:
    ended = []

    async def never(index: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)

    with pytest.raises(SyncError, match=TAKE):
        asyncio.run(asyncio.wait_for(update([FakeEngine(), FakeEngine(refuses=TAKE)], never), timeout=20))
    assert ended == [0]


def test_a_sender_that_fails_leaves_the_engines_paused() -> None:
    async def broken(index: int) -> None:
        raise RuntimeError("the trainer's half broke")

    engine = FakeEngine()
    with pytest.raises(RuntimeError, match="the trainer's half broke"):
        asyncio.run(update([engine], broken))
    assert "continue_generation" not in engine.log


def test_an_engine_of_another_version_is_named_and_none_resumes() -> None:
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
            addresses = [EngineAddress(url, num_gpus) for url, num_gpus in zip(urls, (2, 1, 4), strict=True)]
            whole = WeightUpdate(addresses, api_key=KEY, group_name="g", backend="gloo")
            assert whole.num_engine_ranks == 7
            await whole.connect("10.0.0.1", 4444)
            await whole.disconnect()

    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    asyncio.run(connect(engines))
    assert [engine.bodies[0]["rank_offset"] for engine in engines] == [1, 3, 4]
    assert {engine.bodies[0]["world_size"] for engine in engines} == {8}
    assert engines[0].log == ["init_weights_update_group", "destroy_weights_update_group"]
