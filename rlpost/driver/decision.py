"""Decides whether a dead trainer is restarted within the attempt, or the attempt ends. Pure.

Input: the death, the recoveries before it, the settings. Output: None, or the reason why the whole
attempt restarts instead. The rules, in order:

    off       --max-trainer-recoveries 0
    twice     no step was trained since the last recovery: the same step would kill the next ranks
    too many  --max-trainer-recoveries recoveries lie within the last hour
    shared    engines on the trainer's GPUs hold their memory during a save (--colocate)
    inexact   the newest checkpoint lacks the optimizer (--no-save-optim)

A restart of the whole attempt is always correct, only slower, so every doubtful case takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["generate", "train", "sync", "save", "weights_hash"]
WINDOW_S = 3600.0

LOST = (
    "Connection closed by peer",  # gloo, torch's store
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "gloo/transport",
    "NCCL error",
    "NCCL watchdog",
    "ncclUnhandledCudaError",
    "ncclRemoteError",
    "ncclSystemError",
    "ncclInternalError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "uncorrectable ECC error",
)
REPEATS = ("CUDA out of memory", "OutOfMemoryError", "ncclInvalidUsage", "ncclInvalidArgument")
"""Errors that the same step raises again, although they resemble a lost device."""


@dataclass(frozen=True, slots=True)
class Death:
    """Ranks that died or hang, and the cause in words.

    ``ranks`` is empty when the failure does not tell which one is to blame. ``hang`` has the details
    of a hang for the ledger.
    """

    ranks: tuple[int, ...]
    cause: str
    hang: dict[str, object] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The first line of the cause."""
        return self.cause.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery that was begun ``at`` seconds on a monotonic clock, with ``step`` steps trained."""

    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of the decision, apart from earlier recoveries.

    Attributes:
        phase: the operation that failed; "generate" if ranks died while they were idle.
        step: steps that the trainer had completed.
        now: seconds on the clock of ``Recovery``.
        most: --max-trainer-recoveries.
        engines_hold_gpus: engines on the trainer's GPUs have not released their memory.
        lacks_optimizer: ranks would start from a checkpoint without the optimizer's state.
    """

    phase: Phase
    step: int
    now: float
    most: int
    engines_hold_gpus: bool = False
    lacks_optimizer: bool = False


def refusal(past: Sequence[Recovery], now: Situation) -> str | None:
    """Return why the attempt has to end; None to start the trainer again."""
    if now.most == 0:
        return "recovery of the trainer is off (--max-trainer-recoveries 0)"
    if past and past[-1].step == now.step:
        return (
            f"it died at step {now.step} already, and no step was trained since: the same batch may "
            "kill it again"
        )
    recent = [one for one in past if now.now - one.at < WINDOW_S]
    if len(recent) >= now.most:
        return (
            f"it was started again {len(recent)} times within {WINDOW_S / 60:.0f} min "
            f"(--max-trainer-recoveries {now.most})"
        )
    if now.engines_hold_gpus and now.phase in ("save", "weights_hash"):
        return "during a save the engines hold the memory of the shared GPUs (--colocate)"
    if now.lacks_optimizer:
        return "the newest checkpoint has no optimizer state (--no-save-optim)"
    return None


def lost_peer_or_device(text: str) -> bool:
    """Whether the traceback of a live rank shows that a peer or its device is lost.

    When a rank is killed, the others fail in the collective that they share with it, often before
    Ray reports the death. A GPU that fails breaks the CUDA context of its process, which then has
    to be restarted. Any other error is one of the program or of the data, and would occur again.
    """
    if any(words in text for words in REPEATS):
        return False
    return any(words in text for words in LOST)
