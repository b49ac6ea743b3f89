"""Metrics in the real Weights & Biases.

They are in a run's offline files, under one run id over all attempts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.run_identity import settle_identity
from rlpost.config.groups.wandb import WandbConfig
from rlpost.errors import Preempted
from rlpost.extensions.tracking.wandb import mirrored
from rlpost.observe.writer import MetricsWriter, read_metrics

wandb = pytest.importorskip("wandb", reason="pip install -e '.[wandb]'")

BLOCK, HEADER = 32768, 7  # W&B's files are LevelDB logs: blocks of record fragments
OFFLINE = WandbConfig(use_wandb=True, wandb_mode="offline", wandb_project="p", wandb_group="g")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny run").mkdir()
    (tmp_path / "tiny run/run.json").write_text("{}")
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    return tmp_path / "tiny run"


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, by the layout of LevelDB's log (doc/log_format.md)."""
    from wandb.proto import wandb_internal_pb2

    # The file starts with a header of W&B that is as long as that of a fragment.
    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        # the end of a block that has no space for a header is padding
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        # 1: a full record; 2, 3, 4: its first, middle and last fragment
        whole = (whole if kind in (3, 4) else b"") + data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record


def history(found):
    """Return the lines that were logged, without the keys that W&B adds."""
    rows = [
        {
            "/".join(item.nested_key) or item.key: float(item.value_json)
            for item in record.history.item
        }
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_two_attempts_write_one_run_and_no_file_holds_the_key(folder, capfd):
    """The second attempt resumes and writes step 2 again, as after a preemption.

    Both have one run id and the lines of metrics.jsonl.
    """
    for steps, ends_with in (((1, 2), Preempted("stop")), ((2, 3), None)):
        writer = MetricsWriter(folder / "metrics.jsonl")
        writer.rewind(steps[0] - 1)
        try:
            with mirrored(OFFLINE, folder, {"rollout": {"num_rollout": 3}}) as also:
                writer = MetricsWriter(folder / "metrics.jsonl", also=also)
                for step in steps:
                    writer.write(step, {"reward/mean": step / 8, "train/loss": -0.5})
                if ends_with is not None:
                    raise ends_with
        except Preempted:
            pass
    attempts = [list(records(path)) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
    assert len(attempts) == 2
    runs = [next(record.run for record in found if record.HasField("run")) for found in attempts]
    assert {run.run_id for run in runs} == {settle_identity(folder).label}
    assert [(run.project, run.run_group, run.display_name) for run in runs] == [
        ("p", "g", "tiny run")
    ] * 2
    lines = [history(found) for found in attempts]
    assert lines[1] == read_metrics(folder / "metrics.jsonl")[1:]
    assert [line["step"] for line in (*lines[0], *lines[1])] == [1, 2, 2, 3]
    holders = [
        path for path in folder.rglob("*") if path.is_file() and b"f" * 40 in path.read_bytes()
    ]
    assert holders == []
    assert "WARNING" not in "".join(capfd.readouterr())


def test_without_a_connection_to_wandb_the_attempt_is_written_offline(folder, monkeypatch, caplog):
    init = wandb.init

    def unreachable(*, mode, **given):
        if mode == "online":
            raise wandb.errors.CommError("no route")
        return init(mode=mode, **given)

    monkeypatch.setattr(wandb, "init", unreachable)
    with mirrored(WandbConfig(use_wandb=True), folder, {}) as also:
        also(1, {"reward/mean": 0.5})
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert history(records(path)) == [{"step": 1, "reward/mean": 0.5}]
    assert "no route" in caplog.text
