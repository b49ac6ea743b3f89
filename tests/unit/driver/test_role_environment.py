"""The variables of each role reach the workers of that role, and of no other."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import pytest

from common.cluster import Cluster
from rlpost.config.engine_args import FEATURE_CACHE
from rlpost.config.load import load
from rlpost.driver import startup
from rlpost.driver.engines import own_engines
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.role_environment import (
    engine_environment,
    role_variables,
    trainer_environment,
)
from rlpost.engines.cuda_graphs import PREFILL, REGISTER, VARIABLE
from rlpost.errors import EngineDied

COLOCATED = {"cluster": {"colocate": True}}
DEDICATED = {"cluster": {"colocate": False}}
SLOT = Slot("a", "10.0.0.1", 1)


@pytest.mark.parametrize("groups", [COLOCATED, DEDICATED])
def test_a_variable_is_in_one_row_with_a_reason(groups):
    rows = role_variables(load([], groups).config, {})
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) and all(row.why for row in rows)


@pytest.mark.parametrize(
    ("groups", "given", "wanted"),
    [
        (COLOCATED, {}, "0"),
        (COLOCATED, {REGISTER: "1"}, "1"),
        (COLOCATED, {VARIABLE: "0"}, None),
        (COLOCATED | {"sglang": {f"sglang_{PREFILL}": "breakable"}}, {}, None),
        (COLOCATED | {"sglang": {"sglang_enable_memory_saver": False}}, {}, None),
        (DEDICATED, {}, None),
        ({"cluster": {"colocate": True, "offload_rollout": False}}, {}, None),
    ],
)
def test_nccl_does_not_register_graphs_wherever_they_are_released(groups, given, wanted):
    config = load([], groups).config
    assert engine_environment(config, given).get(REGISTER) == wanted
    assert REGISTER not in trainer_environment(config, given)


@pytest.mark.parametrize("part", ["frozen", "merger", "all"])
@pytest.mark.parametrize("given", [{}, {FEATURE_CACHE: "4096"}])
@pytest.mark.parametrize("placed", [COLOCATED, DEDICATED])
def test_engines_keep_no_features_of_an_encoder_that_is_trained(part, given, placed):
    images = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    config = load([], placed | {"rollout": images, "optimizer": {"vision_tower": part}}).config
    kept = (given | engine_environment(config, given)).get(FEATURE_CACHE)
    assert kept == (given.get(FEATURE_CACHE) if part == "frozen" else "0")
    assert FEATURE_CACHE not in trainer_environment(config, given)


def test_workers_are_created_with_the_variables_of_their_role(tmp_path, monkeypatch):
    seen: dict[str, dict[str, str]] = {}

    class Group:
        def __init__(self, makes, slots, *, names, envs, **_):
            seen.update(zip(names, envs, strict=True))

        async def start(self, *places, **options):
            raise EngineDied("enough")

    for module in (own_engines, startup):
        monkeypatch.setattr(module, "WorkerGroup", Group)
    monkeypatch.setattr(own_engines, "EngineWorkers", lambda group: group)
    config = load([], COLOCATED).config
    (tmp_path / "secret").write_text("key")
    cluster = Cluster("10.0.0.1:1", str(tmp_path), (), 20000, 100)
    beside = dataclasses.replace(SLOT, shared_with=(0,))
    placement = Placement((SLOT,), ((beside,),))
    made = startup.Startup(config, cluster, stop=StopRequest(tmp_path / "STOP"), break_even=1e9)
    asyncio.run(made.workers(placement))
    ports = Ports((1,), (2,), 5, (6,))
    with pytest.raises(EngineDied):
        asyncio.run(OwnEngines(config, cluster, placement, ports).start(["7"]))
    gpu = {"CUDA_VISIBLE_DEVICES": "7"}
    assert seen["engine-0"] == engine_environment(config, os.environ) | gpu
    assert seen["actor-0"] == trainer_environment(config, os.environ)
    assert seen["engine-0"][REGISTER] == "0"
