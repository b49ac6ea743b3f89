"""Check that a checkpoint of one layout loads at another.

Input: the parts that all ranks write. Output: one line for each contradiction. A tensor loads by its key and its shape
over the whole model, whatever the parts are; so each key that a rank reads at either layout must
have been written, with the same shape over the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.extensions.rehearsal.all_ranks.rank_facts import Shape
from rlpost.trainer.model_description import description_of
from tests.contract.all_ranks.saved import SavedFacts, build_rank

SIZES = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
}


def load_problems(config: Config, facts: Mapping[int, SavedFacts]) -> Iterator[str]:
    """Yield what is read at half of one parallel size but was not written.

    Raises ConfigError or PlacementError where the model does not fit that layout.
    """
    written = {part.key: part.global_shape for one in facts.values() for part in one.checkpoint}
    changed, layout = other_settings(config)
    description, world = description_of(changed), config.actor_world_size
    read = {
        rank: build_rank(changed, description, rank=rank, world=world)
        for rank in _ends_of_stages(world, changed.perf.pipeline_model_parallel_size)
    }
    yield from unread(written, read, layout)


def other_settings(config: Config) -> tuple[Config, str]:
    """Settings with one parallel size halved, and the flag. Raises ValueError if all are odd."""
    for name, flag in SIZES.items():
        size = getattr(config.perf, name)
        if size % 2 == 0:
            plain = {
                "num_layers_per_virtual_pipeline_stage": None,
                "decoder_first_pipeline_num_layers": None,
                "decoder_last_pipeline_num_layers": None,
            }
            is_pipeline = name == "pipeline_model_parallel_size"
            changes: dict[str, object] = {name: size // 2} | (plain if is_pipeline else {})
            return with_values(config, **changes), f"{flag} {size // 2}"
    raise ValueError("all parallel sizes are odd")


def unread(
    written: Mapping[str, Shape], read: Mapping[int, SavedFacts], layout: str
) -> Iterator[str]:
    """Yield what a rank of the other layout would read but that was not written in this shape."""
    for rank, facts in read.items():
        for part in facts.checkpoint:
            found = written.get(part.key)
            if found != part.global_shape:
                yield (
                    f"with {layout} rank {rank} reads {part.key} of shape {part.global_shape}, the "
                    f"checkpoint has {found or 'none'}"
                )


def _ends_of_stages(world: int, num_stages: int) -> list[int]:
    """The first and the last rank of each pipeline stage."""
    size = world // num_stages
    return sorted({rank for start in range(0, world, size) for rank in (start, start + size - 1)})
