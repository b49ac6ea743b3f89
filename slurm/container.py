"""The container of the agents: validate it, render pyxis and enroot arguments. Pure.

Input: backend, image, mounts. Output: text for the batch script. The run folder and the code are
always mounted; everything else that the run reads must be listed. Behaviour of pyxis 0.24 and
enroot 4.1, and the consequences:

- Of two --container-mounts options the last one silently wins: pass a single list.
- The image's /etc/environment overrides the host's variables: --container-env lists those that the
  host must set, and ``env`` sets the settings' variables inside the container.
- PATH and working directory come from the image: use an interpreter of the image, and pass the
  working directory.
- A named container outlives its step: its name contains the job and its restart count and, with raw
  enroot, the node, because nodes may share ENROOT_DATA_PATH.
- An entrypoint may print, fork or change the directory: disable it.
- A raw .sqsh is mounted by a process of the step, which a signal to the step kills: extract the
  image first (``enroot.py``).

With ``auto``, ``container.sh`` chooses when the job starts, unless RLPOST_CONTAINER is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slurm.errors import SpecError
from slurm.image import is_file_name

Backend = Literal["auto", "pyxis", "enroot"]
BACKENDS = ("auto", "pyxis", "enroot")
# Host variables that override the image's.
HOST_VARIABLES = ("PYTHONPATH", "RLPOST_HOME")

# Both tools split mount lists at ',' and ':' and expand '$'; enroot splits its table at blanks.
_PATH = r"/[A-Za-z0-9/._@%+=-]*"
_VARIABLE = r"\$[A-Z][A-Z0-9_]*"
_PLACE = rf"(?:{_VARIABLE}(?=[/:]|$))?(?:{_PATH})?"
_MOUNT = re.compile(
    rf"(?=[/$])(?P<source>{_PLACE})(?::(?P<target>(?=[/$]){_PLACE}))?(?::(?P<mode>ro|rw))?"
)
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9/._:@#+=$-]*(?:://[A-Za-z0-9/._:@#+=$-]+)?")


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a job's agents.

    Attributes:
        backend: ``pyxis`` (options of srun), ``enroot`` (a script on each node), or ``auto``
            (detected; may be none).
        image: absolute path of a squashfs file; or a name in a registry, imported into ``cache``
            once; or ``$NAME``, a variable that holds either of these when the job is submitted.
        mounts: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, absolute paths, which may begin with a
            variable ``$NAME``.
        cache: folder on the shared file system for imported images; needed for names. None for a
            variable: $RLPOST_IMAGE_CACHE, or runs/images in the job's $RLPOST_HOME.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    backend: Backend
    image: str
    mounts: tuple[str, ...] = ()
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise SpecError(f"container: {self.backend!r}; use one of none, {', '.join(BACKENDS)}")
        if not _IMAGE.fullmatch(self.image) and not re.fullmatch(_VARIABLE, self.image):
            raise SpecError(
                f"container_image: {self.image!r}; give an absolute path of a .sqsh file, or a name such as "
                "nvcr.io/nvidia/pytorch:25.01-py3 or docker://nvcr.io#nvidia/pytorch:25.01-py3"
            )
        for mount in self.mounts:
            if not _MOUNT.fullmatch(mount):
                raise SpecError(
                    f"container_mounts: {mount!r}; write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths "
                    "of letters, digits and ._@%+=- (pyxis and enroot cannot quote others)"
                )
        has_cache = self.cache is not None and self.cache.startswith("/")
        if not has_cache and (self.is_imported or self.cache is not None):
            raise SpecError(
                f"image_cache: {self.cache!r}; set an absolute path to import image {self.image} into"
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """Paths of the mounts inside the container."""
        return tuple(parts[1] for parts in _parts(self.mounts))

    @property
    def is_imported(self) -> bool:
        """Whether the image has to be imported first."""
        return not is_file_name(self.image) and not self.image.startswith("$")

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that must be set; with ``auto`` the image is optional."""
        image = () if self.backend == "auto" else (self.image,)
        found = (re.match(_VARIABLE, text) for text in (*image, *self.mounts))
        return tuple(dict.fromkeys(match[0][1:] for match in found if match))


def check_mountable(field: str, path: str | None) -> None:
    """Reject a path that is always mounted but cannot be quoted in a mount list.

    Raises:
        SpecError: names the field.
    """
    if path is not None and not re.fullmatch(_PATH, path):
        raise SpecError(
            f"{field}: {path!r} is mounted into the container, and pyxis and enroot can only quote letters, digits "
            "and ._@%+=-; choose another path"
        )


def container_name(job_id: str, num_restarts: int | str) -> str:
    """Container name for one start of a job.

    Raw enroot appends the node, because nodes may share the data folder; pyxis prepends ``pyxis_``
    (scope "global") or ``pyxis_JOB_`` (scope "job").
    """
    return f"rlpost_{job_id}_{num_restarts}"


# In the batch script.
_ON_EACH_NODE = "srun --ntasks-per-node=1 --overlap --mpi=none"
_ENROOT = 'python3 -I "$RLPOST_HOME/slurm/enroot.py"'
_NAME = f'"{container_name("${SLURM_JOB_ID}", "${SLURM_RESTART_COUNT:-0}")}"'


def pyxis_options(container: Container) -> str:
    """Lines of the srun command, each ending in a backslash; ``$image`` is a path."""
    mounts = ",".join(":".join(parts) for parts in _mounts(container))
    return f"""\
  --container-image="$image" --container-name={_NAME} --container-writable \\
  --container-mounts="{mounts}" --container-workdir="$RLPOST_HOME" \\
  --no-container-mount-home --no-container-entrypoint --container-env="{",".join(HOST_VARIABLES)}" \\
"""


def enroot_command(container: Container) -> str:
    """Line of the srun command before the agent's command, ending in a backslash."""
    options = (
        f"{parts[0]}:{parts[1]}:x-create=auto,rbind{',ro' if parts[2:] else ''}"
        for parts in _mounts(container)
    )
    return f"""\
  {_ENROOT} start "$image" {_NAME} {" ".join(f'"{option}"' for option in options)} -- \\
"""


def stale_removal() -> str:
    """Command before the agents' start that removes what earlier pyxis containers left on each node.

    Otherwise a disk needs space for two images. Raw enroot does so itself, before it extracts the
    image.
    """
    return f"timeout -k 1 60 {_ON_EACH_NODE} {_ENROOT} remove-stale pyxis"


def container_removal(backend: str, seconds: str = "60", folder: str = "") -> str:
    """Line after the agents' end: each node removes its extracted image (``enroot.py``).

    Raw enroot always leaves one. pyxis leaves one with its default scope "global"; removal is best
    effort there.

    Args:
        backend: ``enroot``, ``pyxis`` or shell text that expands to one of these.
        seconds: timeout, as shell text.
        folder: where nodes leave a file if they freed space of earlier starts, as shell text.
    """
    step = f"timeout -k 1 {seconds} {_ON_EACH_NODE}"
    script = f"{_ENROOT} remove {backend} {_NAME} {folder}".rstrip()
    return f'{step} {script} || log "a container may be left on a node; the next run there removes it"\n'


def _mounts(container: Container) -> Iterable[tuple[str, ...]]:
    yield "$run_folder", "$run_folder"
    yield "$RLPOST_HOME", "$RLPOST_HOME"
    yield from _parts(container.mounts)


def _parts(mounts: Iterable[str]) -> Iterable[tuple[str, ...]]:
    """(source, target) or (source, target, "ro")."""
    for mount in mounts:
        match = _MOUNT.fullmatch(mount)
        assert match is not None
        both = (match["source"], match["target"] or match["source"])
        yield (*both, "ro") if match["mode"] == "ro" else both
