"""A submission is known, refused or unknown, and what the ledger says of it is what squeue shows.

Generated: what sbatch answers, whether Slurm made a job, and whether squeue answers at that moment.
"""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from common.run_folder import RunFolder, create_run_folder
from rlpost.cli.control import cancel_main
from rlpost.cli.run_claim import claim
from rlpost.cli.runs import newest_job, settle
from rlpost.errors import ConfigError
from rlpost.extensions.watching.run_status import statuses
from slurm import submissions
from slurm.arrays import FleetSpec
from slurm.errors import SubmitError, UnknownJobError
from slurm.executor import submit, submit_fleet
from slurm.spec import JobSpec
from slurm.submissions import unknown_submissions
from tests.settings import a_job
from tests.unit.slurm.stand_ins import commands

FAILED = "sbatch: error: Batch job submission failed: "
NO_RECEIPT = "Unable to contact slurm controller (receive failure)"
ANSWERS = {
    "an id": ("70", "", 0),
    "an id and an error of a wrapper": ("70", "portal: no mail server", 3),
    "an id and a number": ("70\n1000", "", 0),
    "an id, a number and an error": ("1000\n70", "portal: no mail server", 3),
    "nothing": ("welcome", "", 0),
    "an error of a wrapper": ("", "portal: no mail server", 3),
    "a lost answer": ("", f"{FAILED}Socket timed out on send/recv operation", 1),
    "a lost answer of a restart": ("", f"{FAILED}{NO_RECEIPT}", 1),
    "no word": ("", "", 1),
    "a kill": ("", "sbatch: waiting for a license", 137),
    "a refusal": ("", f"{FAILED}Invalid qos specification", 1),
}
# The job is in the file "job", with the batch file that sbatch got, if Slurm made one.
SBATCH = """[ -e accepts ] && echo "70 ${{!#}}" >job
echo "{printed}"; [ -z "{words}" ] || echo "{words}" >&2; exit {code}"""
SQUEUE = """[ ! -e silent ] || { echo 'Unable to contact slurm controller' >&2; exit 1; }
case $* in
*%o*) [ ! -e job ] || cat job ;;
*) [ ! -e job ] || echo '70|PENDING|1:00|N/A||Priority' ;;
esac"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of a cluster: the files accepts, job, silent."""
    for name in ("slurm.executor.LOOKUP_S", "slurm.submissions.RECHECK_S"):
        monkeypatch.setattr(name, 0.0)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    answer(tmp_path, "an id")
    return tmp_path


def answer(folder: Path, name: str) -> None:
    """Let sbatch give one of ANSWERS."""
    printed, words, code = ANSWERS[name]
    sbatch = SBATCH.format(printed=printed, words=words, code=code)
    texts = {"sbatch": sbatch, "squeue": SQUEUE, "scancel": "rm job", "sinfo": "exit 1"}
    texts = {name: f"cd {folder}\n{text}" for name, text in texts.items()}
    os.environ["PATH"] = commands(folder / "bin", scontrol="exit 0", **texts)


def new_run(folder: Path) -> RunFolder:
    return create_run_folder(folder / "run", "{}")


def spec_of(run: RunFolder) -> JobSpec:
    return a_job(home=str(run.root), python=sys.executable, run_folder=str(run.root))


def is_free(run: RunFolder) -> bool:
    """Whether another submission to the folder is allowed."""
    try:
        with claim(run.root, is_given=True):
            return True
    except ConfigError:
        return False


CASES = [
    (name, accepted, is_silent)
    for name, accepted, is_silent in itertools.product(ANSWERS, (True, False), (True, False))
    if accepted or not name.startswith("an id")
    if not (name == "a refusal" and accepted)
]


@pytest.mark.parametrize(("name", "accepted", "is_silent"), CASES)
def test_a_submission_whose_outcome_is_unknown_is_never_taken_for_none(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, name: str, accepted: bool, is_silent: bool
) -> None:
    run = new_run(slurm)
    answer(slurm, name)
    for file, exists in (("accepts", accepted), ("silent", is_silent)):
        if exists:
            (slurm / file).touch()
    job = None
    try:
        job = submit(spec_of(run), run, home=run.root, where="slurm")
    except UnknownJobError:
        assert unknown_submissions(run.ledger.read())
    except SubmitError:
        assert not accepted and not unknown_submissions(run.ledger.read())
    # no second job while the first exists or may exist, whatever squeue answers now
    is_known_free = not accepted and not unknown_submissions(run.ledger.read())
    assert is_free(run) == is_known_free
    (slurm / "silent").unlink(missing_ok=True)
    (status,) = statuses([run])
    assert newest_job(run) == status.job_id == ("70" if accepted else None)
    assert job in (None, "70") and is_free(run) == is_known_free
    # a job that squeue does not show after the time in which a busy controller may make one
    monkeypatch.setattr(submissions, "SETTLE_S", 0.0)
    assert is_free(run) != accepted
    assert not unknown_submissions(run.ledger.read())
    names = [entry["event"] for entry in run.ledger.read()]
    assert names == ["submitting", "submitted" if accepted else "rejected"]


def test_a_job_that_appears_later_is_cancelled_by_its_file(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller was busy: sbatch got no answer, and its request is executed afterwards."""
    run = new_run(slurm)
    answer(slurm, "a lost answer")
    with pytest.raises(
        UnknownJobError, match=r"may be queued .*; the next rlpost command for .* looks it up"
    ):
        submit(spec_of(run), run, home=run.root, where="slurm")
    with pytest.raises(ConfigError, match=r"had no answer, and its job .* try again in 1"):
        cancel_main([str(run.root)])
    assert "had no answer" in statuses([run])[0].reason
    (unknown,) = settle(run)
    (slurm / "job").write_text(f"70 {unknown.file}\n")
    assert cancel_main([str(run.root)]) == 0 and not (slurm / "job").exists()
    assert "cancelled run (70)" in capsys.readouterr().out


def test_a_resume_without_an_answer_hides_no_job_behind_the_earlier_one(slurm: Path) -> None:
    """The ledger names a job that has ended; the newest submission counts."""
    run = new_run(slurm)
    run.ledger.append("submitted", job_id="60")
    run.ledger.append("attempt", attempt=0, job_id="60")
    run.ledger.append("cancelled", job_id="60")
    answer(slurm, "a lost answer")
    with suppress(UnknownJobError):
        submit(spec_of(run), run, home=run.root, where="slurm")
    assert not is_free(run)
    with pytest.raises(ConfigError, match="the known jobs are cancelled; a submission"):
        cancel_main([str(run.root)])
    # the job starts, and is the run's: that its entry is missing does not make it a cancelled one
    run.ledger.append("attempt", attempt=1, job_id="70")
    assert newest_job(run) == "70" and not unknown_submissions(run.ledger.read())


def test_engines_without_an_answer_are_found_with_their_group(slurm: Path) -> None:
    run = new_run(slurm)
    answer(slurm, "a lost answer")
    (slurm / "accepts").touch()
    (slurm / "silent").touch()
    (run.root / "fleet-judge").mkdir()
    job = a_job(
        home=str(run.root),
        run_folder=str(run.root),
        python=sys.executable,
        agent_args=("--group", "judge"),
    )
    with pytest.raises(UnknownJobError):
        submit_fleet(FleetSpec(job, 2), run, os.environ)
    assert [one.is_of_the_run for one in settle(run)] == [False]
    (slurm / "silent").unlink()
    assert settle(run) == []
    found = run.ledger.read()[-1]
    assert {key: found[key] for key in ("event", "array", "engines", "group")} == {
        "event": "fleet",
        "array": "70",
        "engines": 2,
        "group": "judge",
    }
