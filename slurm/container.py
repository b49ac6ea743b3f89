"""The container of the agents: its settings and what is wrong with them. Pure.

Input: backend, image, mounts. Output: a ``Container`` that a batch file can hold. The run folder and
the code are always mounted; everything else that the run reads must be listed. ``slurm.batch.steps``
writes the arguments of pyxis and enroot, ``slurm.container_command`` the words of any other runtime.
With ``auto`` the job chooses (``container_choice``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slurm.container_command import template_problem
from slurm.errors import SpecError
from slurm.image import is_file_name

Backend = Literal["auto", "pyxis", "enroot", "command"]
BACKENDS = ("auto", "pyxis", "enroot", "command")

# Both tools split mount lists at ',' and ':' and expand '$'; enroot splits its table at blanks.
_PATH = r"/[A-Za-z0-9/._@%+=-]*"
_VARIABLE = r"\$[A-Z][A-Z0-9_]*"
_PLACE = rf"(?:{_VARIABLE}(?=[/:]|$))?(?:{_PATH})?"
_MOUNT = re.compile(
    rf"(?=[/$])(?P<source>{_PLACE})(?::(?P<target>(?=[/$]){_PLACE}))?(?::(?P<mode>ro|rw))?"
)
_VARIABLE_IMAGE = re.compile(rf"{_VARIABLE}[A-Za-z0-9/._@%+=-]*")
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9/._:@#+=$-]*(?:://[A-Za-z0-9/._:@#+=$-]+)?")


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a job's agents.

    Attributes:
        backend: ``pyxis`` (options of srun), ``enroot`` (a script on each node), ``command`` (the
            words of ``command``), or ``auto`` (detected; may be none).
        image: absolute path of a squashfs file; or a name in a registry, imported into ``cache``
            once; or ``$NAME``, a variable that holds either of these when the job is submitted.
            With ``command`` whatever its runtime takes; nothing is imported.
        mounts: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, absolute paths, which may begin with a
            variable ``$NAME``.
        cache: folder on the shared file system for imported images; needed for names. None for a
            variable: $RLPOST_IMAGE_CACHE, or runs/images in the job's $RLPOST_HOME.
        command: the template of ``slurm.container_command``; of backend ``command`` alone.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    backend: Backend
    image: str
    mounts: tuple[str, ...] = ()
    cache: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise SpecError(f"container: {self.backend!r}; use one of none, {', '.join(BACKENDS)}")
        if self.backend == "command":
            self._check_image_of_command()
        elif not _IMAGE.fullmatch(self.image) and not re.fullmatch(_VARIABLE, self.image):
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
        if self.backend == "command":
            self._check_command()
        has_cache = self.cache is not None and self.cache.startswith("/")
        if not has_cache and (self.is_imported or self.cache is not None):
            raise SpecError(
                f"image_cache: {self.cache!r}; set an absolute path to import image {self.image} into"
            )

    def _check_image_of_command(self) -> None:
        """Reject an image that is not one argument of a runtime, or would not be expanded."""
        is_expanded = not self.image.startswith("$") or _VARIABLE_IMAGE.fullmatch(self.image)
        is_argument = self.image.strip() and self.image.isprintable() and self.image[0] not in "-~"
        if not (is_argument and is_expanded):
            raise SpecError(
                f"container_image: {self.image!r}; give an absolute path, or a name that the runtime "
                "of --container-command takes, such as docker://REPOSITORY:TAG (no control "
                "characters, no leading '-' or '~'; after a leading $NAME only letters, digits and "
                "/._@%+=-)"
            )

    def _check_command(self) -> None:
        read_only = [mount for mount in self.mounts if mount.endswith(":ro")]
        if not self.command.isprintable():
            raise SpecError("container_command: contains a line break or another control character")
        problem = template_problem(self.command, read_only=read_only, has_mounts=bool(self.mounts))
        if problem:
            raise SpecError(f"container_command: {problem}")

    @property
    def targets(self) -> tuple[str, ...]:
        """Paths of the mounts inside the container."""
        targets = []
        for mount in self.mounts:
            match = _MOUNT.fullmatch(mount)
            assert match is not None
            targets.append(match["target"] or match["source"])
        return tuple(targets)

    @property
    def is_imported(self) -> bool:
        """Whether the image has to be imported first."""
        return (
            self.backend != "command"
            and not is_file_name(self.image)
            and not self.image.startswith("$")
        )


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
