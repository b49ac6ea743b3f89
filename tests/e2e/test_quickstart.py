"""The quick start on this machine alone: no Slurm, no GPU, and a reward that has clearly risen."""

import subprocess
import sys

import psutil

from rlpost.metrics.names import undeclared
from rlpost.metrics.writer import read_metrics
from tests.e2e.runs import RECIPE, ROOT, evaluations

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_the_quick_start_learns_and_leaves_metrics_and_a_picture(assets, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "rlpost.submit", RECIPE, "--local", "--run-folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(61))
    rewards = evaluations(lines)
    assert rewards[60] > rewards[0] + 0.15, rewards
    assert f"reward on heldout: {rewards[0]:.3f} at step 0 -> {rewards[60]:.3f} at step 60" in done.stdout
    assert "step 60/60" in done.stdout and "tok/s" in done.stdout and "eta" in done.stdout
    assert (folder / "report/reward.png").read_bytes().startswith(PNG_SIGNATURE)
    assert undeclared({name for line in lines for name in line}) == []
    samples = read_metrics(folder / "report/samples.jsonl")
    assert [line["step"] for line in samples] == list(range(1, 61))
    assert all(sample["prompt"] and sample["label"] for line in samples for sample in line["samples"])
    page = (folder / "report/report.html").read_text()
    assert "60 / 60" in page and samples[-1]["samples"][0]["prompt"] in page
    left = [p.info for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert not left
