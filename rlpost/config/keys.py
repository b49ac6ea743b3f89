"""Variables that hold a person's keys. They are the driver's alone: no process that it starts inherits them."""

from __future__ import annotations

from collections.abc import Mapping

WANDB = "WANDB_API_KEY"
KEYS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", WANDB)


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """The same environment without any key."""
    return {name: value for name, value in environ.items() if name not in KEYS}
