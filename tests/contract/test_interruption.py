"""Real ranks whose training is interrupted between micro-batches.

All ranks stop at the same point, and the state is as if the step had not been started.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.actor_ranks import run_ranks
from tests.contract.interruption_ranks import train_with_stops
from tests.contract.samples import STEPS
from tests.contract.test_actor import models, settings  # noqa: F401

pytestmark = pytest.mark.timeout(300)

# name: (ranks, settings, numbers of stop points after which a stop is requested); timing decides
# where the step stops
WORLDS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "tp2 dp2, log-probs of the reference within the step": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
        },
        (1, 10, 6, 9, 11),
    ),
    "dp2, collectives overlapped": (
        2,
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        (2, 6, 5, 7),
    ),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, (1, 2)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_an_interrupted_and_repeated_step_equals_an_uninterrupted_one(models, tmp_path, name):  # noqa: F811
    """Bit for bit, on every rank, whatever was incomplete at the interruption."""
    world, changes, stops = WORLDS[name]
    actor_settings = settings(models, "untied", "tp1", **changes)
    disturbed = run_ranks(
        train_with_stops, world, actor_settings, steps=STEPS[:2], stops=stops, folder=str(tmp_path)
    )
    undisturbed = run_ranks(
        train_with_stops, world, actor_settings, steps=STEPS[:2], stops=(), folder=str(tmp_path)
    )
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert ours["metrics"] == theirs["metrics"]
        assert ours["hash"] == theirs["hash"]
        assert ours["left"] == disturbed[0]["left"], (
            "every rank did the same micro-batches of what was left"
        )
    left = [crossed for step in disturbed[0]["left"] for crossed in step]
    assert len(left) >= 2, "no step was ever left: nothing is shown"
