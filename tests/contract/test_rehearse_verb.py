"""``rlpost rehearse`` as a user runs it: all ranks of two nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.config.load import JOBS
from rlpost.extensions.rehearsal import command as rehearse
from tests.contract.families import make_family_config
from tests.unit.jobs.assets import make_assets

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
TWO_NODES = (
    "--nodes", "2", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--colocate",
    "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4", "--pipeline-model-parallel-size", "2",
)  # fmt: skip


def rehearsed(folder: Path, capsys: Any) -> tuple[int, dict[str, Any]]:
    """Run the verb on two nodes of four GPUs; return its exit code and JSON output."""
    make_family_config(folder / "model", "qwen3")
    recipe = str(JOBS / "recipes" / "tiny.toml")
    checkpoint = ("--hf-checkpoint", str(folder / "model"))
    code = rehearse.main([recipe, *checkpoint, *TWO_NODES, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_all_ranks_and_nodes(tmp_path, capsys):
    code, found = rehearsed(tmp_path, capsys)
    assert (code, found["first_fault"]) == (0, None)
    extents = {one["name"]: one["extent"] for one in found["checks"]}
    assert extents["nodes: each worker on its GPUs"] == "2 nodes, 8 ranks, 2 engines"
    assert len(found["memory"]) == 8


@pytest.mark.parametrize(
    ("recipe", "extent"),
    [
        ("qwen3_4b_judge", "1 node, 4 ranks, 4 engines"),
        ("qwen3_4b_teacher", "2 nodes, 8 ranks, 5 engines"),
    ],
)
def test_the_engines_of_all_groups_are_placed(tmp_path, capsys, monkeypatch, recipe, extent):
    monkeypatch.setenv("RLPOST_ASSETS", str(make_assets(tmp_path / "assets")))
    assert rehearse.main([recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    extents = {one["name"]: one["extent"] for one in found["checks"]}
    assert extents["nodes: each worker on its GPUs"] == extent
