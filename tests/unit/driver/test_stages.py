"""Every mode closes exactly what it has started, even if startup fails halfway."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.cluster import Cluster, Node
from rlpost.config.load import load
from rlpost.driver import debug_modes, generation, stages, startup
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.debug_modes import RolloutOnly, TrainOnly, choose_mode
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.stages import ClusterStages
from rlpost.errors import SyncError

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "eos_token_id": 1,
}
SLOT = Slot("n0", "10.0.0.1", 1)
MODES = {
    "colocated": ({"cluster": {"colocate": True}}, ClusterStages),
    "full": ({}, ClusterStages),
    "rollout-only": ({"debug": {"debug_rollout_only": True}}, RolloutOnly),
    "train-only": ({"debug": {"debug_train_only": True}}, TrainOnly),
}


class Workers:
    """A fake of ranks, engines, weights and graders.

    Calls in ``fails`` raise SyncError, all others succeed; ``close`` is logged.
    """

    def __init__(self, name: str, log: list[str], fails: tuple[str, ...] = ()) -> None:
        self._name, self._log, self._fails = name, log, fails
        self.serving, self.counters = SimpleNamespace(places=None), None

    def close(self) -> Any:
        self._log.append(f"close {self._name}")
        return asyncio.sleep(0) if self._name in ("weights", "grader") else None

    def ranks_see(self, visible: object) -> None:
        """Do nothing; part of the interface of ``Offload``."""

    def __len__(self) -> int:
        return 1

    def __getattr__(self, method: str) -> Any:
        async def answer(*given: Any, **__: Any) -> list[Any]:
            if method in self._fails:
                raise SyncError(f"{self._name}: {method} failed")
            return [(0, None)] if given == ("versions",) else [None]

        return answer


def made(
    mode: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fails: tuple[str, ...],
    nodes: tuple[Node, ...] = (),
) -> tuple[Any, list[str]]:
    """Return the stages of a mode, whose calls in ``fails`` raise, and the log of their closes."""
    log: list[str] = []
    for module in (stages, debug_modes):
        monkeypatch.setattr(module, "OwnEngines", lambda *_: Workers("fleet", log, fails))
    monkeypatch.setattr(
        stages, "WeightCoordinator", lambda *_, **__: Workers("weights", log, fails)
    )
    stand_ins = {"connect": lambda cluster: [], "place": lambda *_: Placement((SLOT,), ((SLOT,),))}
    stand_ins |= {"ports_of_run": lambda *_, **__: Ports((), (), 0, (0,))}
    stand_ins |= {
        "WorkerGroup": lambda *_, **__: Workers("actors", log, fails),
        "Training": lambda *_, **__: None,
    }
    stand_ins |= {"order_by_gpu": lambda *_: [0]}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(startup, name, stand_in)
    tokenizer = SimpleNamespace(end_ids=set())
    monkeypatch.setattr(generation, "tokenizer_class", lambda _: lambda *_, **__: tokenizer)
    monkeypatch.setattr(generation, "make_grader", lambda config, engines: Workers("grader", log))
    monkeypatch.setattr(generation.Generation, "connect", Workers("engines", log).connect)
    (folder / "model").mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / "model" / name).write_text(json.dumps(MODEL))
    config = load(
        [], {"checkpoint": {"hf_checkpoint": str(folder / "model")}, **MODES[mode][0]}
    ).config
    cluster = Cluster("10.0.0.1:1", str(folder / "run/attempts/0"), nodes, 20000, 100)
    checkpoints = Checkpoints(
        config.checkpoint, folder / "checkpoints", committed=lambda step, path: None
    )
    stop = StopRequest(folder / "STOP")
    mode = choose_mode(config)
    return mode(config, cluster, checkpoints=checkpoints, stop=stop), log


@pytest.mark.parametrize("mode", MODES)
def test_the_settings_choose_the_mode(mode, tmp_path, monkeypatch):
    made_stages, log = made(mode, tmp_path, monkeypatch, fails=())
    assert type(made_stages) is MODES[mode][1]
    asyncio.run(made_stages.close())
    assert log == ["close grader"], "nothing was started"


@pytest.mark.parametrize(
    ("mode", "fails", "closed"),
    [
        ("full", "start", ["fleet"]),
        ("full", "connect", ["weights", "fleet"]),
        ("full", "call", ["fleet"]),
        ("rollout-only", "start", ["fleet"]),
        ("train-only", "call", []),
    ],
)
async def test_a_failed_startup_leaves_nothing_behind(mode, fails, closed, tmp_path, monkeypatch):
    made_stages, log = made(mode, tmp_path, monkeypatch, fails=(fails,))
    async with asyncio.timeout(20):
        try:
            with pytest.raises(SyncError, match="failed"):
                await made_stages.start(None)
        finally:
            await made_stages.close()
    assert log == ["close grader", *(f"close {name}" for name in closed)]


class JobsThatJoin:
    """Logs the order of events of engines in other jobs and of the run's own engines."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def around_update(self, version: int, *, ready: Any, **_: Any) -> None:
        self._log.append("own engines paused")
        await ready()
        self._log.append("own engines generate")

    def check_any(self, others: int) -> None:
        pass

    async def wait_for_write(self) -> None:
        self._log.append("wait for write")

    def in_background(self, version: int) -> None:
        self._log.append(f"write and publish {version}")

    async def enough(self, others: int) -> None:
        self._log.append(f"enough beside {others}")

    def __getattr__(self, name: str) -> Any:
        async def note(*arguments: Any) -> None:
            self._log.append(" ".join([name, *map(str, arguments)]))

        return note


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        (
            "full",
            [
                *("engines may have 3", "before", "own engines paused", "own engines generate"),
                "write and publish 3",
            ],
        ),
        (
            "colocated",  # the trainer is offloaded before its engines generate
            [
                *("engines may have 3", "before", "own engines paused", "write 3"),
                *("own engines generate", "publish 3"),
            ],
        ),
    ],
)
async def test_other_jobs_get_weights_before_or_while_own_engines_generate(
    mode, order, tmp_path, monkeypatch
):
    nodes = (Node("n0", "10.0.0.1", "lo", 1),)
    log: list[str] = []
    jobs = JobsThatJoin(log)
    made_stages, _ = made(mode, tmp_path, monkeypatch, fails=(), nodes=nodes)
    monkeypatch.setattr(stages, "joining_engines", lambda *_: jobs)
    monkeypatch.setattr(
        stages,
        "EngineHealth",
        lambda *_, **__: SimpleNamespace(
            update=jobs.around_update, num_serving=1, trained=lambda: None
        ),
    )
    monkeypatch.setattr(stages, "Offload", lambda *_, **__: Workers("offload", []))
    monkeypatch.setattr(
        made_stages.generation,
        "note_version",
        lambda version: log.append(f"engines may have {version}"),
    )
    monkeypatch.setattr(made_stages.observation, "attach", jobs.attach)
    async with asyncio.timeout(20):
        try:
            await made_stages.start(None)
            log.clear()
            await made_stages.sync(3)
        finally:
            await made_stages.close()
    assert log[: len(order) + 1] == [*order, "enough beside 1"]


@pytest.mark.parametrize(
    ("dies", "wait", "updated"),
    # the last save of a run waits, and no engine generates after it
    [(True, False, [3]), (False, False, []), (True, True, [])],
)
def test_engines_that_lost_their_weights_in_a_save_get_new_ones_before_they_generate(
    dies, wait, updated, tmp_path, monkeypatch
):
    """Ranks that die in a save are restarted on the GPUs of engines, which lose their weights."""
    made_stages, _ = made("colocated", tmp_path, monkeypatch, fails=())
    held, versions = [True], []

    async def over(phase: str, operation: Any) -> None:
        held[0] = held[0] and not (dies and phase == "save")
        await operation()

    async def update(version: int, **_: Any) -> None:
        versions.append(version)
        held[0] = True

    async def saved(*_: Any, **__: Any) -> None:
        """Save nothing."""

    offload = SimpleNamespace(
        engines_hold_gpus=lambda: held[0], save=lambda **_: None, send=None, generate=None
    )
    made_stages._offload, made_stages._actors, made_stages._policy_version = offload, None, 3
    made_stages._engine_health = SimpleNamespace(update=update)
    made_stages.recovery = SimpleNamespace(over=over)
    made_stages.save_ranks = saved
    asyncio.run(made_stages.save(None, wait=wait))
    assert versions == updated
    asyncio.run(made_stages.close())
