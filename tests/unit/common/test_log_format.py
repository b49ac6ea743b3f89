"""Log lines of every process: dated text, or JSON for programs, which readers get back as text."""

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from common.log_format import VARIABLE, JsonFormatter, as_text
from rlpost.extensions.watching.report.run_facts import network_table
from rlpost.extensions.watching.run_status import warnings_in
from slurm.causes import _AGENT_LINE

ROOT = Path(__file__).parents[3]
PROGRAM = """
import logging
from common.log_format import configure_logging
configure_logging("agent[n%01]", with_logger=True)
log = logging.getLogger("some.module")
log.info("network of this node\\na  1")
log.debug("too low")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broken")
log.warning("agent is slow")
"""


def run_program(log_format: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={VARIABLE: log_format},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.fixture(scope="module")
def text() -> str:
    return run_program("text")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return run_program("json").splitlines()


def test_text_has_date_level_source_and_logger(text):
    first = text.splitlines()[0]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO agent\[n%01\] some.module: network of this node",
        first,
    )
    assert "too low" not in text and "ZeroDivisionError" in text


def test_json_is_one_object_a_record_with_its_traceback(lines):
    found = [json.loads(line) for line in lines]
    assert [one["level"] for one in found] == ["INFO", "ERROR", "WARNING"]
    assert found[0]["message"] == "network of this node\na  1"
    assert "ZeroDivisionError" in found[1]["message"]
    assert {one["source"] for one in found} == {"agent[n%01]"}
    assert all(datetime.fromisoformat(one["time"]).utcoffset() is not None for one in found)


def test_what_is_read_from_logs_is_the_same_in_both_formats(text, lines):
    of_json = "\n".join(lines)
    assert network_table(of_json) == network_table(text.replace(" some.module:", "")) == "a  1"
    assert [line.split(" ", 2)[2] for line in warnings_in(of_json)] == [
        "ERROR agent[n%01] broken",
        "WARNING agent[n%01] agent is slow",
    ]
    assert _AGENT_LINE.search(of_json) and _AGENT_LINE.search(text)


def test_other_lines_stay_as_they_are():
    number = '{"time": "2026-11-23T12:00:00+00:00", "level": 5, "message": "m"}'
    for line in ("a", '{"time": 1}', '{"time": "x", "level": "INFO", "message": "m"}', number, ""):
        assert as_text(line) == line


def test_a_message_that_is_no_text_is_still_a_line():
    record = logging.LogRecord("n", logging.INFO, "f", 1, "%s \ud83d", ({1},), None)
    assert json.loads(JsonFormatter().format(record))["message"] == "{1} \ud83d"
