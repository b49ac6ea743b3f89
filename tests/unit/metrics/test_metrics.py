"""Metrics on disk: every step once, also after a crash; progress lines; the summary."""

import os
import stat
from pathlib import Path

from rlpost.metrics.progress import duration, progress_line
from rlpost.metrics.writer import MetricsWriter, eval_rewards, read_metrics

LINE = {
    "reward/mean": 0.5,
    "rollout/response_length_mean": 3.0,
    "train/loss": -0.01,
    "train/grad_norm": 1.25,
    "time/tokens_per_s": 1234.5,
    "time/step_s": 0.75,
    "eval/heldout/reward_mean": 0.875,
}


def test_rewinding_forgets_later_steps_and_a_torn_last_line(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(4):
        writer.write(step, {"x": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    writer.rewind(2)
    writer.write(3, {"x": 9.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": s, "x": x} for s, x in enumerate((0.0, 0.5, 1.0, 9.0))]


def test_rewinding_before_anything_was_written_is_fine(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").rewind(0)
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_rewound_file_stays_rewound_when_the_machine_goes_down(tmp_path, monkeypatch):
    """Its content is on disk before it takes the name, and the folder that holds the name afterwards."""
    done = []

    def fsync(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda path, target: done.append("renamed") or os.replace(path, target))
    MetricsWriter(tmp_path / "metrics.jsonl").rewind(0)
    assert done == ["file", "renamed", "folder"]


def test_what_is_no_line_ends_the_file(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\nnull\n{"step": 2}\n')
    assert read_metrics(tmp_path / "m") == [{"step": 1}]


def test_numbers_read_back_exactly(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"x": 0.1 + 0.2, "y": 1e-300})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0.1 + 0.2, "y": 1e-300}]


def test_a_progress_line_says_where_the_run_is_and_when_it_will_be_done():
    line = progress_line(15, 60, LINE, steps_done=5, elapsed_s=10.0)
    for part in ("step 15/60", "reward 0.500", "eval/heldout 0.875", "1,234 tok/s", "0.75 s", "eta 1:30"):
        assert part in line, line


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_only_rewards_of_evaluations_count_as_such():
    assert eval_rewards({**LINE, "eval/heldout/truncated_frac": 0.0}) == ["eval/heldout/reward_mean"]
