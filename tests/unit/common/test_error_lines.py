"""``status`` and ``list`` show the line of a failure that names the error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bootstrap.agent.verdict import AttemptOutcome, decide
from common.error_lines import deciding_line, error_line

RAY = """\
2026-11-23 21:00:00.100 INFO step 3/60: reward 0.5
2026-11-23 21:00:01.000 ERROR actor-1 failed:
ray::Worker.call() (pid=71, ip=10.0.0.2)
  File "/code/rlpost/trainer/step.py", line 40, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
2026-11-23 21:00:02.000 INFO the report: /runs/a/report/report.html"""
ENGINE = """\
2026-11-23 21:00:01.000 ERROR engine http://n02:30000 ended by itself (exit code 1); the end of /runs/a/engine.log:
  Traceback (most recent call last):
    File "/sglang/server.py", line 5, in main
  ValueError: unknown quantisation"""
JSON = "\n".join(
    json.dumps(
        {
            "time": "2026-11-23T21:00:01.000+00:00",
            "level": level,
            "logger": "rlpost",
            "source": "",
            "message": text,
        }
    )
    for level, text in (("INFO", "up"), ("ERROR", "--lr -1: must be positive\nuse 1e-6"))
)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (RAY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (ENGINE, "ValueError: unknown quantisation"),
        (JSON, "--lr -1: must be positive"),
        (
            "12:00:00.100 ERROR no step is left: lower --num-rollout",
            "no step is left: lower --num-rollout",
        ),
        ("12:00:00.100 INFO up\nKilled", "Killed"),
        ("(/runs/a/driver.log is empty)", "(/runs/a/driver.log is empty)"),
    ],
)
def test_the_error_of_a_drivers_last_lines(log, expected):
    verdict = decide(AttemptOutcome(driver_code=1, driver_tail=log))
    assert verdict.cause.startswith("the driver ended with exit code 1")
    assert error_line(verdict.cause) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f():\n  raise KeyError('layer.0')\nf()", "KeyError: 'layer.0'"),
        (
            "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise RuntimeError('the step failed') from e",
            "RuntimeError: the step failed",
        ),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys; sys.exit('--lr: not a number')", "--lr: not a number"),
    ],
)
def test_the_error_of_a_real_traceback_after_other_lines(code, expected):
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    log = f"2026-11-23 21:00:00.100 INFO starting\n{said}"
    assert error_line(f"the driver ended with exit code 1; its last lines:\n{log}") == expected


def test_the_deciding_line_of_rays_log_is_rays_own_sentence():
    frames = (
        "Traceback (most recent call last):\n  File 'click/core.py', line 1, in invoke\n    x()\n"
    )
    for sentence in ("Exception: The current node timed out", "ValueError: must be at least 75"):
        assert deciding_line(f"Usage stats: off\n{frames}{sentence}\n") == sentence


@pytest.mark.parametrize(
    "first",
    [
        "the trainer hangs in forward at step 7; rank 3 on n02 is to blame",
        "n02 is gone: no heartbeat for 30 s",
        "n03 of 4 nodes did not join within 600 s (--bringup-deadline-s):",
    ],
)
def test_a_sentence_of_its_own_stays(first):
    assert error_line(f"{first}\nValueError: in the log of another") == first
    assert error_line(first) == first and error_line("") == ""
