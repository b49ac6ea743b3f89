"""Write the weights of all ranks as files, and report a failure on every rank.

Input: the exporter of this rank, and a folder. Output: a Hugging Face folder, or a PEFT folder of the
adapters. Collective: call on every rank.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from common.files import sync
from rlpost.config.plan.shard_plan import Unit
from rlpost.config.plan.weight_update import write_units
from rlpost.config.tree import Config
from rlpost.images.processor import write_bound
from rlpost.trainer.lora.adapters import peft_settings
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.outcomes import on_every_rank
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.folder_export import cannot_write, export_folder
from rlpost.trainer.weights.hf_folder import copy_files, processor_files, tokenizer_files
from rlpost.trainer.weights.inventory import Inventory
from rlpost.trainer.weights.peft_folder import peft_tensors, write_peft_folder
from rlpost.trainer.weights.whole_tensors import BUCKET_BYTES


def export(
    exporter: Exporter,
    inventory: Inventory,
    folder: str | Path,
    description: ModelDescription,
    config: Config,
) -> None:
    """Write the weights as a Hugging Face folder with configuration and tokenizer.

    With adapters these are the merged weights, or with ``lora_export`` peft the adapters alone.

    Raises:
        CheckpointError: the folder cannot be written; raised on every rank.
    """
    if config.lora.lora_export == "peft":
        adapters = peft_settings(config)
        tensors = peft_tensors(inventory, adapters)

        def write() -> None:
            if dist.get_rank() == 0:
                write_peft_folder(tensors, inventory, folder, adapters)
                _copy_inputs(config, Path(folder))

        on_every_rank(write, partial(cannot_write, folder))
    else:
        export_merged(exporter, folder, description, config)


def _copy_inputs(config: Config, folder: Path) -> None:
    """Copy what turns texts and images into tokens, with the bound on images of the run.

    Training may have used other templates, tokens or bounds than the hub's model has.
    """
    base = Path(config.checkpoint.hf_checkpoint)
    copy_files([*tokenizer_files(base), *processor_files(base)], base, folder)
    if config.rollout.image_max_pixels is not None:
        write_bound(folder, config.rollout.image_max_pixels)


def export_merged(
    exporter: Exporter,
    folder: str | Path,
    description: ModelDescription,
    config: Config,
    units: Sequence[Unit] = (),
) -> None:
    """As ``export``, always all weights; ``units`` of the first rank are listed for engines."""
    export_folder(
        exporter,
        folder,
        template=config.checkpoint.hf_checkpoint,
        config=description.file_config,
        image_max_pixels=config.rollout.image_max_pixels,
        bucket_bytes=min(config.sync.update_weight_buffer_size, BUCKET_BYTES),
    )
    on_every_rank(partial(write_units, Path(folder), units), partial(cannot_write, folder))


def write_adapters(inventory: Inventory, folder: Path, config: Config) -> int | None:
    """Write the adapters as a PEFT folder that appears complete.

    Returns:
        Bytes of the folder on the writing rank; None on other ranks.

    Raises:
        CheckpointError: the folder cannot be written; raised on every rank.
    """
    temporary, adapters = temporary_of(folder), peft_settings(config)
    tensors = peft_tensors(inventory, adapters)

    def write() -> int | None:
        if dist.get_rank() != 0:
            return None
        shutil.rmtree(temporary, ignore_errors=True)
        write_peft_folder(tensors, inventory, temporary, adapters)
        return commit(temporary, folder)

    return on_every_rank(write, partial(cannot_write, folder))


def temporary_of(folder: Path) -> Path:
    """Return the hidden folder beside ``folder`` in which it is written."""
    return folder.with_name(f".{folder.name}")


def commit(temporary: Path, folder: Path) -> int:
    """Flush ``temporary`` to disk and rename it to ``folder``, replacing it; returns its bytes."""
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    # A fresh name: on NFS a folder stays as long as a reader holds one of its files.
    replaced = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return sum(path.stat().st_size for path in folder.iterdir())
