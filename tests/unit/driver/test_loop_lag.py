"""The watchdog of the event loop, with an event loop that is blocked on purpose."""

import asyncio
import logging
import time

from common.log_format import DIAGNOSTICS
from rlpost.driver.loop_lag import LoopLag

STALL_S = 0.1


def block_the_loop(seconds):
    time.sleep(seconds)


def stacks(caplog):
    return [record.getMessage() for record in caplog.records if "blocked" in record.getMessage()]


def test_the_longest_block_is_reported_once_and_then_forgotten():
    async def run():
        async with LoopLag() as lag:
            await asyncio.sleep(0.05)
            block_the_loop(0.8)
            blocked = lag.take()  # the callback is still overdue
            await asyncio.sleep(0.05)
            after = lag.take()
            block_the_loop(0.3)
            await asyncio.sleep(0.05)
            return blocked, after, lag.take()

    blocked, after, later = asyncio.run(run())
    assert blocked > 0.7
    assert after < 0.6, "what was returned once counts again"
    assert later > 0.25, "a block between two questions counts although the loop has recovered"


def test_waiting_is_not_lag():
    async def run():
        async with LoopLag() as lag:
            started = time.thread_time()
            await asyncio.sleep(0.5)
            return lag.take(), time.thread_time() - started

    measured = [asyncio.run(run()) for _ in range(3)]  # once the machine may be busy for so long
    assert min(lag_s for lag_s, _ in measured) < 0.4, "half a second of waiting is not a lag"
    assert min(used_s for _, used_s in measured) < 0.1


async def test_a_stall_logs_the_stack_of_the_loop_once(caplog):
    caplog.set_level(logging.INFO)
    async with LoopLag(stall_s=STALL_S):
        await asyncio.sleep(0.05)
        block_the_loop(6 * STALL_S)
    found = stacks(caplog)
    assert len(found) == 1, found
    assert "block_the_loop" in found[0]
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert found[0].startswith(DIAGNOSTICS), "the terminal of rlpost submit shows the stack"


async def test_stalls_in_a_row_are_counted_and_not_logged(caplog):
    caplog.set_level(logging.INFO)
    async with LoopLag(stall_s=STALL_S, quiet_s=1.5):
        for seconds in (4, 4, 4):
            await asyncio.sleep(0.05)
            block_the_loop(seconds * STALL_S)
        await asyncio.sleep(1.5)
        block_the_loop(4 * STALL_S)
    found = stacks(caplog)
    assert len(found) == 2, found
    assert "2 earlier stalls were not logged" in found[1]


async def test_short_blocks_log_nothing(caplog):
    async with LoopLag(stall_s=5.0):
        for _ in range(5):
            block_the_loop(0.05)
            await asyncio.sleep(0)
    assert not stacks(caplog)


async def test_it_ends_with_its_context(caplog):
    async with LoopLag(stall_s=STALL_S):
        await asyncio.sleep(0.05)
    block_the_loop(4 * STALL_S)
    assert not [one for one in stacks(caplog) if "block_the_loop" in one]
