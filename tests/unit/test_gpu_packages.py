"""The packages of the GPU lock were tested: ``make test-gpu-packages`` has recorded this lock."""

import json

from tests.gpu_packages.record import LOCK, RECORD, digest


def test_the_lock_is_the_one_that_passed():
    record = json.loads(RECORD.read_text())
    assert record["lock"] == digest(LOCK), "run make test-gpu-packages (9 GB, 10 minutes)"
    assert set(record["tests"].values()) <= {"passed", "skipped"} and record["tests"]
