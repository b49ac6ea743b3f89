"""A run on images: it learns what it sees, a driver that is killed changes nothing, and without
images the same model stays at chance.

Answers are sampled by a real engine, so two runs differ. The killed run is compared with itself: the
steps since the last checkpoint were trained before the kill without a disturbance, and are trained
again after it, from recorded answers and the images in the run folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from rlpost.extensions.fetching.tiny_squares import COLOURS, FOLDER, NUM_IMAGES
from rlpost.observe.writer import read_metrics
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ROOT

RECIPE = "jobs/recipes/small/tiny_images.toml"
SAVED_AT, KILLED_AFTER, NUM_STEPS, EVALUATED_EVERY = 4, 6, 40, 20
SETTINGS = ("--save-interval", f"{SAVED_AT}")
CHANCE = 1 / len(COLOURS)


@pytest.fixture(scope="module")
def squares() -> Path:
    """The folder that the recipe names; made once and kept between test runs."""
    folder = ROOT / "assets" / FOLDER
    command = [
        sys.executable,
        "-m",
        "rlpost.extensions.fetching.tiny_squares",
        "--out",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def assert_trained_again_alike(run: LocalRun, before: list[dict[str, float]]) -> None:
    """The steps behind the checkpoint were trained again by another driver, with equal metrics."""
    (recovered,) = run.recovered
    saved_at = [entry["step"] for entry in run.ledger if entry["event"] == "committed"]
    from_step = max(step for step in saved_at if step <= before[-1]["step"])
    again = [line for line in before if line["step"] > from_step]
    assert recovered["role"] == "driver" and recovered["step"] == from_step
    assert again and all(line["train/grad_norm"] > 0 for line in again)
    assert run.lines[: len(before)] == before


@pytest.mark.timeout(2400)
def test_a_run_on_images_learns_and_a_killed_driver_changes_nothing(squares, tmp_path):
    with LocalRun(tmp_path, SETTINGS, recipe=RECIPE) as run:
        run.until(lambda: run.step >= KILLED_AFTER, f"step {KILLED_AFTER}")
        run.driver().kill()
        before = run.lines
        run.done()
    assert_trained_again_alike(run, before)
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    for line in lines[1:]:
        assert line["train/rollout_logprob_abs_diff"] < 1e-4, "both sides see the same pixels"
    evaluated = {
        name: [
            line[f"eval/{name}/reward_mean"] for line in lines if f"eval/{name}/reward_mean" in line
        ]
        for name in ("heldout", "blind")
    }
    print(evaluated, [round(line["reward/mean"], 3) for line in lines[1:]])
    assert evaluated["blind"] == [CHANCE] * (1 + NUM_STEPS // EVALUATED_EVERY), (
        "each colour is equally frequent"
    )
    assert evaluated["heldout"][0] <= CHANCE + 0.1 and evaluated["heldout"][-1] >= 0.7
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert fmean(rewards[:10]) < CHANCE + 0.1 and fmean(rewards[-5:]) >= 0.5
    page = (run.folder / "report/report.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') > 10
    num_files = sum(path.is_file() for path in (run.folder / "images").glob("*/*"))
    num_images = len(COLOURS) * sum(NUM_IMAGES.values())
    assert num_files == 2 * num_images, "each once, and once at the size of the model"
