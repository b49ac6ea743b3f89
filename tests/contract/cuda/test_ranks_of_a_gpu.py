"""How the ranks of a test are started when torch has CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.contract.actor_ranks import run_ranks
from tests.contract.families import make_family
from tests.gpu.gpu_ranks import parent_of
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)


def test_a_rank_is_not_forked_from_a_process_that_asked_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server imports Megatron, which asks for a GPU; CUDA then fails in all its forks."""
    make_family(tmp_path, "qwen3")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert run_ranks(parent_of, 1, rank_config(str(tmp_path))) == [os.getpid()]
