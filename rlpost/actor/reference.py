"""The reference model: weights kept in host memory and swapped in when needed.

They are the initial weights and, with --ref-update-interval, the policy's weights at the end of the
newest interval.

Input: the inventory of this rank, and a function that reads the reference into the model. Output:
``KeptWeights``, which are part of a checkpoint once they were updated.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpost.actor.kept_weights import KeptWeights
from rlpost.actor.settings import ActorSettings
from rlpost.weights.inventory import Inventory

SAVED = "reference"
"""Folder in a checkpoint with the reference, once it was updated."""


class ReferenceWeights(KeptWeights):
    """This rank's shard of the reference model."""

    def __init__(
        self, inventory: Inventory, read: Callable[[], None], *, prepare: Callable[[], None]
    ) -> None:
        """Read the reference weights and restore those of the model.

        ``read`` fills the model with the reference weights. For ``prepare`` see ``KeptWeights``.
        """
        super().__init__(inventory, SAVED, prepare=prepare)
        self.was_updated = False
        """Whether a checkpoint needs the weights, because ``read`` no longer gives them."""
        self._keep(self._mine)
        read()
        self._keep(self._kept)
        self._fill(self._mine)

    def take(self) -> None:
        """Make the current weights of the model the reference."""
        super().take()
        self.was_updated = True

    def after_step(self, settings: ActorSettings, num_steps: int) -> None:
        """Take the policy's weights at the end of an interval of --ref-update-interval."""
        interval = settings.ref_update_interval
        if interval is not None and num_steps % (interval * settings.num_steps_per_rollout) == 0:
            self.take()
