"""Commands that Slurm rejects raise errors with the reason; tests/cluster runs real ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm import client
from slurm.errors import JobError, SlurmError

ORDERS: list[Callable[[], object]] = [
    lambda: client.cancel("7"),
    lambda: client.ask_to_requeue("7"),
    lambda: client.expected_start(Path("job.sbatch"), os.environ),
]


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name in ("scancel", "sbatch"):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_that_is_refused_says_what_slurm_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[], object]
) -> None:
    commands(tmp_path, monkeypatch, "echo 'error: Access denied' >&2; exit 1")
    with pytest.raises(SlurmError, match="Access denied"):
        order()


@pytest.mark.parametrize("order", ORDERS)
def test_without_slurm_an_order_says_where_to_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[], object]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match=r"there is no s(cancel|batch) on this host"):
        order()


@pytest.mark.parametrize("order", ORDERS)
def test_a_controller_that_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[], object]
) -> None:
    commands(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(client, "COMMAND_TIMEOUT_S", 0.1)
    with pytest.raises(JobError, match="does not answer"):
        order()


@pytest.mark.parametrize("order", [client.cancel, client.ask_to_requeue])
@pytest.mark.parametrize("word", ["", "-u", "7;-M", "7;8;9", "local-12"])
def test_no_other_word_than_a_job_id_reaches_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[str], None], word: str
) -> None:
    commands(tmp_path, monkeypatch, f"touch {tmp_path}/called")
    with pytest.raises(JobError, match="not a Slurm job id"):
        order(word)
    assert not (tmp_path / "called").exists()
