"""Weights from one form into the other, at any layout: Hugging Face's folders and Megatron's torch_dist.

In: the place of this rank and the settings. Out: a folder in the other form. The model is built as for training but
without gradients and optimizer: a rank holds its own part of the weights and, beside them, one tensor at a time.
Collective: all ranks call the same methods in the same order.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from rlpost.actor import device, megatron_checkpoint, parallel
from rlpost.actor.architecture import mtp_problem
from rlpost.actor.model import build_model, inventory_of
from rlpost.actor.model_description import read_description
from rlpost.actor.mtp import CHECKPOINT_KEY
from rlpost.actor.parallel import Rendezvous
from rlpost.actor.settings import ActorSettings
from rlpost.actor.torch_dist.reader import Stored
from rlpost.actor.torch_dist_folder import find_checkpoint
from rlpost.weights.exporter import Exporter, export_folder
from rlpost.weights.files import tensor_files
from rlpost.weights.importer import import_weights
from rlpost.weights.inventory import MTP_MARK

logger = logging.getLogger(__name__)


def with_mtp_layer(settings: ActorSettings, source: str | Path) -> ActorSettings:
    """The settings with the layer for multi-token prediction built where ``source`` holds it.

    Converted once, it is there when it is to be trained; a run that does not train it ignores it.

    Raises:
        WeightError: ``source`` is a Hugging Face folder that cannot be read.
    """
    description = read_description(settings.hf_checkpoint, settings.model_args)
    if mtp_problem(description.family, description.hf_config) is not None:
        return settings
    folder = find_checkpoint(source)
    if folder is None:
        names = tensor_files(Path(source))
        has_layer = any(MTP_MARK in name for name in names)
    else:
        has_layer = CHECKPOINT_KEY in Stored(folder)
    return replace(settings, enable_mtp_training=has_layer)


class Converter:
    """This rank's part of a model that is only converted."""

    def __init__(self, settings: ActorSettings, rendezvous: Rendezvous) -> None:
        """Join the other ranks and build the model of ``settings.hf_checkpoint``.

        Raises WeightError or ConfigError when it is not supported or cannot be cut so, PlacementError when the layout
        does not fit the number of ranks.
        """
        description = self.description = read_description(settings.hf_checkpoint, settings.model_args)
        description.check_layout(settings)
        self.buffer_bytes = settings.save_buffer_bytes
        device.prepare(settings)
        parallel.initialise(rendezvous, settings, num_virtual_stages=description.num_virtual_stages(settings))
        self.chunks = build_model(description, settings)
        self.inventory = inventory_of(self.chunks, description)

    def from_hugging_face(self, folder: str | Path) -> None:
        """Fill the model from safetensors; raises WeightError when they do not fit."""
        import_weights(self.inventory, folder)

    def from_torch_dist(self, folder: str | Path) -> None:
        """Fill the model from a checkpoint written at any layout; raises CheckpointError when it does not fit."""
        megatron_checkpoint.load_weights(folder, chunks=self.chunks)

    def to_torch_dist(self, folder: str | Path) -> None:
        """Write a checkpoint of weights alone; raises CheckpointError when a rank cannot write."""
        megatron_checkpoint.save_weights(folder, chunks=self.chunks, buffer_bytes=self.buffer_bytes)

    def to_hugging_face(self, folder: str | Path) -> None:
        """Write safetensors with the configuration and the tokenizer of the settings' Hugging Face folder."""
        writes, description = dist.get_rank() == 0, self.description
        template = description.path.parent
        export_folder(Exporter(self.inventory), folder, template=template, config=description.hf_config, writes=writes)
        dist.barrier()

    def close(self) -> None:
        """Leave all groups."""
        parallel.destroy()
