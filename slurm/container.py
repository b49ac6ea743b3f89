"""The container of a job's agents: what may be asked for, and the words that pyxis and enroot want. Pure.

Comes in: backend, image, mounts. Goes out: text for the batch script. The run's folder and the code are always mounted;
everything else that the run reads must be listed. What pyxis 0.24 and enroot 4.1 do, and what follows:

- of two --container-mounts the last one silently wins: there is one list;
- the image's /etc/environment beats the host's variables: those that must not be the image's are in --container-env,
  and the settings' own are set by ``env`` inside;
- PATH and working directory are the image's: the interpreter is one of the image, the folder is given;
- a container that is kept by name outlives its step: the name holds the job and its restart, and with raw enroot the
  node, because ENROOT_DATA_PATH may be shared by the nodes;
- an entrypoint may print, fork or change folders: none runs;
- a raw .sqsh is served by a process of the step that a signal to the step kills: enroot extracts it first
  (``enroot_start.sh``).

``auto`` leaves the choice to the job's first second, or to RLPOST_CONTAINER: ``container.sh``.
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
# Of the host's variables, those which win over the image's.
HOST_VARIABLES = ("PYTHONPATH", "RLPOST_HOME")

# Both tools split lists of mounts at ',' and ':' and enroot's table at blanks; '$' is theirs to expand as well.
_PATH = r"/[A-Za-z0-9/._@%+=-]*"
_VARIABLE = r"\$[A-Z][A-Z0-9_]*"
_PLACE = rf"(?:{_VARIABLE}(?=[/:]|$))?(?:{_PATH})?"
_MOUNT = re.compile(rf"(?=[/$])(?P<source>{_PLACE})(?::(?P<target>(?=[/$]){_PLACE}))?(?::(?P<mode>ro|rw))?")
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9/._:@#+=$-]*(?:://[A-Za-z0-9/._:@#+=$-]+)?")


@dataclass(frozen=True, slots=True)
class Container:
    """What the agents run in.

    Attributes:
        backend: ``pyxis`` (options of srun), ``enroot`` (a script on each node), or ``auto``: one of these, or none.
        image: absolute path of a squashfs file, or a name in a registry, which is imported into ``cache`` once; or
            ``$NAME``, a variable that holds either when the job is submitted.
        mounts: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, absolute paths, which may begin with a variable ``$NAME``.
        cache: folder on the shared file system for imported images; needed for names. None for a variable:
            $RLPOST_IMAGE_CACHE, or runs/images in the job's $RLPOST_HOME.

    Raises:
        SpecError: names the field, what it holds and what it may hold.
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
            raise SpecError(f"image_cache: {self.cache!r}; image {self.image} needs an absolute path to be imported to")

    @property
    def targets(self) -> tuple[str, ...]:
        """Where the mounts are to be seen inside."""
        return tuple(parts[1] for parts in _parts(self.mounts))

    @property
    def is_imported(self) -> bool:
        """Whether the image has to be imported first."""
        return not is_file_name(self.image) and not self.image.startswith("$")

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the job must find set; with ``auto`` it may do without an image."""
        image = () if self.backend == "auto" else (self.image,)
        found = (re.match(_VARIABLE, text) for text in (*image, *self.mounts))
        return tuple(dict.fromkeys(match[0][1:] for match in found if match))


def check_mountable(field: str, path: str | None) -> None:
    """Refuse a path that is mounted always and cannot be written in a list of mounts.

    Raises:
        SpecError: names the field.
    """
    if path is not None and not re.fullmatch(_PATH, path):
        raise SpecError(
            f"{field}: {path!r} is mounted into the container, and pyxis and enroot cannot quote what is beyond "
            "letters, digits and ._@%+=-; choose another place"
        )


def container_name(job_id: str, num_restarts: int | str) -> str:
    """What a job's start calls its containers. Raw enroot adds the node, whose data folder may be a shared one; pyxis
    puts ``pyxis_`` before it (scope "global") or ``pyxis_JOB_`` (scope "job")."""
    return f"rlpost_{job_id}_{num_restarts}"


# In the batch script.
_NAME = f'"{container_name("${SLURM_JOB_ID}", "${SLURM_RESTART_COUNT:-0}")}"'


def pyxis_options(container: Container) -> str:
    """Lines of the srun command, each with a backslash at its end. ``$image`` holds the path of the image."""
    always = ("$run_folder:$run_folder", "$RLPOST_HOME:$RLPOST_HOME")
    mounts = ",".join((*always, *(":".join(parts) for parts in _parts(container.mounts))))
    return f"""\
  --container-image="$image" --container-name={_NAME} --container-writable \\
  --container-mounts="{mounts}" --container-workdir="$RLPOST_HOME" \\
  --no-container-mount-home --no-container-entrypoint --container-env="{",".join(HOST_VARIABLES)}" \\
"""


def enroot_command(container: Container) -> str:
    """The line of the srun command that stands before the agent's, with a backslash at its end."""
    options = (f"{parts[0]}:{parts[1]}:x-create=auto,rbind{',ro' if parts[2:] else ''}" for parts in _mounts(container))
    return f"""\
  bash "$RLPOST_HOME/slurm/enroot_start.sh" "$image" {_NAME} {" ".join(f'"{option}"' for option in options)} -- \\
"""


def container_removal(backend: str, seconds: str = "60") -> str:
    """A line after the agents' end: each node removes its extracted image (``enroot_remove.sh``).

    Raw enroot always leaves one; pyxis does with its default scope "global", where this is done as far as it can be.

    Args:
        backend: ``enroot``, ``pyxis`` or text for the shell that gives one of these.
        seconds: how long it may take at most, as text for the shell.
    """
    step = f"timeout -k 1 {seconds} srun --ntasks-per-node=1 --overlap --mpi=none"
    script = f'bash "$RLPOST_HOME/slurm/enroot_remove.sh" {backend} {_NAME}'
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
