"""What the ranks do in the contract tests of checkpoints; see ``actor_ranks``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.errors import CheckpointError
from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch


def live_through(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str, full_disk: str | None
) -> dict[str, Any]:
    """Train; before the last step save, first to a disk that has no room, if there is one, in each way. After the last
    step load, and train it once more without the generators of the checkpoint."""
    actor.import_weights()
    for samples in steps[:-1]:
        _train(actor, samples)
    said = []
    if full_disk is not None:
        said.append(refusal(lambda: actor.save(f"{full_disk}/waited", 1)))
        shutil.rmtree(f"{full_disk}/waited", ignore_errors=True)
        said.append(refusal(lambda: _save_beside(actor, full_disk)))
    actor.save(folder, len(steps) - 1)
    found = {"said": said, "metrics": _train(actor, steps[-1]), "hash": actor.weights_hash()}
    return found | {"without_generators": _again_without_generators(actor, steps[-1], folder)}


def _again_without_generators(actor: Any, samples: Sequence[TrainSample], folder: str) -> str:
    from rlpost.actor import random_state

    random_state.layout = lambda: []  # as after a resume at another layout; the process ends soon
    actor.load(folder)
    _train(actor, samples)
    return actor.weights_hash()


def go_on(actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str) -> dict[str, Any]:
    """Load and train the last step."""
    actor.load(folder)
    return {"metrics": _train(actor, steps[-1]), "hash": actor.weights_hash()}


def refusal(save: Callable[[], None]) -> str:
    """What a save says that cannot be made."""
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return "saved"


def _save_beside(actor: Any, full_disk: str) -> None:
    actor.save(f"{full_disk}/beside", 1, in_background=True)
    while not actor.save_is_done():
        pass


def _train(actor: Any, samples: Sequence[TrainSample]) -> dict[str, float]:
    return dict(actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics)
