"""Update SGLang's models by regions and by ``load_weights``, on one rank of an engine without others.

Input: Hugging Face folders of tiny models, and layouts of the engine. Output: for each, tensors that
differ afterwards. It runs in a separate process, because it configures SGLang.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlpost.config.plan.shard_plan import SentTensor, Unit, check_complete
from rlpost.engines import server
from rlpost.engines.load_check import boxes_of
from rlpost.engines.shards import failures, loader, messages
from rlpost.engines.shards.parameters import Parameters
from rlpost.errors import WeightError
from rlpost.extensions.on_cpu.engine import engine_settings
from rlpost.models.regions import Box, Boxes, group_from_json
from tests.contract.families import load_folder

GROUPS = ("world", "pp", "tp", "attn_tp", "moe_ep", "moe_tp", "attn_cp")


@dataclass(frozen=True)
class Layout:
    """One rank of an engine."""

    tp_size: int = 1
    ep_size: int = 1
    rank: int = 0
    draft: str = ""
    """SGLang's class of the draft model; empty for the policy."""


@dataclass
class Compared:
    """The outcome for one rank."""

    differing: list[str] = field(default_factory=list)
    """Tensors of the model that differ after an update by regions."""
    changed: list[str] = field(default_factory=list)
    """Tensors of the model that the recording changed."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Tensors that are loaded by name."""
    problem: str = ""
    """Why an engine that is this rank alone is refused."""
    answer: dict[str, Any] = field(default_factory=dict)
    """Of the rank, without its boxes."""
    names: list[str] = field(default_factory=list)
    """Of the tensors by the numbers in it."""
    num_bytes: int = 0
    """That the rank receives."""
    total_bytes: int = 0
    """Of all tensors."""
    num_boxes: int = 0
    types: dict[str, str] = field(default_factory=dict)
    """Dtypes of the parameters of the model."""


def group(size: int, rank: int) -> SimpleNamespace:
    """Return what models read of a process group."""
    handles = dict.fromkeys(("device_group", "cpu_group", "pynccl_comm"))
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        is_first_rank=True,
        is_last_rank=True,
        ranks=list(range(size)),
        **handles,
    )


@contextlib.contextmanager
def built(folder: Path, layout: Layout, **server_args: object) -> Iterator[torch.nn.Module]:
    """Build SGLang's model of a folder, as this rank of an engine."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.model_loader.loader import _get_quantization_config
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": str(folder), "skip_tokenizer_init": True, "tp_size": layout.tp_size}
    given["dtype"] = json.loads((folder / "config.json").read_text()).get("dtype", "float32")
    arguments = server.engine_arguments(engine_settings(given)) | {"ep_size": layout.ep_size}
    args = ServerArgs(**arguments, **server_args)
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=layout.rank, dp_rank=None, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    initialize_dp_attention_flags(args)
    parallel = runtime_context.get_parallel()
    config = ModelConfig.from_server_args(args)
    config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), layout.tp_size)
    architectures = [layout.draft] if layout.draft else config.hf_config.architectures
    model_class, _ = ModelRegistry.resolve_model_cls(architectures)
    moe_tp = layout.tp_size // layout.ep_size
    groups = dict.fromkeys(("pp_group", "attn_cp_group"), group(1, 0))
    groups |= dict.fromkeys(
        ("world_group", "tp_group", "attn_tp_group"), group(layout.tp_size, layout.rank)
    )
    groups["moe_ep_group"] = group(layout.ep_size, layout.rank // moe_tp)
    groups["moe_tp_group"] = group(moe_tp, layout.rank % moe_tp)
    with parallel.override(**groups):
        quantisation = _get_quantization_config(config, LoadConfig())
        with set_default_torch_dtype(config.dtype):
            model = model_class(config=config.hf_config, quant_config=quantisation)
        yield model


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a model."""
    return {name: one.detach().clone() for name, one in Parameters(model).tensors.items()}


def spoil(model: torch.nn.Module, loaded: set[str]) -> None:
    """Give the memory of parameters undefined values, as it has when it returns to an engine."""
    for name, one in Parameters(model).tensors.items():
        if name in loaded:
            one.data.view(torch.uint8).fill_(0x5A) if one.dim() else one.data.fill_(3)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    ours, theirs = (x.detach().contiguous().flatten().view(torch.uint8) for x in (one, other))
    return torch.equal(ours, theirs)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit."""
    names = sorted(one.keys() ^ other.keys())
    return names + [name for name in one if name in other and not same(one[name], other[name])]


class Driver:
    """Sends messages to the loader, as SGLang's rank does."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        self.model, self.count = model, 0
        self.folder = Path(tempfile.mkdtemp())
        self.types = {
            name: (tuple(one.shape), str(one.dtype).removeprefix("torch."))
            for name, one in tensors.items()
        }
        loader.RANK = loader.ShardedRank()

    def send(self, data: torch.Tensor | None = None, **message: object) -> None:
        """Send a message."""
        self.count += 1
        data = torch.empty(0, dtype=torch.uint8) if data is None else data
        loader.load(self.model, [(json.dumps(message | {"id": self.count}), data)])

    def record(self) -> dict[str, Any]:
        """Record, and plan two buckets of the boxes that the rank needs."""
        tensors, answer = self.folder / "tensors.json", self.folder / "answer.json"
        tensors.write_text(json.dumps(self.types))
        self.send(do="record", tensors=str(tensors), answer=str(answer))
        recorded = json.loads(answer.read_text())
        groups = tuple(group_from_json(one, list(self.types)) for one in recorded["boxes"])
        boxes = dict.fromkeys(Boxes(groups))
        by_name = recorded["reasons"].keys()
        boxes = [
            one
            for one in boxes
            if one.tensor not in by_name or one.size == self.types[one.tensor][0]
        ]
        boxes.sort(key=lambda box: -getattr(torch, self.types[box.tensor][1]).itemsize)
        first = [box for box in boxes if box.tensor in by_name]
        second = [box for box in boxes if box.tensor not in by_name]
        self.buckets: list[list[Box]] = [first, second[::2], second[1::2]]
        plan = messages.plan_to_json(self.types, [[(0, Boxes.of(boxes))] for boxes in self.buckets])
        (self.folder / "plan.json").write_text(json.dumps(plan))
        self.send(do="plan", file=str(self.folder / "plan.json"))
        return recorded

    def update(self, tensors: dict[str, torch.Tensor]) -> int:
        """Send all buckets; return their bytes."""
        total = 0
        for number, boxes in enumerate(self.buckets):
            parts = [cut(tensors[box.tensor], box) for box in boxes]
            data = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
            total += data.numel()
            self.send(data, do="apply", bucket=number)
        return total


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the bytes of a box."""
    index = tuple(
        slice(start, start + size) for start, size in zip(box.start, box.size, strict=True)
    )
    return tensor[index].contiguous().flatten().view(torch.uint8)


def other_values(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes with other values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.rand(one.shape, generator=generator) + 0.5).to(one.dtype)
        for name, one in tensors.items()
    }


def compare(folder: Path, layout: Layout) -> Compared:
    """Update a model twice in both ways, with different weights."""
    tensors = load_folder(folder)
    compared = Compared(total_bytes=sum(one.nbytes for one in tensors.values()))
    with built(folder, layout) as model:
        filled = {name for name, one in model.state_dict().items() if one.is_floating_point()}
        driver = Driver(model, tensors)
        compared.types = {name: str(one.dtype) for name, one in model.named_parameters()}
        for number, values in enumerate((tensors, other_values(tensors, 5))):
            spoil(model, filled)
            model.load_weights(iter(values.items()))
            expected = held(model)
            if number == 0:
                recorded = driver.record()
                compared.changed = differing(expected, held(model))
                compared.reasons = recorded["reasons"]
                compared.problem = problem_of(recorded, driver.types)
                compared.answer = {key: recorded[key] for key in ("filled", "reasons")}
                compared.names = list(driver.types)
                compared.num_boxes = sum(len(one[-1]) for one in recorded["boxes"])
            spoil(model, filled)
            compared.num_bytes = driver.update(values)
            compared.differing += differing(expected, held(model))
    return compared


def problem_of(recorded: dict[str, Any], types: dict[str, tuple[tuple[int, ...], str]]) -> str:
    """Return why the answer of an engine with one rank is refused; empty if it is not."""
    units = [Unit(0, (SentTensor(name, *about),)) for name, about in types.items()]
    try:
        check_complete(units, {"here": [boxes_of(recorded, list(types))]})
    except WeightError as error:
        return str(error)
    return ""


def compare_all(cases: list[tuple[Path, Layout]]) -> list[Compared | str]:
    """Return the outcome of each case, or the error."""
    import traceback

    warnings.simplefilter("ignore")
    outcomes: list[Compared | str] = []
    for folder, layout in cases:
        try:
            outcomes.append(compare(folder, layout))
        except Exception:
            outcomes.append(traceback.format_exc())
    return outcomes


def answers_of_two_ranks(folder: Path, store: Path) -> list[tuple[bool, str]]:
    """What both ranks answer to a broadcast that the model of the second cannot load."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_answer, [folder] * 2, [store] * 2, range(2)))


def flushes(answers: list[list[bool]]) -> list[tuple[bool, str]]:
    """What an engine answers to a flush, for each list of the answers of its data-parallel ranks."""
    from sglang.srt.managers.io_struct import FlushCacheReqOutput
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    failures.report_flushes()

    class Manager(TokenizerControlMixin):
        mm_processor = None

        def __init__(self, of_ranks: list[bool]) -> None:
            self.of_ranks = of_ranks

        def auto_create_handle_loop(self) -> None:
            pass

        async def flush_cache_communicator(self, request: object) -> list[FlushCacheReqOutput]:
            return [
                FlushCacheReqOutput(success=one, message=f"rank {rank}")
                for rank, one in enumerate(self.of_ranks)
            ]

    async def flush(manager: Manager) -> tuple[bool, str]:
        for _ in range(2):
            answer = await manager.flush_cache()
        # SGLang calls a method of it, ``set_fan_out``
        assert manager.flush_cache_communicator.__name__ == "flush_cache_communicator"
        return answer.success, answer.message

    return [asyncio.run(flush(Manager(of_ranks))) for of_ranks in answers]


def _answer(folder: Path, store: Path, rank: int) -> tuple[bool, str]:
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
        _WeightUpdateSession,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    failures.report_failures()
    with built(folder, Layout()) as model:
        if rank:
            model.load_weights = lambda weights: 1 / 0
        no_more = dict.fromkeys(
            ("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner")
        )
        updater = WeightUpdater(
            tp_rank=rank, device="cpu", gpu_id=0, get_model=lambda: model,
            custom_weight_loaders={}, _model_update_group={"g": dist.group.WORLD}, **no_more,
        )  # fmt: skip
        runner = SimpleNamespace(weight_updater=updater)
        worker = SimpleNamespace(
            model_runner=runner, weight_update_runners=lambda: [("target", runner)]
        )
        no_more = dict.fromkeys(("draft_worker", "memory_saver_adapter", "is_fully_idle"))
        manager = SchedulerWeightUpdaterManager(
            tp_worker=worker, tp_cpu_group=dist.group.WORLD, flush_cache=None,
            scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None),
            _session=_WeightUpdateSession("all"), **no_more,
        )  # fmt: skip
        request = UpdateWeightsFromDistributedReqInput(
            names=["model.norm.weight"], dtypes=["float32"], shapes=[[64]], group_name="g",
            flush_cache=False,
        )  # fmt: skip
        answer = manager.update_weights_from_distributed(request)
    return answer.success, answer.message
