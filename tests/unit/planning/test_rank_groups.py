"""``rlpost plan`` counts the parallel groups that cross a block, with the groups of Megatron."""

from __future__ import annotations

import json

import pytest

from rlpost.config.plan.shape import Layout
from rlpost.extensions.planning.plan_verb import main
from rlpost.extensions.planning.rank_groups import (
    Crossing,
    crossing_words,
    crossings,
    parallel_groups,
)

LAYOUTS = {
    "dense": Layout(world=16, tensor=2, pipeline=2, context=2),
    "experts": Layout(world=32, tensor=4, pipeline=2, context=2, expert=8, expert_tensor=1),
    "expert tensor": Layout(world=48, tensor=2, pipeline=3, expert=4, expert_tensor=2),
    "data": Layout(world=6),
}


def megatron_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """The groups of ``parallel_state.initialize_model_parallel`` with its default order."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")

    def generator(**sizes: int):
        return parallel_state.RankGenerator(pp=layout.pipeline, order="tp-cp-ep-dp-pp", **sizes)

    expert_data = layout.world // (layout.expert_tensor * layout.expert * layout.pipeline)
    attention = generator(tp=layout.tensor, cp=layout.context, ep=1, dp=layout.data)
    experts = generator(tp=layout.expert_tensor, cp=1, ep=layout.expert, dp=expert_data)
    return {
        "tensor": attention.get_ranks("tp"),
        "context": attention.get_ranks("cp"),
        "expert": experts.get_ranks("ep"),
        "data": attention.get_ranks("dp"),
        "pipeline": attention.get_ranks("pp"),
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_groups_are_those_of_megatron(layout: Layout) -> None:
    groups = parallel_groups(layout)
    assert {name: [[*one] for one in found] for name, found in groups.items()} == megatron_groups(
        layout
    )


@pytest.mark.parametrize("segment", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_group_crosses_when_its_ranks_are_in_several_segments(
    layout: Layout, segment: int
) -> None:
    gpus_per_node = 2
    expected = []
    for name, groups in megatron_groups(layout).items():
        segments = [{rank // gpus_per_node // segment for rank in group} for group in groups]
        if len(groups[0]) > 1:
            expected.append(Crossing(name, len(groups), sum(len(one) > 1 for one in segments)))
    assert crossings(layout, gpus_per_node, segment) == tuple(expected)


def test_the_kinds_that_cross_are_named_first_with_their_number() -> None:
    found = (Crossing("tensor", 8, 0), Crossing("expert", 2, 0), Crossing("data", 8, 4))
    assert crossing_words(found) == "groups that may cross: 4 of 8 data; within one: tensor, expert"
    assert crossing_words(found[:1]) == "groups that may cross: none; within one: tensor"
    assert crossing_words(found[2:]) == "groups that may cross: 4 of 8 data"


def test_the_plan_shows_blocks_only_with_a_segment(capsys) -> None:
    """8 nodes of 8 GPUs, TP 2, CP 2, DP 2, EP 8, PP 8: a stage is a node, a segment four stages."""

    def shown(*flags: str) -> str:
        main(["glm45_355b", *flags])
        return capsys.readouterr().out

    assert "\nblocks" not in shown()
    (row,) = (line for line in shown("--segment", "4").splitlines() if line.startswith("blocks"))
    words = "groups that may cross: 8 of 8 pipeline; within one: tensor, context, expert, data"
    assert row.split(maxsplit=1)[1].strip() == words
    crossed = json.loads(shown("--segment", "4", "--json"))["block_crossings"]
    assert {one["name"] for one in crossed if one["num_crossing"]} == {"pipeline"}
