"""Map state-dict keys to those of checkpoints from other tools.

Input: a state as ``sharded_state_dict`` returns it, and the folder of the checkpoint. Output: the
same state with the keys of the folder. There are two differences:

1. Without TransformerEngine, Megatron-core 0.16.1 names the norm before experts as if it were fused
   with a dense MLP.
2. Modules of TransformerEngine have ``_extra_state``, which is never read: TransformerEngine would
   unpickle it, and it has values with delayed FP8 scales alone, which the trainer refuses.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
)

from rlpost.errors import CheckpointError
from rlpost.trainer.outcomes import gather_objects
from rlpost.trainer.torch_dist.reader import read_metadata
from rlpost.trainer.weights.inventory import ENCODER

NORM_OF_EXPERTS, ONCE = ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
"""The part of a key that names the norm, and that of Megatron-core without TransformerEngine.

The keys of Adam's moments contain it too.
"""
EXTRA_STATE = "_extra_state"
_SHARD = "/shard_"  # Megatron appends the shard of an object other than a tensor to its key


def stored_keys(folder: str | Path) -> frozenset[str]:
    """Return the keys of the checkpoint in ``folder``.

    Raises:
        OSError: the folder holds no torch_dist checkpoint.
        pickle.UnpicklingError: its metadata would run code.
    """
    return frozenset(read_metadata(str(folder)).state_dict_metadata)


def fit_to_checkpoint(
    state: dict[str, object],
    folder: str | Path,
    stored: frozenset[str],
    omitted: tuple[str, ...] = (),
) -> dict[str, object]:
    """Rename the keys of ``state`` in place to those of the checkpoint in ``folder``. Collective.

    Call it between ``sharded_state_dict`` and ``dist_checkpointing.load``. Parts that the
    checkpoint lacks under every known key keep their key, and loading reports them. ``stored`` are
    the keys of the checkpoint, ``omitted`` prefixes of keys that the state lacks on purpose.

    Returns:
        ``state``.

    Raises:
        CheckpointError: it has the weights of another part of the encoder of images.
    """
    if ENCODER not in omitted:
        _check_encoder(folder, state, encoder_keys(stored))
    saved = {key.partition(_SHARD)[0] for key in stored}
    return dict_list_map_inplace(lambda part: fitted(part, saved), state)


def fitted(part: object, saved: set[str]) -> object:
    """Return one part of a state under its saved key.

    Values other than sharded parts are unchanged.
    """
    if not isinstance(part, ShardedBase):
        return part
    part.key = stored_key(part.key, saved)
    is_extra = isinstance(part, ShardedObject) and part.key.endswith(EXTRA_STATE)
    return LocalNonpersistentObject(None) if is_extra else part


def stored_key(key: str, saved: Container[str]) -> str:
    """Return the key of a tensor in a checkpoint: the trainer's, or that of another tool."""
    once = key.replace(NORM_OF_EXPERTS, ONCE)
    return key if key in saved or once not in saved else once


def encoder_keys(stored: Iterable[str]) -> frozenset[str]:
    """Return the keys that are weights of an encoder of images, which was trained."""
    return frozenset(key for key in stored if key.startswith(ENCODER))


def _check_encoder(folder: str | Path, state: Mapping[str, object], stored: frozenset[str]) -> None:
    """Raise CheckpointError if the checkpoint trained another part of the encoder of images.

    Collective: the first pipeline stage alone has the encoder. Otherwise its trained weights would be
    those of --hf-checkpoint, without a word.
    """
    parts = [part.key for part in nested_values(dict(state)) if isinstance(part, ShardedBase)]
    encoder_keys = {key for key in parts if key.startswith(ENCODER)}
    if stored == set().union(*gather_objects(encoder_keys)):
        return
    trained = sorted({key.removeprefix(ENCODER).partition(".")[0] for key in stored})
    what = f"the trained weights {', '.join(trained)} of" if trained else "no trained weights of"
    raise CheckpointError(
        f"{folder} has {what} the encoder of images, and --vision-tower asks for others; use its value and "
        "--multimodal-keys, or start from exported weights (--save-hf) as --hf-checkpoint"
    )
