"""The old policy: the weights that engines generate with, or generated with, in host memory.

Input: the settings ``update_weights_interval`` and ``keep_old_actor``. Output: contexts in which
the model has these weights, and their part of a checkpoint. Without both settings nothing is kept.

With an interval above 1 they are the weights of the engines' last update. With an interval of 1
they are those of the update before, which generated the batch when generation is one step ahead.
slime has two copies (``old_actor``, ``rollout_actor``) and replaces both after each update; when a
rollout is trained, its ``old_actor`` equals the copy here. One copy is enough, because it is
replaced directly before the rollout's first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rlpost.actor.kept_weights import KeptWeights
from rlpost.actor.settings import ActorSettings
from rlpost.weights.inventory import Inventory

SAVED = "old_policy"
"""Folder in a checkpoint with the old policy, unless it is the policy itself."""


class OldPolicy:
    """This rank's shard of the old policy. All methods are collective."""

    def __init__(
        self,
        settings: ActorSettings,
        inventory: Inventory,
        *,
        prepare: Callable[[], None],
        reference: object = None,
    ) -> None:
        """Allocate host memory if the settings need it; call ``start`` or ``load`` next.

        Reference weights share their memory with the old policy. For ``prepare`` see
        ``KeptWeights``.
        """
        self._settings = settings
        self._weights: KeptWeights | None = None
        self._is_current = False  # whether the kept weights equal the model's
        if settings.has_old_policy:
            shares = reference if isinstance(reference, KeptWeights) else None
            self._weights = KeptWeights(inventory, SAVED, prepare=prepare, shares=shares)

    def start(self) -> None:
        """Take the weights that the model has now."""
        if self._weights is not None:
            self._weights.take()
            self._is_current = True

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the weights of the old policy.

        It may be inside ``swap_in`` and ``swap_out``: the export for engines on other jobs may come
        between two buckets that are sent to engines of this job.
        """
        was_in = self._weights is not None and self._weights.is_swapped_in
        self.swap_in()
        try:
            yield
        finally:
            if not was_in:
                self.swap_out()

    def swap_in(self) -> None:
        """Give the model the weights of the old policy until ``swap_out``."""
        assert self._weights is not None, "no old policy is kept with these settings"
        if not self._is_current:
            self._weights.swap_in()

    def swap_out(self) -> None:
        """Give the model its own weights back; nothing if it has them."""
        if self._weights is not None:
            self._weights.swap_out()

    def before_step(self, num_steps: int) -> None:
        """Call before each optimizer step; ``num_steps`` are complete."""
        self._is_current = False
        if self._weights is None or self._settings.update_weights_interval > 1:
            return
        if num_steps % self._settings.num_steps_per_rollout == 0:
            self._weights.take()

    def after_step(self, num_steps: int) -> None:
        """Call after each optimizer step; ``num_steps`` are complete, with this one."""
        if is_sent_after(self._settings, num_steps):
            self.start()

    def save(
        self, folder: str | Path, chunks: Sequence[torch.nn.Module], *, buffer_bytes: int
    ) -> None:
        """Write the weights into the folder of a checkpoint, unless they are the model's own.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        if self._weights is not None and not self._is_current:
            self._weights.save(folder, chunks, buffer_bytes=buffer_bytes)

    def load(self, folder: str | Path, chunks: Sequence[torch.nn.Module]) -> bool:
        """Read what ``save`` wrote, also into the model.

        Returns:
            False if there is nothing: call ``start`` once the model has its own weights.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        self._is_current = False
        return self._weights is not None and self._weights.load(folder, chunks)


def is_sent_after(settings: ActorSettings, num_steps: int) -> bool:
    """Whether engines are updated after optimizer step ``num_steps``, with an interval above 1.

    The interval counts all rollouts of the run, also the first ones that train a critic alone.
    """
    rollouts, rest = divmod(num_steps, settings.num_steps_per_rollout)
    interval = settings.update_weights_interval
    return interval > 1 and not rest and (rollouts + settings.num_critic_only_steps) % interval == 0
