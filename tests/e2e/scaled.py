"""Scaled-down recipes, run to their end on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.cli.command_line import make_parser, settings
from rlpost.config.load import Loaded, parse_dump
from rlpost.config.show import resolved
from rlpost.config.tree import Config
from rlpost.config.wording import COMMAND_LINE, with_values
from rlpost.observe.writer import read_metrics
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ROOT
from tests.engines_on_cpu import PLUGINS
from tests.scale_down import scale_down
from tests.scaled_models import scaled_folder, write_model

NUM_STEPS = 2


@dataclass(frozen=True)
class ScaledRun:
    """The folder of a finished run."""

    folder: Path

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


def recipe_file(name: str | Path) -> Path:
    """Return the file of a recipe: its path, or its name in jobs/recipes."""
    return name if isinstance(name, Path) else ROOT / f"jobs/recipes/{name}.toml"


def make_models(home: Path, names: Sequence[str | Path], ranks: int) -> None:
    """Write the scaled-down models of recipes below ``home``."""
    for name in names:
        write_model(home, recipe_file(name), ranks)


def scaled_recipe(home: Path, recipe: Path, ranks: int, flags: Sequence[str]) -> Path:
    """Write a recipe with all settings of the scaled-down run below ``home``; ``flags`` win.

    Engines find the plugins of tests/engines_on_cpu.
    """
    made = make_parser("scaled", "A recipe and flags.")
    _, loaded = settings(made, [str(recipe), *flags])
    kept = {name for name, origin in loaded.origins.items() if origin == COMMAND_LINE}
    config = scale_down(loaded.config, scaled_folder(home, recipe), ranks=ranks, kept=kept)
    config = with_values(config, setup_commands=(f"export PYTHONPATH={PLUGINS}:$PYTHONPATH",))
    path = home / f"{recipe.stem}-scaled.toml"
    path.write_text(resolved(Loaded(config, {})))
    return path


def run_scaled(
    home: Path,
    name: str | Path,
    ranks: int,
    *flags: str,
) -> ScaledRun:
    """Run a scaled-down recipe for two steps.

    Rewards are random, so that groups have advantages; all else is the recipe's.
    """
    folder = home / "runs" / Path(name).stem
    folder.mkdir(parents=True)
    given = ["--num-rollout", str(NUM_STEPS), "--save-interval", "1", "--rm-type", "random", *flags]
    recipe = scaled_recipe(home, recipe_file(name), ranks, given)
    with LocalRun(folder, [], recipe=str(recipe), home=home) as local:
        local.done()
        if "slices" in flags:
            assert local.num_plans_of_slices() == 1, "engines that live plan once"
    return ScaledRun(local.folder)


def assert_two_steps_are_trained(
    run: ScaledRun, *, first_differs: float = 1e-4, last_differs: float = 1e-4
) -> None:
    """Assert that the run evaluated, that both steps trained and saved, and that engines and trainer
    computed with the same weights.

    ``first_differs`` and ``last_differs`` bound the mean difference of their log-probs in the first
    and in the last step. The defaults allow for rounding: equal precision, and answers of the
    policy that is trained.
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
    assert run.commits == list(range(1, NUM_STEPS + 1))
