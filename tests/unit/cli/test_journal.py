"""``rlpost journal`` on a journal that was written here."""

import json
import re

import pytest

from rlpost.cli.journal import main
from rlpost.errors import ConfigError
from rlpost.rollout.journal import Journal
from slurm.run_folder import create_run_folder
from tests.unit.rollout.test_journal import group


@pytest.fixture
def run(tmp_path):
    return create_run_folder(tmp_path / "run", json.dumps({"checkpoint": {"save": str(tmp_path / "saves")}}))


def write(tmp_path):
    journal = Journal.resume(tmp_path / "saves/journal", 0, step=0, settings="")
    journal.finished(group(4, 3, 2), wanted=True)
    journal.finished(group(5, 6), wanted=False)
    journal.batch(0, [group(4)], {})
    journal.evaluated(0, {"eval/x": 0.25})
    journal.begin(1)
    journal.close()


def test_every_segment_is_a_line_with_what_it_holds(tmp_path, run, capsys):
    write(tmp_path)
    assert main([str(run.root)]) == 0
    folder, head, first, second = capsys.readouterr().out.splitlines()
    assert folder == str(tmp_path / "saves/journal")
    columns = re.split(r"\s{2,}", head.strip())
    rows = [dict(zip(columns, re.split(r"\s{2,}", line.strip()), strict=True)) for line in (first, second)]
    counts = {"groups": "2", "dropped": "1", "tokens": "11", "batches": "1", "evaluations": "1"}
    assert {key: rows[0][key] for key in counts} == counts
    assert (rows[1]["segment"], rows[1]["from step"], rows[1]["groups"]) == ("1", "1", "0")


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
    assert f"{path}: the last" in out and "half a record" in out


def test_a_run_without_a_journal_is_told_so(run):
    with pytest.raises(ConfigError, match="appears with the first attempt"):
        main([str(run.root)])
