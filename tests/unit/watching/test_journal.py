"""``rlpost journal`` on a journal that was written here."""

import json
import re

import pytest

from common.run_folder import create_run_folder
from rlpost.driver.checkpoints import STATE_FILE
from rlpost.durable.commit import begin, commit
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError, ConfigError
from rlpost.extensions.watching.journal_verb import main
from tests.unit.durable.test_journal import begin as begin_segment
from tests.unit.durable.test_journal import group


@pytest.fixture
def run(tmp_path):
    return create_run_folder(
        tmp_path / "run", json.dumps({"checkpoint": {"save": str(tmp_path / "saves")}})
    )


def write(tmp_path):
    journal = Journal.resume(tmp_path / "saves/journal", 0, step=0, settings="")
    journal.append_group(group(4, 3, 2), wanted=True)
    journal.append_group(group(5, 6), wanted=False)
    journal.batch(0, [group(4)], {})
    journal.append_evaluation(0, {"eval/x": 0.25})
    begin_segment(journal, 1)
    journal.close()


def test_every_segment_is_a_line_with_what_it_holds(tmp_path, run, capsys):
    write(tmp_path)
    assert main([str(run.root)]) == 0
    folder, head, first, second, chain = capsys.readouterr().out.splitlines()
    assert folder == str(tmp_path / "saves/journal")
    columns = re.split(r"\s{2,}", head.strip())
    rows = [
        dict(zip(columns, re.split(r"\s{2,}", line.strip()), strict=True))
        for line in (first, second)
    ]
    counts = {"groups": "2", "dropped": "1", "tokens": "11", "batches": "1", "evals": "1"}
    assert {key: rows[0][key] for key in counts} == counts
    assert (rows[1]["file"], rows[1]["step"], rows[1]["groups"]) == ("1", "1", "0")
    assert (rows[0]["after"], rows[1]["after"]) == ("-", "0")
    assert (
        chain
        == "a resume from step 0 (segment 0) uses 0000000 -> 0000001; groups: 2 (11 tokens), batches: 1"
    )


def test_the_same_for_programs(tmp_path, run, capsys):
    write(tmp_path)
    assert main([str(run.root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [segment["number"] for segment in found["segments"]] == [0, 1]
    assert {key: found["segments"][0][key] for key in ("groups", "dropped", "tokens", "batches", "evaluations")} == {
        "groups": 2, "dropped": 1, "tokens": 11, "batches": 1, "evaluations": 1,
    }  # fmt: skip
    assert found["segments"][1]["previous"] == 0
    resume = found["resume"]
    assert (resume["step"], resume["segment"], resume["uses"], resume["problems"]) == (
        0,
        0,
        [0, 1],
        [],
    )
    assert resume["records"] == {"groups": 2, "batches": 1, "evaluations": 1}


def test_with_records_each_is_told_and_damage_is_named(tmp_path, run, capsys):
    write(tmp_path)
    path = tmp_path / "saves/journal/0000000.log"
    path.write_bytes(path.read_bytes()[:-1])
    main([str(run.root), "--records"])
    out = capsys.readouterr().out
    assert "group of prompt 4, 5 tokens" in out
    assert "group of prompt 5, 6 tokens, dropped by the filter" in out
    assert "batch after step 0: prompts 4" in out
    assert "evaluation after" not in out
    assert f"{path}: the last" in out and "an incomplete record" in out


def test_where_the_chain_ends_and_why_is_said_for_the_checkpoint_that_a_resume_takes(
    tmp_path, run, capsys
):
    write(tmp_path)
    folder = tmp_path / "saves/journal"
    state = RunState(step=1, journal=1)
    writing = begin(tmp_path / "saves", 1)
    (writing / STATE_FILE).write_text(state.to_json())
    commit(writing)
    journal = Journal.resume(folder, 1, step=1, settings="")
    journal.append_group(group(6, 2), wanted=True)
    begin_segment(journal, 2)
    journal.append_group(group(7, 2), wanted=True)
    journal.close()
    (folder / "0000002.log").write_bytes(b"")
    main([str(run.root)])
    *_, used, empty, last = capsys.readouterr().out.splitlines()
    # Segment 2 holds what segment 1 did, so the resume deleted that.
    assert used == "no segment continues the checkpoint of step 1, which names segment 1"
    assert empty.startswith(f"{folder / '0000002.log'}: it is empty")
    assert last.startswith(
        f"{folder / '0000003.log'}: follows segment 2, which is missing or damaged"
    )


def test_a_run_without_a_journal_is_told_so(run):
    with pytest.raises(ConfigError, match="appears with the first attempt"):
        main([str(run.root)])


def test_a_segment_that_cannot_be_read_is_an_error_that_names_it(tmp_path, run, monkeypatch):
    write(tmp_path)

    def fail(path):
        raise CheckpointError(f"{path} cannot be read")

    monkeypatch.setattr("rlpost.durable.journal_chain.read_segment", fail)
    with pytest.raises(ConfigError, match=r"0000000\.log cannot be read"):
        main([str(run.root)])


def test_verify_reads_every_checkpoint(tmp_path, run, capsys):
    saves = tmp_path / "saves"
    for step in (1, 2):
        writing = begin(saves, step)
        (writing / "weights.distcp").write_bytes(bytes([step]) * 5000)
        (writing / STATE_FILE).write_text(RunState(step=step, pending={}).to_json())
        commit(writing)
    assert main([str(run.root), "--verify"]) == 0
    assert capsys.readouterr().out.count("complete, with the digests") == 2
    (saves / "iter_0000002/weights.distcp").write_bytes(bytes([2]) * 904 + bytes(4096))
    assert main([str(run.root), "--verify"]) == 1
    _, newest, older = capsys.readouterr().out.splitlines()
    assert newest.startswith("iter_0000002") and "weights.distcp is damaged" in newest
    assert older.startswith("iter_0000001") and "complete" in older
