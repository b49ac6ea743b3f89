"""Why an attempt ended before its agents started, from real output of pyxis, enroot, bash, Python
and srun. Invariants: only a permanent failure of every host ends a job; no secret is quoted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.durable.commit import checkpoint_name
from slurm.causes import Finding, HostEnd, explain, last_words, without_secrets
from slurm.evidence import find_cause, keep_freed_hosts, leave_verdict, mask, resume_point

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


def by_pyxis(enroot: str) -> str:
    """What pyxis 0.24 prints when enroot fails with these lines."""
    lines = ["child 4711 failed with error code: 1", "failed to create container filesystem"]
    lines += ["printing enroot log file:", *(f"    {line}" for line in enroot.splitlines())]
    said = "".join(f"slurmstepd-n01: error: pyxis: {line}\n" for line in lines)
    return said + PYXIS_END


PYXIS_END = """\
slurmstepd-n01: error: pyxis: couldn't start container
slurmstepd-n01: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n01: error: Failed to invoke spank plugin stack
"""
# enroot 4.1.2
ENROOT_MISSING = "[ERROR] No such file or directory: /images/rl.sqsh\n"
ENROOT_CORRUPT = "[ERROR] Invalid image format: /images/rl.sqsh\n"
ENROOT_MOUNT = (
    "enroot-mount: failed to mount: /nonexistent/data at /run/enroot/data-0/rlpost_21_0_n01/data: "
    "No such file or directory\n"
)
ENROOT_MOUNT_REFUSED = ENROOT_MOUNT.replace("No such file or directory", "Permission denied")
ENROOT_MOUNT_TARGET = (
    "enroot-mount: failed to resolve path: /run/enroot/data-0/rlpost_21_0_n01/etc/passwd/x: "
    "Not a directory\n"
)
RC_NO_BASH = "/proc/self/fd/3: exec: line 3: bash: not found\n"
RC_NO_PYTHON = "/proc/self/fd/3: exec: line 3: /opt/python: not found\n"
NOEXEC = "enroot-switchroot: failed to execute: /bin/sh: Permission denied\n"
NO_SHELL = "enroot-switchroot: failed to execute: /bin/bash: No such file or directory\n"
NO_BASH = "slurmstepd-n01: error: execve(): bash: No such file or directory\n"
OTHER_CPU = "enroot-switchroot: failed to execute: /bin/sh: Exec format error\n"
NO_FOLDER = "mkdir: cannot create directory '/run/user/1234': Permission denied\n"
NO_FOLDER_UTF8 = "mkdir: cannot create directory \u2018/run/enroot\u2019: Read-only file system\n"
PYXIS_NO_FOLDER = (
    "slurmstepd-n01: error: pyxis: couldn't mkdir /run/pyxis/1234: Permission denied\n"
)
UNSQUASHFS = """\
[INFO] Extracting squashfs filesystem...
Parallel unsquashfs: Using 2 processors
8125 inodes (7563 blocks) to write
created 6230 files
created 904 directories
created 1895 symlinks
created 8 devices
created 0 fifos
created 0 sockets
created 0 hardlinks
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


CH_RUN = "ch-run[11292]: error: "  # of Charliecloud 0.31
CH_NO_IMAGE = CH_RUN + "can't stat: /images/rl: No such file or directory (ch_core.c:255 2)\n"
CH_NO_SOURCE = CH_RUN + "can't bind: source not found: /nowhere (ch_core.c:104)\n"
CH_NO_TARGET = CH_RUN + "can't mkdir: /images/rl/data: Read-only file system (ch_misc.c:409 30)\n"
CH_MADE_TWICE = CH_RUN + "can't mkdir: /images/rl/data: File exists (ch_misc.c:409 17)\n"
CH_NO_PASSWD = CH_RUN + "can't bind: destination not found: /images/rl/etc/passwd (ch_core.c:111)\n"
CH_NO_SHELL = CH_RUN + "can't execve(2): sh: No such file or directory (ch_core.c:410 2)\n"
CH_NAMESPACES = (
    CH_RUN + "can't init user+mount namespaces: No space left on device (ch_core.c:436 28)\n"
)
CH_OPTION = "ch-run: unrecognized option '--bnd=/usr'\n"
SIF_MISSING = (
    "FATAL:   could not open image /images/rl.sif: failed to retrieve path for /images/rl.sif: "
    "lstat /images/rl.sif: no such file or directory\n"
)
SIF_SOURCE = (
    "FATAL:   container creation failed: mount hook function failure: mount /nowhere->/data error: "
    "while mounting /nowhere: mount source /nowhere doesn't exist\n"
)
SIF_TARGET = (
    "FATAL:   container creation failed: mount hook function failure: mount "
    "/var/apptainer/mnt/session/storage->/storage error: while mounting "
    "/var/apptainer/mnt/session/storage: destination /storage doesn't exist in container\n"
)
SIF_SHELL = 'FATAL:   "sh": executable file not found in $PATH\n'
SIF_OPTION = 'Error for command "exec": unknown flag: --nvv\n'
NO_ENVIRONMENT = "container command: SLURM_JOB_ID is not set inside\n"
NOT_MOUNTED = "sh: 0: cannot open /home/u/rlpost/slurm/enter.sh: No such file\n"  # dash
NOT_MOUNTED_BASH = "sh: /home/u/rlpost/slurm/enter.sh: No such file or directory\n"

IMPORT = "enroot import docker://r.org#rl/train:9 failed (exit 1):\n"
CAPABILITIES = (
    IMPORT + "[INFO] Converting whiteouts...\n"
    "enroot-aufs2ovlfs: failed to set capabilities: Operation not permitted\n"
)
BASIC_NONE = (
    IMPORT + "[INFO] Querying registry for permission grant\n"
    "[INFO] Authenticating with user: <anonymous>\n"
)
BASIC_WRONG = (
    IMPORT + "[INFO] Authenticating with user: bob\n"
    "[INFO] Using credentials from file: /home/bob/.config/enroot/.credentials\n"
)
IMPORT_DISK = (
    IMPORT + "tar: ./var/lib/pam/account: Cannot write: No space left on device\n"
    "on n01: ENROOT_TEMP_PATH /tmp: 0 MB free; --image-cache /images: 900 MB free\n"
)


NO_GPU_TOOL = "[ERROR] Command not found: nvidia-container-cli, see https://github.com/NVIDIA\n"
NO_DRIVER = [
    f"nvidia-container-cli: initialization error: {what}\n[ERROR] /etc/enroot/hooks.d/98-nvidia.sh "
    "exited with return code 1\n"
    for what in (
        "nvml error: driver not loaded",
        "nvml error: driver/library version mismatch",
        "load library failed: libnvidia-ml.so.1: cannot open shared object file: No such file",
    )
]
WRONG_DEVICE = "nvidia-container-cli: device error: 9: unknown device\n"
# errno of unshare(2): limit of 0, AppArmor and Debian's switch, SELinux, a kernel without them
REFUSALS = ("No space left on device", "Operation not permitted", "Permission denied")
NO_NAMESPACES = [
    words
    for why in (*REFUSALS, "Invalid argument")
    for words in (
        f"enroot-nsenter: failed to create user namespace: {why}\n",
        by_pyxis(f"enroot-nsenter: failed to create user namespace: {why}\n"),
        f"enroot-mksquashovlfs: failed to create mount namespace: {why}\n",
        f"slurmstepd-n01: error: pyxis: couldn't unshare mount namespace: {why}\n{PYXIS_END}",
    )
]


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
        (ENROOT_MISSING, "/images/rl.sqsh does not exist", "--container-image"),
        (ENROOT_CORRUPT, "/images/rl.sqsh is damaged", "--container-image"),
        (by_pyxis(ENROOT_TRUNCATED), "the image is damaged", "--container-image"),
        (ENROOT_MOUNT, "the mount source /nonexistent/data does not exist", "--container-mounts"),
        (by_pyxis(ENROOT_MOUNT), "the mount source /nonexistent/data", "--container-mounts"),
        (ENROOT_MOUNT_REFUSED, "source /nonexistent/data cannot be read", "--container-mounts"),
        (ENROOT_MOUNT_TARGET, "a mount target cannot be created", "--container-mounts"),
        (NOEXEC, "own shell cannot be run (/bin/sh: Permission denied)", "noexec"),
        (by_pyxis(NOEXEC), "own shell cannot be run (/bin/sh: Permission denied)", "noexec"),
        (NO_SHELL, "the container has no shell (/bin/bash: No such", "an image with /bin/sh"),
        (NO_BASH, "the container has no shell (bash: No such", "--setup-commands, bash"),
        (RC_NO_BASH, "the container has no shell (bash: not found)", "--setup-commands, bash"),
        (RC_NO_PYTHON, "the interpreter cannot be run (/opt/python: not found)", "--python"),
        (OTHER_CPU, "own shell cannot be run (/bin/sh: Exec format", "architecture"),
        (NO_FOLDER, "enroot cannot create /run/user/1234", "enroot.conf"),
        (NO_FOLDER_UTF8, "enroot cannot create /run/enroot", "enroot.conf"),
        (by_pyxis(NO_FOLDER), "enroot cannot create /run/user/1234", "enroot.conf"),
        (PYXIS_NO_FOLDER, "pyxis cannot create its folder (/run/pyxis/1234: Perm", "plugstack"),
        (EXECVE, "/opt/venv/bin/python: No such file", "--python"),
        (BASH_EXEC, "python3: not found", "--python"),
        (DASH_EXEC, "/opt/python: Permission denied", "--python"),
        (ENV_EXEC, "the interpreter python3 cannot", "--python"),
        (NO_PSUTIL, "package psutil is missing", "rlpost doctor --image"),
        (NO_CODE, "code is not visible", "mount"),
        (OLD_PYTHON, "SyntaxError", "3.11"),
        (SETUP, "pip install -r /models/more.txt", "--setup-commands"),
        (CH_NO_IMAGE, "the image /images/rl does not exist", "--container-image"),
        (CH_NO_SOURCE, "the mount source /nowhere does not exist", "--container-mounts"),
        (CH_NO_TARGET, "mount target /images/rl/data does not exist", "--write"),
        (CH_MADE_TWICE, "two nodes made the mount target /images/rl/data", "--bind=/shared"),
        (CH_NO_PASSWD, "mount target /images/rl/etc/passwd does not exist", "--write"),
        (CH_NO_SHELL, "the container has no program sh", "/bin/sh"),
        (CH_NAMESPACES, "cannot create namespaces (can't init user+mount", "max_user_namespaces"),
        (CH_OPTION, "does not know '--bnd=/usr'", "--container-command"),
        (SIF_MISSING, "the image /images/rl.sif does not exist", "--container-image"),
        (SIF_SOURCE, "the mount source /nowhere does not exist", "--container-mounts"),
        (SIF_TARGET, "the mount target /storage does not exist", "create it in the image"),
        (SIF_SHELL, "the container has no program sh", "/bin/sh"),
        (SIF_OPTION, "does not know --nvv", "--container-command"),
        (NO_ENVIRONMENT, "SLURM_JOB_ID is not set inside", "--env-host"),
        (NOT_MOUNTED, "/home/u/rlpost/slurm/enter.sh", "{source} and {target}"),
        (NOT_MOUNTED_BASH, "/home/u/rlpost/slurm/enter.sh", "{source} and {target}"),
        (NO_GPU_TOOL, "enroot needs the program nvidia-container-cli, which", "ask the site"),
        *((words, "the GPU driver of the host cannot", "nvidia-smi") for words in NO_DRIVER),
        (by_pyxis(NO_DRIVER[0]), "nvml error: driver not loaded", "nvidia-smi"),
        (WRONG_DEVICE, "the GPUs cannot be given to the container", "nvidia-container-cli info"),
        *((words, "need user namespaces", "max_user_namespaces") for words in NO_NAMESPACES),
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
    assert last_words(words).splitlines()[-1] in finding.cause


def test_apptainer_ends_a_task_with_255_which_is_no_signal() -> None:
    assert both(SIF_MISSING, "Exited with exit code 255").verdict == "config"


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
        (CAPABILITIES, "config", "enroot+caps"),
        (IMPORT + "[ERROR] Command not found: parallel\n", "config", "the program parallel"),
        (BASIC_NONE, "config", ".credentials"),
        (BASIC_WRONG, "config", ".credentials"),
        (BASIC_WRONG + "curl: (7) Failed to connect to r.org port 443\n", "failed", "curl: (7)"),
        (BASIC_WRONG + "[INFO] Authentication succeeded\n", "failed", "could not be imported"),
        (NO_FOLDER, "config", "enroot.conf"),
        (IMPORT_DISK, "failed", "ENROOT_TEMP_PATH /tmp: 0 MB free"),
        (IMPORT_DISK, "failed", "remedy: free space where df -h shows none"),
    ],
)
def test_a_step_that_never_was_is_explained_by_srun_or_the_import(
    launch: str, verdict: str, said: str
) -> None:
    finding = explain({"n01": HostEnd(), "n02": HostEnd()}, launch)
    assert finding is not None
    assert finding.verdict == verdict and said in finding.cause and finding.exclude == ()


def test_what_slurm_image_refuses_is_the_cause_itself() -> None:
    """Its exit code says that no retry helps; the same text with another code is no verdict."""
    refusal = (
        "--image-cache /images does not contain a, and bob cannot write to it; use another folder"
    )
    launch = f"/images/a.lock: cannot lock (x); importing without a lock\n{refusal}\n"
    ends = {"n01": HostEnd(), "n02": HostEnd()}
    assert explain(ends, launch, 78) == Finding("config", refusal)
    other = explain(ends, launch, 1)
    assert other is not None and other.verdict == "failed"


def test_the_last_lines_are_those_that_say_something() -> None:
    """Not what unsquashfs counts, nor what follows every failure of a container."""
    said = "slurmstepd-n01: error: pyxis: --container-mounts: source path does not exist: /nowhere"
    assert last_words(UNSQUASHFS + f"{said}\n" + PYXIS_END).splitlines() == [
        "[INFO] Extracting squashfs filesystem...",
        said,
    ]
    assert last_words(by_pyxis(UNSQUASHFS + NOEXEC)).splitlines()[-1].endswith(NOEXEC.strip())
    assert last_words("created 1 files\n") == "created 1 files"


@pytest.mark.parametrize("log", [ENROOT_DISK, by_pyxis(ENROOT_DISK), NO_PSUTIL])
@pytest.mark.parametrize("is_freed", [True, False])
def test_a_host_whose_full_disk_was_freed_is_not_excluded(
    tmp_path: Path, log: str, is_freed: bool
) -> None:
    (tmp_path / "agent-n02.log").write_text(log)
    (tmp_path / "exclude").write_text("n02\nn03\n")
    if is_freed:
        (tmp_path / "freed-n02").touch()
        (tmp_path / "freed-n03").touch()  # excluded for another reason
    kept = ["n03"] if is_freed and log != NO_PSUTIL else ["n02", "n03"]
    assert keep_freed_hosts(tmp_path) == sorted({"n02", "n03"} - set(kept))
    assert (tmp_path / "exclude").read_text().split() == kept


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
    committed = {"event": "committed", "step": 20, "checkpoint": checkpoint_name(20)}
    assert (
        resume_point(tmp_path, [committed])
        == f"it resumes from checkpoint {checkpoint_name(20)} and the journal"
    )
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run.json").write_text(json.dumps({"checkpoint": {"save": str(elsewhere)}}))
    assert (
        resume_point(tmp_path, [committed]) == f"it resumes from checkpoint {checkpoint_name(20)}"
    )
