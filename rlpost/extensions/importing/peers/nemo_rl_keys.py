"""Prefixes of NeMo-RL's keys, and conversions that several of its tables use. Pure."""

from __future__ import annotations

from rlpost.extensions.importing.peers.common import RECOMPUTE_ALL, as_is, lora_targets
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    as_count,
    needless,
    row,
    same,
)

MEGATRON, DTENSOR = "policy.megatron_cfg.", "policy.dtensor_cfg."


def steps_per_rollout(it: Given) -> int:
    """Optimizer steps of a rollout: NeMo-RL's schedule counts rollouts, rlpost's optimizer steps."""
    prompts, answers, batch = (
        as_count(key, it.look(key))
        for key in (
            "grpo.num_prompts_per_step",
            "grpo.num_generations_per_prompt",
            "policy.train_global_batch_size",
        )
    )
    if batch < 1 or prompts * answers % batch:
        raise NotHere("train_global_batch_size does not divide the answers of a step")
    return prompts * answers // batch


def recompute(it: Given) -> Settings:
    """Return the recomputation that ``activation_checkpointing`` means."""
    if not same(it.value, True):
        raise Needless("off, as here")
    if it.key.startswith(MEGATRON) and it.look(MEGATRON + "recompute_granularity") == "selective":
        return {"recompute_granularity": "selective"}
    return {**RECOMPUTE_ALL}


def with_adapters(table: str, convert: Convert) -> Convert:
    """Return ``convert`` where ``table`` turns adapters on."""

    def checked(it: Given) -> Settings:
        if not same(it.look(f"{table}enabled"), True):
            raise Needless("adapters are off")
        return convert(it)

    return checked


def adapters(table: str) -> tuple[Row, ...]:
    """Return the rows of a table of LoRA."""

    def off(it: Given) -> Settings:
        raise Needless("see its key dim" if same(it.value, True) else "off, as here")

    def targets(it: Given) -> Settings:
        if it.value in ([], None):
            raise Needless("all linear layers, as here")
        return lora_targets(it)

    return (
        row(table + "enabled", "", off),
        row(table + "dim", "lora_rank", with_adapters(table, as_is("lora_rank"))),
        row(table + "alpha", "lora_alpha", with_adapters(table, as_is("lora_alpha"))),
        row(table + "dropout", "lora_dropout", with_adapters(table, as_is("lora_dropout"))),
        row(table + "target_modules", "lora_targets", with_adapters(table, targets)),
        needless(table + "*", "adapters have one form here (docs/lora.md)"),
    )
