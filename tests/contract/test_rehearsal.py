"""A rehearsal of whole steps.

Planted faults are found with their rank and line, sound layouts have none, and the calls are those
of a run over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rlpost.config.plan.shape import layout_of, rank_parameters
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.extensions.planning.nccl_memory import communicators
from rlpost.extensions.planning.plan_verb import model_of
from rlpost.extensions.planning.rank_memory import HOST_BYTES, held_memory, pinned_rounding
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import (
    RECEIVE,
    SEND,
    SPLIT,
    Call,
    Recording,
)
from rlpost.extensions.rehearsal.all_ranks.given import BalancedMap
from rlpost.extensions.rehearsal.all_ranks.hangs import Fault, hangs
from rlpost.extensions.rehearsal.all_ranks.meta import MetaResults
from rlpost.extensions.rehearsal.all_ranks.phases import Phases, rehearse_phases, run_phases
from rlpost.extensions.rehearsal.all_ranks.rank import rehearse_rank
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts
from rlpost.extensions.rehearsal.all_ranks.recorder import CallRecorder
from rlpost.extensions.rehearsal.all_ranks.result import memory_check, memory_use
from rlpost.extensions.rehearsal.all_ranks.symmetry import classes, record
from rlpost.trainer import logprobs, passes
from rlpost.trainer.model_description import ModelDescription, description_of
from rlpost.types import TrainBatch, TrainSample
from tests.contract.actor_ranks import run_ranks
from tests.contract.all_ranks.other_layout import unread
from tests.contract.all_ranks.saved import SavedFacts, build_ranks
from tests.contract.cuda.test_every_rank import SMALL, recipe_config
from tests.contract.families import make_family
from tests.contract.layouts import ALGORITHMS, LAYOUTS
from tests.contract.layouts import Layout as TableLayout
from tests.settings import rank_config

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
EIGHT = {
    "hf": SMALL | {"num_hidden_layers": 2},
    "perf": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1,
        "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    },
    "cluster": {"actor_num_nodes": 1, "rollout_num_gpus_per_engine": 8},
    "sync": {"update_weight_buffer_size": 50_000},
    "optimizer": {"optimizer_cpu_offload": False},
}  # fmt: skip
WORLD = 8
RESULTS = MetaResults()
"""Shared by all rehearsals here; ``test_rehearsal_results`` shows that they change nothing."""


def sample(length: int) -> TrainSample:
    prompt = length // 2
    response = length - prompt
    return TrainSample(
        token_ids=[1] * length,
        prompt_length=prompt,
        loss_mask=[1] * response,
        rollout_logprobs=[-1.0] * response,
        advantage=1.0,
    )


def batch(*lengths: int) -> TrainBatch:
    """Return a batch with a micro-batch of one sample for each length."""
    return TrainBatch(tuple((sample(one),) for one in lengths), len(lengths), sum(lengths))


@dataclass(frozen=True)
class Step:
    """The recordings of all ranks of a configuration."""

    settings: Config
    description: ModelDescription
    facts: Mapping[int, SavedFacts]
    phases: Phases
    recordings: Mapping[int, Recording]

    def run(self, rank: int, *, phases: Phases | None = None, **changes: Any) -> Recording:
        return rehearse_phases(
            with_values(self.settings, **changes),
            self.description,
            phases or self.phases,
            rank=rank,
            world=WORLD,
            facts=self.facts,
            results=RESULTS,
        )

    def with_rank(self, recording: Recording) -> list[Fault]:
        """Find the faults with another recording of one rank."""
        return hangs({**self.recordings, recording.rank: recording})


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    config, _ = recipe_config("glm45_355b", tmp_path_factory.mktemp("eight"), **EIGHT)
    assert layout_of(config).world == WORLD
    description = description_of(config)
    facts = build_ranks(config)
    phases = Phases(batch(24, 16), batch(24, 16), shares_gpus=True)
    empty = Step(config, description, facts, phases, {})
    made = record(facts, empty.run, all_ranks=False, all_gather=True)
    assert made.ran == (0, 3, 4, 7)
    return replace(empty, recordings=made.recordings)


def test_a_sound_step_has_no_fault(step):
    assert hangs(step.recordings) == []


@pytest.mark.parametrize(
    "perf",
    [
        {},
        {"context_parallel_size": 2, "expert_model_parallel_size": 4},
        {
            "pipeline_model_parallel_size": 1,
            "tensor_model_parallel_size": 4,
            "expert_model_parallel_size": 8,
        },
    ],
)
def test_a_rank_uses_the_communicators_that_the_planner_counts(perf, tmp_path):
    """One for each process group; the last rank has experts."""
    config, _ = recipe_config("glm45_355b", tmp_path, **(EIGHT | {"perf": EIGHT["perf"] | perf}))
    layout = layout_of(config)
    description = description_of(config)
    facts = {
        rank: rehearse_rank(config, description, rank=rank, world=WORLD) for rank in range(WORLD)
    }
    used: dict[str, tuple[int, ...]] = {}

    def noted(self: CallRecorder, name: str, args: Any, group: dist.ProcessGroup) -> Call:
        made = call(self, name, args, group)
        used[group.group_name] = made.group
        return made

    phases, call = Phases(batch(24, 16), batch(24, 16), shares_gpus=True), CallRecorder._call
    with patch.object(CallRecorder, "_call", noted):
        rehearse_phases(
            config, description, phases, rank=WORLD - 1, world=WORLD, facts=facts, results=RESULTS
        )
    planned = communicators(layout, model_of(config)[0])
    found = [(len(ranks), ranks[1] - ranks[0]) for ranks in used.values() if len(ranks) > 1]
    assert sorted(found) == sorted((one.size, one.stride) for one in planned if one.size > 1)


@pytest.mark.parametrize(("recipe", "rank"), [("glm45_355b", 16), ("qwen3_30b_a3b", 0)])
def test_pinned_gradients_take_as_much_host_memory_as_planned(recipe, rank, tmp_path):
    """Within 5 %: Megatron's shards of this rank, each rounded up as torch rounds pinned memory."""
    config, _ = recipe_config(recipe, tmp_path)
    layout = layout_of(config)
    facts = rehearse_rank(config, description_of(config), rank=rank, world=layout.world)
    sizes = [4 * (one.optimizer[1] - one.optimizer[0]) for one in facts.weights if one.optimizer]
    rounded = sum(1 << (size - 1).bit_length() for size in sizes)
    assert rounded > 1.05 * sum(sizes)
    shape, stage = model_of(config)[0], rank * layout.pipeline // layout.world
    _, in_host_memory = held_memory(config, layout, rank_parameters(shape, layout, stage))
    planned = 4 * in_host_memory // HOST_BYTES + pinned_rounding(config, shape, layout, stage)
    assert planned == pytest.approx(rounded, rel=0.05)


def test_two_ranks_of_a_class_represent_all_of_it(step):
    """The recording of rank 6, taken from ranks 4 and 7, is what rank 6 records itself."""
    assert classes(step.facts, all_gather=True) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert step.run(6).calls == step.recordings[6].calls


def test_all_ranks_run_of_a_class_whose_first_and_last_differ(step):
    ran = []

    def run(rank: int) -> Recording:
        ran.append(rank)
        one = step.recordings[rank]
        return replace(one, calls=one.calls[:-1]) if rank == 3 else one

    made = record(step.facts, run, all_ranks=False, all_gather=True)
    assert sorted(ran) == [0, 1, 2, 3, 4, 7]
    assert hangs(made.recordings)[0].ranks == (3,)


# Faults in the code or the settings of one rank.


def no_all_reduce(*args: object, **options: object) -> None:
    """Do nothing, like a branch that leaves a collective out."""


def sum_for_max(tensor: torch.Tensor, **options: Any) -> object:
    return dist.all_reduce(tensor, **(options | {"op": dist.ReduceOp.SUM}))


def skewed(self: BalancedMap, dim: int) -> torch.Tensor:
    """Send all rows to the first expert of the map."""
    counts = torch.zeros(self._num_experts, dtype=torch.int64)
    counts[0] = self._rows * self._topk
    return counts


class WithDist:
    """torch.distributed with one name replaced."""

    def __init__(self, **own: object) -> None:
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)


def world_group(**options: object) -> object:
    return dist.group.WORLD


IN_CODE: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "a collective left out": (
        lambda: patch.object(logprobs, "dist", WithDist(all_reduce=no_all_reduce)),
        "rlpost/trainer/logprobs.py",
    ),
    "another operation": (
        lambda: patch.object(logprobs, "dist", WithDist(all_reduce=sum_for_max)),
        "rlpost/trainer/logprobs.py",
    ),
    "the wrong group": (
        lambda: patch.object(passes.parallel, "data_parallel_group", world_group),
        "rlpost/trainer/passes.py",
    ),
    "another map of experts": (
        lambda: patch.object(BalancedMap, "sum", skewed),
        "megatron/core/tensor_parallel/mappings.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_CODE)
def test_a_fault_in_the_code_of_one_rank_is_found_with_its_line(step, fault):
    planted, line = IN_CODE[fault]
    with planted():
        recording = step.run(5)
    found = step.with_rank(recording)
    assert 5 in found[0].ranks
    assert line in found[0].line


IN_SETTINGS: dict[str, tuple[dict[str, Any], Phases | None]] = {
    "the chunk of log-probs": ({"log_probs_chunk_size": 5}, None),
    "recomputation": ({"recompute_granularity": None, "recompute_method": None,
                       "recompute_num_layers": None}, None),
    "the distributed optimizer": ({"use_distributed_optimizer": False}, None),
    "the number of micro-batches": ({}, Phases(batch(24), batch(24, 16), shares_gpus=True)),
    "no weight update": ({}, Phases(batch(24, 16), batch(24, 16), shares_gpus=True, updates=False)),
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_SETTINGS)
def test_a_rank_with_other_settings_is_found(step, fault):
    changes, phases = IN_SETTINGS[fault]
    found = step.with_rank(step.run(6, phases=phases, **changes))
    assert 6 in found[0].ranks


# Faults in the calls that one rank issued.


def at(recording: Recording, wanted: Callable[[Call], bool], *, number: int = 0) -> int:
    """Return the index of a call."""
    return [index for index, call in enumerate(recording.calls) if wanted(call)][number]


def changed(recording: Recording, index: int, *calls: Call) -> Recording:
    """Return the recording with other calls in place of one."""
    return replace(
        recording, calls=(*recording.calls[:index], *calls, *recording.calls[index + 1 :])
    )


def is_in(kind: str, phase: str) -> Callable[[Call], bool]:
    return lambda call: call.kind == kind and call.phase == phase and len(call.group) > 1


IN_CALLS: dict[str, tuple[Callable[[Call], bool], Callable[[Call], tuple[Call, ...]]]] = {
    "a send left out": (is_in(SEND, "train"), lambda call: ()),
    "a receive left out": (is_in(RECEIVE, "train"), lambda call: ()),
    "a send of another shape": (
        is_in(SEND, "train"), lambda call: (replace(call, sizes=(call.sizes[0] + 1,)),)
    ),
    "a receive of another dtype": (is_in(RECEIVE, "log-probs"), lambda call: (replace(call, dtype="int8"),)),
    "a receive twice": (is_in(RECEIVE, "log-probs"), lambda call: (call, call)),
    "a gather of other size": (
        is_in("all_gather", "train"), lambda call: (replace(call, sizes=(1,)),)
    ),
    "a gather twice": (is_in("all_gather", "weight update"), lambda call: (call, call)),
    "a reduction in another precision": (
        is_in("reduce_scatter", "train"), lambda call: (replace(call, dtype="float64"),)
    ),
    "a broadcast from another rank": (
        is_in("broadcast", "weight update"), lambda call: (replace(call, root=1 - call.root),)
    ),
    "a bucket that one rank does not gather": (
        is_in("broadcast", "weight update"), lambda call: ()
    ),
    "objects not exchanged": (is_in("all_gather_object", "build"), lambda call: ()),
    "rows for the wrong expert": (
        is_in(SPLIT, "train"),
        lambda call: (replace(call, sent=(call.sent[0] - 1, call.sent[1] + 1)),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_CALLS)
def test_a_call_that_differs_on_one_rank_is_found(step, fault):
    (wanted, planted), rank = IN_CALLS[fault], 4
    mine = step.recordings[rank]
    index = at(mine, wanted)
    found = step.with_rank(changed(mine, index, *planted(mine.calls[index])))
    assert rank in found[0].ranks
    assert file_of(found[0].line) == file_of(mine.calls[index].line)


def file_of(line: str) -> str:
    """Return the file of a line.

    The lines may differ: where this rank issues no call, that of another rank is reported.
    """
    return line.partition(":")[0]


def test_a_rank_that_ends_early_is_found(step):
    mine = step.recordings[2]
    found = step.with_rank(replace(mine, calls=mine.calls[:-1]))
    assert found[0].ranks == (2,)
    assert found[0].line == mine.calls[-1].line


def test_groups_entered_in_opposite_orders_are_found():
    """The order within each group is the same, and both ranks wait."""
    pair, all_ranks = (0, 1), (0, 1, 2)
    first = Call("all_reduce", pair, (4,), "float32", "train", "a.py:1")
    second = Call("barrier", all_ranks, (), "", "train", "a.py:2")
    calls = {0: (first, second), 1: (second, first), 2: (second,)}
    found = hangs({rank: Recording(rank, of_rank, {}, {}) for rank, of_rank in calls.items()})
    assert [one.ranks for one in found] == [(0, 1)]
    assert "a.py:1" in found[0].message
    assert "a.py:2" in found[0].message


def test_a_rank_that_runs_out_of_memory_is_named(step):
    held = {"weights": 10, "gradients": 20, "optimizer": 40}
    full = Recording(6, (), {"build": 0, "train": 90 * 10**9, "log-probs": 50 * 10**9}, held)
    memory = [memory_use(full, offloaded_fraction=0.0)]
    (fault,) = memory_check(memory, 80 * 10**9, context=3 * 10**9).faults
    assert "rank 6: train takes 90.0 GB" in fault
    assert memory_check(memory, 141 * 10**9, context=3 * 10**9).faults == ()


def test_a_key_that_another_layout_reads_and_no_rank_writes_is_named(step):
    written = {
        part.key: part.global_shape for one in step.facts.values() for part in one.checkpoint
    }
    assert list(unread(written, step.facts, "--tensor-model-parallel-size 1")) == []
    part = step.facts[3].checkpoint[0]
    del written[part.key]
    (first, *_) = unread(written, step.facts, "--tensor-model-parallel-size 1")
    assert part.key in first


# The rehearsal and a run over gloo.

CHEAP = ("cp2-pp2-vpp2", "moe-tp2-sp-ep2-etp2", "tp2-sp-pp2-muon", "mtp-pp2")
"""Layouts that ``make test-fast`` rehearses, too; the others are slow tests."""


def pairs_of(layout: TableLayout) -> set[tuple[object, ...]]:
    """Return every two of a layout's settings, model and algorithm among them."""
    settings = [*layout.settings.items(), layout.model, layout.algorithm]
    return set(combinations(sorted(settings, key=str), 2))


def covering(layouts: Sequence[TableLayout]) -> list[str]:
    """Return names of layouts that have every pair of settings which any of them has."""
    names, missing = [], set[tuple[object, ...]]().union(*map(pairs_of, layouts))
    while missing:
        chosen = max(layouts, key=lambda one: len(pairs_of(one) & missing))
        names.append(chosen.name)
        missing -= pairs_of(chosen)
    return names


SEVERAL_DIMENSIONS = covering([layout for layout in LAYOUTS if layout.num_ranks == 4])
REAL = ["tp2-sp", "pp2-vpp2", "moe-ep2-overlap"]
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def run_of_a_rank(actor: Any, *, phases: Phases) -> tuple[tuple[Call, ...], dict[str, int]]:
    """Record the phases of a real rank, and the bytes that it holds afterwards."""
    from rlpost.extensions.rehearsal.all_ranks.recorder import CallRecorder

    actor.import_weights()
    recorder = CallRecorder(transfers=True)
    with recorder.recording():
        run_phases(actor, phases, recorder)
    return tuple(recorder.calls), bytes_of(actor.model, actor.optimizer)


def bytes_of(model: Any, optimizer: Any) -> dict[str, int]:
    """Count bytes of weights, gradient buffers and optimizer state on the device.

    Memory that tensors share counts once, by its address.
    """
    parameters = [one for chunk in model for one in chunk.parameters()]
    buffers = [one for chunk in model for one in chunk.buffers + chunk.expert_parallel_buffers]
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    adams = [one for one in inner if one is not None]
    mains = [one for adam in adams for group in adam.param_groups for one in group["params"]]
    states = [value for adam in adams for state in adam.state.values() for value in state.values()]
    tensors = [one for one in mains + states if isinstance(one, torch.Tensor)]
    weights, all_state = addresses(parameters), addresses(tensors)
    return {
        "weights": sum(weights.values()),
        "gradients": sum(addresses([one.grad_data for one in buffers]).values()),
        "optimizer": sum(size for at, size in all_state.items() if at not in weights),
        "parameters": sum(one.nbytes for one in parameters),
    }


def addresses(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Map the address of each block of memory under the tensors to its bytes."""
    blocks = [one.untyped_storage() for one in tensors]
    return {block.data_ptr(): block.nbytes() for block in blocks}


def table_settings(folder: Path, layout: TableLayout) -> Config:
    make_family(folder / layout.model, layout.model)
    return rank_config(
        str(folder / layout.model), rollout_temperature=0.8, distributed_timeout_minutes=2,
        update_weight_buffer_size=40_000, **(layout.settings | ALGORITHMS[layout.algorithm]),
    )  # fmt: skip


@dataclass(frozen=True)
class RehearsedLayout:
    """Facts and recordings of every rank of a layout."""

    facts: Mapping[int, RankFacts]
    recordings: Mapping[int, Recording]


def rehearsed_layout(settings: Config, layout: TableLayout, phases: Phases) -> RehearsedLayout:
    description, world = description_of(settings), layout.num_ranks
    facts = {
        rank: rehearse_rank(settings, description, rank=rank, world=world) for rank in range(world)
    }

    def run(rank: int) -> Recording:
        return rehearse_phases(
            settings, description, phases, rank=rank, world=world, facts=facts, results=RESULTS
        )

    made = record(facts, run, all_ranks=False, all_gather=phases.shares_gpus)
    return RehearsedLayout(facts, made.recordings)


def compared(call: Call) -> tuple[object, ...]:
    """Return a call without what depends on data: how many rows go to which expert."""
    sizes = () if call.kind == SPLIT or call.dtype == "int64" else call.sizes
    return (
        call.kind,
        call.group,
        sizes,
        call.dtype,
        call.phase,
        call.line,
        call.root,
        call.operation,
    )


@pytest.mark.parametrize("name", REAL)
def test_calls_and_bytes_are_those_of_a_run_over_gloo(tmp_path, name):
    layout = BY_NAME[name]
    settings = table_settings(tmp_path, layout)
    phases = Phases(batch(24, 16), batch(24, 16), shares_gpus=True)
    real = run_ranks(run_of_a_rank, layout.num_ranks, settings, phases=phases)
    made = rehearsed_layout(settings, layout, phases)
    for rank, (calls, held) in enumerate(real):
        facts = made.facts[rank]
        assert held.pop("parameters") == facts.memory.weights
        assert held["gradients"] == facts.memory.gradients
        assert made.recordings[rank].held == held
        ours = [call for call in made.recordings[rank].calls if call.phase != "build"]
        assert [compared(call) for call in ours] == [compared(call) for call in calls]


@pytest.mark.parametrize(
    "name",
    [
        *CHEAP,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in SEVERAL_DIMENSIONS
            if name not in CHEAP
        ),
    ],
)
def test_no_layout_of_several_dimensions_has_a_fault(tmp_path, name):
    layout = BY_NAME[name]
    num_stages = layout.settings.get("pipeline_model_parallel_size", 1)
    lengths = (24, 16, 12, 8)[: max(2, num_stages)]
    phases = Phases(batch(*lengths), batch(*lengths), shares_gpus=True)
    made = rehearsed_layout(table_settings(tmp_path, layout), layout, phases)
    assert hangs(made.recordings) == []


def test_nothing_stays_patched_after_a_rehearsal(step):
    assert not dist.is_initialized()
    assert dist.all_gather_object.__module__.startswith("torch.distributed")
