"""Evaluation beside training: in order, at its step, also after a kill; the loop does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.driver import background_evaluation
from rlpost.driver.background_evaluation import (
    MAX_WAITING,
    BackgroundEvaluation,
    SnapshotWeights,
)
from rlpost.errors import CheckpointError, EngineDied, Preempted


class Engines:
    """The group: health and weights. An evaluation ends when ``go_on`` is set."""

    def __init__(self, root: Path, *, error: Exception | None = None) -> None:
        self.root, self.error = root, error
        self.weights = SimpleNamespace(folder=None, forget=self.forget)
        self.go_on = asyncio.Event()
        self.log: list[str] = []
        self.results: dict[int, float] = {}
        self.evaluation = BackgroundEvaluation(root, self, self.weights, self.evaluate)  # type: ignore[arg-type]

    async def update(self, version: int, **_: Any) -> None:
        folder = self.weights.folder
        assert (folder / "weights").read_text() == str(version), "of the version that is evaluated"
        self.log.append(f"load {version}")

    async def forget(self) -> None:
        self.log.append(f"forget {self.weights.folder.name[5:12].lstrip('0')}")
        assert self.weights.folder.is_dir(), "no engine reads a folder that is removed"

    async def over(self, work: Awaitable[Any]) -> Any:
        return await work

    def forget_restarts(self) -> None:
        self.log.append("ended")

    async def evaluate(self, step: int) -> dict[str, float]:
        self.log.append(f"evaluate {step}")
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return {"eval/a/reward_mean": step / 10}

    async def done(self, step: int, metrics: Any) -> None:
        assert self.folders(), "the weights stay until the result is on disk"
        self.results[step] = metrics["eval/a/reward_mean"]
        assert metrics["time/eval_beside_s"] >= 0

    async def begin(self, step: int, *, is_last: bool = False) -> None:
        async def write(folder: str) -> None:
            Path(folder).mkdir()
            (Path(folder) / "weights").write_text(str(step + 100))

        await self.evaluation.begin(step, step + 100, write, is_last=is_last)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("*"))


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


async def test_steps_are_evaluated_in_order_while_the_loop_goes_on(tmp_path: Path) -> None:
    engines = Engines(tmp_path / "evaluations")
    await engines.evaluation.resume(0, engines.done)
    for step in (1, 2):
        await engines.begin(step)  # returns while step 1 is evaluated
        await asyncio.sleep(0.05)
    assert engines.results == {} and engines.log == ["load 101", "evaluate 1"]
    engines.go_on.set()
    await engines.evaluation.finish()
    assert engines.log == [
        *("load 101", "evaluate 1", "ended", "forget 1"),
        *("load 102", "evaluate 2", "ended", "forget 2"),
    ]
    assert engines.results == {1: 0.1, 2: 0.2} and engines.folders() == []


async def test_an_attempt_carries_out_what_a_killed_one_owes_and_no_later_step(
    tmp_path: Path,
) -> None:
    root = tmp_path / "evaluations"
    killed = Engines(root)
    await killed.evaluation.resume(0, killed.done)
    for step in (2, 4, 6):
        await killed.begin(step)
    await killed.evaluation.close()
    (root / ".step-0000008-version-108").mkdir()  # half written
    (root / "mine").mkdir()  # not of a run
    assert killed.results == {} and len(killed.folders()) == 5
    engines = Engines(root)
    engines.go_on.set()
    await engines.evaluation.resume(4, engines.done)
    owed = ["step-0000002-version-102", "step-0000004-version-104"]
    assert engines.folders() == ["mine", *owed]
    await engines.begin(4)  # its line was not written: the loop asks again
    await engines.evaluation.finish()
    assert engines.results == {2: 0.2, 4: 0.4} and engines.log.count("evaluate 4") == 1
    await engines.begin(6)
    await engines.evaluation.finish()
    assert engines.results[6] == 0.6


async def test_too_many_that_wait_are_skipped_but_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engines(tmp_path / "evaluations")
    await engines.evaluation.resume(0, engines.done)
    for step in range(1, MAX_WAITING + 3):
        await engines.begin(step)
    await engines.begin(99, is_last=True)
    engines.go_on.set()
    await engines.evaluation.finish()
    assert [*engines.results] == [*range(1, MAX_WAITING + 2), 99]
    assert f"the evaluation of step {MAX_WAITING + 2} is skipped" in caplog.text


async def test_weights_that_cannot_be_written_cost_one_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engines(tmp_path / "evaluations")
    engines.go_on.set()
    await engines.evaluation.resume(0, engines.done)

    async def write(folder: str) -> None:
        raise CheckpointError("the disk is full")

    await engines.evaluation.begin(1, 1, write, is_last=True)
    await engines.begin(2)
    await engines.evaluation.finish()
    assert [*engines.results] == [2]
    assert "the evaluation of step 1 is skipped: the disk is full" in caplog.text


@pytest.mark.parametrize("error", [EngineDied("died 4 times"), Preempted("stop")])
async def test_an_error_is_raised_in_the_next_step_and_at_the_end(
    tmp_path: Path, error: Exception
) -> None:
    engines = Engines(tmp_path / "evaluations", error=error)
    await engines.evaluation.resume(0, engines.done)
    await engines.begin(1)
    engines.evaluation.check()
    engines.go_on.set()
    await asyncio.sleep(0.05)
    with pytest.raises(type(error)):
        engines.evaluation.check()
    with pytest.raises(type(error)):
        await engines.evaluation.finish()
    assert engines.folders() == ["step-0000001-version-101"], "the next attempt evaluates it"
    await engines.evaluation.close()


async def test_engines_read_the_folder_of_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that they are checked: SGLang skips names that its model does not have."""
    moved: list[Any] = []

    async def check_folder(self: Any, receivers: Any, weights: Path) -> None:
        moved.append(("check", receivers, weights))

    class Update:
        receivers = ()

        def __init__(self, addresses: Any, **options: Any) -> None:
            moved.append(addresses)

        async def update(self, version: int, mover: Any, **_: Any) -> None:
            await mover.move((), version)

    async def move(self: Any, receivers: Any, version: int) -> None:
        moved.append((version, await self._write(version)))

    monkeypatch.setattr(background_evaluation, "WeightUpdate", Update)
    monkeypatch.setattr(background_evaluation.DiskMover, "move", move)
    fleet: Any = SimpleNamespace(addresses=("a",), api_key="k")
    monkeypatch.setattr(background_evaluation.LoadCheck, "check_folder", check_folder)
    weights = SnapshotWeights(fleet, load_adapters=False, timeout_s=1.0)
    await weights.update(3)
    assert moved == [], "no snapshot yet: the engines have the weights of the model folder"
    weights.folder = tmp_path
    await weights.update(3)
    assert moved == [("a",), ("check", (), tmp_path), (3, str(tmp_path))]
