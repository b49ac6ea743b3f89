"""Guess the cause of a failure from the last lines of a log. Pure.

Input: text of a log, or the message of ``files.tail`` about a missing log. Output: one sentence, or
nothing.
"""

from __future__ import annotations

import re

# (pattern, cause), first match first: messages of rlpost, Python, Ray 2.60, enroot and the kernel.
_CAUSES = (
    ("no space left on device", "a disk is full there"),
    ("holds no secret", "its run folder is not the shared one"),
    (
        "did not find the head",
        "a firewall or the wrong network is between it and the head; see --socket-ifname",
    ),
    ("setup command failed", "one of --setup-commands fails there"),
    (
        r"\[error\] no such file|invalid image format|superblock|uncompress failed",
        "its image is missing or damaged",
    ),
    (
        r"source path does not exist|enroot-mount: failed to mount: \S+ at \S+: no such file",
        "a folder of --container-mounts is missing there",
    ),
    (
        r"enroot-mount: failed to mount: \S+ at \S+: permission denied",
        "a folder of --container-mounts cannot be read there",
    ),
    (
        r"mkdir: cannot create directory|pyxis: couldn't mkdir",
        "enroot or pyxis cannot create its folder there",
    ),
    (
        r"failed to execute: /bin/(ba|da)?sh: permission denied",
        "ENROOT_DATA_PATH is on a file system mounted noexec there",
    ),
    (
        r"execve\(\): |exec: .*(not found|cannot execute)|failed to execute",
        "the interpreter is missing there",
    ),
    ("modulenotfounderror|no module named", "another Python environment or image is used there"),
    ("address already in use", "another process has one of the job's ports"),
    ("timed out during startup", "the machine is overloaded: Ray gives its raylet 30 s to start"),
    ("out of memory", "memory ran out"),
    (r"\boom\b|\boom-kill|oom_kill", "memory ran out"),
    ("permission denied", "a file or folder belongs to another user"),
    (
        "cannot be read: no such file",
        "its agent never started: the node is down, its image is still loading, or the run folder is not mounted",
    ),
)


def with_likely_cause(log: str) -> str:
    """The text, preceded by its likely cause if one is known."""
    lower = log.lower()
    cause = next((cause for words, cause in _CAUSES if re.search(words, lower)), None)
    return f"probably {cause}:\n{log}" if cause else log
