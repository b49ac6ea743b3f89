"""Convert weights between Hugging Face folders and Megatron's torch_dist, at any layout.

Input: the rendezvous of this rank, and the settings. Output: a folder in the other format. The
model is built as for training, but without gradients and optimizer. In addition to its shard of the
weights, a rank holds one tensor at a time. Collective: call on every rank, in order.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.config.plan.architecture import mtp_problem
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.durable.provenance import PROVENANCE_FILE, Provenance
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.errors import WeightError
from rlpost.trainer import device, megatron_checkpoint, parallel
from rlpost.trainer.checkpoint_keys import encoder_keys, stored_keys
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.model_description import read_description
from rlpost.trainer.mtp import CHECKPOINT_KEY
from rlpost.trainer.outcomes import on_every_rank
from rlpost.trainer.parallel import Rendezvous
from rlpost.trainer.torch_dist.reader import StoredTensors
from rlpost.trainer.vision.images import build_images
from rlpost.trainer.vision.trained import MERGERS
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.folder_export import export_folder
from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights
from rlpost.trainer.weights.inventory import ENCODER, MTP_MARK
from rlpost.trainer.weights.safetensors_files import tensor_files


def with_parts_of(config: Config, source: str | Path) -> Config:
    """Return the settings with the parts that ``source`` has besides the layers of the model.

    The layer for multi-token prediction: the converted checkpoint can then be used with and without
    ``--enable-mtp-training``. The trained weights of an encoder of images, from a checkpoint; and
    settings of its run that the files of an export state.

    Raises:
        WeightError: ``source`` is a Hugging Face folder that cannot be read.
        CheckpointError: the record of its settings in a checkpoint cannot be read.
    """
    folder = find_checkpoint(source)
    if folder is not None:
        config = _with_settings_of(config, folder)
    if folder is not None and (keys := encoder_keys(stored_keys(folder))):
        names = {key.removeprefix(ENCODER).partition(".")[0] for key in keys}
        which = "merger" if names <= set(MERGERS) else "all"
        config = with_values(config, multimodal_keys={"image": "images"}, vision_tower=which)
    description = read_description(config.checkpoint.hf_checkpoint, config.checkpoint)
    if mtp_problem(description.family, description.hf_config) is not None:
        return config
    if folder is None:
        tensors = tensor_files(Path(source))
        has_layer = any(MTP_MARK in name for name in tensors)
    else:
        has_layer = CHECKPOINT_KEY in StoredTensors(folder)
    return with_values(config, enable_mtp_training=has_layer)


def _with_settings_of(config: Config, checkpoint: Path) -> Config:
    """Add the settings of the run of ``checkpoint`` that its exports state, unless they are given."""
    record = checkpoint / PROVENANCE_FILE
    if not record.is_file():  # a conversion, or a checkpoint of Megatron-LM
        return config
    of_run = Provenance.from_json(record.read_text()).settings
    given = {
        "image_max_pixels": config.rollout.image_max_pixels,
        "override_hf_config": dict(config.checkpoint.override_hf_config),
    }
    stated = {key: of_run[key] for key, value in given.items() if not value and of_run.get(key)}
    return with_values(config, **stated) if stated else config


class Converter:
    """This rank's shard of a model that is only converted."""

    def __init__(self, config: Config, rendezvous: Rendezvous) -> None:
        """Join the other ranks and build the model of ``hf_checkpoint``.

        Raises:
            WeightError: the architecture is not supported.
            ConfigError: the model cannot be sharded this way.
            PlacementError: the layout does not fit the number of ranks.
        """
        description = self.description = read_description(
            config.checkpoint.hf_checkpoint, config.checkpoint
        )
        # No rows are routed, so no package of a dispatcher is needed.
        config = with_values(config, moe_token_dispatcher_type="alltoall", moe_enable_deepep=False)
        description.check_layout(config, trains=False)
        self._image_max_pixels = config.rollout.image_max_pixels
        self.buffer_bytes = config.checkpoint.save_buffer_bytes
        device.prepare(config)
        parallel.initialise(
            rendezvous, config, num_virtual_stages=description.num_virtual_stages(config)
        )
        self.chunks = build_model(description, config)
        if images := build_images(config, description, None):
            images.install(self.chunks[0])
        self.inventory = inventory_of(self.chunks, description)

    def from_hugging_face(self, folder: str | Path) -> None:
        """Fill the model from safetensors; raise WeightError if they do not fit."""
        on_every_rank(
            lambda: import_weights(self.inventory, HuggingFaceFolder(folder)), WeightError
        )

    def from_torch_dist(self, folder: str | Path) -> None:
        """Fill the model from a checkpoint of any layout.

        Raises CheckpointError if the checkpoint does not fit.
        """
        megatron_checkpoint.load_weights(folder, chunks=self.chunks)

    def to_torch_dist(self, folder: str | Path) -> None:
        """Write a checkpoint of the weights; raise CheckpointError if a rank cannot write."""
        megatron_checkpoint.save_weights(folder, chunks=self.chunks, buffer_bytes=self.buffer_bytes)

    def to_hugging_face(self, folder: str | Path) -> None:
        """Write safetensors, with configuration and tokenizer of ``hf_checkpoint``."""
        export_folder(
            Exporter(self.inventory),
            folder,
            template=self.description.path.parent,
            config=self.description.file_config,
            image_max_pixels=self._image_max_pixels,
        )

    def close(self) -> None:
        """Leave all groups."""
        parallel.destroy()
