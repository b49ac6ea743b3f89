"""The agents' container on one node: start it, enter it, remove what is left. Runs outside of it.

    python3 -I slurm/enroot.py start IMAGE NAME MOUNT... -- COMMAND...
    python3 -I slurm/enroot.py exec NAME COMMAND...
    python3 -I slurm/enroot.py remove pyxis|enroot NAME [FOLDER]
    python3 -I slurm/enroot.py remove-stale pyxis|enroot

``start`` and ``exec`` are for raw enroot; ``remove`` and ``remove-stale`` also for the containers
that remain on a node with pyxis' default scope "global". NAME is ``rlpost_JOB_RESTART``; a raw
enroot container is named NAME_NODE, because nodes may share ENROOT_DATA_PATH. ``remove`` removes
stale containers as well and, where there were any, leaves the file ``freed-NODE`` in FOLDER.

Only the standard library of Python 3.6 and no module of the project. ``-I``: a script would find
slurm/ on its path, whose queue.py hides that of the standard library.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Set

SQUEUE_S = 10.0
ENDING_S, ENDING_POLL_S = 10.0, 0.5
"""How long the removal waits for an agent that is still ending: it would delete the agent's files."""
RC = os.path.join(os.path.dirname(os.path.abspath(__file__)), "enroot_rc.sh")
PASSED = ("SLURM", "NVIDIA_", "CUDA_VISIBLE_", "RLPOST_")
"""Beginnings of the variables that a raw enroot container gets: it gets only those that are named."""
EXIT_NOT_FOUND = 127  # of a shell
FREED_FILE = "freed"
"""Beginning of the name of a file for each node whose disk a removal has freed."""
MB = 1 << 20


def node_name(environ: Mapping[str, str]) -> str:
    """Slurm's name of this node."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_root_of(mountinfo: str, container: str) -> bool:
    """Whether a process with this mountinfo (proc(5)) runs in a container.

    ``enroot list -f`` does not recognise running containers if ENROOT_DATA_PATH is a bind mount.
    The source of the process's root ends with the container's name in both cases.
    """
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) < 5 or fields[4] != "/":
            continue
        if fields[3].rpartition("/")[2] == container:
            return True
    return False


def start_time(stat: str) -> int:
    """Start time in ticks since boot: field 22 of ``/proc/PID/stat`` (proc(5)).

    The second field is the command in parentheses, which may contain blanks and parentheses.
    """
    return int(stat.rpartition(") ")[2].split()[19])


def oldest(started: Mapping[int, int]) -> Optional[int]:
    """The process that started first, which is the agent. Pids may wrap: their order says nothing."""
    return min(started, key=lambda pid: started[pid]) if started else None


def name_pattern(backend: str, node: str) -> str:
    """Regular expression for the containers of this node, with the job as its group."""
    if backend == "pyxis":
        return r"pyxis_rlpost_([0-9]+)_[0-9]+"
    return r"rlpost_([0-9]+)_[0-9]+_" + re.escape(node)


def jobs_of(names: Iterable[str], pattern: str) -> Dict[str, str]:
    """The job of each container whose name matches."""
    matches = ((name, re.fullmatch(pattern, name)) for name in names)
    return {name: match.group(1) for name, match in matches if match}


def stale(jobs: Mapping[str, str], own: str, queue: Optional[Set[str]]) -> List[str]:
    """Containers of earlier starts of the job ``own``, and of jobs that have left the queue.

    Args:
        jobs: the job of each container.
        queue: the jobs that Slurm knows; None if it gave no reliable answer. In doubt a container
            stays.
    """
    return sorted(
        name for name, job in jobs.items() if job == own or (queue is not None and job not in queue)
    )


def process_of(container: str) -> Optional[int]:
    """The agent's pid in a container of this node; None if no process runs in it."""
    started = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if is_root_of(_text(f"/proc/{pid}/mountinfo"), container):
                started[int(pid)] = start_time(_text(f"/proc/{pid}/stat"))
        except (OSError, ValueError, IndexError):  # has ended
            continue
    return oldest(started)


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")


def containers() -> List[str]:
    """Containers on this node, running or not; none without enroot."""
    return (_output(["enroot", "list"]) or "").split()


def jobs_in_queue(jobs: Iterable[str], own: str) -> Optional[Set[str]]:
    """Those of the jobs that Slurm knows; None if squeue gives no reliable answer."""
    # Query this job as well: an answer without it is incomplete.
    asked = ",".join([own, *sorted(jobs)])
    answer = _output(["squeue", "-h", "-j", asked, "-o", "%A"], timeout=SQUEUE_S)
    known = set((answer or "").split())
    return known if own in known else None


def _output(command: Sequence[str], timeout: Optional[float] = None) -> Optional[str]:
    """Standard output of a command; None if it fails or does not end in time."""
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            answer, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # A wrapper's children as well: they keep the pipe open.
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return answer.decode(errors="replace") if process.returncode == 0 else None


def remove_stale(backend: str) -> int:
    """Remove this node's stale containers in which no process runs; return how many.

    Never fails.
    """
    own_job = os.environ.get("SLURM_JOB_ID", "")
    jobs = jobs_of(containers(), name_pattern(backend, node_name(os.environ)))
    others = set(jobs.values()) - {own_job}
    queue = jobs_in_queue(others, own_job) if others else None
    num_removed = 0
    for name in stale(jobs, own_job, queue):
        if process_of(name) is None:
            _say(f"removing the container {name} of an earlier start")
            code = subprocess.call(["enroot", "remove", "--force", "--", name])
            num_removed += int(code == 0)
    return num_removed


def enroot_folder(variable: str) -> str:
    """ENROOT_DATA_PATH, ENROOT_CACHE_PATH or ENROOT_TEMP_PATH, as enroot finds it; or empty.

    The environment wins over enroot.conf, whose values are shell text (config::init in enroot.in).
    """
    return (_output(["bash", "-c", _READ_CONFIG, "bash", variable]) or "").strip()


# With the defaults of enroot.in.
_READ_CONFIG = r"""
for file in /etc/enroot/enroot.conf /etc/enroot/enroot.conf.d/*.conf; do
  [ -e "$file" ] && while IFS=$' \t=' read -r key value; do
    [ "$key" != "$1" ] || export "$key=${!key:-$(eval echo "$value")}"
  done <"$file"
done
: "${ENROOT_DATA_PATH:=${XDG_DATA_HOME:-$(echo ~)/.local/share}/enroot}"
: "${ENROOT_CACHE_PATH:=${XDG_CACHE_HOME:-$(echo ~)/.cache}/enroot}"
: "${ENROOT_TEMP_PATH:=${TMPDIR:-/tmp}}"
echo "${!1}"
"""


def free_space(name: str, folder: str) -> str:
    """A phrase such as ``ENROOT_TEMP_PATH /tmp: 12 MB free``.

    A folder that does not exist yet has the space of the nearest one above it.
    """
    existing = os.path.abspath(folder)
    while not os.path.isdir(existing) and existing != "/":
        existing = os.path.dirname(existing)
    try:
        disk = os.statvfs(existing)
    except OSError as error:
        return f"{name} {folder}: {error.strerror}"
    files = ", no file can be created" if disk.f_files and not disk.f_favail else ""
    return f"{name} {folder}: {disk.f_bavail * disk.f_frsize // MB} MB free{files}"


def remove(container: str) -> int:
    """Remove a container after its agent has ended; return 1 if a process still runs in it."""
    if container not in containers():
        return 0
    deadline = time.monotonic() + ENDING_S
    pid = process_of(container)
    while pid is not None and time.monotonic() < deadline:
        time.sleep(ENDING_POLL_S)
        pid = process_of(container)
    if pid is not None:
        return _fail(f"process {pid} still runs in the container {container}, which stays", 1)
    return subprocess.call(["enroot", "remove", "--force", "--", container])


def start(words: Sequence[str]) -> NoReturn:
    """Extract the image and become its agent: IMAGE NAME MOUNT... -- COMMAND...

    The image is extracted first: a signal to the step would kill the process that mounts a .sqsh.
    The agent replaces this process, because under proctrack/cgroup only the task itself gets those
    signals.
    """
    end = words.index("--")
    image, name, mounts, command = words[0], words[1], words[2:end], words[end + 1 :]
    container = f"{name}_{node_name(os.environ)}"
    # Remove the containers of killed starts on this node: a cancelled job cannot start a step for
    # that.
    remove_stale("enroot")
    _say(f"extracting the image {image}")
    code = subprocess.call(["enroot", "create", "--name", container, "--", image])
    if code != 0:
        space = free_space("ENROOT_DATA_PATH", enroot_folder("ENROOT_DATA_PATH"))
        sys.exit(_fail(f"enroot create failed (exit {code}); {space}", code))
    options = []
    for mount in mounts:
        options += ["--mount", mount]
    passed = sorted(variable for variable in os.environ if variable.startswith(PASSED))
    for variable in [*passed, "PYTHONPATH"]:
        options += ["--env", variable]
    become(["enroot", "start", "--rw", "--rc", RC, *options, "--", container, *command])


def enter(name: str, command: Sequence[str]) -> NoReturn:
    """Become a command in the container of this node's agent, with the agent's environment."""
    node = node_name(os.environ)
    container = f"{name}_{node}"
    pid = process_of(container)
    if pid is None:
        text = f"no process of the container {container} runs on {node}; see agent-{node}.log"
        sys.exit(f"{text} of the attempt")
    become(["enroot", "exec", "--", str(pid), *command])


def become(command: List[str]) -> NoReturn:
    """Replace this process. Python ignores some signals, and the command would inherit that."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    os.execvp(command[0], command)


def main() -> int:
    """The command line."""
    verb, words = sys.argv[1], sys.argv[2:]
    try:
        if verb == "start":
            start(words)
        if verb == "exec":
            enter(words[0], words[1:])
        if verb in ("remove", "remove-stale"):
            return remove_all(words[0], *words[1:])
    except FileNotFoundError as error:
        return _fail(f"{error.filename} is not on the PATH", EXIT_NOT_FOUND)
    return _fail(f"no verb {verb}; use start, exec, remove or remove-stale", 2)


def remove_all(backend: str, name: str = "", folder: str = "") -> int:
    """Remove this start's container, if it is named, and stale ones.

    Returns 1 if a process still runs in the container. With pyxis errors are neither reported nor
    returned: with scope "job" there is no such container, and enroot may not be installed.
    """
    is_pyxis = backend == "pyxis"
    if is_pyxis:
        use_environment_of_pyxis()
    if shutil.which("enroot") is None:
        return 0
    code = 0
    if name:
        own_name = f"pyxis_{name}" if is_pyxis else f"{name}_{node_name(os.environ)}"
        code = remove(own_name)
    if remove_stale(backend) and folder:
        with open(f"{folder}/{FREED_FILE}-{node_name(os.environ)}", "w"):
            pass
    return 0 if is_pyxis else code


def use_environment_of_pyxis() -> None:
    """pyxis uses neither the job's ENROOT variables nor its PATH; discard standard error."""
    for variable in [name for name in os.environ if name.startswith("ENROOT_")]:
        del os.environ[variable]
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin"
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def _say(text: str) -> None:
    print(f"{node_name(os.environ)}: {text}", flush=True)


def _fail(text: str, code: int) -> int:
    print(f"{node_name(os.environ)}: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
