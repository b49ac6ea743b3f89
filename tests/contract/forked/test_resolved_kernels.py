"""Engines keep weights in the layout of the checkpoint on every GPU, also where SGLang would not."""

from __future__ import annotations

from pathlib import Path

from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.resolved_kernels import chosen_alone, problems, write_configs


def test_kernels_of_every_family_bear_updates_and_return_routes(
    forked: ForkedSglang, tmp_path: Path
) -> None:
    """All GPUs and settings: tests/gpu_packages/test_resolved_kernels.py."""
    folders = [folder for folder in write_configs(tmp_path) if "moe" in folder.name]
    assert forked.call(problems, folders, ("sm100",), ({},)) == []
    alone = forked.call(chosen_alone, folders, "sm100")
    assert "flashinfer_trtllm" in alone, "SGLang chooses no other kernel any more"
