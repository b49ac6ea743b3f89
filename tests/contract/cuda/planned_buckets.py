"""How many buckets the trainer makes of a model at its full size, and their bytes; one JSON object a line.

A script of its own, as ``tests.contract.plan_modules``: each pipeline stage is built on the meta device in turn, by a
stand-in for a process group of any size, and the last one plans with what all of them hold.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from rlpost.actor.model import build_model, inventory_of
from rlpost.actor.settings import ActorSettings
from rlpost.weights.exporter import Exporter
from rlpost.weights.quantise import BlockFp8
from rlpost.weights.sync import Buckets
from tests.contract.plan_modules import described, on_meta, ranks

NOT_IN_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "bias")


def plan(case: dict[str, Any]) -> dict[str, int]:
    """The trainer's plan for a model, a layout, a number of engines and a size of GPU."""
    settings = ActorSettings(hf_checkpoint="model", bf16=True, **case["settings"])
    description = described(case["hf"])
    of_stages: list[Any] = []

    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        of_stages.append(mine)
        found[: len(of_stages)] = of_stages

    dist.all_gather_object = all_gather_object
    stages = settings.pipeline_model_parallel_size
    for stage in range(stages):
        rank = stage * case["world"] // stages
        with ranks(settings, description, world=case["world"], rank=rank), torch.device("meta"), on_meta():
            inventory = inventory_of(build_model(description, settings), description)
            if stage < stages - 1:
                continue
            names = {name for name in inventory.hugging_face if not any(part in name for part in NOT_IN_FP8)}
            buckets = Buckets(
                Exporter(inventory),
                limit=settings.update_weight_buffer_size,
                num_engines=case["num_engines"],
                device_bytes=case["device_bytes"],
                quantisation=BlockFp8(frozenset(names)) if case["in_fp8"] else None,
            )
            sizes = [
                sum(
                    torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                    for shape, dtype in zip(bucket.shapes, bucket.dtypes, strict=True)
                )
                for bucket in buckets.plan()
            ]
    return {"num_buckets": len(sizes), "total": sum(sizes), "largest": max(sizes)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print("RESULT " + json.dumps(plan(json.loads(line))))
