"""Logs of many processes in one stream: in order of time, each line with its source, and only what
is asked for.
"""

import re

import pytest

from common.run_folder import create_run_folder
from rlpost.cli.follow import _LogTail
from rlpost.cli.log_lines import Wanted, merged
from rlpost.cli.main import main

LOGS = {
    "driver": "10:00:00 INFO starting\n10:00:05 WARNING engine is slow\n10:00:09 INFO step 1/8\n",
    "actor-0": "10:00:02 INFO rlpost.actor: built\n10:00:07 ERROR rlpost.actor: broken\nTraceback:\n  File x\n",
    "engine-0-server": "a warning before any time\n[10:00:03] ready\n[10:00:08] ERROR: cache is full\n",
    "agent-n01": "10:00:01.250 INFO agent[n01] up\n",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = create_run_folder(tmp_path / "runs" / "one", "{}")
    attempt = made.new_attempt()
    for name, text in LOGS.items():
        (attempt / f"{name}.log").write_text(text)
    return made


def logs(capsys, *words):
    assert main(["logs", "one", *words]) == 0
    return capsys.readouterr().out


def test_without_more_it_is_the_drivers_log_as_it_stands(run, capsys):
    assert logs(capsys) == LOGS["driver"]
    assert logs(capsys, "--node", "n01") == LOGS["agent-n01"]
    assert logs(capsys, "--of", "actor-0") == LOGS["actor-0"]


def test_all_logs_are_one_stream_in_order_of_time_with_the_source_before_every_line(run, capsys):
    lines = logs(capsys, "--of", "*").splitlines()
    assert len(lines) == sum(text.count("\n") for text in LOGS.values())
    assert [line.split(" | ")[0].strip() for line in lines] == [
        "engine-0-server",
        *("driver", "agent-n01", "actor-0", "engine-0-server", "driver"),
        *["actor-0"] * 3,
        *("engine-0-server", "driver"),
    ]
    assert len({line.index(" | ") for line in lines}) == 1


def test_a_level_shows_what_is_that_bad_and_a_traceback_stays_with_its_error(run, capsys):
    assert logs(capsys, "--of", "*", "--level", "warning").splitlines() == [
        "driver          | 10:00:05 WARNING engine is slow",
        "actor-0         | 10:00:07 ERROR rlpost.actor: broken",
        "actor-0         | Traceback:",
        "actor-0         |   File x",
        "engine-0-server | [10:00:08] ERROR: cache is full",
    ]


def test_a_pattern_is_looked_for_in_whole_records(run, capsys):
    assert "ERROR" in logs(capsys, "--of", "actor-*", "--grep", "File x")
    assert logs(
        capsys, "--of", "driver", "--of", "engine-*", "--grep", "step|ready"
    ).splitlines() == [
        "engine-0-server | [10:00:03] ready",
        "driver          | 10:00:09 INFO step 1/8",
    ]
    assert main(["logs", "one", "--grep", "("]) == 2
    assert "no regular expression" in capsys.readouterr().err


def test_the_tail_is_the_last_records_of_all_logs_together(run, capsys):
    assert logs(capsys, "--tail", "1") == "10:00:09 INFO step 1/8\n"
    assert logs(capsys, "--of", "*", "--level", "error", "--tail", "2").splitlines() == [
        "actor-0         | 10:00:07 ERROR rlpost.actor: broken",
        "actor-0         | Traceback:",
        "actor-0         |   File x",
        "engine-0-server | [10:00:08] ERROR: cache is full",
    ]
    for words in (["--tail", "0"], ["--tail", "3", "-f"]):
        assert main(["logs", "one", *words]) == 2
        assert "must be at least 1 record, and not with --follow" in capsys.readouterr().err


def test_a_log_that_is_not_there_is_an_error_with_those_that_are(run, capsys):
    assert main(["logs", "one", "--of", "actor-7"]) == 2
    assert "actor-7.log: not written; there are actor-0.log" in capsys.readouterr().err


def test_following_shows_each_line_once_and_goes_on_with_the_next_attempt(run, capsys):
    tail = _LogTail(run.attempts, Wanted(("driver", "actor-*")))
    tail.print_new()
    first = capsys.readouterr().out.splitlines()
    assert first[0].startswith("--- attempt 0")
    assert len(first) == 1 + 3 + 4
    with (run.attempts / "latest/driver.log").open("a") as file:
        file.write("10:00:10 INFO step 2/8\n10:00:11 INFO half a li")
    tail.print_new()
    assert capsys.readouterr().out == "driver  | 10:00:10 INFO step 2/8\n"
    (run.new_attempt() / "driver.log").write_text("10:10:00 INFO again\n")
    tail.print_new()
    assert capsys.readouterr().out.splitlines()[1:] == ["driver | 10:10:00 INFO again"]


def test_midnight_does_not_turn_the_order_around():
    found = merged({"a": ["23:59:58 x\n", "00:00:02 z\n"], "b": ["23:59:59 y\n", "00:00:03 w\n"]})
    assert [record.split()[1] for _, record in found] == list("xyzw")


def test_what_is_asked_for_is_known_by_name():
    wanted = Wanted(("engine-?",), pattern=re.compile("x"))
    assert wanted.log("engine-0") and not wanted.log("engine-0-server") and not wanted.log("driver")
    assert not wanted.is_one and Wanted().is_one
