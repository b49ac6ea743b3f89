"""rlpost report and compare: the files that they write."""

from __future__ import annotations

from rlpost.cli.main import main
from tests.unit.watching.report.runs import make_run


def test_a_report_is_a_page_a_recipe_and_a_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    run = make_run(tmp_path / "runs/seven-b", num_steps=40, preempted_at=(25,))
    assert main(["report", str(run.root)]) == 0
    text = capsys.readouterr().out
    assert text == (run.report / "report.txt").read_text()
    assert f"report {run.report / 'report.html'}" in text
    assert "reward on aime: 0.120 at step 0 -> " in text and "preempted  reason SIGUSR2" in text
    assert "40 / 40" in (run.report / "report.html").read_text()
    assert "num_rollout = 40" in (run.report / "recipe.toml").read_text()
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.report.glob("re*.[ht]*ml")}
    assert modes == {"report.html": 0o600, "recipe.toml": 0o600}


def test_a_run_without_a_step_has_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    run = make_run(tmp_path / "runs/seven-b", num_steps=1, preempted_at=())
    run.metrics.unlink()
    assert main(["report", str(run.root)]) == 0
    assert (run.report / "report.html").exists()
    assert "report " in capsys.readouterr().out


def test_a_comparison_lies_in_the_first_run_unless_told_otherwise(tmp_path, capsys):
    runs = [make_run(tmp_path / name, num_steps=5, preempted_at=()) for name in ("a", "b")]
    assert main(["compare", *(str(run.root) for run in runs)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["page", str(runs[0].report / "compare.html")]
    elsewhere = ["--runs-dir", str(tmp_path), "--html", str(tmp_path / "out/two.html")]
    assert main(["compare", "a", "b", *elsewhere]) == 0
    assert (tmp_path / "out/two.html").read_text() == (runs[0].report / "compare.html").read_text()
