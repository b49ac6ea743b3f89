"""The checkpoint of --load that a run started from, recorded beside its own.

Input: the folder of --load at the first attempt. Output: the same checkpoint at every later attempt
until the run has its own: the run that writes to --load may commit newer ones, whose steps this run
has not trained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpost.durable.commit import COMMITTED, defect, write_durably
from rlpost.durable.run_files import read_again
from rlpost.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ORIGIN = "ORIGIN"


@dataclass(frozen=True, slots=True)
class Origin:
    """``checkpoint`` is its folder's name, empty if --load had none; ``digest`` of its manifest."""

    load: str
    checkpoint: str = ""
    digest: str = ""

    @property
    def content(self) -> str | None:
        """The checkpoint's name and digest, for a comparison; None without a checkpoint."""
        return f"{self.checkpoint} {self.digest[:16]}" if self.checkpoint else None


def origin_of(load: Path, checkpoint: Path | None) -> Origin:
    """Return the origin of a run that starts from ``checkpoint``. Raises OSError."""
    if checkpoint is None:
        return Origin(str(load))
    digest = read_again((checkpoint / COMMITTED).read_text).strip()
    return Origin(str(load), checkpoint.name, digest)


def read_origin(save: Path) -> Origin | None:
    """Return the origin that a run recorded; None if there is none. Raises CheckpointError."""
    path = save / ORIGIN

    def read() -> str | None:
        try:
            return path.read_text()
        except FileNotFoundError:
            return None

    try:
        text = read_again(read)
        return None if text is None else Origin(**json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; it says which checkpoint of --load the run started from. "
            "Repair the storage, or delete the file to start from the newest checkpoint of --load"
        ) from error


def record_origin(save: Path, origin: Origin, *, lane: Path) -> None:
    """Write the origin of a run. Raises OSError."""
    write_durably(save / ORIGIN, json.dumps(asdict(origin)) + "\n", beside=lane)


def find_origin(
    save: Path, origin: Origin, load: Path, unusable: Callable[[Path], str | None]
) -> tuple[bool, Path | None]:
    """Return whether a run resumes from ``origin``, and that checkpoint in ``load``, if any.

    It does not if --load names another folder now, without that checkpoint; a warning says what is
    lost. ``unusable`` returns why a checkpoint's state cannot be used.

    Raises ConfigError when the checkpoint is gone, CheckpointError when it is damaged, OSError when
    its manifest's digest cannot be read.
    """
    is_same = load.resolve() == Path(origin.load).resolve()  # also by another link
    if not origin.checkpoint and is_same:
        logger.info("--load %s had no checkpoint when this run started, so none is used", load)
        return True, None
    path = load / origin.checkpoint
    if (path / COMMITTED).exists() and origin_of(load, path).digest == origin.digest:
        problem = defect(path) or unusable(path)
        if problem is not None:
            raise CheckpointError(f"{path}, from which this run started: {problem}")
        return True, path
    if is_same:
        raise ConfigError(
            f"--load {load}: this run started from {origin.checkpoint}, which is no longer there as it "
            "was, and has committed no checkpoint since. Put it back, or delete "
            f"{save / ORIGIN} to start from the newest checkpoint there; what the run has trained and "
            "generated is then lost"
        )
    logger.warning(
        "--load was %s and is %s: the run starts from there, and what it has trained and generated "
        "is lost",
        *(origin.load, load),
    )
    return False, None
