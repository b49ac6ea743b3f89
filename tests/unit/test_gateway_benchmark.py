"""The benchmark of the gateway: its direct generation runs with one conversation."""

import asyncio

from benchmarks.gateway import Load, direct
from rlpost.engines.connection import Connection, RunEngines
from rlpost.extensions.agents.gateway import Gateway
from tests.unit.agents.chat_models import write_model
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving


def test_direct_generation_runs(tmp_path):
    folder = write_model(tmp_path, "qwen")
    engine = FakeEngine(answer=lambda _: generated([5, 6], version="1", text="ab", reason="length"))

    async def running():
        async with (
            serving(engine) as (url,),
            Connection(RunEngines.of([url], KEY, capacity=8)) as connection,
        ):
            return await direct(connection, Load("one", 1, 2, 2, None), Gateway(folder))

    assert asyncio.run(running()) == 4
