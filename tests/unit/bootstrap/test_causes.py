"""Invariant: the likely cause precedes a known error, and no line of the log is lost."""

from pathlib import Path

import pytest

from bootstrap.agent.early_exits import with_likely_cause
from bootstrap.agent.rendezvous import describe_missing
from common.files import tail


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("OSError: [Errno 28] No space left on device: '/tmp/r1.0'", "disk is full"),
        (
            "Exception: The current node timed out during startup. This could happen because",
            "overloaded",
        ),
        ("ModuleNotFoundError: No module named 'ray'", "environment or image"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0", "memory ran out"),
        ("Killed (OOM)", "memory ran out"),
        (
            "enroot-mount: failed to mount: /data at /run/enroot/data-0/r/data: No such file or directory",
            "--container-mounts is missing",
        ),
        (
            "enroot-mount: failed to mount: /data at /run/enroot/data-0/r/data: Permission denied",
            "--container-mounts cannot be read",
        ),
        (
            "mkdir: cannot create directory '/run/user/1234': Permission denied",
            "cannot create its folder",
        ),
        ("enroot-switchroot: failed to execute: /bin/sh: Permission denied", "noexec"),
    ],
)
def test_a_known_error_has_its_cause_beside_it_and_no_frame_before_it(log: str, words: str) -> None:
    frames = f'Traceback (most recent call last):\n  File "click/core.py", line 1, in invoke\n{log}'
    first, rest = with_likely_cause(frames).split("\nlast lines:\n", 1)
    assert first.startswith(f"{log} (probably ") and words in first and rest == frames


@pytest.mark.parametrize("log", ["Segmentation fault", "no room for headroom in the zoom"])
def test_an_unknown_trace_is_left_as_it_is(log: str) -> None:
    assert with_likely_cause(log) == log


def test_a_host_without_a_log_has_never_begun(tmp_path: Path) -> None:
    (tmp_path / "agent-n2.log").write_text("exec format error\n")
    said = describe_missing(["n1", "n2"], tmp_path, "agent-HOST.log")
    assert "(probably its agent never started" in said and "n2: exec format error" in said
    assert tail(tmp_path / "agent-n1.log") in said
