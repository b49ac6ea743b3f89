"""Placement and ports: deterministic, within what is offered, and clear when it is not enough."""

import pytest

from rlpost.config.load import load
from rlpost.errors import PlacementError
from rlpost.orchestration.placement import Offer, place, service_ports


def config(**cluster):
    return load([], {"cluster": cluster}).config


def offers(*gpus):
    return [Offer(f"id{i}", f"10.0.0.{i}", n) for i, n in enumerate(gpus)]


def test_ranks_fill_nodes_in_order_and_engines_spread():
    settings = config(nodes=2, num_gpus_per_node=4, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    placement = place(offers(4, 4), settings)
    assert [slot.ip for slot in placement.actors] == ["10.0.0.0"] * 2 + ["10.0.0.1"] * 2
    assert [slot.ip for slot in placement.engines] == ["10.0.0.0", "10.0.0.1"]


def test_one_node_holds_everything_when_it_can():
    settings = config(num_gpus_per_node=4, actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    placement = place(offers(4), settings)
    assert len(placement.actors) == 2
    assert [slot.num_gpus for slot in placement.engines] == [2]


@pytest.mark.parametrize(("gpus", "word"), [((1, 4), "2 nodes with 2 GPUs to train"), ((2, 2), "2 engines of 1 GPUs")])
def test_too_few_gpus_are_an_error_with_a_table(gpus, word):
    settings = config(nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    with pytest.raises(PlacementError, match=word) as caught:
        place(offers(*gpus), settings)
    assert "10.0.0.1" in str(caught.value)


def test_all_ports_are_different_and_inside_the_block():
    ports = service_ports(20000, 100, 3)
    numbers = [
        *ports.engines,
        *ports.engine_groups,
        ports.router,
        ports.router_metrics,
        ports.actor_group,
        ports.sync_group,
    ]
    assert len(set(numbers)) == len(numbers) == 10
    assert all(20000 <= number < 20100 for number in numbers)


def test_a_block_that_is_too_small_is_refused():
    with pytest.raises(PlacementError, match="need 10 ports"):
        service_ports(20000, 9, 3)
