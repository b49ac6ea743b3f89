"""Why an attempt ended before its agents started, from real output of pyxis, enroot, bash, Python
and srun. Invariants: only a permanent failure of every host ends a job; no secret is quoted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm.causes import Finding, HostEnd, explain, last_words, without_secrets
from slurm.evidence import find_cause, leave_verdict, mask, resume_point

EXIT_1 = "Exited with exit code 1"
AGENT = "20:15:01.123 INFO agent[n01] looking for the head n01\n"
PYXIS_MISSING = """\
slurmstepd-n01: error: pyxis: child 4711 failed with error code: 1
slurmstepd-n01: error: pyxis: failed to create container filesystem for image: /images/rl.sqsh
slurmstepd-n01: error: pyxis: printing enroot log file:
slurmstepd-n01: error: pyxis:     [ERROR] No such file or directory: /images/rl.sqsh
slurmstepd-n01: error: pyxis: couldn't start container
slurmstepd-n01: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n01: error: Failed to invoke spank plugin stack
"""
PYXIS_CORRUPT = PYXIS_MISSING.replace("No such file or directory", "Invalid image format")
PYXIS_MOUNT = """\
slurmstepd-n01: error: pyxis: --container-mounts: source path does not exist: /nowhere/models
slurmstepd-n01: error: Failed to invoke spank plugin stack
"""
ENROOT_TRUNCATED = """\
[INFO] Extracting squashfs filesystem...
FATAL ERROR: failed to read fragment table
"""
ENROOT_DISK = """\
[INFO] Extracting squashfs filesystem...
Write on output file failed because No space left on device
FATAL ERROR: writer: failed to write file /run/enroot/data/rlpost_5_0/usr/lib/libtorch_cuda.so
"""
EXECVE = "slurmstepd-n01: error: execve(): /opt/venv/bin/python: No such file or directory\n"
BASH_EXEC = "/home/u/rlpost/slurm/prepare.sh: line 12: exec: python3: not found\n"
DASH_EXEC = "/etc/rc: 3: exec: /opt/python: Permission denied\n"
ENV_EXEC = "env: \u2018python3\u2019: No such file or directory\n"
NO_PSUTIL = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/home/u/rlpost/bootstrap/preflight/probe.py", line 12, in <module>
    import psutil
ModuleNotFoundError: No module named 'psutil'
"""
NO_CODE = (
    "/usr/bin/python3: Error while finding module specification for 'bootstrap.agent' "
    "(ModuleNotFoundError: No module named 'bootstrap')\n"
)
OLD_PYTHON = """\
  File "/home/u/bootstrap/agent/__main__.py", line 3
    match word:
          ^
SyntaxError: invalid syntax
"""
SETUP = "pip: bad option\nsetup command failed: pip install -r /models/more.txt\n"
SETUP_OFFLINE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by NewConnectionError: [Errno -3] Temporary failure in \
name resolution: /simple/psutil/
ERROR: Could not find a version that satisfies the requirement psutil
setup command failed: pip install psutil
"""


def both(words: str, how: str = EXIT_1) -> Finding:
    """The finding if two hosts left the same."""
    ends = {host: HostEnd(how, words.replace("n01", host)) for host in ("n01", "n02")}
    finding = explain(ends, f"srun: error: n[01-02]: tasks 0-1: {how}\n")
    assert finding is not None
    return finding


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (PYXIS_MISSING, "/images/rl.sqsh does not exist", "--container-image"),
        (PYXIS_CORRUPT, "/images/rl.sqsh is damaged", "--container-image"),
        (PYXIS_MOUNT, "/nowhere/models", "--container-mounts"),
        (ENROOT_TRUNCATED, "the image is damaged", "--container-image"),
        (EXECVE, "/opt/venv/bin/python: No such file", "--python"),
        (BASH_EXEC, "python3: not found", "--python"),
        (DASH_EXEC, "/opt/python: Permission denied", "--python"),
        (ENV_EXEC, "the interpreter python3 cannot", "--python"),
        (NO_PSUTIL, "package psutil is missing", "rlpost doctor --image"),
        (NO_CODE, "code is not visible", "mount"),
        (OLD_PYTHON, "SyntaxError", "3.11"),
        (SETUP, "pip install -r /models/more.txt", "--setup-commands"),
    ],
)
def test_what_every_host_will_meet_again_is_not_tried_again(
    words: str, named: str, remedy: str
) -> None:
    """Hosts, meaning, remedy and the program's last line are reported."""
    finding = both(words)
    headline, advice, _ = finding.cause.split("\n", 2)
    assert finding.verdict == "config" and finding.exclude == ()
    assert headline.startswith("n01, n02: ") and named in headline and EXIT_1 in headline
    assert advice.startswith("remedy: ") and remedy in advice
    assert words.splitlines()[-1] in finding.cause


@pytest.mark.parametrize("words", [ENROOT_DISK, SETUP_OFFLINE, "Segmentation fault\n", ""])
def test_what_may_pass_or_is_unknown_is_tried_again_with_its_cause(words: str) -> None:
    finding = both(words)
    assert finding.verdict == "failed" and finding.exclude == ()
    assert last_words(words) in finding.cause and finding.cause.startswith("n01, n02: ")


@pytest.mark.parametrize("how", ["Terminated", "Killed", "Exited with exit code 143", ""])
def test_a_preemption_during_the_setup_commands_is_no_fault_of_theirs(how: str) -> None:
    """They retry in several ways, and were killed in the middle."""
    finding = both(NO_PSUTIL + "Collecting psutil\n", how)
    assert finding.verdict == "failed"


def test_lines_of_slurmstepd_without_a_host_count_for_each_host_that_failed() -> None:
    """The output of srun of Slurm 26.05 for a program that neither node has."""
    failed = "Exited with exit code 2"
    launch = "".join(
        f"[2026-11-26T14:06:00.{ms}] error: execve(): /nowhere: No such file or directory\n"
        f"srun: error: n0{task + 1}: task {task}: {failed}\n"
        for task, ms in enumerate((908, 940))
    )
    finding = explain({"n01": HostEnd(failed), "n02": HostEnd(failed)}, launch)
    assert finding is not None and finding.verdict == "config"
    assert finding.cause.startswith("n01, n02: the interpreter cannot be run (/nowhere: No such")
    one_failed = explain({"n01": HostEnd("", AGENT), "n02": HostEnd(failed)}, launch)
    assert one_failed is not None
    assert (one_failed.verdict, one_failed.exclude) == ("failed", ("n02",))


def test_only_the_last_lines_of_a_log_tell_why_it_ended() -> None:
    installed = "".join(
        f"Requirement already satisfied: package-{number}\n" for number in range(40)
    )
    assert both(NO_PSUTIL + installed + "Segmentation fault\n").verdict == "failed"


def test_one_bad_host_is_avoided_and_does_not_end_the_job() -> None:
    """The agent of the other host had started; the text alone would be permanent."""
    ends = {"n01": HostEnd("", AGENT), "n02": HostEnd(EXIT_1, NO_PSUTIL)}
    finding = explain(ends, f"srun: error: n02: task 1: {EXIT_1}\n")
    assert finding is not None
    assert (finding.verdict, finding.exclude) == ("failed", ("n02",))
    assert finding.cause.startswith("n02: the Python package psutil")


def test_a_host_that_shows_nothing_keeps_the_job_alive() -> None:
    """Slurm itself lost one of three hosts: not every host failed permanently."""
    ends = {
        "n01": HostEnd(EXIT_1, SETUP),
        "n02": HostEnd(EXIT_1, SETUP),
        "n03": HostEnd("Killed", ""),
    }
    finding = explain(ends, "")
    assert finding is not None and finding.verdict == "failed"
    assert "n01, n02: the setup command" in finding.cause and "n03: the task ended" in finding.cause


def test_agents_that_had_begun_are_no_early_failure() -> None:
    ends = {host: HostEnd("Killed", AGENT) for host in ("n01", "n02")}
    assert explain(ends, "srun: error: n[01-02]: tasks 0-1: Killed\n") is None


@pytest.mark.parametrize(
    ("launch", "verdict", "said"),
    [
        (
            "srun: unrecognized option '--container-image=/x.sqsh'\nTry \"srun --help\"\n",
            "config",
            "has no pyxis",
        ),
        (
            "srun: error: Unable to create step for job 5: Socket timed out on send/recv\n",
            "failed",
            "timed out",
        ),
        (
            "enroot import docker://r.org#rl/train:9 failed (exit 1):\n"
            "[ERROR] URL https://r.org/v2/rl/train/manifests/9 returned error code: 404 Not Found\n",
            "config",
            "404",
        ),
        (
            "enroot import docker://r.org#rl/train:9 failed (exit 1):\n"
            "[ERROR] URL https://r.org/v2/rl/train/manifests/9 returned error code: 503 Service Unavailable\n",
            "failed",
            "503",
        ),
        (
            "enroot import docker://r.org#a failed (exit 6):\ncurl: (6) Could not resolve host: r.org",
            "failed",
            "r.org",
        ),
        (
            "no enroot on this host to import r.org/a; import it where there is one\n",
            "config",
            "no enroot",
        ),
    ],
)
def test_a_step_that_never_was_is_explained_by_srun_or_the_import(
    launch: str, verdict: str, said: str
) -> None:
    finding = explain({"n01": HostEnd(), "n02": HostEnd()}, launch)
    assert finding is not None
    assert finding.verdict == verdict and said in finding.cause and finding.exclude == ()


def test_pyxis_may_speak_through_srun_alone() -> None:
    """As if the log of a task could not be opened."""
    launch = (
        PYXIS_MOUNT
        + PYXIS_MOUNT.replace("n01", "n02")
        + f"srun: error: n[01-02]: tasks 0-1: {EXIT_1}\n"
    )
    finding = explain({"n01": HostEnd(EXIT_1), "n02": HostEnd(EXIT_1)}, launch)
    assert finding is not None
    assert finding.verdict == "config" and "/nowhere/models" in finding.cause


def test_last_words_are_few_whatever_a_program_wrote() -> None:
    many = "".join(f"line {number} {'x' * 500}\n" for number in range(1000))
    finding = both(many + SETUP)
    assert len(finding.cause) < 2500 and "setup command failed" in finding.cause
    hosts = {f"n{number:03d}": HostEnd(EXIT_1, SETUP) for number in range(300)}
    crowd = explain(hosts, "")
    assert crowd is not None and "n000, n001" in crowd.cause and "and 292 more" in crowd.cause
    assert len(crowd.cause) < 2000


@pytest.mark.parametrize(
    "text",
    [
        "pip install --index-url https://me:S3CRET-word@pypi.site.org/simple x",
        "export HF_TOKEN=S3CRET-word",
        "wandb: API_KEY: S3CRET-word",
        "Authorization: Bearer S3CRET-word",
        "hf_S3CRETwordS3CRETword went astray, S3CRET-word",
    ],
)
def test_no_secret_is_quoted(text: str) -> None:
    assert "S3CRET" not in without_secrets(text, ["S3CRET-word"])
    if "astray" not in text:
        assert "S3CRET" not in without_secrets(text)


def test_the_evidence_of_an_attempt_is_read_and_its_verdict_left(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts/0"
    attempt.mkdir(parents=True)
    (tmp_path / "secrets.env").write_text("WANDB_API_KEY='0123456789abcdef'\n")
    (attempt / "secret").write_text("feed" * 16 + "\n")
    (attempt / "launch.log").write_text(f"srun: error: n[01-02]: tasks 0-1: {EXIT_1}\n")
    words = f"login 0123456789abcdef {'feed' * 16}\n{SETUP}"
    for host in ("n01", "n02"):
        (attempt / f"agent-{host}.log").write_text(words)
    finding = find_cause(tmp_path, attempt, "n[01-02]")
    assert finding.verdict == "config" and "login *** ***" in finding.cause
    assert find_cause(tmp_path, attempt, "") == finding, (
        "without the ledger's list: the hosts that left something"
    )
    leave_verdict(attempt, finding)
    assert (attempt / "verdict").read_text() == "config\n"
    assert json.loads((attempt / "verdict.json").read_text())["cause"] == finding.cause
    assert not (attempt / "exclude").exists()
    assert (attempt / "verdict").stat().st_mode & 0o777 == 0o600


def test_an_attempt_that_left_nothing_has_no_verdict_and_no_cause(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts/0"
    attempt.mkdir(parents=True)
    assert find_cause(tmp_path, attempt, "n01") == Finding("none", "")
    leave_verdict(attempt, Finding("none", ""))
    assert list(attempt.iterdir()) == []
    assert mask(tmp_path, attempt, "a word") == "a word"


def test_where_the_next_attempt_begins_is_told_as_it_is(tmp_path: Path) -> None:
    assert "nothing is saved" in resume_point(tmp_path, [])
    (tmp_path / "checkpoints/journal").mkdir(parents=True)
    (tmp_path / "checkpoints/journal/0.log").write_text("x")
    assert "from the beginning, with what the journal holds" in resume_point(tmp_path, [])
    committed = {"event": "committed", "step": 20, "checkpoint": "iter_0000020"}
    assert (
        resume_point(tmp_path, [committed])
        == "it resumes from checkpoint iter_0000020 and the journal"
    )
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run.json").write_text(json.dumps({"checkpoint": {"save": str(elsewhere)}}))
    assert resume_point(tmp_path, [committed]) == "it resumes from checkpoint iter_0000020"
