"""The old policy (--update-weights-interval, --keep-old-actor) in the real actor.

Weights are compared by hash with those that the policy had after other steps of the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.actor.settings import ActorSettings
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model

pytestmark = pytest.mark.timeout(300)

FOUR = [*STEPS, STEPS[0]]


def settings(folder: Path, **given: Any) -> ActorSettings:
    return ActorSettings(str(folder / "model"), lr=1e-2, distributed_timeout_minutes=2, **given)


def old_hash(actor: Any) -> str:
    """Return the hash of the weights that engines would get."""
    with actor.old_policy.swapped_in():
        return str(actor.weights_hash())


def train(actor: Any, batches: Any, folder: str | None = None) -> dict[str, list[Any]]:
    """Train each batch on the log-probs of the old policy; save after the third."""
    found: dict[str, list[Any]] = {"own": [], "old": [], "metrics": []}
    for number, samples in enumerate(batches, start=1):
        batch = my_batch(actor, samples, max_tokens=None)
        old = actor.compute_old_logprobs(batch)
        found["metrics"].append(dict(actor.train_step(batch, old).metrics))
        if folder is not None and number == 3:
            actor.save(folder, number)
        found["own"].append(actor.weights_hash())
        found["old"].append(old_hash(actor))
    return found


def both(actor: Any, *, folder: str) -> dict[str, Any]:
    """Train four steps; then load the state after the third and train the fourth again."""
    actor.import_weights()
    start = actor.weights_hash()
    whole = train(actor, FOUR, folder)
    assert actor.load(folder) == 3
    loaded = old_hash(actor)
    again = train(actor, FOUR[3:])
    return {"start": start, "whole": whole, "loaded": loaded, "again": again}


@pytest.mark.parametrize(
    ("given", "age"),
    [
        ({"update_weights_interval": 2, "keep_old_actor": True}, lambda step: step - step % 2),
        ({"keep_old_actor": True}, lambda step: step - 1),
        ({"keep_old_actor": True, "use_kl_loss": True}, lambda step: step - 1),
    ],
)
def test_kept_weights_are_those_of_their_update_and_survive_a_resume_bit_for_bit(
    tmp_path, given, age
):
    make_model(tmp_path / "model", tied=False)
    (found,) = run_ranks(both, 1, settings(tmp_path, **given), folder=str(tmp_path / "saved"))
    whole, again = found["whole"], found["again"]
    own = [found["start"], *whole["own"]]
    assert len(set(own)) == 5
    assert whole["old"] == [own[age(step)] for step in range(1, 5)]
    assert found["loaded"] == own[age(3)]
    assert {name: values[0] for name, values in again.items()} == {
        name: values[3] for name, values in whole.items()
    }
    # the first step has no older weights; later steps use older weights than the policy's
    assert (
        abs(whole["metrics"][0]["train/ppo_kl"]) < 1e-6 < abs(whole["metrics"][1]["train/ppo_kl"])
    )


def reference_between_buckets(actor: Any) -> dict[str, Any]:
    """Return the reference's log-probs before training, and while the old policy is swapped in."""
    actor.import_weights()
    batches = [my_batch(actor, samples, max_tokens=None) for samples in STEPS]
    found = {"before": actor.compute_ref_logprobs(batches[0])}
    for batch in batches:
        actor.train_step(batch, actor.compute_old_logprobs(batch))
    own = actor.weights_hash()
    actor.old_policy.swap_in()  # as between two buckets for engines
    found["is_old"] = actor.weights_hash() != own
    found["between"] = actor.compute_ref_logprobs(batches[0])
    found["is_own"] = actor.weights_hash() == own
    return found


def test_the_reference_is_the_same_between_two_buckets_and_the_old_policy_leaves_the_model(
    tmp_path,
):
    """Both keep their copies in the same host memory.

    So the old weights must first leave the model.
    """
    make_model(tmp_path / "model", tied=False)
    given = settings(tmp_path, keep_old_actor=True, use_kl_loss=True)
    (found,) = run_ranks(reference_between_buckets, 1, given)
    assert found["is_old"] and found["is_own"]
    assert found["between"] == found["before"]
