"""The buckets that ``rlpost plan`` announces are those that the trainer makes of Megatron's real modules."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.shape import layout_of
from rlpost.config.plan.weight_update import WeightUpdate, weight_update
from rlpost.config.tree import Config
from tests.contract.test_plan import PUBLISHED, RANKS, ROOT, shape

DEVICE_BYTES = 80 * 10**9
CASES = [("glm45_355b", False), ("glm45_355b", True), ("qwen3_30b_a3b", False), ("qwen3_4b", True)]


def config_of(recipe: str) -> Config:
    return load(files_of(JOBS / "recipes" / f"{recipe}.toml", {}), {}).config


def announced(recipe: str, in_fp8: bool) -> WeightUpdate:
    config = config_of(recipe)
    layout = layout_of(config)
    return weight_update(config, shape(PUBLISHED[recipe]), layout, gpu_bytes=DEVICE_BYTES, width=2, in_fp8=in_fp8)


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, bool], dict[str, int]]:
    """The trainer's plans, from one process."""
    lines = ""
    for recipe, in_fp8 in CASES:
        settings, layout = RANKS[recipe]
        case: dict[str, Any] = {"settings": settings, "world": layout.world, "hf": PUBLISHED[recipe]}
        case |= {"num_engines": config_of(recipe).num_engines, "device_bytes": DEVICE_BYTES, "in_fp8": in_fp8}
        lines += json.dumps(case) + "\n"
    script = [sys.executable, "-m", "tests.contract.cuda.planned_buckets"]
    done = subprocess.run(script, input=lines, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize(("recipe", "in_fp8"), CASES)
def test_the_plan_announces_the_buckets_of_the_trainer(recipe, in_fp8, made):
    """Exactly as many, of the same bytes but for the biases of experts, four bytes each, which the plan leaves out."""
    said, found = announced(recipe, in_fp8), made[recipe, in_fp8]
    one = shape(PUBLISHED[recipe])
    biases = 4 * one.num_experts * sum(one.sparse)
    assert said.num_buckets == found["num_buckets"]
    assert found["total"] - said.total_bytes in (0, biases)
    assert said.largest_bytes == pytest.approx(found["largest"], abs=max(1, biases))


def test_the_driver_relays_a_few_hundred_requests_for_the_largest_recipe():
    """At 512 MiB a bucket, as it was, it relayed 3,750."""
    update = announced("glm45_355b", in_fp8=False)
    assert update.num_requests == 2 * update.num_buckets <= 400
    assert update.gpu_bytes <= DEVICE_BYTES / 6
