"""Failed control requests name engine, path, status and body, and reveal no secrets."""

import asyncio
import time

import pytest
from aiohttp import web

from rlpost.engines import engine_client
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.shards.messages import LOADER, Failure
from rlpost.errors import EngineDied, EngineNotPrepared, RolloutError
from rlpost.types import Bucket
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving


async def ask(engine: FakeEngine, call, *, key: str = KEY):
    async with serving(engine) as (url,):
        return await call(EngineClient(url, key, timeout_s=5))


def test_a_refusal_names_engine_path_status_and_body() -> None:
    engine = FakeEngine(refuses="pause_generation")
    with pytest.raises(RolloutError) as error:
        asyncio.run(ask(engine, lambda client: client.pause()))
    for part in (engine.url, "POST /pause_generation", "400", '"message": "no"'):
        assert part in str(error.value)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_failure_of_the_loader_says_whether_another_preparation_mends_it(
    is_prepared: bool,
) -> None:
    """However long the texts are, of one data-parallel rank or of two."""
    failure = Failure(("rank 0: " + "x" * 2_000, "rank 1: lost"), is_prepared).to_text()
    for refusal in (failure, f"{failure} | {failure}"):
        engine = FakeEngine(refuses="update_weights_from_tensor", refusal=refusal)
        with pytest.raises(RolloutError, match="the loader of slices failed: rank 0: x") as error:
            asyncio.run(ask(engine, lambda client: client.send_to_loader(["payload"])))
        assert isinstance(error.value, EngineNotPrepared) is not is_prepared
        assert len(str(error.value)) < 700


def test_a_wrong_key_is_refused_and_not_shown() -> None:
    with pytest.raises(RolloutError, match="401") as error:
        asyncio.run(ask(FakeEngine(), lambda client: client.abort(), key="another"))
    assert "another" not in str(error.value)


def test_an_unreachable_engine_has_died() -> None:
    with pytest.raises(EngineDied, match=r"http://127\.0\.0\.1:9: POST /flush_cache failed"):
        asyncio.run(EngineClient("http://127.0.0.1:9", KEY).flush_cache())


async def test_a_hanging_engine_has_died_and_the_deadline_is_named() -> None:
    with pytest.raises(EngineDied, match="not answered after 0 s"):
        engine = FakeEngine(holds=asyncio.Event())
        async with serving(engine) as (url,):
            await EngineClient(url, KEY, timeout_s=0.2).request(
                "POST", "/generate", {"input_ids": [1]}
            )


def test_an_engine_that_no_longer_listens_and_never_answers_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang stops listening on TERM while it waits for its scheduler; a slow engine is awaited."""
    monkeypatch.setattr(engine_client, "LISTENING_POLL_S", 0.05)

    async def asked() -> tuple[bool, float]:
        asked = asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(9):
                asked.set()
                await asyncio.Event().wait()  # the connection stays open
                writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asking = asyncio.create_task(EngineClient(url, KEY, timeout_s=600).flush_cache())
        await asked.wait()
        await asyncio.sleep(0.3)
        is_waited_for = not asking.done()
        server.close()
        closed_at = time.monotonic()
        with pytest.raises(
            EngineDied, match=r"POST /flush_cache has no answer, and the server no longer listens"
        ):
            await asking
        return is_waited_for, time.monotonic() - closed_at

    is_waited_for, seconds = asyncio.run(asked())
    assert is_waited_for and seconds < 60


def test_keys_are_neither_printed_nor_returned() -> None:
    assert KEY not in repr(EngineClient("http://x", KEY))
    info = asyncio.run(ask(FakeEngine(), lambda client: client.server_info()))
    assert info == {"tp_size": 1, "internal_states": [{"tp_size": 1}]}


class Names(tuple):
    """Names of weights that count how often they are iterated."""

    times = 0

    def __iter__(self):
        Names.times += 1
        return super().__iter__()


async def test_a_bucket_is_serialised_once_for_all_engines() -> None:
    """With many experts, a request names hundreds of weights, and 512 engines get the same one."""
    engines = [FakeEngine() for _ in range(4)]
    bucket = Bucket(Names(("a.weight", "b.weight")), ((8, 4), (2,)), ("bfloat16", "float32"))
    Names.times = 0
    async with serving(*engines) as urls:
        for url in urls:
            await EngineClient(url, KEY).update_weights(bucket, group_name="group", version=7)
    assert Names.times == 1
    bodies = [engine.bodies[-1] for engine in engines]
    assert bodies == [bodies[0]] * 4
    assert bodies[0]["names"] == ["a.weight", "b.weight"]
    assert bodies[0]["shapes"] == [[8, 4], [2]]
    assert bodies[0]["weight_version"] == "7"


def test_an_adapter_that_some_ranks_failed_to_load_is_unloaded_and_can_be_loaded_again() -> None:
    engine = FakeEngine(adapters=["version-3"], half_loads=1)

    def load(client: EngineClient):
        return client.replace_adapter("/adapters/4", version=4)

    with pytest.raises(RolloutError, match="/load_lora_adapter"):
        asyncio.run(ask(engine, load))
    assert (engine.adapters, engine.half_loaded, engine.version) == ([], [], "0")
    asyncio.run(ask(engine, load))
    assert (engine.adapters, engine.version) == (["version-4"], "4")


@pytest.mark.parametrize(
    ("loaders", "stages", "answers"),
    [([LOADER], 1, True), ([LOADER], 2, False), (["other.load"], 1, False), (None, 1, False)],
)
async def test_only_an_engine_with_the_loader_and_without_stages_answers_it(
    loaders, stages, answers, monkeypatch
):
    """SGLang gives the same payload to ranks of several stages, which would answer into one file."""

    async def server_info(self):
        return {"custom_weight_loader": loaders, "pp_size": stages}

    monkeypatch.setattr(EngineClient, "server_info", server_info)
    assert await EngineClient("http://a", "k").has_shard_loader() == answers


@pytest.mark.parametrize(
    "body", [b"", b"<html>log in</html>", b"[]", b"null", b"3", b'"text"', b"\xff\xfe", b"[1, {}]"]
)
async def test_another_server_on_the_port_is_an_error_of_this_engine(body: bytes) -> None:
    """An engine that names itself in an error is restarted; a TypeError would end the attempt."""

    class Other(FakeEngine):
        async def handle(self, request: web.Request) -> web.Response:
            return web.Response(body=body, content_type="text/html", charset="utf-8")

    async with serving(Other()) as (url,):
        client = EngineClient(url, KEY, timeout_s=5)
        for asking in (client.weight_version, client.server_info, client.has_shard_loader):
            with pytest.raises(RolloutError, match=f"engine {url}: GET .* which is no JSON object"):
                await asking()
        with pytest.raises(RolloutError, match=f"engine {url}: GET /v1/models"):
            await client.adapters()
