"""Invariant: the head's work for a node does not depend on the number of nodes. One real head
without Ray (``tests/fakes/ray_stub``) and simulated nodes with the real protocol.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.bootstrap.simulated_head import simulate

_NODES = (8, 128)


@pytest.mark.slow
def test_messages_bytes_and_open_sockets_grow_linearly_with_the_nodes(tmp_path: Path) -> None:
    """Seven messages per node (hello, welcome, joined, the order to try the folder and its answer,
    start_ray, end), one connection, and a report of constant size.
    """
    small, large = _NODES
    folders = [tmp_path / str(num_nodes) for num_nodes in _NODES]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        found = dict(zip(_NODES, pool.map(simulate, _NODES, folders), strict=True))
    for num_nodes in _NODES:
        assert found[num_nodes].num_messages == 7 * (num_nodes - 1)
    added = large - small
    # the two come and go
    assert found[large].num_descriptors - found[small].num_descriptors <= added + 2
    per_node = [found[num_nodes].num_bytes / (num_nodes - 1) for num_nodes in _NODES]
    assert abs(per_node[1] - per_node[0]) < 0.05 * per_node[0]
