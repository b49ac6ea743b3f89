"""Features of SGLang servers by version, and checks of those that a run needs. Pure.

Input: the versions of the servers (``version`` of ``GET /server_info``) and the features that the
run needs. Output: an error that names the server, the missing feature and its purpose; and whether
optional features are present.

The table was determined from source and test runs of the versions OLDEST to NEWEST
(CONTRIBUTING.md: how to run another). A newer version is treated as NEWEST, with a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rlpost.errors import RolloutError

logger = logging.getLogger(__name__)

Version = tuple[int, int, int]
Feature = Literal[
    "weight updates", "updates amid answers", "update sessions", "checksum without CUDA"
]
OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
"""These versions and all in between were tested."""


@dataclass(frozen=True, slots=True)
class Known:
    """The first version with a feature, and its purpose in a run."""

    since: Version
    gives: str


FEATURES: Mapping[Feature, Known] = {
    "weight updates": Known(
        OLDEST, "new weights over a process group, memory or disk, under a version"
    ),
    # From 0.5.19 on each token's version is reported (meta_info.weight_versions), but before 0.5.21
    # no cache is flushed while a request waits.
    "updates amid answers": Known(
        (0, 5, 21), "answers that wait in the engine while it takes new weights"
    ),
    "update sessions": Known(
        (0, 5, 21), "begin_weight_update and end_weight_update around an update"
    ),
    "checksum without CUDA": Known((0, 5, 23), "checksums of an engine's weights on a CPU"),
}


def parse_version(text: str) -> Version | None:
    """Return the first three numbers of a version; None if it does not begin with three.

    Suffixes are ignored, as in ``0.5.10.post1`` and ``0.5.22.dev3+gabc``.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def has(version: str, feature: Feature) -> bool:
    """Return whether a version has a feature; an unreadable version counts as OLDEST."""
    return (parse_version(version) or OLDEST) >= FEATURES[feature].since


def check_servers(versions: Mapping[str, str], needed: Collection[Feature]) -> None:
    """Check that every server has the needed features.

    Args:
        versions: version by URL, as in ``GET /server_info``.

    Raises:
        RolloutError: names each server that lacks a feature, and the feature.
    """
    problems = []
    for url, text in versions.items():
        version = parse_version(text)
        lacking = [
            name for name in needed if version is not None and version < FEATURES[name].since
        ]
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
        elif lacking:
            says = "; ".join(
                f"{FEATURES[name].gives}: from {_dotted(FEATURES[name].since)} on"
                for name in lacking
            )
            problems.append(f"engine {url} runs SGLang {text}, which lacks {says}")
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
