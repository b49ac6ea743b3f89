"""``--json``: one object on standard output, equal to what the tables say, with the exit code of
the table.
"""

import json
import re

import pytest

from rlpost.cli.main import main
from rlpost.config.load import JOBS
from tests.unit.watching.report.runs import STEP_S, make_run

RECIPE = str(JOBS / "recipes/qwen3_4b.toml")
GLM = str(JOBS / "recipes/glm45_355b.toml")


@pytest.fixture(autouse=True)
def _variables(monkeypatch, tmp_path):
    monkeypatch.setenv("RLPOST_ASSETS", str(tmp_path))
    monkeypatch.setenv("RLPOST_IMAGE", "/image.sqsh")


def output(capsys, *words):
    """The exit code, and the object that alone is on standard output."""
    code = main(list(words))
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_holds_the_figures_of_the_table(capsys):
    code, plan = output(capsys, "plan", RECIPE, "--json", "--suggest")
    assert code == 0 and plan["fits"] and plan["problems"] == []
    assert main(["plan", RECIPE, "--suggest"]) == 0
    shown = capsys.readouterr().out
    for phase in plan["phases"]:
        assert phase["total"] == sum(phase["parts"].values())
        assert re.search(rf"{phase['name']} .* {phase['total'] / 1e9:.1f} GB of", shown)
    assert f"{plan['checkpoint_bytes'] / 1e9:.1f} GB" in shown
    assert all(choice["layout"] in shown for choice in plan["suggestions"])


def test_a_plan_that_does_not_fit_says_why_and_what_would(capsys):
    words = ("plan", RECIPE, "--gpu-memory", "24GB")  # a small model: few layouts to search
    code, plan = output(capsys, *words, "--json")
    assert code == 2 and not plan["fits"] and plan["problems"]
    [nearest] = plan["suggestions"]
    assert main([*words, *nearest["flags"].split(), "--json"]) == 0


def test_a_check_lists_its_problems(capsys):
    code, found = output(capsys, "check", RECIPE, "--json")
    assert code == 2 and not found["ok"]
    assert any("--hf-checkpoint" in problem for problem in found["problems"])


def test_a_check_of_settings_that_cannot_be_loaded_is_an_object_too(capsys):
    code, found = output(capsys, "check", RECIPE, "--json", "--no-such-flag", "1")
    assert code == 2 and not found["ok"]
    assert any("--no-such-flag" in problem for problem in found["problems"])


def test_a_comparison_holds_figures_and_differing_settings(tmp_path, capsys):
    make_run(tmp_path / "a", num_steps=5, preempted_at=(3,))
    make_run(tmp_path / "b", num_steps=7, preempted_at=(), seed=1)
    code, found = output(capsys, "compare", "a", "b", "--runs-dir", str(tmp_path), "--json")
    assert code == 0
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert [run["step"] for run in found["runs"]] == [5, 7]
    assert [run["num_preemptions"] for run in found["runs"]] == [1, 0]
    assert found["settings"]["rollout.num_rollout"] == [5, 7]
    assert not (tmp_path / "a/report/compare.html").exists()


def test_status_list_report_and_compare_show_the_same_goodput(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    for name in ("a", "b"):
        run = make_run(tmp_path / name, num_steps=50, preempted_at=(30,))
    runs = ("--runs-dir", str(tmp_path))
    _, status = output(capsys, "status", "b", *runs, "--json")
    _, listed = output(capsys, "list", *runs, "--json")
    _, compared = output(capsys, "compare", "a", "b", *runs, "--json")
    found = status["goodput"]
    assert found == compared["runs"][1]["goodput"]
    assert found in [one["goodput"] for one in listed]
    # two nodes of 8 GPUs: two start-ups of 205 s, 25 s to the verdict after a preemption, 11 s
    # after the end
    stepped_s = 50 * STEP_S
    assert found["gpu_hours"] == pytest.approx(
        16 * (stepped_s + 2 * 205 + 25 + 11) / 3600, rel=0.02
    )
    assert found["gpu_hours_by_use"]["start-up"] == pytest.approx(16 * 410 / 3600)
    assert found["queue_s"] == 240 + 900
    share = f"{found['trained_frac']:.0%} of "
    for words in (("status", "b"), ("list",), ("report", "b")):
        assert main([*words, *runs]) == 0
        shown = capsys.readouterr().out
        assert share in shown, words
        assert ("start-up 8%" in shown) == (words[0] != "list"), shown
    assert share in (run.report / "report.html").read_text()
    assert main(["compare", "a", "b", *runs]) == 0
    assert share in (tmp_path / "a/report/compare.html").read_text()
