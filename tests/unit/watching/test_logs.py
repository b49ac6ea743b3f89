"""Logs of many processes in one stream: in order of time, each line with its source, and only what
is asked for.
"""

import os
import re
from datetime import datetime
from itertools import pairwise

import pytest

from common.run_folder import create_run_folder
from rlpost.cli.main import main
from rlpost.cli.waiting_notes import SILENT_S
from rlpost.extensions.watching.follow import _LogTail
from rlpost.extensions.watching.log_lines import LogSelection, merged, parse_since, wall_seconds
from rlpost.extensions.watching.startup_notes import QUEUE_S, StartupNotes

LOGS = {
    "driver": "10:00:00 INFO starting\n10:00:05 WARNING engine is slow\n10:00:09 INFO step 1/8\n",
    "actor-0": "10:00:02 INFO rlpost.trainer: built\n10:00:07 ERROR rlpost.trainer: broken\nTraceback:\n  File x\n",
    "engine-0-server": "a warning before any time\n[10:00:03] ready\n[10:00:08] ERROR: cache is full\n",
    "agent-n01": "10:00:01.250 INFO agent[n01] up\n",
}


@pytest.fixture(params=["00:15", "10:30"])
def run(tmp_path, monkeypatch, request):
    """A run whose logs were last changed at this time of day: soon after midnight they are of the day
    before.
    """
    monkeypatch.chdir(tmp_path)
    made = create_run_folder(tmp_path / "runs" / "one", "{}")
    attempt = made.new_attempt()
    changed = datetime.fromisoformat(f"{datetime.now():%Y-%m-%d} {request.param}").timestamp()
    for name, text in LOGS.items():
        (attempt / f"{name}.log").write_text(text)
        os.utime(attempt / f"{name}.log", (changed, changed))
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
        "actor-0         | 10:00:07 ERROR rlpost.trainer: broken",
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
        "actor-0         | 10:00:07 ERROR rlpost.trainer: broken",
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
    tail = _LogTail(run.attempts, LogSelection(("driver", "actor-*")))
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


def test_an_empty_drivers_log_leads_to_the_cause_and_the_logs_that_explain(run, capsys):
    attempt = run.attempts / "0"
    (attempt / "driver.log").write_text("")
    assert logs(capsys) == "", "it may still start"
    (attempt / "verdict.json").write_text('{"cause": "Ray ended: ValueError: x\\nlast lines"}')
    said = logs(capsys)
    assert "Ray ended: ValueError: x\nlast lines" in said and "logs --of agent-n01\n" in said
    assert logs(capsys, "--of", "agent-n01") == LOGS["agent-n01"]


def test_a_terminal_shows_neither_diagnostics_nor_the_attempt_before_the_submission(run, capsys):
    tail = _LogTail(run.attempts, LogSelection(has_diagnostics=False), earlier="0")
    assert tail.print_new() == "" and not tail.has_attempt
    assert capsys.readouterr().out == ""
    (run.new_attempt() / "driver.log").write_text(
        "10:10:00 INFO diagnostics: the event loop has been blocked; it is in:\n  File x\n"
        '{"time": "2026-11-23T12:00:00+00:00", "level": "INFO", "message": "diagnostics: y"}\n'
        "10:10:01 INFO starting 2 actor ranks\n"
    )
    assert "starting 2" in tail.print_new() and tail.has_attempt
    assert capsys.readouterr().out.splitlines()[1:] == ["10:10:01 INFO starting 2 actor ranks"]


@pytest.mark.parametrize("is_local", [True, False])
def test_a_start_is_never_silent_for_longer_than_the_limit(is_local):
    notes = StartupNotes(0.0, is_local=is_local)
    heard = {3.0: "INFO starting 2 actor ranks", 47.0: "INFO ready"}
    heard[90.0] = "INFO step 1/60  reward 0.1"
    said = [0.0]
    for now in (number / 2 for number in range(400)):
        if now in heard:
            notes.heard(heard[now], now)
            said.append(now)
        if line := notes.due(now >= 1.0, now):
            assert "waiting for" in line and not line.endswith("for ")
            said.append(now)
    assert max(later - one for one, later in pairwise(said)) <= SILENT_S + 0.5
    assert said[-1] == 90.0, "steps have their own lines"


def test_a_job_in_the_queue_is_mentioned_more_and_more_rarely():
    notes = StartupNotes(0.0, is_local=False)
    said = [now for now in range(20_000) if notes.due(False, float(now))]
    pauses = [later - one for one, later in pairwise(said)]
    assert said[0] == SILENT_S and pauses == sorted(pauses) and pauses[-1] == QUEUE_S


def test_midnight_does_not_turn_the_order_around():
    found = merged({"a": ["23:59:58 x\n", "00:00:02 z\n"], "b": ["23:59:59 y\n", "00:00:03 w\n"]})
    assert [record.split()[1] for _, record in found] == list("xyzw")


def test_what_is_asked_for_is_known_by_name():
    wanted = LogSelection(("engine-?",), pattern=re.compile("x"))
    assert wanted.log("engine-0") and not wanted.log("engine-0-server") and not wanted.log("driver")
    assert not wanted.is_one and LogSelection().is_one


NOW = datetime(2026, 11, 23, 12, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("90s", datetime(2026, 11, 23, 11, 58, 30)),
        ("1.5h", datetime(2026, 11, 23, 10, 30)),
        ("2d", datetime(2026, 11, 21, 12, 0)),
        ("11:30", datetime(2026, 11, 23, 11, 30)),
        ("12:30:05", datetime(2026, 11, 22, 12, 30, 5)),
        ("2026-11-20 08:00", datetime(2026, 11, 20, 8, 0)),
    ],
)
def test_a_beginning_is_a_duration_or_a_time(given, expected):
    assert parse_since(given, NOW) == expected


def test_since_leaves_out_older_records_with_their_tracebacks(run, capsys):
    attempt = run.attempts / "0"
    (attempt / "driver.log").write_text(
        "2026-11-22 23:59:58.100 ERROR old\nTraceback:\n"
        "2026-11-23 00:00:02.000 INFO new\n  more\n"
        '{"time": "2026-11-23T00:00:05.000+00:00", "level": "WARNING", "message": "json"}\n'
    )
    lines = logs(capsys, "--since", "2026-11-23 00:00").splitlines()
    assert [line.strip()[:10] for line in lines] == ["2026-11-23", "more", '{"time": "']
    assert len(logs(capsys, "--since", "2026-11-23 00:00:03").splitlines()) == 1
    assert "json" in logs(capsys, "--level", "warning", "--since", "2026-11-23")
    assert main(["logs", "one", "--since", "soon"]) == 2
    assert "use a duration such as 90s" in capsys.readouterr().err


def test_times_without_a_date_are_of_the_day_of_the_last_change(run, capsys):
    """23:59 in a log that changed at 00:01 is of the day before."""
    path = run.attempts / "0/engine-0-server.log"
    path.write_text("23:59:00 before\n00:00:30 after\n")
    changed = datetime(2026, 11, 23, 0, 1).timestamp()
    os.utime(path, (changed, changed))
    assert logs(capsys, "--of", "engine-0-server", "--since", "2026-11-23") == "00:00:30 after\n"
    assert len(logs(capsys, "--of", "engine-0-server", "--since", "2026-11-22").splitlines()) == 2


def test_a_follower_leaves_out_older_records(run, capsys):
    since = wall_seconds(datetime(2026, 11, 23))
    (run.attempts / "0/driver.log").write_text(
        "2026-11-22 23:59:58 INFO old\n2026-11-23 00:00:02 INFO new\n"
    )
    _LogTail(run.attempts, LogSelection(), since).print_new()
    assert capsys.readouterr().out.splitlines()[1:] == ["2026-11-23 00:00:02 INFO new"]
