"""Evaluation on the policy's engines: they are taken, evaluate, and are given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.driver import spare_engines
from rlpost.driver.spare_engines import MAX_TRIES, SpareEngines
from rlpost.engines.own_membership import OwnMembership
from rlpost.engines.places import Place
from rlpost.errors import SyncError
from rlpost.types import EngineAddress


class Policy:
    """The policy's engines and their health; one of them is never lent."""

    def __init__(self, num_engines: int) -> None:
        self.addresses = tuple(EngineAddress(f"http://{index}", 1) for index in range(num_engines))
        self.members, self.api_key, self.log = OwnMembership(num_engines), "k", list[Any]()

    def places_of(self, indices: Any) -> list[Place]:
        return [Place(self.addresses[index].url, "k", 4) for index in indices]

    async def lend(self, most: int) -> list[int]:
        lent = self.members.lend(most)
        self.log.append(("lend", lent))
        return lent

    async def give_back(self, indices: Any, version: int | None) -> None:
        self.members.give_back(indices, version)
        self.log.append(("back", list(indices), version))

    def die(self, index: int) -> None:
        self.members.stopped(index)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(spare_engines, "POLL_S", 0.01)
    return Policy(4)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


def spare_of(policy: Policy, number: int, read: Callable[[tuple[str, ...]], None]) -> SpareEngines:
    spare = SpareEngines(policy, policy, number, load_adapters=False, timeout_s=1.0)  # type: ignore[arg-type]

    async def update(version: int) -> None:
        policy.log.append(("read", version))
        read(tuple(address.url for address in spare.addresses))

    spare.weights = SimpleNamespace(update=update, folder=Path("/w"))  # type: ignore[assignment]
    return spare


def served(spare: SpareEngines) -> list[str]:
    return [place.url for place in spare.serving.places.all()]


async def bring(spare: SpareEngines, version: int) -> None:
    await spare.update(version, pause="abort", before=nothing, ready=nothing)


async def nothing() -> None:
    pass


async def test_engines_read_the_version_before_requests_and_are_given_back_with_it(
    policy: Policy,
) -> None:
    spare = spare_of(policy, 2, lambda urls: None)
    await bring(spare, 7)

    async def evaluating() -> str:
        assert served(spare) == ["http://3", "http://2"]
        assert policy.members.checked == [0, 1, 2, 3], "their health is checked from now on"
        return "metrics"

    assert await spare.over(evaluating()) == "metrics"
    assert not served(spare)
    assert policy.log == [("lend", [3, 2]), ("read", 7), ("back", [3, 2], 7)]


async def test_one_that_dies_is_left_out_and_the_last_one_is_replaced(policy: Policy) -> None:
    spare = spare_of(policy, 2, lambda urls: None)
    await bring(spare, 7)

    async def evaluating() -> None:
        policy.die(3)
        while served(spare) != ["http://2"]:
            await asyncio.sleep(0.01)
        policy.die(2)
        while served(spare) != ["http://1"]:  # the last one serves the policy
            await asyncio.sleep(0.01)

    await spare.over(evaluating())
    assert policy.log.count(("read", 7)) == 2 and policy.log[-1] == ("back", [1], 7)


async def test_engines_that_did_not_read_the_weights_are_given_back_as_unknown(
    policy: Policy,
) -> None:
    def fail(urls: tuple[str, ...]) -> None:
        raise SyncError(f"{urls[0]} does not answer")

    spare = spare_of(policy, 1, fail)
    with pytest.raises(SyncError, match="http://3 does not answer"):
        await bring(spare, 7)
    assert policy.log.count(("back", [3], None)) == MAX_TRIES and not policy.members.lent
    assert ("back", [3], 7) not in policy.log and not served(spare)


async def test_a_cancelled_evaluation_gives_its_engines_back(policy: Policy) -> None:
    spare = spare_of(policy, 1, lambda urls: None)
    await bring(spare, 7)
    working = asyncio.create_task(spare.over(asyncio.Event().wait()))
    await asyncio.sleep(0.02)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert policy.log[-1] == ("back", [3], 7) and not policy.members.lent
