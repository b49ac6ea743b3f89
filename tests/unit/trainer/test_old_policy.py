"""The old policy and the reference in one model of one weight, without process groups."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlpost.errors import SyncError
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.trainer.kept_weights import KeptWeights, host_copies
from rlpost.trainer.old_policy import OldPolicy
from rlpost.trainer.weights.inventory import Inventory
from rlpost.types import StepPlace
from tests.settings import rank_config


class Model:
    """One weight; each optimizer step adds 1."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)
        held = {"weight": SimpleNamespace(tensor=self.weight)}
        self.inventory = cast(Inventory, SimpleNamespace(held=held))

    @property
    def value(self) -> float:
        return float(self.weight)

    def step(self, old: OldPolicy, place: StepPlace) -> None:
        old.swap_out()
        old.before_step(place)
        self.weight.add_(1)
        old.after_step(place)


def nothing() -> None:
    pass


@pytest.fixture
def model() -> Model:
    return Model()


def old_policy(model: Model, reference: object = None) -> OldPolicy:
    settings = rank_config("model", keep_old_actor=True)
    found = OldPolicy(settings, model.inventory, prepare=nothing, reference=reference)
    found.start(0)
    return found


def test_an_export_between_two_buckets_leaves_the_old_weights_for_the_second(model):
    old = old_policy(model)
    model.step(old, StepPlace(1, 1, 1, old_version=0))
    old.swap_in(0)
    for version in (0, 1):
        with old.swapped_in(version):
            assert model.value == version
        assert model.value == 0
    old.swap_out()
    assert model.value == 1


def test_a_reference_and_the_old_policy_share_the_copy_of_the_models_own_weights(model):
    model.weight.fill_(-1)
    reference = KeptWeights(model.inventory, "reference", prepare=nothing)
    reference.take()
    model.weight.fill_(0)
    old = old_policy(model, reference)
    for number in (1, 2):
        model.step(old, StepPlace(number, 1, 1, old_version=number - 1))
        with reference.swapped_in():
            assert model.value == -1
        with old.swapped_in(number - 1):
            assert model.value == number - 1
        assert model.value == number


@pytest.mark.parametrize(
    ("place", "asked", "has"),
    [
        (StepPlace(1, 1, 2, old_version=1), 0, "weights in the middle of a rollout"),
        (StepPlace(1, 1, 1, old_version=1), 0, "version 1"),
        (StepPlace(1, 1, 1, old_version=0), 2, "version 1 and the kept version 0"),
        (None, 1, "weights in the middle of a rollout"),
    ],
)
def test_a_version_that_a_rank_does_not_have_is_refused(model, place, asked, has):
    old = old_policy(model)
    model.step(old, place)
    with pytest.raises(SyncError) as found:
        old.swap_in(asked)
    asks = f"policy version {asked} is asked for"
    assert str(found.value) == f"{asks}, but the trainer has {has}"
    assert model.value == 1


def test_an_older_version_is_given_up_when_the_old_policy_becomes_the_policy(model):
    """A checkpoint then has one copy of the weights instead of two."""
    old = old_policy(model)
    model.step(old, StepPlace(1, 1, 1, old_version=0))
    assert old.kept_version == 0
    model.step(old, StepPlace(2, 1, 1, old_version=2))
    assert old.kept_version is None


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the run below."""

    step: int
    oldest: int  # version with the same weights
    weight: float
    kept: tuple[int, float] | None
    reference: float


class Run:
    """A run of several attempts; ``weights[v]`` is the weight of policy version v."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = {0: 0.0}
        self.saved = Saved(0, 0, 0.0, None, 0.0)
        self.critic_only = self.random.choice([0, 0, 2, 5])

    def load(self) -> None:
        """Start ranks from the newest checkpoint, as ``Actor.load`` does."""
        self.model, saved = Model(), self.saved
        reference = KeptWeights(self.model.inventory, "reference", prepare=nothing)
        self.model.weight.fill_(saved.reference)
        reference.take()
        self.old = OldPolicy(
            rank_config("model", keep_old_actor=self.keeps_old),
            self.model.inventory,
            prepare=nothing,
            reference=reference,
        )
        if saved.kept is not None and self.old._weights is not None:
            self.model.weight.fill_(saved.kept[1])
            self.old._weights.take(saved.kept[0])
        self.model.weight.fill_(saved.weight)
        self.old.start(saved.step, saved.oldest)
        self.reference, self.step = reference, saved.step

    def save(self) -> None:
        version = self.old.kept_version
        kept = None if version is None else (version, self.weight_of(version))
        with self.reference.swapped_in():
            reference = self.model.value
        oldest = self.old.own_versions.start
        self.saved = Saved(self.step, oldest, self.model.value, kept, reference)

    def weight_of(self, version: int) -> float:
        with self.old.swapped_in(version):
            return self.model.value

    def begin_attempt(self) -> None:
        """Resume with other settings."""
        choose = self.random.choice
        interval, keep_old_actor = choose([1, 1, 2, 3, 4]), choose([False, True])
        self.keeps_old, self.compares = keep_old_actor or interval > 1, keep_old_actor
        self.num_steps, self.ref_interval = choose([1, 2, 4]), choose([None, 2, 3])
        self.load()
        own, kept = self.old.own_versions[-1], self.old.older_version
        self.versions = PolicyVersions(interval, own, kept, self.ref_interval)
        self.check()

    def train(self) -> None:
        """Train a rollout; its gradings may be lost, so that it has fewer steps."""
        rollout, of = self.step + 1, self.random.randint(1, self.num_steps)
        if self.compares:
            compared = self.versions.old(self.step)
            assert self.weight_of(compared) == self.weights[compared]
        if rollout <= self.critic_only:
            self.old.skip(rollout)
        else:
            for number in range(1, of + 1):
                place = self.versions.place(rollout, number, of)
                self.model.step(self.old, place)
                if place.is_last and place.updates_reference:
                    self.reference.take()
        self.step, self.weights[rollout] = rollout, self.model.value
        self.check()

    def check(self) -> None:
        """Check what engines get now, and how old it is."""
        version = self.versions.engines(self.step)
        assert self.weight_of(version) == self.weights[version]
        assert self.step - version < self.versions.interval
        assert self.model.value == self.weights[self.step]

    def die(self) -> None:
        """Lose the ranks, and train again what follows the checkpoint, within the attempt."""
        until = self.step
        self.load()
        while self.step < until:
            self.train()


@pytest.mark.parametrize("seed", range(20))
def test_engines_get_the_weights_of_their_label_whatever_the_resumes_change(seed):
    """Resumes change the steps of a rollout, intervals and --keep-old-actor; gradings are lost.

    Some runs begin with rollouts of a critic alone; ranks die. ``Run.check`` compares what the ranks
    give for a label with the recorded weights.
    """
    for trial in range(25):
        run = Run(1000 * seed + trial)
        for _ in range(4):
            run.begin_attempt()
            for _ in range(run.random.randint(1, 7)):
                run.train()
                if run.random.random() < 0.4:
                    run.save()
                if run.random.random() < 0.2:
                    run.die()
        # an undisturbed resume continues with the versions that engines had
        run.save()
        before = run.versions.engines(run.step), run.versions.old(run.step)
        run.load()
        kept, of = run.old.older_version, run.versions
        again = PolicyVersions(of.interval, run.step, kept, of.ref_interval)
        if run.keeps_old and run.step > run.critic_only:
            assert (again.engines(run.step), again.old(run.step)) == before


def test_host_copies_take_at_most_five_percent_more_than_the_weights_when_rounded(monkeypatch):
    """The weights of Qwen3-4B at TP 2; one allocation for each takes a third more.

    torch rounds each pinned allocation up to a power of two.
    """
    layer = [(3072, 2560), (2560, 2048), (9728, 2560), (2560, 4864), (2560,), (128,)]
    shapes = [(75968, 2560), *layer * 36]
    weights = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    allocated: list[int] = []
    empty = torch.empty

    def on_meta(size: int, **options: object) -> torch.Tensor:
        allocated.append(size)
        return empty(size, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(torch, "empty", on_meta)
    copies = host_copies(weights)
    rounded = sum(1 << (size - 1).bit_length() for size in allocated)
    total = sum(weight.nbytes for weight in weights)
    assert [(copy.shape, copy.dtype) for copy in copies] == [
        (weight.shape, weight.dtype) for weight in weights
    ]
    assert total <= rounded < 1.05 * total
    alone = sum(1 << (weight.nbytes - 1).bit_length() for weight in weights)
    assert alone > 1.3 * total


def test_host_copies_do_not_overlap():
    weights = [torch.rand(3, 5), torch.rand(7, dtype=torch.float64), torch.tensor(2.5)]
    copies = host_copies(weights, piece_bytes=600)
    for copy, weight in zip(copies, weights, strict=True):
        copy.copy_(weight)
    assert all(torch.equal(copy, weight) for copy, weight in zip(copies, weights, strict=True))
