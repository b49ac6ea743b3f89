"""Placement and ports are deterministic and within the offers; shortages are clear errors."""

import pytest

from common.cluster import Cluster, Node
from rlpost.config.load import load
from rlpost.driver import workers
from rlpost.driver.placement import Offer, Slot, order_by_gpu, place, replaced, service_ports
from rlpost.errors import PlacementError
from rlpost.extensions.planning.planned_slices import policy_nodes


def config(**cluster):
    return load([], {"cluster": cluster}).config


def offers(*gpus):
    return [Offer(f"id{i}", f"10.0.0.{i}", n) for i, n in enumerate(gpus)]


def test_ranks_fill_nodes_in_order_and_engines_spread():
    settings = config(nodes=2, num_gpus_per_node=4, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    placement = place(offers(4, 4), settings)
    assert [slot.ip for slot in placement.actors] == ["10.0.0.0"] * 2 + ["10.0.0.1"] * 2
    assert [[part.ip for part in parts] for parts in placement.engines] == [
        ["10.0.0.0"],
        ["10.0.0.1"],
    ]
    assert placement.ranks_of_engines == ((), ())


@pytest.mark.parametrize(
    ("num_nodes", "cluster"),
    [
        (
            1,
            {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4},
        ),
        (
            1,
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2},
        ),
        (3, {"actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 12}),
        (3, {"actor_num_nodes": 1, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 16}),
        (2, {"actor_num_nodes": 2, "colocate": True, "rollout_num_gpus_per_engine": 16}),
    ],
)
def test_the_planner_has_the_engines_on_the_nodes_on_which_they_are_placed(num_nodes, cluster):
    settings = config(nodes=num_nodes, num_gpus_per_node=8, **cluster)
    placement = place(offers(*[8] * num_nodes), settings)
    parts = [part for engine in placement.engines for part in engine]
    nodes = [int(part.ip.rpartition(".")[2]) for part in parts for _ in range(part.num_gpus)]
    assert policy_nodes(settings) == tuple(nodes)


def test_ranks_are_in_the_order_of_the_agents_nodes_whatever_the_order_of_ray(monkeypatch):
    """Agents order nodes by block; Ray lists them by their ids, with one that has left."""
    hosts = {"n1": "10.0.0.1", "n3": "10.0.0.3", "n2": "10.0.0.2", "n4": "10.0.0.4"}
    cluster = Cluster(
        "10.0.0.1:1", "", tuple(Node(host, ip, "eth0", 2) for host, ip in hosts.items()), 1, 1
    )
    listed = [
        {"NodeManagerAddress": ip, "NodeID": f"id-{host}", "Alive": True, "Resources": {"GPU": 2.0}}
        for host, ip in sorted(hosts.items(), reverse=True)
    ]
    gone = {**listed[0], "NodeID": "id-gone", "Alive": False}
    monkeypatch.setattr(workers.ray, "init", lambda **named: None)
    monkeypatch.setattr(workers.ray, "nodes", lambda: [*listed, gone])
    settings = config(nodes=4, num_gpus_per_node=2, actor_num_gpus_per_node=2, colocate=True)
    placement = place(workers.connect(cluster), settings)
    by_rank = [f"id-{host}" for host in hosts for _ in range(2)]
    assert [slot.node_id for slot in placement.actors] == by_rank
    assert [part.node_id for (part,) in placement.engines] == by_rank
    on_gpus_in_reverse = order_by_gpu(placement.actors, [1, 0] * 4)
    assert [placement.actors[worker].node_id for worker in on_gpus_in_reverse] == by_rank
    moved = replaced(placement, hosts["n3"], Offer("id-n5", "10.0.0.5", 2))
    kept = [node_id.replace("n3", "n5") for node_id in by_rank]
    assert [slot.node_id for slot in moved.actors] == kept


def test_a_run_whose_engines_are_in_other_jobs_needs_only_gpus_for_the_trainer():
    settings = config(num_gpus_per_node=2, actor_num_gpus_per_node=2, rollout_num_gpus=0)
    placement = place(offers(2), settings)
    assert len(placement.actors) == 2 and placement.engines == placement.ranks_of_engines == ()
    ports = service_ports(20000, 10, engines=placement.engines, num_stages=1)
    assert ports.engines == () and ports.actor_group == 20000
    assert settings.num_nodes == 1 and settings.num_engines == 0


def test_one_node_is_used_if_everything_fits():
    settings = config(
        num_gpus_per_node=4,
        actor_num_gpus_per_node=2,
        rollout_num_gpus=2,
        rollout_num_gpus_per_engine=2,
    )
    placement = place(offers(4), settings)
    assert len(placement.actors) == 2
    assert [[part.num_gpus for part in parts] for parts in placement.engines] == [[2]]


def test_an_engine_larger_than_a_node_takes_whole_nodes_that_do_not_train():
    settings = config(
        nodes=3, num_gpus_per_node=4, actor_num_nodes=1, actor_num_gpus_per_node=4, rollout_num_gpus=8,
        rollout_num_gpus_per_engine=8,
    )  # fmt: skip
    (parts,) = place(offers(4, 4, 4), settings).engines
    assert [(part.ip, part.num_gpus) for part in parts] == [("10.0.0.1", 4), ("10.0.0.2", 4)]


@pytest.mark.parametrize(
    ("per_engine", "ranks", "parts"),
    [
        (1, ((0,), (1,), (2,), (3,)), (1, 1, 1, 1)),
        (2, ((0, 1), (2, 3)), (1, 1)),
        (4, ((0, 1, 2, 3),), (2,)),
    ],
)
def test_colocated_engines_share_the_gpus_of_the_ranks_in_their_order(per_engine, ranks, parts):
    settings = config(
        colocate=True,
        nodes=2,
        num_gpus_per_node=2,
        actor_num_gpus_per_node=2,
        rollout_num_gpus_per_engine=per_engine,
    )
    placement = place(offers(2, 2), settings)
    assert placement.ranks_of_engines == ranks
    assert tuple(len(engine) for engine in placement.engines) == parts
    for engine in placement.engines:
        for part in engine:
            assert {placement.actors[rank].node_id for rank in part.shared_with} == {part.node_id}


@pytest.mark.parametrize(
    ("gpus", "word"), [((1, 4), "2 nodes with 2 GPUs to train"), ((2, 2), "2 engines of 1 GPU ")]
)
def test_too_few_gpus_are_an_error_with_a_table(gpus, word):
    settings = config(nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    with pytest.raises(PlacementError, match=word) as caught:
        place(offers(*gpus), settings)
    assert "10.0.0.1" in str(caught.value)


def engines_on(*nodes):
    """Return engines with one part on each of the given nodes."""
    return [tuple(Slot(f"id{node}", f"10.0.0.{node}", 1) for node in own) for own in nodes]


ON_ONE_NODE = engines_on([0], [0], [0])


def test_all_ports_are_different_and_inside_the_block():
    ports = service_ports(20000, 100, engines=ON_ONE_NODE, num_stages=2)
    numbers = [
        *ports.engines,
        *ports.engine_groups,
        ports.actor_group,
        *ports.sync_groups,
    ]
    assert len(set(numbers)) == len(numbers) == 9
    assert all(20000 <= number < 20100 for number in numbers)


def test_engines_that_use_tcp_have_free_ports_after_their_rendezvous():
    """SGLang uses the six ports after it, so no other service and no other engine may have them."""
    ports = service_ports(20000, 100, engines=ON_ONE_NODE, num_stages=2, over_tcp=True)
    derived = [meeting + behind for meeting in ports.engine_groups for behind in range(1, 7)]
    named = [
        *ports.engines,
        *ports.engine_groups,
        ports.actor_group,
    ]
    named += ports.sync_groups
    assert len({*named, *derived}) == len(named) + len(derived)


def test_a_block_that_is_too_small_is_refused():
    with pytest.raises(PlacementError, match="need 8 ports"):
        service_ports(20000, 7, engines=ON_ONE_NODE, num_stages=1)


@pytest.mark.parametrize("over_tcp", [False, True])
def test_the_block_of_a_job_has_ports_for_512_engines_on_64_nodes(over_tcp):
    engines = engines_on(*([number % 64] for number in range(512)))
    ports = service_ports(20600, 400, engines=engines, num_stages=16, over_tcp=over_tcp)
    numbers = [
        *ports.engines,
        *ports.engine_groups,
        *ports.sync_groups,
    ]
    assert min(numbers) >= 20600 and max(numbers) < 21000
    places = [(parts[0].ip, port) for parts, port in zip(engines, ports.engines, strict=True)]
    assert len(set(places)) == 512, "two engines listen at the same address"


def test_engines_of_several_nodes_share_no_port_on_any_of_them():
    engines = engines_on([0], [1], [1, 2], [0], [2], [2, 0])
    ports = service_ports(20000, 100, engines=engines, num_stages=1)
    used = [
        (part.ip, port)
        for parts, of_engine in zip(
            engines, zip(ports.engines, ports.engine_groups, strict=True), strict=True
        )
        for part in parts
        for port in of_engine
    ]
    assert len(set(used)) == len(used)


def colocated(per_engine, nodes=2, gpus=4):
    settings = config(
        colocate=True, nodes=nodes, num_gpus_per_node=gpus, actor_num_gpus_per_node=gpus,
        rollout_num_gpus_per_engine=per_engine,
    )  # fmt: skip
    return place(offers(*[gpus] * nodes), settings)


def test_ranks_follow_the_gpus_of_their_node_in_any_order_of_workers():
    placement = colocated(per_engine=2)
    order = order_by_gpu(placement.actors, [2, 0, 3, 1, 1, 3, 2, 0])
    assert order == (1, 3, 0, 2, 7, 4, 6, 5)
    for rank, worker in enumerate(order):
        assert placement.actors[rank].node_id == placement.actors[worker].node_id


@pytest.mark.parametrize(
    "positions", [[None] * 8, [0, None, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0, 0]]
)
def test_a_node_with_unknown_or_equal_gpu_positions_keeps_its_order(positions):
    assert order_by_gpu(colocated(per_engine=1).actors, positions) == tuple(range(8))


def test_one_node_with_unknown_positions_does_not_affect_the_others():
    positions = [None, None, None, None, 3, 2, 1, 0]
    assert order_by_gpu(colocated(per_engine=1).actors, positions) == (0, 1, 2, 3, 7, 6, 5, 4)


def test_gpus_whose_positions_do_not_start_at_zero_are_sorted_too():
    """With trainer and engines on one node, Ray may have started an engine first."""
    settings = config(num_gpus_per_node=4, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    assert order_by_gpu(place(offers(4), settings).actors, [3, 1]) == (1, 0)


@pytest.mark.parametrize("per_engine", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [str, "GPU-{:04x}".format])
def test_an_engine_gets_the_gpus_of_its_ranks_in_bus_order(per_engine, name):
    """Combine both steps as the stages do: order the workers, list each engine's GPUs by rank."""
    placement = colocated(per_engine)
    positions = [2, 0, 3, 1, 1, 3, 2, 0]  # GPU positions of the workers in Ray's order
    order = order_by_gpu(placement.actors, positions)
    visible = [name(positions[worker]) for worker in order]  # GPU names of ranks 0, 1, ...
    for engine, ranks in zip(placement.engines, placement.ranks_of_engines, strict=True):
        lists = [[visible[rank] for rank in part.shared_with] for part in engine]
        assert [gpu for part in lists for gpu in part] == [visible[rank] for rank in ranks]
        for part, gpus in zip(engine, lists, strict=True):
            first = part.shared_with[0] % 4
            assert gpus == [name(first + index) for index in range(part.num_gpus)]


def test_groups_are_placed_beside_the_policy_the_largest_engines_first():
    settings = load(
        [],
        {
            "cluster": {
                "nodes": 3,
                "actor_num_nodes": 1,
                "num_gpus_per_node": 4,
                "actor_num_gpus_per_node": 4,
                "rollout_num_gpus": 2,
            },
            "engines": {
                "judge": {"model": "/m", "engines": 2},
                "teacher": {"model": "/t", "gpus": 4},
            },
        },
    ).config
    placement = place(offers(4, 4, 4), settings)
    on = {name: [parts[0].ip for parts in engines] for name, engines in placement.groups.items()}
    assert on == {"judge": ["10.0.0.2"] * 2, "teacher": ["10.0.0.1"]}
    assert [parts[0].ip for parts in placement.engines] == ["10.0.0.2"] * 2
    assert placement.of_group("policy") is placement
    assert placement.of_group("judge").engines == placement.groups["judge"]
    ports = service_ports(
        20000, 100, engines=placement.engines, num_stages=1, groups=placement.groups
    )
    assert ports.engines == (20000, 20002) and ports.of_group("judge").engines == (20004, 20006)
    assert ports.of_group("teacher").engines == (20000,) and ports.actor_group == 20008
    moved = replaced(placement, "10.0.0.2", Offer("new", "10.0.0.9", 4))
    assert [parts[0].ip for parts in moved.groups["judge"]] == ["10.0.0.9"] * 2
    assert moved.groups["teacher"] == placement.groups["teacher"]
    with pytest.raises(
        PlacementError, match=r"1 engine of 4 GPUs for \[engines.teacher\] beside 4"
    ):
        place(offers(4, 2, 2), settings)
