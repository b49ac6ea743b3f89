"""Environment variables with API keys.

Only the driver has them; its child processes do not inherit them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WANDB = "WANDB_API_KEY"
EXTERNAL_ENGINES = "SGLANG_API_KEY"
"""The key of engines that are not ours (--rollout-external-engine-addrs)."""
TEACHER = "OPD_TEACHER_API_KEY"
"""The key of a teacher on a server (--opd-teacher-url)."""
KEYS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    WANDB,
    EXTERNAL_ENGINES,
    TEACHER,
)
SUFFIX = "_ENGINES_KEY"
"""Ending of the names of other variables with keys (``api_key_env`` of a group of engines)."""


REFERENCE = re.compile(r"\$\{(\w+)\}")
"""A text that names a variable with a key instead of writing it, in arguments of environments."""


def is_for_engines(name: str) -> bool:
    """Return whether a group of engines may send a variable's key to its servers.

    The user's tokens for the hub and W&B go to these services alone.
    """
    return name in (EXTERNAL_ENGINES, TEACHER) or name.endswith(SUFFIX)


def is_reference(value: object) -> bool:
    """Return whether a value names a variable."""
    return isinstance(value, str) and REFERENCE.fullmatch(value) is not None


def is_key(name: str) -> bool:
    """Return whether a variable holds a key."""
    return name in KEYS or name.endswith(SUFFIX)


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without any key."""
    return {name: value for name, value in environ.items() if not is_key(name)}
