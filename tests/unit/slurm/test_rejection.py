"""A job that sbatch rejects: Slurm's message once, and what may be changed. Slurm's own words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm.client import explain_rejection
from slurm.errors import SubmitError
from slurm.executor import submit_script
from tests.unit.slurm.stand_ins import commands

SINFO = """gpu*|up|1-00:00:00|4|gpu:h100:8|h100,ib
gpu*|up|1-00:00:00|2|gpu:a100:4|a100
cpu|up|infinite|9|(null)|(null)
old|down|4:00:00|1|gpu:4|v100
"""
FAILED = "sbatch: error: Batch job submission failed: "
GPUS = (
    "gpu: 4 nodes with gpu:h100:8 or 2 nodes with gpu:a100:4, cpu: 9 nodes with none, "
    "old: 1 node with gpu:4"
)


@pytest.mark.parametrize(
    ("words", "flag", "allowed"),
    [
        (
            f"sbatch: error: invalid partition specified: low\n{FAILED}Invalid partition name specified",
            "--partition",
            "gpu (default), cpu, old (down)",
        ),
        (f"{FAILED}No partition specified or system default partition", "--partition", "cpu"),
        (f"{FAILED}User's group not permitted to use this partition", "another --partition", "cpu"),
        (
            f"{FAILED}Invalid account or account/partition combination specified",
            "--account",
            "sacctmgr show associations",
        ),
        (f"{FAILED}Invalid qos specification", "--qos", "sacctmgr show associations"),
        (
            f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)",
            "--time",
            "2 nodes for at most 1-00:00:00, cpu: 9 nodes for at most infinite",
        ),
        (f"{FAILED}Requested partition configuration not available now", "--time", "4:00:00"),
        (f"{FAILED}Invalid generic resource (gres) specification", "--gpu-request", GPUS),
        (f"{FAILED}Requested node configuration is not available", "--num-gpus-per-node", GPUS),
        (f"{FAILED}Node count specification invalid", "--nodes", "cpu: 9 nodes"),
        (f"{FAILED}Invalid feature specification", "--constraint", "gpu: h100,ib or a100"),
        (f"{FAILED}Job dependency problem", "--sbatch=--dependency", "leave the option out"),
        (f"{FAILED}Requested reservation is invalid", "--reservation", "scontrol show reservation"),
        (
            f"{FAILED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "QOS limits this job",
            "maxtres",
        ),
        (
            f"{FAILED}Unable to contact slurm controller (connect failure)",
            "scontrol ping",
            "submit again",
        ),
    ],
)
def test_a_message_of_slurm_gets_the_flag_and_what_is_allowed(
    words: str, flag: str, allowed: str
) -> None:
    explained = explain_rejection(words, SINFO)
    remedy = explained.removeprefix(words + "\nremedy: ")
    assert remedy != explained and flag in remedy and allowed in remedy


def test_an_unknown_message_and_a_silent_sinfo_get_no_invented_remedy() -> None:
    assert explain_rejection("sbatch: error: quota of site is used up\n", SINFO) == (
        "sbatch: error: quota of site is used up"
    )
    words = f"{FAILED}Invalid partition name specified"
    assert explain_rejection(words, "") == f"{words}\nremedy: choose --partition"


def test_a_sentence_of_the_site_gets_no_remedy_for_a_word_in_it() -> None:
    words = (
        f"sbatch: error: name the gres and the time limit of project X\n{FAILED}Unspecified error"
    )
    assert explain_rejection(words, SINFO) == words


def test_a_rejected_submission_shows_slurms_words_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sbatch = f'echo "{FAILED}Invalid qos specification" >&2; exit 1'
    path = commands(tmp_path / "bin", sbatch=sbatch, sinfo="exit 1")
    monkeypatch.setenv("PATH", path)
    with pytest.raises(SubmitError, match=r"Invalid qos specification\nremedy: choose --qos"):
        submit_script("#!/bin/bash\n", tmp_path / "job.sbatch", 1, os.environ)
    assert capfd.readouterr() == ("", "")
