"""``rlpost rehearse`` and ``rlpost submit --rehearse``: what they print and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlpost.cli.command_line import make_parser, settings
from rlpost.config import extensions
from rlpost.errors import ConfigError
from rlpost.extensions.rehearsal import command as rehearse
from rlpost.extensions.rehearsal.all_ranks.result import (
    Compared,
    MemoryUse,
    RehearsalCheck,
    RehearsalResult,
    memory_check,
)

RECIPE = str(Path(__file__).parents[3] / "jobs/recipes/qwen3_4b.toml")


def result(gpu_bytes: int) -> RehearsalResult:
    """Two ranks, of which one takes 60 GB."""
    held = {"weights": 8 * 10**9, "gradients": 16 * 10**9, "optimizer": 12 * 10**9}
    memory = tuple(
        MemoryUse(rank, held, {"train": size * 10**9}) for rank, size in ((0, 40), (1, 60))
    )
    return RehearsalResult(
        checks=(
            RehearsalCheck("groups", (), "2 ranks"),
            memory_check(memory, gpu_bytes, context=3 * 10**9),
        ),
        memory=memory,
        classes=((0, 1),),
        ran=(0, 1),
        num_calls=10,
        micro_batches=(2, 40),
        gpu_bytes=gpu_bytes,
        planned_bytes=55 * 10**9,
        compared=(Compared("weights", 9 * 10**9, 8 * 10**9),),
        seconds=1.0,
        peak_host_bytes=10**9,
    )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    def made(config, *, gpu_bytes, all_ranks=False, micro_batches=None):
        return result(gpu_bytes)

    monkeypatch.setattr(rehearse, "rehearse_config", made)


def test_a_fault_ends_with_2_and_is_told_last(capsys):
    assert rehearse.main([RECIPE, "--gpu-memory", "48GB"]) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("first fault: rank 1: train takes 60.0 GB")


def test_no_fault_ends_with_0(capsys):
    assert rehearse.main([RECIPE]) == 0
    shown = capsys.readouterr().out
    assert "rank 1 is the fullest: 60.0 GB; rlpost plan says 55.0 GB" in shown
    assert re.search(r"weights +9\.0 GB +8\.0 GB +\+12\.5%", shown)
    assert "2 of the 40 micro-batches of a step were rehearsed" in shown


def test_one_object_for_programs(capsys):
    assert rehearse.main([RECIPE, "--gpu-memory", "48GB", "--json"]) == 2
    made = json.loads(capsys.readouterr().out)
    assert made["passed"] is False
    assert made["memory"][1] == {
        "rank": 1,
        "held": {"weights": 8 * 10**9, "gradients": 16 * 10**9, "optimizer": 12 * 10**9},
        "peaks": {"train": 60 * 10**9},
    }


def test_nothing_is_submitted_after_a_fault():
    config = settings(make_parser("test", ""), [RECIPE])[1].config
    with pytest.raises(ConfigError, match=r"rank 1: train takes 60\.0 GB.*nothing was submitted"):
        extensions.rehearsal()(config, "48GB")
    extensions.rehearsal()(config, "80GB")


def test_zero_micro_batches_are_rejected():
    with pytest.raises(ConfigError, match="--micro-batches 0"):
        rehearse.main([RECIPE, "--micro-batches", "0"])
