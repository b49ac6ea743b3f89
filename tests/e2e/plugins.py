"""Functions that runs of the tests name in their settings."""

from rlpost.types import SampleGroup


def has_a_call(group: SampleGroup) -> bool:
    """Keep every third group, and those in which a tool was called."""
    return group.prompt_id % 3 == 0 or any(scored.sample.loss_mask is not None for scored in group.samples)
