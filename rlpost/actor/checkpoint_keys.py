"""Reading a checkpoint whose keys are not those that this version writes: of an earlier version, or of other tools.

Input: what is to be loaded, as ``sharded_state_dict`` gives it, and the folder. Output: the same with the keys that the
folder has. Two things differ:

1. Megatron-core 0.16.1 names the norm before experts, where there is no TransformerEngine, as if it were fused with a
   dense MLP; so did this trainer once.
2. ``_extra_state``, which TransformerEngine's modules have and others may lack. Without FP8 it is empty, so one that
   the checkpoint does not have is taken as empty.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from torch.distributed.checkpoint import FileSystemReader

NORM_OF_EXPERTS, ONCE = ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
"""The part of a key that says which norm, now and in older folders; Adam's moments have it too."""
EXTRA_STATE = "_extra_state"
_SHARD = "/shard_"  # Megatron appends the place of an object that is no tensor to its key


def fit_to_checkpoint(state: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """``state``, changed in place, with the keys under which the checkpoint in ``folder`` has its parts.

    Call it between ``sharded_state_dict`` and ``dist_checkpointing.load``, on every rank. A part that the checkpoint
    does not have under any known key is left alone: loading will name it.

    Raises:
        OSError: the folder holds no torch_dist checkpoint.
    """
    metadata = FileSystemReader(str(folder)).read_metadata()
    saved = {key.partition(_SHARD)[0] for key in metadata.state_dict_metadata}
    return dict_list_map_inplace(lambda part: fitted(part, saved), state)


def fitted(part: Any, saved: set[str]) -> Any:
    """One part of a state with the key that it has among those saved; what is no part of a model stays as it is."""
    if not isinstance(part, ShardedBase) or part.key in saved:
        return part
    part.key = stored_key(part.key, saved)
    if part.key in saved:
        return part
    if isinstance(part, ShardedObject) and part.key.endswith(EXTRA_STATE):
        return LocalNonpersistentObject(None)
    return part


def stored_key(key: str, saved: Container[str]) -> str:
    """The key under which a checkpoint has a tensor: its own, or that of older folders if it has that one."""
    once = key.replace(NORM_OF_EXPERTS, ONCE)
    return key if key in saved or once not in saved else once
