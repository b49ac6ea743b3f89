"""Every error that rlpost raises for a person to read.

    RlpostError
      ConfigError(ValueError)      a setting, a recipe or a file named by one is wrong; found before anything runs
      DataError(ValueError)        a prompt file or a recorded rollout cannot be used
      RolloutError                 generation failed
        EngineDied                 an inference engine ended by itself, or hangs
      GradingLost                  an answer could not be graded, which says nothing of the answer
      TrainingError                a step's numbers are wrong; its weights are not saved
      WeightError(ValueError)      names or shapes of weights do not fit
      SyncError                    an engine did not take the weights it was sent
      CheckpointError              a checkpoint cannot be committed or read
        Fenced                     another attempt writes to the folder now; this one must end
      AssetError                   a model or a data set cannot be had from the hub, or is damaged
      PlacementError               the cluster does not offer what the run needs
      Preempted                    a stop was requested; what is consistent has been committed
        HalfTrained                the same between two optimizer steps of one rollout: the weights must not be saved
      Interrupted                  an actor left a pass between two micro-batches; its state is that before the step

A message holds the key or path, what was got, what is needed and how to fix it. Errors cross process borders
inside Ray, so each is made from one string and stays picklable.
"""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``; did you mean 'X'?`` when something known is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""


class RlpostError(Exception):
    """Base of all of them."""


class ConfigError(RlpostError, ValueError):
    """A setting or a file it names is wrong."""


class DataError(RlpostError, ValueError):
    """A prompt file or a recorded rollout cannot be used."""


class RolloutError(RlpostError):
    """Generation failed."""


class EngineDied(RolloutError):
    """An inference engine ended by itself, or does not answer in time."""


class GradingLost(RlpostError):
    """An answer could not be graded for a reason that lies outside it: a server is down, a sandbox is gone.

    A reward function or an answer function of the user's may raise it: the answer is then left out of its group instead
    of scoring 0, or of ending the run.
    """


class TrainingError(RlpostError):
    """A step's numbers are wrong; its weights are not saved."""


class WeightError(RlpostError, ValueError):
    """Names or shapes of weights do not fit."""


class SyncError(RlpostError):
    """An engine did not take the weights it was sent."""


class CheckpointError(RlpostError):
    """A checkpoint cannot be committed or read."""


class Fenced(CheckpointError):
    """Another attempt writes to the folder of checkpoints now; this one must end, and not come back."""


class AssetError(RlpostError):
    """A model or a data set cannot be had from the hub, or is damaged."""


class PlacementError(RlpostError):
    """The cluster does not offer what the run needs."""


class Preempted(RlpostError):
    """A stop was requested while a phase ran; the caller commits what is consistent and leaves."""


class HalfTrained(Preempted):
    """A stop between two optimizer steps of one rollout: the trainer's state is of no step, and must not be saved."""


class Interrupted(RlpostError):
    """A pass over micro-batches was left, on every rank at the same place; the step it was part of did not happen."""
