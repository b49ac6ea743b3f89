"""The old policy and the reference in one model of one weight, without process groups."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlpost.actor.kept_weights import KeptWeights
from rlpost.actor.old_policy import OldPolicy
from rlpost.actor.settings import ActorSettings
from rlpost.weights.inventory import Inventory


class Model:
    """One weight; the version of the policy is its value."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)
        held = {"weight": SimpleNamespace(tensor=self.weight)}
        self.inventory = cast(Inventory, SimpleNamespace(held=held))

    @property
    def value(self) -> float:
        return float(self.weight)

    def step(self, old: OldPolicy, number: int) -> None:
        old.before_step(number - 1)
        self.weight.fill_(number)
        old.after_step(number)


def nothing() -> None:
    pass


@pytest.fixture
def model() -> Model:
    return Model()


def old_policy(model: Model, reference: object = None, **given: object) -> OldPolicy:
    settings = ActorSettings("model", **given)  # type: ignore[arg-type]
    found = OldPolicy(settings, model.inventory, prepare=nothing, reference=reference)
    found.start()
    return found


def test_an_export_between_two_buckets_leaves_the_old_weights_for_the_second(model):
    old = old_policy(model, update_weights_interval=2)
    model.step(old, 1)
    old.swap_in()
    with old.swapped_in():
        assert model.value == 0
    assert model.value == 0
    old.swap_out()
    assert model.value == 1


def test_a_reference_and_the_old_policy_share_the_copy_of_the_models_own_weights(model):
    model.weight.fill_(-1)
    reference = KeptWeights(model.inventory, "reference", prepare=nothing)
    reference.take()
    model.weight.fill_(0)
    old = old_policy(model, reference, keep_old_actor=True)
    for number in (1, 2):
        model.step(old, number)
        for kept, value in ((reference, -1), (old, number - 1)):
            with kept.swapped_in():
                assert model.value == value
            assert model.value == number
