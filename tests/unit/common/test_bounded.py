"""Awaiting many calls, a bounded number at a time."""

import asyncio

import pytest

from common.bounded import await_unless, for_each


def test_results_are_in_order_and_no_more_than_allowed_are_in_progress():
    now = most = 0

    async def act(item):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001 * (10 - item))
        now -= 1
        return item * item

    assert asyncio.run(for_each(act, range(10), at_most=3)) == [item * item for item in range(10)]
    assert most == 3


async def test_a_failure_cancels_the_other_calls():
    ended = []

    async def act(item):
        if item == 2:
            raise ValueError("two")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(item)

    with pytest.raises(ValueError, match="two"):
        await for_each(act, range(5), at_most=4)
    await asyncio.sleep(0)
    assert {0, 1, 3} <= set(ended)


def test_no_items_give_no_results():
    async def act(item):
        raise AssertionError(item)

    assert asyncio.run(for_each(act, [])) == []


# -- await_unless ----------------------------------------------------------------------------------


class Interruption(Exception):
    """Ends the work."""


async def nothing():
    await asyncio.Event().wait()


async def after(turns, result=None):
    """Return ``result``, or raise it, after some turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    if isinstance(result, Exception):
        raise result
    return result


def outcome(work, interruption):
    try:
        return asyncio.run(await_unless(work, interruption))
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("result", [7, ValueError("of the work")])
def test_of_two_that_finish_in_one_turn_the_work_counts(result):
    """Whichever is scheduled first: both sides of the turn, and the turn itself, are tried."""
    outcomes = [outcome(after(5, result), after(turns, Interruption())) for turns in range(12)]
    of_work = 7 if result == 7 else ValueError
    first = outcomes.index(of_work)
    assert outcomes == [Interruption] * first + [of_work] * (12 - first)

    async def same_turn():
        both = asyncio.get_running_loop().create_future()

        async def finish(result):
            await asyncio.shield(both)
            return await after(0, result)

        running = asyncio.ensure_future(await_unless(finish(result), finish(Interruption())))
        await asyncio.sleep(0.01)
        both.set_result(None)
        return await running

    if result == 7:
        assert asyncio.run(same_turn()) == 7
    else:
        with pytest.raises(ValueError, match="of the work"):
            asyncio.run(same_turn())


def test_what_is_raised_at_once_keeps_the_work_from_beginning():
    begun = []

    async def work():
        begun.append(True)

    assert outcome(work(), after(0, Interruption())) is Interruption
    assert not begun


def test_an_interruption_that_returns_lets_the_work_go_on():
    assert outcome(after(9, 7), after(0)) == outcome(after(9, 7), after(3)) == 7


@pytest.mark.parametrize("how", ["result", "interruption", "cancelled"])
async def test_both_have_ended_on_return_with_their_cleanup(how):
    ended = []

    async def cleaning(name, then):
        try:
            return await then
        finally:
            await asyncio.sleep(0.01)
            ended.append(name)

    work = after(3, 7) if how == "result" else nothing()
    interruption = after(3, Interruption()) if how == "interruption" else nothing()
    both = await_unless(cleaning("work", work), cleaning("interruption", interruption))
    running = asyncio.ensure_future(both)
    if how == "cancelled":
        await asyncio.sleep(0.01)
        running.cancel()
    await asyncio.wait([running])
    assert sorted(ended) == ["interruption", "work"]
