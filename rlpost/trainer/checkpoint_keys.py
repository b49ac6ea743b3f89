"""Map state-dict keys to those of checkpoints from other tools.

Input: a state as ``sharded_state_dict`` returns it, and the folder of the checkpoint. Output: the
same state with the keys of the folder. There are two differences:

1. Without TransformerEngine, Megatron-core 0.16.1 names the norm before experts as if it were fused
   with a dense MLP.
2. Modules of TransformerEngine have ``_extra_state``, which is never read: TransformerEngine would
   unpickle it, and it has values with delayed FP8 scales alone, which the trainer refuses.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
)

from rlpost.trainer.torch_dist.reader import read_metadata

NORM_OF_EXPERTS, ONCE = ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
"""The part of a key that names the norm, and that of Megatron-core without TransformerEngine.

The keys of Adam's moments contain it too.
"""
EXTRA_STATE = "_extra_state"
_SHARD = "/shard_"  # Megatron appends the shard of an object other than a tensor to its key


def fit_to_checkpoint(state: dict[str, object], folder: str | Path) -> dict[str, object]:
    """Rename the keys of ``state`` in place to those of the checkpoint in ``folder``.

    Call it between ``sharded_state_dict`` and ``dist_checkpointing.load``, on every rank. Parts
    that the checkpoint lacks under every known key keep their key, and loading reports them.

    Returns:
        ``state``.

    Raises:
        OSError: the folder holds no torch_dist checkpoint.
        pickle.UnpicklingError: its metadata would run code.
    """
    metadata = read_metadata(str(folder))
    saved = {key.partition(_SHARD)[0] for key in metadata.state_dict_metadata}
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
