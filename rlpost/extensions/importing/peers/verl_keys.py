"""Prefixes of verl's keys, and conversions that several of its tables use. Pure."""

from __future__ import annotations

from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Settings,
    as_count,
)

ACTOR, ENGINE, MODEL = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.model.",
)


MEGATRON = ACTOR + "megatron."


IMAGES = "data.image_key"
"""The column of images. verl has a default, and reads it for models with an encoder alone."""


LAYOUT = "the trainer is Megatron-core, which has no such sharding; see rlpost plan --suggest"


def steps_per_rollout(it: Given) -> int:
    """Optimizer steps of a rollout: verl's schedule counts rollouts, rlpost's optimizer steps."""
    batch, mini = (
        as_count(key, it.look(key))
        for key in ("data.train_batch_size", ACTOR + "ppo_mini_batch_size")
    )
    if mini < 1 or batch % mini:
        raise NotHere("ppo_mini_batch_size does not divide train_batch_size")
    return batch // mini


def warmup(setting: str) -> Convert:
    """Return a conversion of verl's warm-up in rollouts; below 0 its ratio decides."""

    def convert(it: Given) -> Settings:
        if it.value is None or it.count() < 0:
            raise Needless("off: lr_warmup_steps_ratio decides")
        return {setting: it.count() * steps_per_rollout(it)}

    return convert


def numeric(setting: str) -> Convert:
    """Return a conversion that takes a number as it is."""
    return lambda it: {setting: it.number()}


def trains_adapters(it: Given) -> bool:
    """Return whether verl trains adapters alone."""
    ranks = (it.look(MODEL + "lora_rank"), it.look(MODEL + "lora.rank"))
    return any(isinstance(rank, int) and rank > 0 for rank in ranks)
