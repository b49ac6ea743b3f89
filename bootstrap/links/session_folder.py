"""The folder of an attempt on a node: Ray's session and the temporary files of all its processes.

Input: the nominal path and the environment. Output: private folders, and TMPDIR, so that whatever a
library puts there (compiled kernels of TorchInductor, sockets, pickles) is out of reach of other
users. Ray's keeper removes the folders when all processes have ended.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.files import new_folder

LONGEST_TEMP = 70
"""Bytes of TMPDIR; engines open sockets in a folder below it, whose paths have at most 107."""


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """Private folders of an attempt; ``problem`` says why they could not be made."""

    path: Path
    temp: Path | None
    problem: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables for Ray and the driver."""
        return {} if self.temp is None else {"TMPDIR": str(self.temp)}

    @property
    def all(self) -> tuple[str, ...]:
        """Every folder to remove; none where they could not be made."""
        if self.problem:
            return ()
        return tuple(str(one) for one in (self.path, self.temp) if one is not None)

    def remove(self) -> None:
        """Remove all folders; used where Ray's keeper did not start."""
        for folder in self.all:
            shutil.rmtree(folder, ignore_errors=True)


def make_session_folder(nominal: str, environ: Mapping[str, str]) -> SessionFolder:
    """Make the folders; a failure is in ``problem``, for the report of the node."""
    try:
        path = new_folder(Path(nominal))
        return SessionFolder(path, _temp_folder(path, environ))
    except OSError as error:
        cause = f"{nominal}, the folder for Ray's session, cannot be made: {error.strerror}"
        return SessionFolder(Path(nominal), None, cause)


def is_short_enough(tmpdir: str, session: str) -> bool:
    """Whether the user's TMPDIR leaves room for the names of sockets; ``session``: folder's name."""
    return len(tmpdir.encode()) + len(session) < LONGEST_TEMP - len("/-12345678")


def _temp_folder(session: Path, environ: Mapping[str, str]) -> Path:
    """Return a folder in the user's TMPDIR where that is set, otherwise in the session's."""
    given = environ.get("TMPDIR")
    if given and is_short_enough(given, session.name):
        try:
            return Path(tempfile.mkdtemp(prefix=f"{session.name}-", dir=given))
        except OSError:
            pass  # Python and others pass over a TMPDIR that they cannot write to, too
    temp = session / "tmp"
    temp.mkdir(mode=0o700)
    return temp
