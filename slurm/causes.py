"""Diagnose attempts that ended before their agents started, and whether a restart can help. Pure.

Input: per host, the end of its task as srun reports it and the last lines of its agent's log; the
launch output (``launch.log``, from srun or from the image import). Output: a ``Finding``, or None.

A failure is permanent only if the last lines of every host match a known permanent pattern and
every task exited without a signal: a preemption during the setup commands is not permanent.
Patterns of registry, network and disk failures take precedence, and unknown text counts as
transient. Only the standard library of Python 3.6 and later, see ``supervise``.
"""

import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from common.exit_codes import EXIT_CONFIG
from common.units import first_names

MAX_LINES = 8
MAX_CHARS = 1200
LAST_SIGNAL = 64
SIGN_LINES = 30  # number of last lines of a log in which a permanent pattern counts

# as text, or as JSON (common.log_format)
_AGENT_LINE = re.compile(
    r"^(?:(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d\.\d+ [A-Z]+ agent\["
    r'|\{"time": .*"source": "agent\[)',
    re.M,
)


_STAMPED = re.compile(r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\] ")


class Sign(NamedTuple):
    """A known permanent error; ``{}`` in ``what`` stands for the one group of ``pattern``."""

    pattern: str
    what: str
    remedy: str


# unshare(2) of enroot-nsenter, enroot-mksquashovlfs and pyxis: ENOSPC means a limit of 0, EINVAL a
# kernel without namespaces, EPERM and EACCES a policy; none of them a disk.
_NO_NAMESPACE = re.compile(
    r"(?:failed to create|couldn't unshare|failed to unshare) (?:user|mount) namespaces?: [^\n]+"
)
_NAMESPACE_REMEDY = (
    "ask the site to allow them on every node (sysctl user.max_user_namespaces and "
    "user.max_mnt_namespaces above 0; where they exist, kernel.unprivileged_userns_clone = 1 and "
    "kernel.apparmor_restrict_unprivileged_userns = 0), or use --container none"
)
# Messages of the kernel, curl, enroot, pip and Slurm about disks, networks, registries and memory.
# Of a namespace ENOSPC means its limit, not a disk (user_namespaces(7)).
_DISK_FULL = re.compile(r"(?<!namespaces: )no space left on device|disk quota exceeded", re.I)
_TRANSIENT = re.compile(
    r"temporary failure in name resolution|could not resolve host"
    r"|connection (?:refused|reset)|network is unreachable|no route to host|timed out"
    r"|(?:read|connect|gateway )time-?out"
    r"|returned error code: (?:000|408|429|5\d\d)|too many requests|stale file handle|input/output error"
    r"|transport endpoint is not connected|cannot allocate memory|out of memory|oom[-_]kill"
    r"|resource temporarily unavailable|device or resource busy|curl: \((?:5|6|7|18|28|35|52|55|56)\)",
    re.I,
)

_DISK_REMEDY = (
    "free space where df -h shows none, or choose others: ENROOT_TEMP_PATH, ENROOT_CACHE_PATH and --image-cache "
    "on the first node (import), ENROOT_DATA_PATH on each node (extraction), what the setup commands write"
)
_IMAGE_REMEDY = "correct --container-image; the file must be on every node, whole and readable (unsquashfs -s FILE)"
_PYTHON_REMEDY = (
    "install it in the image or environment, or with --setup-commands; "
    "`rlpost doctor --image`, where installed, lists them all"
)
_CREDENTIALS_REMEDY = (
    "correct --container-image or enroot's credentials (~/.config/enroot/.credentials)"
)
# Programs that exec a command: enroot-switchroot, slurmstepd.
_EXEC = r"(?:failed to execute|execve\(\)): "
_SHELL = r"(?:\S*/)?(?:ba|da)?sh"
_INTERPRETER_REMEDY = (
    "set --python to an interpreter that exists and runs on every node; in a container: a path of the "
    "image or a mount"
)
_LASTING = (
    Sign(
        f"({_NO_NAMESPACE.pattern})",
        "containers need user namespaces, which the host does not allow ({})",
        _NAMESPACE_REMEDY,
    ),
    # enroot's hook 98-nvidia.sh
    Sign(
        r"nvidia-container-cli: (\w+ error: (?:nvml error: driver|load library failed|driver).*)",
        "the GPU driver of the host cannot be used ({})",
        "ask the site to load or repair it there: nvidia-smi fails on the host too",
    ),
    Sign(
        r"nvidia-container-cli: (\w+ error: .*)",
        "the GPUs cannot be given to the container ({})",
        "ask the site: nvidia-container-cli info and nvidia-smi on the host show more",
    ),
    Sign(
        r"unrecognized option '?(--(?:no-)?container-[a-z-]+)",
        "srun does not know {}: this cluster has no pyxis",
        "use --container enroot or none, or ask the site for pyxis",
    ),
    Sign(
        r"setup command failed: (.+)",
        "the setup command `{}` failed",
        "run it on a node (`rlpost exec`, where installed, in a running job, or srun) and correct --setup-commands",
    ),
    Sign(
        r"No module named '?bootstrap\b",
        "rlpost's code is not visible",
        "mount the folder of the code on every node",
    ),
    Sign(r"No module named '?([\w.]+)", "the Python package {} is missing", _PYTHON_REMEDY),
    Sign(r"^ImportError: (.+)", "the agent cannot be imported ({})", _PYTHON_REMEDY),
    Sign(
        r"^(SyntaxError: .+)",
        "its Python cannot read rlpost's code ({})",
        "set --python to Python 3.11 or later",
    ),
    Sign(
        rf"{_EXEC}({_SHELL}: Permission denied)",
        "the container's own shell cannot be run ({})",
        "let ENROOT_DATA_PATH be on a file system without noexec (findmnt -T FOLDER shows it)",
    ),
    Sign(
        rf"(?:{_EXEC}|exec: (?:line \d+: )?)({_SHELL}: (?:No such file or directory|not found))",
        "the container has no shell ({})",
        "use an image with /bin/sh and, for --setup-commands, bash",
    ),
    Sign(
        rf"{_EXEC}({_SHELL}: Exec format error)",
        "the container's own shell cannot be run ({})",
        "use an image of this machine's architecture (uname -m)",
    ),
    Sign(
        r"execve\(\): (.+?: (?:No such file or directory|Permission denied|Exec format error))",
        "the interpreter cannot be run ({})",
        _INTERPRETER_REMEDY,
    ),
    Sign(
        r"exec: (?:line \d+: )?(.+?: (?:not found|cannot execute.*|Permission denied|No such file or directory))",
        "the interpreter cannot be run ({})",
        _INTERPRETER_REMEDY,
    ),
    Sign(
        r"env: [\u2018'\"]?(.+?)[\u2019'\"]?: (?:No such file or directory|Permission denied|Exec format error)",
        "the interpreter {} cannot be run",
        _INTERPRETER_REMEDY,
    ),
    Sign(r"failed to execute: (.+)", "the interpreter cannot be run ({})", _INTERPRETER_REMEDY),
    Sign(
        r"error while loading shared libraries: (.+)",
        "the interpreter cannot be run ({})",
        _INTERPRETER_REMEDY,
    ),
    Sign(
        r"--container-mounts: source path does not exist: (.+)",
        "the mount source {} does not exist",
        "correct --container-mounts",
    ),
    Sign(
        r"enroot-mount: failed to mount: (/\S*) at \S+: No such file or directory",
        "the mount source {} does not exist",
        "correct --container-mounts",
    ),
    Sign(
        r"enroot-mount: failed to mount: (/\S*) at \S+: Permission denied",
        "the mount source {} cannot be read (Permission denied)",
        "mount only what you can read on every node (--container-mounts)",
    ),
    Sign(
        r"enroot-mount: failed to (?:create (?:file|directory)|resolve path): \S+: "
        r"(?:Permission denied|Read-only file system|Not a directory|File exists)",
        "a mount target cannot be created in the container",
        "choose another target in --container-mounts",
    ),
    Sign(
        r"mkdir: cannot create directory .(\S+).: "
        r"(?:Permission denied|Read-only file system|Not a directory)",
        "enroot cannot create {}",
        "the site must set ENROOT_RUNTIME_PATH, ENROOT_DATA_PATH and ENROOT_CACHE_PATH in enroot.conf to folders that "
        "users can create, or create them in Slurm's prolog",
    ),
    Sign(
        r"pyxis: couldn't mkdir (\S+: (?:Permission denied|Read-only file system|No such file or directory))",
        "pyxis cannot create its folder ({})",
        "the site must correct runtime_path of pyxis in plugstack.conf",
    ),
    Sign(
        r"(enroot-\w+: failed to set capabilities): Operation not permitted",
        "this host's enroot lacks its capabilities ({})",
        "ask the site for the package enroot+caps, or import the image on another host (enroot import --output "
        "FILE.sqsh) and give the file as --container-image",
    ),
    Sign(
        r"\[ERROR\] Command not found: ([^\s,]+)",
        "enroot needs the program {}, which is missing",
        "ask the site to install it on every node, as enroot's documentation lists it",
    ),
    # With Basic authentication enroot ends without an error (docker::_authenticate in src/docker.sh).
    Sign(
        r"\[INFO\] (Authenticating with user: [^\n]*|Using credentials from file: [^\n]*)\s*\Z",
        "the registry refused the image to this user ({})",
        _CREDENTIALS_REMEDY,
    ),
    Sign(r"Invalid image format: (.+)", "the image {} is damaged or unreadable", _IMAGE_REMEDY),
    Sign(
        r"(SQUASHFS superblock|FATAL ERROR.*|[Ff]ailed to read (?:fragment|inode|directory|id|xattr) table.*"
        r"|\w*uncompress failed.*|[Ff]ile system corruption.*)",
        "the image is damaged ({})",
        _IMAGE_REMEDY,
    ),
    Sign(
        r"\[ERROR\] No such file or directory: (.+)",
        "the image or mount {} does not exist",
        _IMAGE_REMEDY,
    ),
    Sign(
        r"bash: (?:line \d+: )?(\S+): No such file or directory",
        "the file {} is not visible",
        "mount the folder of the code on every node",
    ),
    Sign(
        r"(URL \S+ returned error code: 40[0134][^\n]*)",
        "the image cannot be imported ({})",
        _CREDENTIALS_REMEDY,
    ),
    Sign(
        r"(Invalid image reference: .+|Could not parse digest information from .+)",
        "the image cannot be imported ({})",
        "correct --container-image",
    ),
    # Runtimes of --container-command: Charliecloud 0.31, Apptainer 1.4, podman 5.
    Sign(
        r"container command: (.+)",
        "the environment of the job does not reach the container ({})",
        "let --container-command pass it: no --cleanenv with Apptainer, --env-host with podman",
    ),
    Sign(
        r"(?:can(?:no|')t open '?|sh: )(/\S*/slurm/enter\.sh)",
        "the folder of the code is not visible in the container ({})",
        "add a word with {source} and {target} to --container-command, such as --bind={source}:{target}",
    ),
    Sign(
        r"(?:can't bind: source not found: |mount source |Error: statfs )(/[^\s:]*)",
        "the mount source {} does not exist",
        "correct --container-mounts",
    ),
    Sign(
        r"(?:can't bind: destination not found: |can't mkdir: |destination )"
        r"(/[^\s:]*)(?: doesn't exist in container|: Read-only file system| \()",
        "the mount target {} does not exist in the image",
        "create it in the image, or let the runtime do so (ch-run --write)",
    ),
    Sign(
        r"can't mkdir: (/[^\s:]*): File exists",
        "two nodes made the mount target {} in the same image at once",
        "make a target for the shared file system in the image and mount it first, such as --bind=/shared",
    ),
    Sign(
        r"(?:can't stat: |could not open image )(\S+): ",
        "the image {} does not exist or is damaged",
        "correct --container-image, which must be visible on every node",
    ),
    Sign(
        r"((?:can't init user\+mount namespaces|Failed to create user namespace): .+)",
        "the runtime cannot create namespaces ({})",
        "ask the site for user namespaces (sysctl user.max_user_namespaces), or use --container none",
    ),
    Sign(
        r"(?:ch-run: unrecognized option |unknown (?:shorthand )?flag: )(\S+)",
        "the container runtime does not know {}",
        "correct --container-command",
    ),
    Sign(
        r"(?:can't execve\(2\): |FATAL: +\")(\S+?)\"?: (?:No such file|executable file not found)",
        "the container has no program {}",
        "use an image with /bin/sh, and --python of the image",
    ),
)
_LASTING_PATTERNS = tuple((re.compile(sign.pattern, re.M), sign) for sign in _LASTING)

# What unsquashfs counts, and what pyxis and Slurm report after each failure of a container.
_NOISE = re.compile(
    r"^(?:slurmstepd\S*: (?:error: )?(?:pyxis:\s+)?)?"
    r"(?:created \d+ \w+|Parallel unsquashfs: .*|\d+ inodes \(.*|\[[=|/\\ -]*\] *\d+/\d+ .*"
    r"|child \d+ failed with error code: \d+|printing enroot log file:|couldn't start container"
    r"|spank: required plugin .*|Failed to invoke spank plugin stack)$"
)

_SECRETS = (
    (re.compile(r"(://)[^/\s@]+@"), r"\1***@"),
    (re.compile(r"(?i)(\bauthorization\b\s*[=:]\s*(?:\w+\s+)?)\S+"), r"\1***"),
    (
        re.compile(
            r"(?i)(\b[\w-]*(?:token|passw(?:or)?d|secret|api[_-]?key|credential)[\w-]*\s*[=:]\s*)\S+"
        ),
        r"\1***",
    ),
    (re.compile(r"\b(?:hf|ghp|gho|glpat|sk|nvapi)[_-][A-Za-z0-9_-]{16,}"), "***"),
)


class HostEnd(NamedTuple):
    """Evidence about the end of one host's task.

    ``how``: srun's message about its task, empty if there is none; ``words``: the last part of its
    agent's log.
    """

    how: str = ""
    words: str = ""

    @property
    def ended_by_itself(self) -> bool:
        """Whether the task failed without a signal: N below a shell gives 128 + N.

        Apptainer fails with 255.
        """
        code = re.fullmatch(r"Exited with exit code (\d+)", self.how)
        return code is not None and not 128 <= int(code[1]) <= 128 + LAST_SIGNAL

    @property
    def agent_began(self) -> bool:
        """Whether the agent itself logged something, so that every step before it succeeded."""
        return _AGENT_LINE.search(self.words) is not None


class Finding(NamedTuple):
    """Verdict (``config``: a restart cannot help, else ``failed``), cause, bad hosts."""

    verdict: str
    cause: str
    exclude: Sequence[str] = ()


def explain(ends: Mapping[str, HostEnd], launch: str, code: int = 0) -> Optional[Finding]:
    """Explain why the agents of an attempt without a verdict did not start; None if they did.

    Args:
        ends: every host of the job.
        launch: output of srun, or of the image import before it.
        code: exit code of srun, or of ``slurm.image`` if that failed.
    """
    is_alone = len(ends) == 1
    early = {}
    for host, end in ends.items():
        if not end.agent_began:
            stepd = _of_slurmstepd(host, launch, is_alone=is_alone, has_failed=bool(end.how))
            early[host] = HostEnd(end.how, stepd + end.words)
    signs = {host: _sign(end.words) for host, end in early.items()}
    failed = [host for host, end in early.items() if end.how or signs[host]]
    is_everywhere = len(early) == len(ends)
    if not failed:
        return _never_launched(launch, code) if is_everywhere else None
    is_lasting = is_everywhere
    for host, end in early.items():
        sign = signs[host]
        is_lasting = is_lasting and end.ended_by_itself and bool(sign and sign.is_lasting)
    parts = [
        _paragraph(hosts, early[hosts[0]], signs[hosts[0]])
        for hosts in _alike(failed, early, signs)
    ]
    return Finding(
        "config" if is_lasting else "failed",
        "\n".join(parts),
        () if is_everywhere else tuple(failed),
    )


def without_secrets(text: str, values: Sequence[str] = ()) -> str:
    """Replace these values, and anything that looks like a password, token or key, with ``***``."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= 6:
            text = text.replace(value, "***")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def last_words(text: str) -> str:
    """The last lines of a text, at most MAX_LINES and MAX_CHARS, without those that say nothing."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not _NOISE.search(line)] or lines
    return "\n".join(lines[-MAX_LINES:])[-MAX_CHARS:]


class _Known(NamedTuple):
    """An error found in a text."""

    what: str
    remedy: str = ""
    is_lasting: bool = False


def is_disk_full(text: str) -> bool:
    """Whether a text reports a full disk."""
    return _DISK_FULL.search(_NO_NAMESPACE.sub("", text)) is not None


def _sign(text: str) -> Optional[_Known]:
    full = _DISK_FULL.search(_NO_NAMESPACE.sub("", text))
    if full:
        return _Known(full[0], _DISK_REMEDY)
    transient = _TRANSIENT.search(text)
    if transient:
        return _Known(transient[0])
    newest = "\n".join(text.splitlines()[-SIGN_LINES:])
    for pattern, sign in _LASTING_PATTERNS:
        match = pattern.search(newest)
        if match:
            named = match[1].strip()[:200] if pattern.groups else ""
            return _Known(sign.what.format(named), sign.remedy, is_lasting=True)
    return None


def _of_slurmstepd(host: str, launch: str, *, is_alone: bool, has_failed: bool) -> str:
    """slurmstepd's messages in srun's output; with one node they omit the host name.

    Since Slurm 25.11 they begin with a time and never name the host: they count for each host whose
    task failed before its agent started.
    """
    begins = [f"slurmstepd-{host}:"] + (["slurmstepd:"] if is_alone else [])
    lines = [
        line
        for line in launch.splitlines()
        if line.startswith(tuple(begins)) or (has_failed and _STAMPED.match(line))
    ]
    return "".join(f"{line}\n" for line in lines)


def _never_launched(launch: str, code: int) -> Optional[Finding]:
    """Finding if nothing started: the image import failed, or srun refused."""
    words, sign = last_words(launch), _sign(launch)
    if not words:
        return None
    if code == EXIT_CONFIG:  # slurm.image gave the reason
        return Finding("config", words.splitlines()[-1])
    remedy = f"\nremedy: {sign.remedy}" if sign and sign.remedy else ""
    if sign and sign.is_lasting:
        return Finding("config", f"{sign.what}{remedy}\nlast lines:\n{words}")
    what = "the nodes could not be started"
    if "enroot import" in launch:
        what = "the image could not be imported"
    named = f" ({sign.what})" if sign else ""
    return Finding("failed", f"{what}{named}{remedy}\nlast lines:\n{words}")


def _alike(
    hosts: Sequence[str], ends: Mapping[str, HostEnd], signs: Mapping[str, Optional[_Known]]
) -> Sequence[Sequence[str]]:
    """Group hosts that failed in the same way."""
    groups: Dict[object, List[str]] = {}
    for host in hosts:
        groups.setdefault((signs[host], ends[host].how), []).append(host)
    return list(groups.values())


def _paragraph(hosts: Sequence[str], end: HostEnd, sign: Optional[_Known]) -> str:
    what = sign.what if sign else "the task ended before its agent started"
    lines = [f"{first_names(hosts)}: {what}" + (f" ({end.how})" if end.how else "")]
    if sign and sign.remedy:
        lines.append(f"remedy: {sign.remedy}")
    words = last_words(end.words)
    lines.append(
        f"last lines of {hosts[0]}:\n{words}" if words else f"agent-{hosts[0]}.log is empty"
    )
    return "\n".join(lines)
