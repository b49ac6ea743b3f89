"""Versions of SGLang servers: which a run accepts, and what they can do. Pure.

Input: the versions of the servers (``version`` of ``GET /server_info``). Output: an error that names
the servers that are too old; and whether an optional feature is present.

The versions OLDEST to NEWEST were tested (CONTRIBUTING.md: how to run another). A newer version is
treated as NEWEST, with a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from rlpost.errors import RolloutError

logger = logging.getLogger(__name__)

Version = tuple[int, int, int]
OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
"""These versions and all in between were tested. Weights arrive over a process group, memory or
disk, under a version, from OLDEST on.
"""
UPDATES_AMID_ANSWERS = (0, 5, 21)
"""From this version on, answers wait in the engine while it takes new weights.

From 0.5.19 on each token's version is reported (meta_info.weight_versions), but before 0.5.21 no
cache is flushed while a request waits.
"""


def parse_version(text: str) -> Version | None:
    """Return the first three numbers of a version; None if it does not begin with three.

    Suffixes are ignored, as in ``0.5.10.post1`` and ``0.5.22.dev3+gabc``.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def has_updates_amid_answers(version: str) -> bool:
    """Whether a version has UPDATES_AMID_ANSWERS; an unreadable version counts as OLDEST."""
    return (parse_version(version) or OLDEST) >= UPDATES_AMID_ANSWERS


def check_servers(versions: Mapping[str, str]) -> None:
    """Check that no server is too old. ``versions``: as in ``GET /server_info``, by URL.

    Raises:
        RolloutError: names each server that is.
    """
    problems = []
    for url, text in versions.items():
        version = parse_version(text)
        if version is None:
            logger.warning(
                "engine %s says version %r, which cannot be read; taken as %s",
                url,
                text,
                _dotted(OLDEST),
            )
        elif version < OLDEST:
            problems.append(
                f"engine {url} runs SGLang {text}; {_dotted(OLDEST)} or newer is needed"
            )
        elif version > NEWEST:
            logger.warning(
                "engine %s runs SGLang %s; the newest that was tried is %s",
                url,
                text,
                _dotted(NEWEST),
            )
    if problems:
        raise RolloutError("\n".join(problems))


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
