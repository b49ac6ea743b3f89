"""The STOP file: the first writer wins, and readers accept what users and Slurm write."""

import json

import pytest

from common.stop_file import StopMessage, parse_stop, read_deadline, write_stop


@pytest.mark.parametrize("nothing", ["N/A", "", "Unknown", None, "nan", -5, [1]])
def test_a_deadline_that_slurm_does_not_know_is_none(nothing):
    text = json.dumps({"reason": "x", "time": 7, "deadline": nothing})
    assert parse_stop(text) == StopMessage("x", 7.0, None)


def test_the_first_reason_and_deadline_stay(tmp_path):
    path = tmp_path / "STOP"
    assert write_stop(path, StopMessage("signal USR2", 100.00049, 160.0))
    assert not write_stop(path, StopMessage("rlpost cancel", 101.0))
    assert parse_stop(path.read_text()) == StopMessage("signal USR2", 100.0, 160.0)
    assert read_deadline(path) == 160.0 and path.stat().st_mode & 0o777 == 0o600


def test_no_file_and_no_json_have_no_deadline(tmp_path):
    assert read_deadline(tmp_path / "STOP") is None
    (tmp_path / "STOP").write_text("enough")
    assert read_deadline(tmp_path / "STOP") is None
