"""The exceptions of rlpost; their messages are written for users.

    RlpostError
      ConfigError(ValueError)      a setting, a recipe or a file named by one is wrong; found before anything runs
      DataError(ValueError)        a prompt file or a recorded rollout cannot be used
        NotFinite                  a sample has NaN or infinity for a number
        ImageError                 an image is broken, too large, of another format or missing
      RolloutError                 generation failed
        EngineDied                 an inference engine exited or hangs
        EngineRefused              an inference engine refused a request
        EngineNotPrepared          an inference engine lacks what an update in slices assumes
      GradingLost                  an answer could not be graded, for reasons outside the answer
      Hang                         the trainer's ranks stand still; the message names the one to blame
      WorkerDied                   the process of a Ray worker ended
        TrainerDied                that of a trainer rank: its ranks can be started again (docs/preemption.md)
      MemoryHeld                   a rank cannot onload: another process holds the memory of its GPU
      WorkerFailed                 a worker that lives raised an error that is none of these
      TrainingError                a step's numbers are wrong; its weights are not saved
      WeightError(ValueError)      names or shapes of weights do not fit
      SyncError                    an engine did not load the weights that were sent
        SlicesRefused              an engine that has not died did not take part in an update in slices
          PlanOutdated             it no longer has what the plan of the update assumes
      CheckpointError              a checkpoint cannot be committed or read
        Fenced                     another attempt writes to the folder now; this one must end
      AssetError                   a model or a data set cannot be downloaded, or is damaged
      PlacementError               the cluster lacks resources that the run needs
      Preempted                    a stop was requested; the last consistent state is committed
        HalfTrained                a stop in the middle of a rollout's steps: the weights must not be saved
      Interrupted                  an actor left a pass between micro-batches; its state is that before the step

A message holds the key or path, the value, the constraint and the remedy. Ray pickles exceptions
between processes, so each takes a single string.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NO_FUNCTION_FILE = (
    "no such file; give FILE.py:FUNCTION, relative to the working directory, or module.function"
)


def suggestion(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'X'?`` when a known word is close, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""


def choice(word: str, known: Sequence[str]) -> str:
    """Return ``; did you mean 'X'? It has X, Y``, without the question where no word is close.

    >>> choice("kep", ["drop", "keep"]), choice("x", [])
    ("; did you mean 'keep'? It has drop, keep", '; it has none')
    """
    near, names = suggestion(word, known), ", ".join(known) or "none"
    return f"{near} It has {names}" if near else f"; it has {names}"


class RlpostError(Exception):
    """Base class of all errors of rlpost."""


class ConfigError(RlpostError, ValueError):
    """A setting or a file it names is wrong."""


class DataError(RlpostError, ValueError):
    """A prompt file or a recorded rollout cannot be used."""


class NotFinite(DataError):
    """A sample has NaN or infinity for a number."""


class ImageError(DataError):
    """An image cannot be used; who read it adds the file and the line."""


class RolloutError(RlpostError):
    """Generation failed."""


class EngineDied(RolloutError):
    """An inference engine exited, or does not answer in time."""


class EngineRefused(RolloutError):
    """An inference engine refused a request; ``answer`` is the parsed body of its response."""

    def __init__(self, message: str, answer: object = None) -> None:
        super().__init__(message)
        self.answer = answer


class EngineNotPrepared(RolloutError):
    """An inference engine lacks what an update in slices assumes; another preparation mends it."""


class GradingLost(RlpostError):
    """An answer could not be graded for a reason outside the answer: a server is down, a sandbox is
    gone.

    Custom reward and generate functions may raise it. The answer is then left out of its group,
    instead of scoring 0 or ending the run.
    """


class Hang(RlpostError):
    """The trainer's ranks stand still in a call; names the ranks to blame.

    ``details`` are JSON values for the ledger: call, ranks, hosts, why, seconds, stacks.
    """

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})


class WorkerDied(RlpostError):
    """The process of a Ray worker ended; ``ranks`` are its indices in its group, if known."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TrainerDied(WorkerDied):
    """The process of a trainer rank ended. An error that a living rank raises is not a death."""


class MemoryHeld(RlpostError):
    """A rank cannot onload, because another process holds the memory of its GPU."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerFailed(RlpostError):
    """A worker that lives raised an error that is no RlpostError; the message has its traceback."""


class TrainingError(RlpostError):
    """A step's numbers are wrong; its weights are not saved."""


class WeightError(RlpostError, ValueError):
    """Names or shapes of weights do not fit."""


class SyncError(RlpostError):
    """An engine did not load the weights that were sent."""


class SlicesRefused(SyncError):
    """An engine that has not died did not take part in an update in slices."""


class PlanOutdated(SlicesRefused):
    """An engine no longer has what the plan of an update in slices assumes."""


class CheckpointError(RlpostError):
    """A checkpoint cannot be committed or read."""


class Fenced(CheckpointError):
    """Another attempt owns the folder of checkpoints; this one must end without a requeue."""


class AssetError(RlpostError):
    """A model or a data set cannot be downloaded, or is damaged."""


class PlacementError(RlpostError):
    """The cluster lacks resources that the run needs."""


class Preempted(RlpostError):
    """A stop was requested; the caller commits the last consistent state and exits."""


class HalfTrained(Preempted):
    """A stop between two optimizer steps of one rollout; its weights must not be saved."""


class Interrupted(RlpostError):
    """All ranks left a pass over micro-batches at the same point; its step did not happen."""
