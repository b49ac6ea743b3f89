"""Write the weights of all ranks as files, and report a failure on every rank.

Input: the exporter of this rank, and a folder. Output: a Hugging Face folder, or a version for
engines that read files. Collective: call on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from rlpost.actor import parallel
from rlpost.actor.lora.targets import peft_settings
from rlpost.actor.model_description import ModelDescription
from rlpost.actor.settings import ActorSettings
from rlpost.errors import CheckpointError, SyncError
from rlpost.weights.delta import Written
from rlpost.weights.exporter import Exporter, export_folder
from rlpost.weights.inventory import Inventory
from rlpost.weights.peft_folder import write_peft_folder
from rlpost.weights.sent_weights import LastSent


def export(
    exporter: Exporter,
    inventory: Inventory,
    folder: str | Path,
    description: ModelDescription,
    settings: ActorSettings,
) -> None:
    """Write the weights as a Hugging Face folder with configuration and tokenizer.

    With adapters these are the merged weights, or with ``lora_export`` peft the adapters alone.

    Raises:
        CheckpointError: the folder cannot be written; raised on every rank.
    """
    writes = dist.get_rank() == 0
    if settings.lora_export == "peft":
        adapters = peft_settings(settings)
        write = partial(write_peft_folder, inventory, folder, settings=adapters, writes=writes)
    else:
        write = partial(
            export_folder,
            exporter,
            folder,
            template=settings.hf_checkpoint,
            config=description.hf_config,
            writes=writes,
        )
    written_everywhere(write, folder)


def written_everywhere(write: Callable[[], None], folder: str | Path) -> None:
    """Call ``write``.

    Raises:
        CheckpointError: it failed on a rank; raised on every rank.
    """
    problem = None
    try:
        write()
    except OSError as error:
        problem = str(error)
    if problem := parallel.first_problem(problem):
        raise CheckpointError(f"cannot write weights to {folder}: {problem}")


def write_version(
    last_sent: LastSent,
    folder: Path,
    version: int,
    description: ModelDescription,
    settings: ActorSettings,
    *,
    whole: bool,
) -> Written | None:
    """Write a version for engines that read files: all weights, or a delta to the last version.

    Returns:
        What the writing rank wrote; None on other ranks.

    Raises:
        SyncError: the version cannot be written; raised on every rank.
    """
    export_all = partial(
        export_folder,
        template=settings.hf_checkpoint,
        config=description.hf_config,
        writes=dist.get_rank() == 0,
    )
    problem, written = None, None
    try:
        if whole:
            written = last_sent.write_whole(folder, version, export_all)
        else:
            written = last_sent.write_delta(folder, version)
    except OSError as error:
        problem = str(error)
    if problem := parallel.first_problem(problem):
        raise SyncError(f"cannot write weights of version {version} to {folder}: {problem}")
    return written
