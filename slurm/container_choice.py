"""Choose the container of a job: pyxis, enroot or none. Python 3.6.

Input: the backend of the settings, the image, the environment, and what this host has. Output: the
choice and its reason; or an error with all that is missing. The job chooses in its first second
with the rule that a login node checks before submission.

``auto`` is $RLPOST_CONTAINER. If that is unset: pyxis if srun has --container-image, else enroot if
it is on the PATH, else none. Login nodes may lack the enroot that compute nodes have: outside a job
a missing enroot is no error.
"""

import os
import shutil
import socket
import subprocess
from typing import Mapping, NamedTuple, Sequence, Tuple

from slurm.errors import SpecError

ANSWER_S = 20.0
CHOICES = ("pyxis", "enroot", "none")


class Tools(NamedTuple):
    """The container tools of a host."""

    pyxis: bool
    enroot: bool


def tools_here(environ: Mapping[str, str]) -> Tools:
    """Look for the tools on this host."""
    path = environ.get("PATH", os.defpath)
    try:
        done = subprocess.run(
            [shutil.which("srun", path=path) or "srun", "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=ANSWER_S,
            env=dict(environ),
        )
        answer = done.stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = b""
    has_enroot = shutil.which("enroot", path=path) is not None
    return Tools(pyxis=b"--container-image" in answer, enroot=has_enroot)


def choose(
    backend: str,
    image: str,
    variables: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Tuple[str, str]:
    """The container that this host gives a job, and a line with the reason.

    Args:
        backend: auto, pyxis, enroot or command.
        image: path or name; empty if unknown.
        variables: names that must be set in the environment, with or without a container.

    Raises:
        SpecError: the backend is not available, or a variable is wrong or missing; with the remedy.
    """
    return decide(backend, image, variables, environ, tools_here(environ))


def decide(
    backend: str, image: str, variables: Sequence[str], environ: Mapping[str, str], tools: Tools
) -> Tuple[str, str]:
    """``choose`` for a host with these tools. Pure."""
    asked = environ.get("RLPOST_CONTAINER", "")
    missing = [name for name in variables if not environ.get(name)]
    chosen, why, without = backend, "the cluster profile says so", "--container none"
    problems = []
    if backend == "auto":
        chosen, why = _automatic(asked, tools)
        without = "RLPOST_CONTAINER=none"
        if chosen != "none" and not image:
            problems.append(
                f"RLPOST_IMAGE is not set, and the container is {chosen} ({why}); export "
                "RLPOST_IMAGE=/path/image.sqsh (or a name in a registry), or "
                "RLPOST_CONTAINER=none to run without a container"
            )
            missing.insert(0, "RLPOST_IMAGE")
    elif asked not in ("", backend):
        why += f", RLPOST_CONTAINER={asked} has no effect"
    if missing:
        problems.append(
            f"not set: {' '.join(missing)}; export before sbatch, or fill jobs/clusters/site.toml "
            "and make jobs"
        )
    problems += _unavailable(chosen, why, without, environ, tools)
    if chosen != "none" and image and not image.startswith("/") and _is_path(image):
        problems.append(f"RLPOST_IMAGE={image}: not an absolute path; use /path/image.sqsh")
    if problems:
        raise SpecError("\n".join(problems))
    if chosen == "none" and image:
        why += f"; the image {image} is not used"
    return chosen, f"{chosen}: {why}"


def _automatic(asked: str, tools: Tools) -> Tuple[str, str]:
    """What ``auto`` stands for, and why."""
    if asked:
        if asked not in CHOICES:
            raise SpecError(
                f"RLPOST_CONTAINER={asked} is not a choice; use pyxis, enroot or none, or unset "
                "it to have it detected"
            )
        return asked, f"RLPOST_CONTAINER={asked}"
    if tools.pyxis:
        return "pyxis", "srun --help lists --container-image"
    if tools.enroot:
        return "enroot", "enroot is on the PATH and srun has no --container-image"
    return "none", "srun has no --container-image and enroot is not on the PATH"


def _unavailable(
    chosen: str, why: str, without: str, environ: Mapping[str, str], tools: Tools
) -> Sequence[str]:
    """Why the chosen tool cannot be used on this host; empty if it can."""
    host = socket.gethostname()
    if chosen == "pyxis" and not tools.pyxis:
        return [
            f"pyxis ({why}): srun --help lists no --container-image on {host}, so this cluster has "
            f"no pyxis; choose enroot where it is installed, or {without}"
        ]
    is_in_job = bool(environ.get("SLURM_JOB_ID"))
    if chosen == "enroot" and is_in_job and not tools.enroot:
        return [
            f"enroot ({why}): enroot is not on the PATH of {host}; install it, or choose {without}"
        ]
    return []


def _is_path(image: str) -> bool:
    """Whether an image that is no absolute path is meant as a path."""
    return image.endswith(".sqsh") or image.startswith(".")
