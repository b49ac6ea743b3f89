"""Read the initial weights of the policy on all ranks.

Input: the settings and the model of this rank. Output: its weights, from --ref-load if it is set, else
from --hf-checkpoint. Collective: call on every rank. A failure of one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlpost.config.tree import Config
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.errors import CheckpointError, WeightError
from rlpost.trainer import megatron_checkpoint
from rlpost.trainer.checkpoint_keys import encoder_keys, stored_keys
from rlpost.trainer.outcomes import on_every_rank, same_on_every_rank
from rlpost.trainer.vision.images import Images
from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights
from rlpost.trainer.weights.inventory import ENCODER, Inventory


def read_initial_weights(
    config: Config,
    chunks: Sequence[torch.nn.Module],
    inventory: Inventory,
    images: Images | None,
) -> None:
    """Fill the model; of ``images`` (None on ranks without them) only what is trained.

    Raises:
        WeightError, CheckpointError: the weights do not fit the model, or a rank cannot read them.
    """
    folder = config.checkpoint.ref_load or config.checkpoint.hf_checkpoint
    checkpoint = same_on_every_rank(lambda: find_checkpoint(folder), CheckpointError)
    if checkpoint is None:
        on_every_rank(lambda: import_weights(inventory, HuggingFaceFolder(folder)), WeightError)
        return
    lacks_encoder = config.trains_encoder and not same_on_every_rank(
        lambda: bool(encoder_keys(stored_keys(checkpoint))), CheckpointError
    )
    if lacks_encoder:
        read_encoder(config, images)
    omitted = (ENCODER,) if lacks_encoder else ()
    megatron_checkpoint.load_weights(folder, chunks=chunks, omitted=omitted)


def read_encoder(config: Config, images: Images | None, *, untrained_alone: bool = False) -> None:
    """Load the encoder of images of --hf-checkpoint, on the ranks that have it.

    With ``untrained_alone`` without its trained part, since the rest is in no checkpoint.

    Raises:
        WeightError: the weights do not fit it, or a rank cannot read them.
    """
    folder = config.checkpoint.hf_checkpoint

    def read() -> None:
        if images is not None:
            images.read_weights(folder, untrained_alone=untrained_alone)

    if config.takes_images:
        on_every_rank(read, WeightError)
