"""Engines in other jobs: an extension has them; without one a run has none, or is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.cluster import Cluster, Node
from rlpost.cli.check_settings import _settings_problems
from rlpost.config import extensions
from rlpost.config.extensions import Extension
from rlpost.config.load import load
from rlpost.driver.engines.joining import (
    JoiningEngines,
    JoinParts,
    NoEngines,
    joining_engines,
)
from rlpost.engines import engine_job
from rlpost.engines.places import Places
from rlpost.errors import ConfigError
from rlpost.extensions.fleet.fleet_sync import FleetSync

ALONE = {"num_gpus_per_node": 1, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 0}
GROUP = {"engines": {"judge": {"model": "/m", "fleet": True}}}
OF_PROTOCOL = {name for name in vars(JoiningEngines) if not name.startswith("_")}


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without engines in other jobs; its tables stay, which are made at import."""
    rows = [row for row in extensions.extensions() if row.name != "fleet"]
    monkeypatch.setattr(extensions, "extensions", lambda: rows)


def parts(folder: Path, group: str = "policy") -> JoinParts:
    cluster = Cluster(
        "127.0.0.1:1", str(folder / "attempts/0"), (Node("n0", "127.0.0.1", "lo", 1),), 20000, 100
    )
    return JoinParts(cluster, Places(), hf={}, check=lambda: None, group=group)


def test_the_extension_and_its_absence_have_the_whole_interface(tmp_path: Path) -> None:
    made = joining_engines(load([], {}).config, parts(tmp_path))
    assert isinstance(made, FleetSync)
    for kind in (FleetSync, NoEngines):
        assert vars(kind).keys() >= OF_PROTOCOL


@pytest.mark.usefixtures("no_extension")
def test_without_an_extension_no_engine_joins_and_nothing_is_awaited(tmp_path: Path) -> None:
    engines = joining_engines(load([], {}).config, parts(tmp_path))

    async def update() -> None:
        await engines.before()
        await engines.write(3)
        await engines.publish(3)
        engines.in_background(4)
        await engines.wait_for_write()
        await engines.serve(4)
        await engines.enough(0)
        engines.check_any(0)
        engines.end()
        await engines.close()

    asyncio.run(update())
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("no_extension")
def test_without_an_extension_what_asks_for_such_engines_is_refused(tmp_path: Path) -> None:
    """Otherwise requests would wait for ever for an engine that cannot join."""
    with pytest.raises(ConfigError, match=r"\[engines.judge\] fleet = true: .* no extension"):
        joining_engines(load([], GROUP).config, parts(tmp_path, "judge"))
    assert problems(GROUP, "extension for engines") == [
        "[engines.judge] fleet = true: this installation has no extension for engines in other jobs; "
        "leave it out"
    ]
    rollout = {"num_rollout": 1}
    assert problems({"cluster": ALONE, "rollout": rollout}, "no engine is in") == [
        "--rollout-num-gpus 0: no engine is in the run's own job; use --rollout-num-gpus 1"
    ]
    assert not problems({"grpo": {"loss_type": "sft_loss"}}, "no engine is in")


def problems(settings: dict[str, Any], words: str) -> list[str]:
    """The problems of the settings with these words."""
    return [line for line in _settings_problems(load([], settings).config) if words in line]


def test_an_engine_job_runs_the_agent_of_the_extension(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["engine_job", "--engine", "7_0"])
    row = Extension(name="theirs", engine_agent=f"{__name__}:agent")
    monkeypatch.setattr(extensions, "extensions", lambda: [row])
    assert engine_job.main() == 75
    monkeypatch.setattr(extensions, "extensions", list)
    assert engine_job.main() == 78, "a restart would fail in the same way"
    assert "this installation has no extension" in capsys.readouterr().err


def agent(words: list[str]) -> int:
    """The agent of an extension."""
    assert words == ["--engine", "7_0"]
    return 75
