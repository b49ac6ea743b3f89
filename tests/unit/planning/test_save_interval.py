"""The save interval against Daly's published figures, and what follows from the journal."""

import json
import math
from pathlib import Path

import pytest

from rlpost.cli.check import main as check_main
from rlpost.config.load import dump, load
from rlpost.errors import ConfigError
from rlpost.extensions.planning.earlier_runs import earlier_step_times
from rlpost.extensions.planning.plan_verb import main as plan_main
from rlpost.extensions.planning.save_interval import (
    StepTimes,
    interval_note,
    interval_words,
    lost_frac,
    optimum_s,
    save_interval,
)
from tests.unit.cli.projects import make_project


def config(**groups):
    return load([], groups).config


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_optimum_is_that_of_dalys_figures(mtbf_min, published_min):
    """Figures 3 to 5: dumps of 5 minutes."""
    assert optimum_s(5 * 60, mtbf_min * 60) / 60 == pytest.approx(published_min, rel=0.01)


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(1, 1e6), (60, 36_000), (300, 3600), (600, 2000)])
def test_no_other_interval_has_a_shorter_expected_time(save_s, mtbf_s):
    """Poisson failures: a segment of work w and its save take M (exp((w + d) / M) - 1) on
    average.
    """

    def expected(work_s):
        return mtbf_s * math.expm1((work_s + save_s) / mtbf_s) / work_s

    best = optimum_s(save_s, mtbf_s)
    least = min(expected(best * factor / 100) for factor in range(20, 500))
    assert expected(best) <= least * 1.001


def test_a_save_that_takes_longer_than_failures_allow_is_spaced_by_the_failures():
    assert optimum_s(100.0, 50.0) == optimum_s(1000.0, 50.0) == 50.0


def test_generation_is_in_the_journal_so_only_training_counts_as_lost():
    """Steps of 100 s with 25 s of training: failures are as harmful as ones a fourth as
    frequent.
    """
    settings = config(cluster={"actor_num_nodes": 4, "nodes": 4, "node_mtbf_hours": 400.0})
    half, all_of_it = (
        save_interval(settings, checkpoint_bytes=80e9, times=StepTimes(100.0, train_s, "given"))
        for train_s in (25.0, 100.0)
    )
    # 80 GB over 4 nodes at 2 GB/s; 400 h over 4 nodes
    assert half.save_s == all_of_it.save_s == 10.0
    assert half.mtbf_s == all_of_it.mtbf_s == 360_000.0
    assert all_of_it.steps == round(optimum_s(10.0, 360_000.0) / 100) == 27
    assert half.steps == round(optimum_s(10.0, 4 * 360_000.0) / 100) == 54
    assert lost_frac(half, 5400.0) == pytest.approx(10 / 5400 + 0.25 * 5400 / 720_000)


def test_background_saves_are_as_far_apart_as_one_takes():
    saved = {"save_interval": 1, "async_save": True}
    times = StepTimes(10.0, 5.0, "measured", save_s=0.01)
    best = save_interval(config(checkpoint=saved), checkpoint_bytes=8e12, times=times)
    assert best.seconds >= 8e12 / 2e9, "else saves would pile up"
    assert save_interval(config(), checkpoint_bytes=8e12, times=times).seconds < 2000


def test_without_the_time_of_a_step_the_interval_is_a_time_and_nothing_is_noted():
    given = config(checkpoint={"save_interval": 20})
    best = save_interval(given, checkpoint_bytes=80e9)
    assert best.steps is None
    assert "--step-s" in interval_words(best, 20)
    assert interval_note(given, best) is None


@pytest.mark.parametrize(
    ("interval", "cause"),
    [
        (1, "goes to saves"),
        (25, None),
        (100, None),
        (300, None),
        (1000, "goes to training that a failure repeats"),
    ],
)
def test_an_interval_far_off_is_noted_and_another_is_not(interval, cause):
    """64 nodes that fail every 6400 h, a save of 40 s, steps of 60 s of training alone: best every
    89 steps.
    """
    cluster = {"actor_num_nodes": 64, "nodes": 64, "node_mtbf_hours": 6400.0}
    given = config(cluster=cluster, checkpoint={"save_interval": interval})
    best = save_interval(
        given, checkpoint_bytes=1.0, times=StepTimes(60.0, 60.0, "measured in a", save_s=40.0)
    )
    assert best.steps == 89
    note = interval_note(given, best)
    assert (note is None) == (cause is None), note
    if cause is not None:
        assert note.startswith(f"--save-interval {interval}: about ") and cause in note
        assert "--save-interval 89" in note and "measured in a" in note


def test_no_interval_means_the_end_of_the_run():
    cluster = {"actor_num_nodes": 64, "nodes": 64}
    times = StepTimes(600.0, 600.0, "measured", save_s=40.0)
    long, short = (config(cluster=cluster, rollout={"num_rollout": steps}) for steps in (3000, 20))
    assert "is not given" in interval_note(
        long, save_interval(long, checkpoint_bytes=1.0, times=times)
    )
    assert interval_note(short, save_interval(short, checkpoint_bytes=1.0, times=times)) is None


def test_a_far_interval_that_loses_nothing_worth_saying_is_not_noted():
    """A node alone, saves of 50 ms: any interval will do."""
    given = config(checkpoint={"save_interval": 20})
    times = StepTimes(2.0, 1.0, "measured", save_s=0.05)
    best = save_interval(given, checkpoint_bytes=1.0, times=times)
    assert best.steps > 4 * 20 and interval_note(given, best) is None


def earlier_run(folder, name, *, step_s, save_s, recipe, **cluster):
    run = folder / "runs" / name
    run.mkdir(parents=True)
    made = load([recipe], {"cluster": cluster}).config
    (run / "run.json").write_text(dump(made))
    lines = [{"step": n, "time/step_s": step_s, "time/train_s": step_s / 2} for n in range(1, 9)]
    lines[2]["checkpoint/blocking_s"] = save_s
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_plan_and_check_use_what_an_earlier_run_of_the_recipe_measured(
    tmp_path, monkeypatch, capsys
):
    recipe = make_project(tmp_path) / "recipe.toml"
    monkeypatch.chdir(tmp_path)
    words = ["recipe.toml", "--save-interval", "1", "--num-rollout", "100"]
    assert check_main(words) == 0
    assert "note" not in capsys.readouterr().out
    earlier_run(tmp_path, "test-20260101-000000", step_s=10.0, save_s=30.0, recipe=recipe)
    earlier_run(
        tmp_path, "test-other-size", step_s=1.0, save_s=0.1, recipe=recipe, rollout_num_gpus=1
    )
    assert check_main(words) == 0, "a note refuses nothing"
    said = capsys.readouterr().out
    assert "--save-interval 1: about 3" in said and "goes to saves" in said
    assert "measured in test-20260101-000000" in said
    assert check_main([*words[:1], "--save-interval", "3000", "--num-rollout", "9000"]) == 0
    assert "--save-interval 3000" not in capsys.readouterr().out, "at most four times the best"
    assert plan_main([*words, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["save_interval"]
    assert (measured["save_s"], measured["source"]) == (30.0, "measured in test-20260101-000000")
    assert plan_main([*words, "--json", "--step-s", "20", "--train-s", "20"]) == 0
    given = json.loads(capsys.readouterr().out)["save_interval"]
    assert given["save_s"] < 1, "from the bytes of a checkpoint"
    assert plan_main(words) == 0
    assert f"--save-interval {measured['steps']} (" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_removed_while_runs_are_listed_is_skipped(tmp_path, monkeypatch):
    recipe = make_project(tmp_path) / "recipe.toml"
    monkeypatch.chdir(tmp_path)
    earlier_run(tmp_path, "test-1", step_s=10.0, save_s=30.0, recipe=recipe)
    listed = Path.glob
    removed = tmp_path / "runs/test-2/metrics.jsonl"
    monkeypatch.setattr(Path, "glob", lambda *given: [*listed(*given), removed])
    assert earlier_step_times(load([recipe], {}).config).source == "measured in test-1"


@pytest.mark.parametrize(
    "words", [("--step-s", "0"), ("--train-s", "3"), ("--step-s", "2", "--train-s", "3")]
)
def test_times_that_are_none_are_refused(words, tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words[0]):
        plan_main(["recipe.toml", *words])
