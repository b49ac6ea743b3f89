"""Invariant: a job's ports are in one block below the ephemeral range, and its parts do not
overlap.
"""

import itertools
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import port_blocks as ports
from common.addresses import host_port
from common.port_blocks import (
    BLOCK_SIZE,
    PortBlock,
    PortError,
    candidate_blocks,
    claim_block,
    ephemeral_floor,
)


@given(st.text(min_size=1, max_size=12), st.integers(9000, 61000))
def test_every_port_is_unprivileged_and_below_the_ephemeral_floor(job_id: str, floor: int) -> None:
    blocks = list(candidate_blocks(job_id, floor))
    assert len({block.base for block in blocks}) == len(blocks)
    for block in blocks:
        assert block.base > 1024 and block.job_ports.stop <= floor


def test_the_parts_of_a_block_are_disjoint_and_fill_it() -> None:
    block = PortBlock(20_000)
    parts = [[block.rendezvous], block.service_ports, block.worker_ports, block.job_ports]
    assert sorted(itertools.chain(*parts)) == list(range(20_000, 20_000 + BLOCK_SIZE))
    assert block.gcs in block.service_ports


def test_neighbouring_jobs_begin_with_different_blocks() -> None:
    assert len({next(candidate_blocks(str(job), 32768)).base for job in range(100, 110)}) == 10


def test_a_floor_without_room_is_an_error() -> None:
    with pytest.raises(PortError, match=r"1500.*ip_local_port_range"):
        list(candidate_blocks("1", 1500))


def test_the_floor_is_what_the_kernel_says(tmp_path) -> None:
    (tmp_path / "range").write_text("9000\t65535\n")
    assert ephemeral_floor(tmp_path / "range") == 9000
    assert ephemeral_floor(tmp_path / "absent") == 32768


def test_a_claimed_block_is_not_given_to_another() -> None:
    """The bound rendezvous socket reserves the block while it is open."""
    first, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
    with claim:
        second, other = claim_block("7", ephemeral_floor(), "127.0.0.2")
        other.close()
    assert first != second
    again, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
    claim.close()
    assert again == first


def test_a_block_whose_last_connections_wind_down_is_free() -> None:
    """The side that closes first keeps the connection in TIME_WAIT for a minute; a job that
    restarts within it gets the same block.
    """
    first, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
    with claim, socket.create_connection(("127.0.0.2", first.rendezvous)) as node:
        taken, _ = claim.accept()
        taken.close()
        assert node.recv(1) == b""
    again, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
    claim.close()
    assert again == first


def test_a_block_with_a_busy_service_port_is_passed_over() -> None:
    first, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
    claim.close()
    with socket.socket() as intruder:
        intruder.bind(("127.0.0.1", first.gcs))
        intruder.listen()
        second, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
        claim.close()
    assert second != first


def test_sockets_at_all_predictable_blocks_do_not_keep_a_job_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predictable, claim = claim_block("7", ephemeral_floor(), "127.0.0.2")
    monkeypatch.setattr(ports, "candidate_blocks", lambda *_: iter([predictable]))
    with claim:  # another user's
        found, own = claim_block("7", ephemeral_floor(), "127.0.0.2")
        own.close()
    assert found != predictable
    assert 10_000 <= found.base <= ephemeral_floor() - BLOCK_SIZE


def test_an_address_of_another_host_is_not_taken_for_busy_ports() -> None:
    with pytest.raises(PortError, match=r"192\.0\.2\.1 is no address of this host"):
        claim_block("7", ephemeral_floor(), "192.0.2.1")


def test_an_ipv6_address_is_bracketed_before_a_port() -> None:
    assert host_port("10.0.0.1", 6379) == "10.0.0.1:6379"
    assert host_port("fd00::1", 6379) == "[fd00::1]:6379"


@pytest.mark.parametrize("page", ["cluster.md", "bringup.md"])
def test_the_pages_say_which_ports_a_firewall_has_to_leave_open(page: str) -> None:
    blocks = list(candidate_blocks("1", 32768))
    first, last = (
        min(block.base for block in blocks),
        max(block.job_ports.stop - 1 for block in blocks),
    )
    assert f"{first} to {last}" in (Path(__file__).parents[3] / "docs" / page).read_text()
