"""Model and optimizer in Megatron's distributed checkpoint format (torch_dist).

Input: this rank's model and optimizer, and a folder on the shared file system. Output: a checkpoint
that any other layout can read ("fully_reshardable"). It is one part of a commit:
``rlpost.durable`` makes the whole commit durable. Collective: call ``Saver.start`` and ``load``
on every rank.

Every rank writes the elements that it holds. Data-parallel replicas of a weight each write a part
of it, and nothing is gathered. Besides the live tensors, a save needs only a host buffer of bounded
size, through which they are streamed to the files. A background save therefore reads live tensors:
call ``Writing.wait_copied`` before changing them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.optimizer import MegatronOptimizer

from rlpost.durable.torch_dist_folder import RELEASE, TRACKER, find_checkpoint
from rlpost.durable.verification import check_files
from rlpost.errors import CheckpointError
from rlpost.trainer import random_state
from rlpost.trainer.checkpoint_keys import fit_to_checkpoint, stored_key, stored_keys
from rlpost.trainer.frozen import any_frozen
from rlpost.trainer.layer_specs import implementation_name
from rlpost.trainer.lora.adapters import base_alone, check_stored, has_adapters
from rlpost.trainer.model_state import METADATA, keyed_chunks, model_state, objects_of, whole_state
from rlpost.trainer.outcomes import on_every_rank, same_on_every_rank
from rlpost.trainer.progress import SAVE_GROUP
from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.torch_dist.host_stream import HostBuffer, HostStream
from rlpost.trainer.torch_dist.optimizer_state import KEYS, ParameterState
from rlpost.trainer.torch_dist.reader import StoredTensors, files_without
from rlpost.trainer.torch_dist.shards import Chunk, Shard, chunks_of
from rlpost.trainer.torch_dist.writer import Contents, write
from rlpost.trainer.torch_dist.written import (
    OPTIMIZER_PREFIX,
    Regions,
    regions_of_model,
    state_shards,
    states_of,
    written_states,
    written_weights,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

MTP_KEYS = "mtp.layers."
"""Key prefix of the layer for multi-token prediction; identifies the error of a missing layer."""
UNREADABLE = (
    CheckpointingException,
    torch_checkpoint.CheckpointException,
    pickle.UnpicklingError,
    OSError,
    RuntimeError,  # raised by torch for a file that is not a torch archive
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Training progress of a checkpoint."""

    step: int
    num_optimizer_steps: int
    policy_version: int | None = None
    """Oldest version of the policy with these weights; None: not recorded."""


@dataclass(frozen=True, slots=True)
class Residence:
    """Location of offloaded tensors: ``of(tensor)`` has the values; hold ``lock`` to read them."""

    of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)


class Writing:
    """A save that a background thread completes."""

    def __init__(
        self, stream: HostStream, run: Callable[[], None], *, what: str, must_stay: bool
    ) -> None:
        """Start the thread; ``what`` is the prefix of error messages."""
        self.must_stay = must_stay
        """Whether the optimizer must not be offloaded before its state is copied."""
        self._stream = stream
        self._what = what
        self._error: BaseException | None = None
        stream.start()
        self._thread = threading.Thread(target=self._run, args=(run,), name="checkpoint")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether ``wait`` would block."""
        return self._thread.is_alive()

    def wait_copied(self, *, weights_only: bool = False, timeout_s: float) -> None:
        """Wait until tensors (or only weights) may change; see ``HostStream.wait_copied``."""
        self._stream.wait_copied(weights_only=weights_only, timeout_s=timeout_s)

    def wait(self) -> None:
        """Wait until every file is on disk.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        self.join()
        if self._error is not None:
            raise CheckpointError(f"{self._what}: {_message_of(self._error)}") from self._error

    def join(self) -> None:
        """Wait until nothing is written any more, whether or not it succeeded."""
        self._thread.join()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._error = error


class Saver:
    """Saves one model and optimizer; owns the host buffer and the process group of its saves.

    Construction is collective.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        *,
        buffer_bytes: int,
        residence: Residence | None = None,
        adapters: Mapping[str, object] | None = None,
    ) -> None:
        """Create the process group; the buffer is allocated by the first save.

        Args:
            chunks: the model chunks of this rank.
            optimizer: None to save only weights.
            buffer_bytes: bound of the host memory of a save, in addition to the tensors.
            residence: location of offloaded tensors.
            adapters: their settings, stored with them; None for a model without.
        """
        self._model = chunks
        self._adapters = adapters
        self._optimizer = optimizer
        self._residence = residence or Residence()
        self._buffer = HostBuffer(buffer_bytes)
        # For the save thread: training uses the others.
        self._group = dist.new_group(backend="gloo", group_desc=SAVE_GROUP)
        self._must_stay = optimizer is not None and not optimizer_state.is_live(optimizer)
        self._written = written_states(optimizer, regions_of_model(model_state(chunks)))
        self._has_frozen = any_frozen(chunks)

    def start(
        self, folder: str | Path, progress: Progress, *, with_random_state: bool = True
    ) -> Writing:
        """Start writing model, optimizer, progress and random generators into an existing folder.

        Files of tensors are flushed to disk; the small files are flushed by the commit. Call
        ``wait`` on the result before the next save.

        Raises:
            CheckpointError: the small files cannot be written; raised on every rank.
        """
        state = model_state(self._model)
        regions = regions_of_model(state)
        _, common = save_preprocess(
            state | self._common(progress, with_random_state), validate_access_integrity=False
        )
        failed = f"cannot write the checkpoint of step {progress.step} to {folder}"
        _on_first_rank(lambda: _write_small_files(Path(folder), common), failed)
        weights = self._chunked(written_weights(regions))
        everything = weights + self._chunked(self._states(regions))
        incomplete = OPTIMIZER_PREFIX if self._has_frozen else None
        contents = Contents(everything, objects_of(state, with_random_state), incomplete)
        stream = HostStream(
            everything,
            num_weights=len(weights),
            buffer=self._buffer,
            residence=self._residence.of,
            lock=self._residence.lock,
        )
        return Writing(
            stream,
            lambda: write(folder, contents, stream, group=self._group),
            what=failed,
            must_stay=self._must_stay,
        )

    def _common(self, progress: Progress, with_random_state: bool) -> dict[str, object]:
        """Plain values only, because they are read with ``weights_only``."""
        found: dict[str, object] = dataclasses.asdict(progress)
        found["content_metadata"] = METADATA | {
            "transformer_impl": implementation_name(self._model)
        }
        if self._adapters is not None:
            found["adapters"] = dict(self._adapters)
        if with_random_state:
            found["layout"] = random_state.layout()
        if self._optimizer is not None:
            found["adam_step"] = optimizer_state.num_steps(self._optimizer)
            found["uses_muon"] = optimizer_state.uses_muon(self._optimizer)
            found["optimizer"] = {"param_groups": optimizer_state.plain_groups(self._optimizer)}
        return found

    def _states(self, regions: Regions) -> list[Shard]:
        """Return the optimizer shards of this rank.

        There are none before the first step, when the weights determine the state.
        """
        if self._optimizer is None or optimizer_state.num_steps(self._optimizer) == 0:
            return []
        return states_of(self._optimizer, regions, self._written)

    def _chunked(self, shards: Sequence[Shard]) -> list[Chunk]:
        return [
            chunk
            for shard in shards
            for chunk in chunks_of(shard, max_bytes=self._buffer.slot_bytes)
        ]


def load(
    folder: str | Path,
    *,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    buffer_bytes: int,
    adapters: Mapping[str, object] | None = None,
) -> Progress:
    """Restore model and optimizer from ``folder``, which ``compare`` or the driver has compared.

    It was written at any layout. Without optimizer state in it, a warning says that Adam starts from
    scratch. With ``adapters``, their settings, the model keeps its base weights.

    Raises:
        CheckpointError: the folder holds no checkpoint of this model, or other adapters.
    """
    common = _read(lambda: dist_checkpointing.load_common_state_dict(str(folder)), folder)
    if (num_optimizer_steps := common.get("num_optimizer_steps")) is None:
        raise CheckpointError(f"{folder}: written by rlpost 0.1; resume it with rlpost 0.2.0")
    check_stored(folder, common.get("adapters"), adapters)
    is_same_layout = common.get("layout") == random_state.layout()
    state = model_state(chunks)
    regions = regions_of_model(state)
    loaded = _load(
        folder,
        chunks,
        state | ({random_state.KEY: random_state.sharded()} if is_same_layout else {}),
    )
    if is_same_layout:
        random_state.restore(loaded[random_state.KEY])
    elif "layout" in common:  # a critic's part has no random generators
        logger.info("%s has another layout: random generators restart from the seed", folder)
    optimizer_state.prime(optimizer)
    optimizer_state.take_model_weights(optimizer)
    if common.get("adam_step"):
        _check_kind(folder, optimizer, common.get("uses_muon", False))
        _read(
            lambda: _load_optimizer(StoredTensors(folder), optimizer, regions, buffer_bytes), folder
        )
        optimizer_state.give_float32_weights(optimizer)
        optimizer_state.set_num_steps(optimizer, common["adam_step"])
    elif "adam_step" not in common:
        logger.warning(
            "%s has no optimizer state (saved with --no-save-optim): Adam starts from scratch",
            folder,
        )
    return Progress(common["step"], num_optimizer_steps, common.get("policy_version"))


def create_folder(folder: Path, step: int) -> None:
    """Create the folder of a checkpoint on the first rank. Collective.

    Raises:
        CheckpointError: the folder cannot be created; raised on every rank.
    """
    _on_first_rank(
        lambda: folder.mkdir(parents=True, exist_ok=True, mode=0o700),
        f"checkpoint of step {step}: cannot create {folder}",
    )


def save_weights(
    folder: str | Path,
    *,
    chunks: Sequence[torch.nn.Module],
    buffer_bytes: int,
    saver: Saver | None = None,
    version: int | None = None,
) -> Saver:
    """Write only the weights, in Megatron-LM's layout of a release, which other tools can read.

    ``version`` of the policy is stored with them.

    Returns: The saver that was used, for a later call; a new one without ``saver``.

    Raises:
        CheckpointError: the folder cannot be written; raised on every rank.
    """
    release = Path(folder) / RELEASE
    failed = f"cannot write weights to {folder}"
    _on_first_rank(lambda: release.mkdir(parents=True, exist_ok=True), failed)
    saver = saver or Saver(chunks, None, buffer_bytes=buffer_bytes)
    saver.start(release, Progress(0, 0, version), with_random_state=False).wait()
    _on_first_rank(lambda: (Path(folder) / TRACKER).write_text(RELEASE), failed)
    return saver


def _on_first_rank(act: Callable[[], object], failed: str) -> None:
    """Act on the first rank, and wait for it. Raises CheckpointError on every rank."""
    on_every_rank(
        lambda: act() if dist.get_rank() == 0 else None,
        lambda problem: CheckpointError(f"{failed}: {problem}"),
    )


def load_weights(
    folder: str | Path, *, chunks: Sequence[torch.nn.Module], omitted: tuple[str, ...] = ()
) -> int | None:
    """Fill the weights of the model from the checkpoint in ``folder``, ignoring optimizer state.

    Adapters of the model, and tensors whose key begins with one of ``omitted``, keep their values.

    Returns: The version that ``save_weights`` stored with the weights; None if there is none.

    Raises:
        CheckpointError: the folder holds no checkpoint of this model, or adapters alone.
    """
    checkpoint = same_on_every_rank(lambda: find_checkpoint(folder), CheckpointError)
    if checkpoint is None:
        raise CheckpointError(f"{folder} holds no torch_dist checkpoint")
    compare(checkpoint, _read(lambda: files_without(checkpoint, OPTIMIZER_PREFIX), checkpoint))
    common = _read(lambda: dist_checkpointing.load_common_state_dict(str(checkpoint)), checkpoint)
    check_stored(checkpoint, common.get("adapters"), None)
    whole = whole_state(chunks)
    base: dict[str, object] = {key: base_alone(state) for key, state in whole.items()}
    _load(checkpoint, chunks, base, omitted=omitted)
    version: int | None = common.get("policy_version")
    return version


def compare(folder: str | Path, names: set[str] | None = None) -> None:
    """Compare files with their digests (``check_files``), which the ranks divide. Collective."""
    part, parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    _read(lambda: check_files(folder, names, part=part, parts=parts), folder)


def _load(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    state: dict[str, object],
    *,
    omitted: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Fill the model; returns the whole loaded state."""
    for key, _ in keyed_chunks(chunks) if omitted else ():
        parts = state[key]
        assert isinstance(parts, dict)
        state[key] = {
            name: part for name, part in parts.items() if not part.key.startswith(omitted)
        }
    keys = _read(lambda: stored_keys(folder), folder)
    digest = hashlib.blake2b("\n".join(sorted(keys)).encode(), digest_size=8).hexdigest()
    same_on_every_rank(lambda: f"{len(keys)} keys ({digest})", CheckpointError)
    fitted = fit_to_checkpoint(state, folder, keys, omitted)
    loaded = _readable(lambda: dist_checkpointing.load(fitted, str(folder)), folder)
    for key, chunk in keyed_chunks(chunks):
        # A model with adapters loads either these or its base.
        is_whole = not (omitted or has_adapters(chunks))
        chunk.load_state_dict(loaded[key], strict=is_whole)
    return loaded


def _check_kind(folder: str | Path, optimizer: MegatronOptimizer, stored_muon: bool) -> None:
    """Raise CheckpointError if the optimizer state is that of another optimizer."""
    if optimizer_state.uses_muon(optimizer) != stored_muon:
        stored, given = ("muon", "adam") if stored_muon else ("adam", "muon")
        raise CheckpointError(
            f"{folder} has the optimizer state of --optimizer {stored}, and --optimizer is {given}; use --optimizer "
            f"{stored}, or start from the weights of the checkpoint with --ref-load"
        )


def _load_optimizer(
    stored: StoredTensors, optimizer: MegatronOptimizer, regions: Regions, buffer_bytes: int
) -> None:
    """Load main weights and moments in place.

    States without live tensors are loaded in groups of about ``buffer_bytes``.
    """
    live: list[ParameterState] = []
    copied: list[ParameterState] = []
    for state in optimizer_state.parameter_states(optimizer):
        (live if state.store is None else copied).append(state)
    _fill(stored, live, regions, buffer_bytes)
    while copied:
        group: list[ParameterState] = []
        held = 0
        while copied and (not group or held < buffer_bytes):
            group.append(copied.pop())
            held += len(KEYS) * 4 * (group[-1].end - group[-1].start)
        _fill(stored, group, regions, buffer_bytes)


def _fill(
    stored: StoredTensors, states: Sequence[ParameterState], regions: Regions, buffer_bytes: int
) -> None:
    stored_chunks: list[Chunk] = []
    targets: dict[int, torch.Tensor] = {}
    kept = [state.tensors() for state in states]
    for state, tensors in zip(states, kept, strict=True):
        shards = state_shards(state, regions[state.parameter], (state.start, state.end))
        for shard, name in zip(shards, state.keys, strict=True):
            for chunk in chunks_of(shard, max_bytes=buffer_bytes):
                if (renamed := _as_stored(chunk, stored)) is not None:
                    stored_chunks.append(renamed)
            targets[id(shard)] = tensors[name]
    stored.read_into(stored_chunks, lambda chunk: chunk.within(targets[id(chunk.shard)]))
    for state, tensors in zip(states, kept, strict=True):
        if state.store is not None:
            state.store(tensors)


def _as_stored(chunk: Chunk, stored: StoredTensors) -> Chunk | None:
    """The chunk under its key in the checkpoint; None for a main weight that is not stored.

    For an optimizer that is not distributed, Megatron's own save names main weights ``fp32_param``,
    and stores none for a float32 model, whose weights serve as main weights.
    """
    main = f"{OPTIMIZER_PREFIX}param."
    chunk = dataclasses.replace(chunk, key=stored_key(chunk.key, stored))
    if chunk.key in stored or not chunk.key.startswith(main):
        return chunk
    key = stored_key(f"{OPTIMIZER_PREFIX}fp32_param.{chunk.key.removeprefix(main)}", stored)
    return dataclasses.replace(chunk, key=key) if key in stored else None


def _read(read: Callable[[], T], folder: str | Path) -> T:
    """Read what a rank needs alone. Collective; raises CheckpointError on every rank."""
    return on_every_rank(lambda: _readable(read, folder), CheckpointError)


def _readable(read: Callable[[], T], folder: str | Path) -> T:
    """Call ``read``; raise CheckpointError with the folder if it fails."""
    try:
        return read()
    except UNREADABLE as error:
        if isinstance(error, torch_checkpoint.CheckpointException) and MTP_KEYS in str(error):
            raise CheckpointError(
                f"{folder} has no layer for multi-token prediction, which --enable-mtp-training trains; use "
                "--enable-mtp-training false, or weights that have it (convert the Hugging Face folder again)"
            ) from error
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error


def _message_of(error: BaseException) -> str:
    """The error message, without the stack traces of all ranks that torch includes."""
    if not isinstance(error, torch_checkpoint.CheckpointException):
        return str(error)
    return "; ".join(
        f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())
    )


def _write_small_files(folder: Path, common: dict[str, object]) -> None:
    """Write Megatron's files other than tensors. Raises OSError."""
    held = io.BytesIO()
    # not to the file: on a full disk torch reports only "iostream error"
    torch.save(common, held)
    (folder / COMMON_STATE_FNAME).write_bytes(held.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
