"""Notes of a call that prints nothing."""

import time

from rlpost.cli import waiting_notes


def test_a_call_that_prints_nothing_says_what_it_waits_for(capsys, monkeypatch):
    monkeypatch.setattr(waiting_notes, "SILENT_S", 0.01)
    said = ""
    with waiting_notes.explained("a copy (usually 1 s)"):
        deadline = time.monotonic() + 60
        while "waiting for a copy (usually 1 s)" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
            time.sleep(0.01)
    assert said.startswith("... 0 s: waiting for a copy (usually 1 s)\n")
