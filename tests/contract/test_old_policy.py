"""The versions of a real actor's weights (--update-weights-interval, --keep-old-actor).

Weights are compared by hash with those that the policy had after other rollouts of the same run.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.tree import Config
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.types import StepPlace, TrainSample
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

FOUR = [*STEPS, STEPS[0]]


def settings(folder: Path, **given: Any) -> Config:
    return rank_config(
        str(folder / "model"),
        lr=1e-2,
        distributed_timeout_minutes=2,
        keep_old_actor=True,
        **given,
    )


def hash_of(actor: Any, version: int) -> str:
    """Return the hash of the weights that engines get as ``version``."""
    with actor.old_policy.swapped_in(version):
        return str(actor.weights_hash())


def train(
    actor: Any,
    batches: Sequence[Sequence[TrainSample]],
    versions: PolicyVersions,
    folder: str | None = None,
) -> dict[str, list[Any]]:
    """Train rollouts of one batch on the log-probs of the old policy; save after the third."""
    found: dict[str, list[Any]] = {"own": [], "old": [], "metrics": []}
    for rollout, samples in enumerate(batches, start=versions.start + 1):
        batch = my_batch(actor, samples, max_tokens=None)
        old = actor.compute_old_logprobs(batch, versions.old(rollout - 1))
        place = versions.place(rollout, 1, 1)
        found["metrics"].append(dict(actor.train_step(batch, old, place=place).metrics))
        if folder is not None and rollout == 3:
            actor.save(folder, rollout)
        found["own"].append(actor.weights_hash())
        found["old"].append(hash_of(actor, versions.old(rollout)))
    return found


def both(actor: Any, *, interval: int, folder: str) -> dict[str, Any]:
    """Train four steps; then load the state after the third and train the fourth again."""
    actor.import_weights()
    start = actor.weights_hash()
    whole = train(actor, FOUR, PolicyVersions(interval), folder)
    assert actor.load(folder) == 3
    versions = PolicyVersions(interval, *actor.versions)
    loaded = hash_of(actor, versions.old(3))
    again = train(actor, FOUR[3:], versions)
    return {"start": start, "whole": whole, "loaded": loaded, "again": again}


@pytest.mark.parametrize(
    ("given", "interval", "age"),
    [
        ({}, 2, lambda step: step - step % 2),
        ({}, 1, lambda step: step - 1),
        ({"use_kl_loss": True}, 1, lambda step: step - 1),
    ],
)
def test_kept_weights_are_those_of_their_update_and_survive_a_resume_bit_for_bit(
    tmp_path, given, interval, age
):
    make_model(tmp_path / "model", tied=False)
    (found,) = run_ranks(
        both, 1, settings(tmp_path, **given), interval=interval, folder=str(tmp_path / "saved")
    )
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


RESUMES = [
    # interval, steps of each rollout, version that engines have at the start and after each rollout
    pytest.param(2, [2, 2, 2], [2, 4, 4, 6], id="another batch size"),
    pytest.param(2, [4, 3, 4], [2, 4, 4, 6], id="a lost grading"),
    pytest.param(3, [1, 1, 1], [3, 3, 3, 6], id="an interval that ends here"),
    pytest.param(4, [1, 2, 1], [2, 4, 4, 4], id="a longer interval"),
    pytest.param(1, [1, 1, 1], [3, 4, 5, 6], id="an update after each rollout"),
]


def resume_each(
    actor: Any, *, folder: str, attempts: Sequence[tuple[int, Sequence[int]]]
) -> list[dict[str, Any]]:
    """Train three rollouts of one step at interval 2, and resume from there in each way."""
    actor.import_weights()
    first = train(actor, STEPS, PolicyVersions(2), folder)
    seen: list[dict[str, Any]] = []
    for interval, num_steps in attempts:
        assert actor.load(folder) == 3
        versions, own = PolicyVersions(interval, *actor.versions), dict(enumerate(first["own"], 1))
        given = [(versions.engines(3), hash_of(actor, versions.engines(3)))]
        for rollout, of in enumerate(num_steps, start=4):
            for step in range(1, of + 1):
                batch = my_batch(actor, FOUR[step - 1], max_tokens=None)
                actor.train_step(batch, place=versions.place(rollout, step, of))
            own[rollout] = actor.weights_hash()
            version = versions.engines(rollout)
            given.append((version, hash_of(actor, version)))
        seen.append({"own": own, "given": given})
    # checkpoints of older versions of rlpost do not record which version they keep
    assert actor.load(folder) == 3 and actor.versions == (3, 2)
    kept = actor.old_policy._weights
    kept.version = None
    shutil.rmtree(Path(folder) / "old_policy")
    kept.save(folder, actor.chunks, buffer_bytes=actor.config.checkpoint.save_buffer_bytes)
    assert actor.load(folder) == 3 and actor.versions == (3, None)
    return seen


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    make_model(folder / "model", tied=False)
    attempts = [each.values[:2] for each in RESUMES]
    (found,) = run_ranks(
        resume_each, 1, settings(folder), folder=str(folder / "saved"), attempts=attempts
    )
    return dict(zip([each.id for each in RESUMES], found, strict=True))


@pytest.mark.parametrize(("interval", "num_steps", "labels"), RESUMES)
def test_engines_get_the_weights_of_their_label_after_a_resume_with(
    resumed, request, interval, num_steps, labels
):
    found = resumed[request.node.callspec.id]
    assert [version for version, _ in found["given"]] == labels
    assert found["given"] == [(label, found["own"][label]) for label in labels]


def reference_between_buckets(actor: Any) -> dict[str, Any]:
    """Return the reference's log-probs before training, and while the old policy is swapped in."""
    actor.import_weights()
    batches = [my_batch(actor, samples, max_tokens=None) for samples in STEPS]
    found = {"before": actor.compute_ref_logprobs(batches[0])}
    for rollout, batch in enumerate(batches, start=1):
        place = StepPlace(rollout, 1, 1, old_version=rollout - 1)
        actor.train_step(batch, place=place)
    own = actor.weights_hash()
    actor.old_policy.swap_in(len(batches) - 1)  # as between two buckets for engines
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
    given = settings(tmp_path, use_kl_loss=True)
    (found,) = run_ranks(reference_between_buckets, 1, given)
    assert found["is_old"] and found["is_own"]
    assert found["between"] == found["before"]
