"""The reference that is updated from the policy (--ref-update-interval), in the real actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.config.tree import Config
from rlpost.rollout.policy_versions import PolicyVersions
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

FOUR = [*STEPS, STEPS[0]]
VERSIONS = PolicyVersions(ref_interval=2)


def settings(folder: Path) -> Config:
    return rank_config(
        str(folder / "model"),
        lr=1e-2,
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_type="k2",
        distributed_timeout_minutes=2,
    )


def train_four(actor: Any, *, folder: str) -> dict[str, Any]:
    """Train four rollouts, of one step and of two by turns; save after the third."""
    actor.import_weights()
    found: dict[str, Any] = {"is_policy": [], "metrics": []}
    for number, samples in enumerate(FOUR, start=1):
        batch = my_batch(actor, samples, max_tokens=None)
        for step in range(1, 2 + number % 2):
            place = VERSIONS.place(number, step, 1 + number % 2)
            metrics = dict(actor.train_step(batch, place=place).metrics)
        found["metrics"].append(metrics)
        found["is_policy"].append(
            actor.compute_ref_logprobs(batch) == actor.compute_logprobs(batch)
        )
        if number == 3:
            actor.save(folder, number)
    return found | {"hash": actor.weights_hash()}


def resume(actor: Any, *, folder: str) -> dict[str, Any]:
    """Load, and train the last step."""
    assert actor.load(folder) == 3
    batch, place = my_batch(actor, FOUR[3], max_tokens=None), VERSIONS.place(4, 1, 1)
    metrics = dict(actor.train_step(batch, place=place).metrics)
    return {"metrics": metrics, "hash": actor.weights_hash()}


def test_the_reference_is_the_policy_after_each_interval_and_survives_a_resume_bit_for_bit(
    tmp_path,
):
    make_model(tmp_path / "model", tied=False)
    folder = str(tmp_path / "saved")
    (found,) = run_ranks(train_four, 1, settings(tmp_path), folder=folder)
    assert found["is_policy"] == [False, True, False, True]
    (again,) = run_ranks(resume, 1, settings(tmp_path), folder=folder)
    assert again["hash"] == found["hash"]
    assert again["metrics"] == found["metrics"][3]
    assert again["metrics"]["train/ref_kl"] > 0
