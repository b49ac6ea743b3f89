"""Recipes in small, run to their end on this machine: made once for a file of tests, each run by
itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.config.load import parse_dump
from rlpost.config.tree import Config
from rlpost.metrics.writer import read_metrics
from tests.e2e.runs import ROOT

NUM_STEPS = 2
DEADLINE_S = 900


@dataclass(frozen=True)
class ScaledRun:
    """What a run left."""

    folder: Path
    said: str

    @property
    def config(self) -> Config:
        return parse_dump((self.folder / "run.json").read_text())

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The lines of steps that trained."""
        return [line for line in self.lines if line["step"] > 0]

    @property
    def commits(self) -> list[int]:
        """Steps with a checkpoint, in the order of the ledger."""
        lines = (self.folder / "ledger.jsonl").read_text().splitlines()
        return [entry["step"] for entry in map(json.loads, lines) if entry["event"] == "committed"]


def recipe(name: str | Path) -> str:
    """The file of a recipe of jobs/recipes by its name; another one is given as a path."""
    return str(name if isinstance(name, Path) else ROOT / f"jobs/recipes/{name}.toml")


def make_models(home: Path, names: Sequence[str | Path], ranks: int) -> None:
    """The models of recipes in small, in a home of their own, without a warm-up: what they answer
    is no matter.
    """
    tool = [sys.executable, "-m", "rlpost.cli.tiny_model", "--warmup-steps", "0"]
    words = ["--scale-down", str(ranks), "--recipe", *map(recipe, names)]
    subprocess.run([*tool, *words], cwd=home, check=True, timeout=DEADLINE_S)


def run_scaled(home: Path, name: str | Path, ranks: int, *flags: str) -> ScaledRun:
    """``rlpost submit RECIPE --scale-down RANKS`` for two steps.

    Rewards are tossed, so that groups differ; all else about algorithm and rollout is the recipe's.
    """
    folder = home / "runs" / Path(name).stem
    command = [
        sys.executable,
        "-m",
        "rlpost.submit",
        recipe(name),
        "--local",
        "--run-folder",
        str(folder),
    ]
    command += ["--scale-down", str(ranks), "--num-rollout", str(NUM_STEPS), "--save-interval", "1"]
    command += ["--rm-type", "random", *flags]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return ScaledRun(folder, done.stdout)


def assert_two_steps_are_trained(
    run: ScaledRun, *, first_differs: float = 1e-4, last_differs: float = 1e-4
) -> None:
    """Evaluated, trained, synchronised, saved, twice; and engines and trainer computed with the
    same weights.

    What ``_differs`` bounds is the mean difference of their log-probs: rounding where they compute
    in one precision and the answers are of the policy that is trained.
    """
    assert [line["step"] for line in run.lines] == list(range(NUM_STEPS + 1))
    assert "eval/heldout/reward_mean" in run.lines[0]
    first, last = run.trained
    for line, bound in ((first, first_differs), (last, last_differs)):
        assert line["train/grad_norm"] > 0.0
        assert line["train/rollout_logprob_abs_diff"] < bound
    if run.config.grpo.use_kl_loss:
        assert last["train/ref_kl"] > 0.0, "the policy has left the reference"
    else:
        assert "train/ref_kl" not in last, "no reference was asked for"
    assert run.commits == [1, NUM_STEPS]
