"""No GPU and no host holds more than it has, in any order of events, for every recipe.

Real: stages, offload, fleet, health, weight updates and recovery. Fakes: the processes of ranks and
engines, which hold the bytes of ``rlpost plan`` in a ledger (``tests.fakes``).
"""

import asyncio
import json
from functools import lru_cache
from types import SimpleNamespace

import pytest

from common.cluster import Cluster, Node
from rlpost.config.load import JOBS, files_of, load
from rlpost.driver import generation, stages, startup
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.engines import own_engines
from rlpost.driver.preemption import StopRequest
from rlpost.driver.stages import ClusterStages
from rlpost.driver.worker_groups import Actor, remote
from rlpost.durable.commit import checkpoint_name
from rlpost.durable.state import RunState
from rlpost.engines import engine_side_weights
from rlpost.errors import MemoryHeld
from rlpost.extensions.planning.estimate import estimate
from rlpost.extensions.planning.plan_verb import model_of
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.trainer import device
from tests.fakes.memory_ledger import MemoryLedger, OutOfMemory
from tests.fakes.planned_cluster import (
    PORTS,
    Client,
    EngineProcesses,
    PlannedCluster,
    RankProcesses,
    free_memory,
)
from tests.unit.driver.test_stages import MODEL, JobsThatJoin, Workers

SAME_MEMORY = {"glm45_355b_fp8", "glm46_355b", "glm47_355b"}  # as glm45_355b (tests/unit/jobs)
SAME_MEMORY |= {"qwen3_4b_judge", "qwen3_4b_teacher"}  # groups have GPUs of their own
RECIPES = sorted({path.stem for path in (JOBS / "recipes").glob("*.toml")} - {"tiny"} - SAME_MEMORY)
PPO = {"grpo": {"advantage_estimator": "ppo", "use_kl_loss": False}}
CRITICS = {
    "critic in the policy's ranks": PPO,
}
WITH_CRITIC = "qwen3_4b"
TIGHT = ["given", "tight"]
GPU_BYTES = 80 * 10**9


def config_of(name, flags):
    """The settings of a recipe, or of ``WITH_CRITIC`` with a critic; ``flags`` of SGLang."""
    given = dict(CRITICS.get(name, {})) | {"sglang": flags}
    recipe = WITH_CRITIC if name in CRITICS else name
    return load(files_of(JOBS / "recipes" / f"{recipe}.toml"), given).config


@lru_cache
def planned(name, fraction):
    """The estimate of a run; "tight": with the largest KV cache that the plan accepts."""
    config = config_of(name, {})
    shape, width = model_of(config)
    sizes = {"gpu_bytes": GPU_BYTES, "engine_width": width}
    if fraction == "given":
        return estimate(config, shape, **sizes), {}
    for percent in range(90, 50, -1):
        flags = {"sglang_mem_fraction_static": percent / 100}
        made = estimate(config_of(name, flags), shape, **sizes)
        if not made.problems:
            return made, flags
    raise AssertionError("no fraction fits")


class Training:
    """One optimizer step on all ranks, after one of the critic."""

    def __init__(self, config, actors, *_, **__):
        self._actors, self._has_critic = actors, config.use_critic

    async def train(self, groups, rollout, versions):
        if self._has_critic:
            await self._actors.all(remote(Actor.train_critic))
        await self._actors.all(remote(Actor.train_step))
        return {}


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Return a function that makes a run of a recipe: its cluster and its stages."""
    tokenizer = SimpleNamespace(end_ids=set())
    for module, stand_ins in {
        own_engines: {
            "WorkerGroup": EngineProcesses,
            "EngineClient": Client,
            "check_engine": Client.failure,
            "failure": Client.failure,
        },
        engine_side_weights: {"EngineClient": Client},
        stages: {"joining_engines": lambda *_: JobsThatJoin([])},
        generation: {
            "tokenizer_class": lambda _: lambda *_, **__: tokenizer,
            "prompt_set": lambda *_, **__: SimpleNamespace(all=list),
            "make_grader": lambda config, engines: Workers("grader", []),
        },
        startup: {
            "WorkerGroup": RankProcesses,
            "Training": Training,
            "connect": lambda cluster: [],
            "place": lambda *_: PlannedCluster.current.placement,
            "ports_of_run": lambda *_, **__: PORTS,
            "order_by_gpu": lambda *_: [0, 1],
        },
        startup.Startup: {"_calls": lambda *_: None},
        generation.Generation: {
            "connect": Workers("engines", []).connect,
            "note_version": lambda *_: None,
        },
        device: {"free_memory": free_memory},
    }.items():
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(module, name, stand_in)
    (tmp_path / "model").mkdir()
    (tmp_path / "run/attempts/0").mkdir(parents=True)
    (tmp_path / "run/attempts/0/secret").write_text("key")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "model" / name).write_text(json.dumps(MODEL))

    def make(name, fraction="given"):
        made, flags = planned(name, fraction)
        cluster = PlannedCluster(made)
        given = {
            "checkpoint": {"hf_checkpoint": str(tmp_path / "model")},
            "sglang": {"rollout_health_check_interval": 0.01} | flags,
            "rollout": {"multimodal_keys": {}},  # the model folder here reads no images
        }
        groups = dict(CRITICS.get(name, {})) | given
        recipe = WITH_CRITIC if name in CRITICS else name
        config = load(files_of(JOBS / "recipes" / f"{recipe}.toml"), groups).config
        nodes = (Node("n0", "10.0.0.1", "lo", 4),)
        run = ClusterStages(
            config,
            Cluster("10.0.0.1:1", str(tmp_path / "run/attempts/0"), nodes, 20000, 100),
            checkpoints=Checkpoints(
                config.checkpoint, tmp_path / "checkpoints", committed=lambda step, path: None
            ),
            stop=StopRequest(tmp_path / "STOP"),
        )
        return cluster, Run(run)

    return make


class Run:
    """The phases of a run on its stages."""

    def __init__(self, made):
        self.stages, self.step = made, 0

    async def start(self, checkpoint=None):
        async def around(groups, training):
            return await training

        self.stages.observation.attach = Workers("", []).attach
        self.stages.observation.around = around
        await self.stages.start(checkpoint)
        self.stages.recovery.resume(0, PolicyVersions(), self._batches)

    async def _batches(self, state, checkpoint, until):
        return SimpleNamespace(groups=Workers("batches", []).groups)

    async def generate(self, until=lambda: True):
        async def work():
            while not until():
                await asyncio.sleep(0.01)

        await self.stages._watch(work())

    async def cycle(self):
        """Generate, train, synchronise and save."""
        await self.generate()
        await self.stages.train([], self.step + 1)
        self.step += 1
        await self.stages.sync(0)
        await self.stages.save(RunState(step=self.step), wait=False)
        await self.stages.checkpoints.wait_committed()

    async def whole(self, cycles=2, checkpoint=None):
        await self.start(checkpoint)
        await self.stages.sync(0)
        for _ in range(cycles):
            await self.cycle()
        await self.generate()
        await self.stages.save(RunState(step=self.step), wait=True)
        await self.stages.close()


def run_whole(run, **options):
    asyncio.run(asyncio.wait_for(run.whole(**options), timeout=60))


def check_engines(cluster):
    """Every engine has as much cache as at its first start, but for what NCCL takes meanwhile."""
    for engine in cluster.engines:
        assert min(engine.caches) >= 0.95 * engine.caches[0] > 0


@pytest.mark.parametrize("fraction", TIGHT)
@pytest.mark.parametrize("name", [*RECIPES, *CRITICS])
def test_an_undisturbed_run_fits(name, fraction, run_of):
    cluster, run = run_of(name, fraction)
    cluster.releases_late = True
    run_whole(run)
    assert [len(engine.caches) for engine in cluster.engines] == [1, 1]


@pytest.mark.parametrize("name", [*RECIPES, *CRITICS])
def test_a_resumed_run_fits_and_its_engines_have_the_cache_of_a_first_start(name, run_of, tmp_path):
    first, fresh = run_of(name, "tight")
    run_whole(fresh, cycles=0)
    cluster, run = run_of(name, "tight")
    run_whole(run, checkpoint=tmp_path / checkpoint_name(1))
    assert "load" in cluster.log and "import_weights" not in cluster.log
    assert ("load", {"is_compared": True}) in cluster.keywords, "the driver has compared it"
    assert [engine.caches for engine in cluster.engines] == [
        engine.caches for engine in first.engines
    ]


ENGINE_DEATHS = [
    ("engine-1 reads", 2),
    ("engine-1 reads", 5),
    ("engine-1 restores", 1),
    ("engine-1 releases", 2),
    ("train_step", 1),
    ("save", 1),
]


@pytest.mark.parametrize(("event", "number"), ENGINE_DEATHS)
@pytest.mark.parametrize("name", RECIPES)
def test_an_engine_that_dies_is_restarted_with_its_whole_cache(name, event, number, run_of):
    cluster, run = run_of(name, "tight")
    cluster.fail_at(event, cluster.engines[1].kill, number=number)
    run_whole(run)
    check_engines(cluster)


@pytest.mark.parametrize("name", RECIPES)
async def test_an_engine_that_dies_while_it_generates_is_restarted_with_its_whole_cache(
    name, run_of
):
    cluster, run = run_of(name, "tight")
    async with asyncio.timeout(60):
        await run.start()
        await run.stages.sync(0)
        cluster.engines[1].kill()
        await run.generate(
            lambda: (
                run.stages._engines.members.dismissed
                if cluster.colocated
                else cluster.engines[1].is_alive
            )
        )
        await run.cycle()
        await run.stages.close()
    assert [len(engine.caches) for engine in cluster.engines] == [1, 2]
    check_engines(cluster)


RANK_DEATHS = [("train_step", 1), ("save", 1), ("share_bucket", 5), ("send_bucket", 5)]


@pytest.mark.parametrize(("event", "number"), RANK_DEATHS)
@pytest.mark.parametrize("name", [*RECIPES, *CRITICS])
def test_ranks_that_die_are_started_again_beside_the_engines(name, event, number, run_of):
    cluster, run = run_of(name, "tight")
    cluster.fail_at(event, lambda: run.stages.ranks.workers.die(), number=number)
    run_whole(run)
    check_engines(cluster)


@pytest.mark.parametrize(("event", "number"), [("train_step", 2), ("save", 1)])
@pytest.mark.parametrize("name", RECIPES)
def test_standbys_take_over_twice_and_hold_no_memory_before(name, event, number, run_of):
    cluster, run = run_of(name, "tight")

    def die():
        run.stages.ranks.workers.die()

    def die_twice():
        die()
        cluster.fail_at(event, die, number=2)

    cluster.fail_at(event, die_twice, number=number)
    run_whole(run, cycles=3)
    assert cluster.log.count("2 standbys take over") == 2
    check_engines(cluster)
    loads = [keywords for method, keywords in cluster.keywords if method == "load"]
    assert loads and all(one == {"is_compared": False} for one in loads), "the ranks compare"


async def test_a_rank_without_memory_names_the_engine_that_holds_it(run_of, monkeypatch):
    _, run = run_of("qwen3_4b")
    with pytest.raises(MemoryHeld, match=r"rank 0: .* engine-0 shares this GPU .*engine-0-server"):
        async with asyncio.timeout(60):
            await run.start()
            await run.stages.sync(0)
            monkeypatch.setattr(device, "free_memory", lambda: 0)
            monkeypatch.setattr("rlpost.trainer.memory.FREE_S", 0.0)
            try:
                await run.stages.train([], 1)
            finally:
                await run.stages.close()


def test_the_ledger_names_every_holder():
    ledger = MemoryLedger({"GPU 0": 80 * 10**9})
    ledger.hold("GPU 0", "engine-0", "weights", 50 * 10**9)
    with pytest.raises(OutOfMemory, match=r"actor-0 takes 40.0 GB .*engine-0 weights 50.0 GB"):
        ledger.hold("GPU 0", "actor-0", "weights", 40 * 10**9)
    ledger.free("actor-0")
    assert ledger.available("GPU 0") == 30 * 10**9 and ledger.held("engine-0", "weights")
