"""The versions of this rank's weights, and the old policy: an older version in host memory.

Input: the place of every optimizer step, which the driver decides (``policy_versions``). Output:
contexts in which the model has the weights of a version by its number, and the old policy's part of
a checkpoint. Without --update-weights-interval and --keep-old-actor no older version is kept.

The old policy are the weights that engines generate with, or generated with. slime has two copies
(``old_actor``, ``rollout_actor``) and replaces both after each update; when a rollout is trained,
its ``old_actor`` equals the copy here. One copy is enough, because it is replaced directly before
the rollout's first optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rlpost.config.tree import Config
from rlpost.errors import SyncError
from rlpost.trainer.kept_weights import KeptWeights
from rlpost.trainer.weights.inventory import Inventory
from rlpost.types import StepPlace

logger = logging.getLogger(__name__)

SAVED = "old_policy"
"""Folder in a checkpoint with the old policy, unless it is the policy itself."""
NO_VERSION = range(0)
"""The versions of weights within a rollout."""


class OldPolicy:
    """This rank's shard of the old policy. All methods are collective."""

    def __init__(
        self,
        config: Config,
        inventory: Inventory,
        *,
        prepare: Callable[[], None],
        reference: object = None,
    ) -> None:
        """Allocate host memory if the settings need it; call ``start`` next.

        Reference weights share their memory with the old policy. For ``prepare`` see
        ``KeptWeights``.
        """
        self.own_versions = NO_VERSION
        """The versions that equal the model's own weights: several while a critic trains alone."""
        self._weights: KeptWeights | None = None
        if config.keeps_old_policy:
            shares = reference if isinstance(reference, KeptWeights) else None
            self._weights = KeptWeights(inventory, SAVED, prepare=prepare, shares=shares)

    @property
    def kept_version(self) -> int | None:
        """The version in host memory; None without one."""
        return None if self._weights is None else self._weights.version

    @property
    def older_version(self) -> int | None:
        """A version before the newest that this rank has; None without one."""
        if self.kept_version is not None or len(self.own_versions) < 2:
            return self.kept_version
        return self.own_versions.start

    def start(self, version: int, oldest: int | None = None) -> None:
        """Record that the model's own weights, just loaded, are the policy of ``version``.

        ``oldest`` is the first version with the same weights; default: ``version``.
        """
        self.own_versions = range(version if oldest is None else oldest, version + 1)

    @contextmanager
    def swapped_in(self, version: int) -> Iterator[None]:
        """Context in which the model has the weights of ``version``.

        It may be inside ``swap_in`` and ``swap_out``: the export for engines on other jobs may come
        between two buckets that are sent to engines of this job.

        Raises:
            SyncError: this rank does not have that version.
        """
        was_in = self._weights is not None and self._weights.is_swapped_in
        self.swap_in(version)
        try:
            yield
        finally:
            if was_in and self._weights is not None:
                self._weights.swap_in()
            else:
                self.swap_out()

    def swap_in(self, version: int) -> None:
        """Give the model the weights of ``version`` until ``swap_out``.

        Raises:
            SyncError: this rank does not have that version.
        """
        if version in self.own_versions:
            self.swap_out()
        elif self._weights is not None and version == self._weights.version:
            self._weights.swap_in()
        else:
            raise SyncError(self._lacks(version))

    def swap_out(self) -> None:
        """Give the model its own weights back; nothing if it has them."""
        if self._weights is not None:
            self._weights.swap_out()

    def before_step(self, place: StepPlace | None) -> None:
        """Keep the weights that the step is about to change, if the driver needs them later."""
        if place is not None and self._weights is not None:
            if place.old_version in self.own_versions:
                self._weights.take(place.old_version)
            elif place.old_version == place.rollout:
                self._weights.version = None  # the policy itself once the rollout is trained
        self.own_versions = NO_VERSION

    def after_step(self, place: StepPlace | None) -> None:
        """Label the weights that the step has changed."""
        if place is not None and place.is_last:
            self.own_versions = range(place.rollout, place.rollout + 1)

    def skip(self, rollout: int) -> None:
        """Record that ``rollout`` has not changed the weights."""
        self.own_versions = range(self.own_versions.start, rollout + 1)

    def save(
        self, folder: str | Path, chunks: Sequence[torch.nn.Module], *, buffer_bytes: int
    ) -> None:
        """Write the kept weights with their version into the folder of a checkpoint, if any.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        if self._weights is not None and self._weights.version is not None:
            self._weights.save(folder, chunks, buffer_bytes=buffer_bytes)

    def load(self, folder: str | Path, chunks: Sequence[torch.nn.Module]) -> None:
        """Read what ``save`` wrote, also into the model; ``start`` follows.

        Weights without a version, which older checkpoints hold, are not used.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        self.own_versions = NO_VERSION
        if self._weights is None:
            return
        self._weights.version = None
        if self._weights.load(folder, chunks) and self._weights.version is None:
            logger.warning(
                "%s/%s does not record its version (an older rlpost wrote it), so it is not used: "
                "engines start with the weights of the checkpoint's own step",
                *(folder, SAVED),
            )

    def _lacks(self, version: int) -> str:
        """Return the message about a version that this rank does not have."""
        own = self.own_versions
        has = "weights in the middle of a rollout"
        if own:
            has = f"version {own.start}" if len(own) == 1 else f"versions {own.start} to {own[-1]}"
        if self.kept_version is not None:
            has += f" and the kept version {self.kept_version}"
        return f"policy version {version} is asked for, but the trainer has {has}"
