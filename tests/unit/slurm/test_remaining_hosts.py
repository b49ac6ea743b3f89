"""Whether a job fits on the hosts that are not excluded, from texts of scontrol and sinfo, and with
commands that hang.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm import remaining_hosts
from slurm.remaining_hosts import describe_shortage, why_too_few

JOB = "JobId=7 JobName=tiny UserId=u(1) JobState=RUNNING Partition=batch NumNodes=2 NumCPUs=8 Features={} DelayBoot=0"
NODES = "n01|gpu,a100\nn02|gpu,a100\nn03|gpu\n"


@pytest.mark.parametrize(
    ("features", "excluded", "left"),
    [
        ("(null)", ["n02"], None),
        ("(null)", ["n02", "n03"], 1),
        ("(null)", ["n[02-03]"], 1),
        ("(null)", ["n09"], None),
        ("a100", ["n02"], 1),
        ("gpu&a100", ["n02"], 1),
        ("gpu", ["n02"], None),
        ("[a100|h100]", ["n02"], None),
    ],
)
def test_a_job_that_would_wait_for_good_is_told_by_its_hosts(
    features: str, excluded: list[str], left: int | None
) -> None:
    said = describe_shortage(JOB.format(features), NODES, excluded)
    if left is None:
        assert said is None
    else:
        assert said is not None and "without n02" in said and f"has {left} of the 2 nodes" in said
        assert "--resume" in said and "attempts/*/exclude" in said


@pytest.mark.parametrize(
    ("job", "nodes"), [("", NODES), (JOB, ""), ("JobId=7 NumNodes=2", NODES[:0])]
)
def test_where_slurm_says_nothing_nothing_is_claimed(job: str, nodes: str) -> None:
    assert describe_shortage(job, nodes, ["n01", "n02", "n03"]) is None


def test_slurm_is_asked_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {
        "scontrol": f"echo '{JOB.format('(null)')}'",
        "sinfo": '[ "$SINFO_FORMAT$SLURM_TIME_FORMAT" ] || printf "n01|x\\nn02|x\\n"',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SINFO_FORMAT": "%P",
        "SLURM_TIME_FORMAT": "%s",
    }
    monkeypatch.setenv("PATH", environ["PATH"])
    assert "has 1 of the 2 nodes" in (why_too_few(["n02"], environ) or "")
    assert why_too_few([], environ) is None
    assert why_too_few(["n02"], {"PATH": environ["PATH"]}) is None, "outside a job"
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(remaining_hosts, "ANSWER_S", 0.2)
    assert why_too_few(["n02"], environ) is None
