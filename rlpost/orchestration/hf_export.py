"""The weights as a Hugging Face folder beside a checkpoint (--save-hf): whole or not there.

In: the template of the folder's path, the step, and what writes the weights into a folder. Out: the folder. A failure
is logged and never ends a run: checkpoints do not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlpost.errors import CheckpointError, WeightError
from rlpost.files import sync

logger = logging.getLogger(__name__)


def folder_of(template: str, step: int) -> Path:
    """The folder of a step: ``{step}`` and ``{rollout_id}`` in the template stand for its number."""
    return Path(template.replace("{step}", str(step)).replace("{rollout_id}", str(step)))


async def export(template: str, step: int, write: Callable[[str], Awaitable[Any]]) -> None:
    """Let ``write`` fill a folder under another name, which then becomes the step's; one that is there is left alone.

    A template that names no step is one folder, which each export replaces.
    """
    target = folder_of(template, step)
    if target.exists() and folder_of(template, step) != folder_of(template, step + 1):
        logger.info("--save-hf: %s is there already", target)
        return
    started, writing = time.monotonic(), target.with_name(f".{target.name}.writing")
    try:
        await asyncio.to_thread(_empty, writing)
        await write(str(writing))
        await asyncio.to_thread(_publish, writing, target)
    except (CheckpointError, WeightError, OSError) as error:
        logger.error("--save-hf: the weights of step %d are not exported to %s: %s", step, target, error)
        return
    logger.info("--save-hf: weights of step %d in %s after %.1f s", step, target, time.monotonic() - started)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)


def _publish(writing: Path, target: Path) -> None:
    for path in [*writing.iterdir(), writing]:
        sync(path)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(writing, target)
    shutil.rmtree(old, ignore_errors=True)
