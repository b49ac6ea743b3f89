"""Requests go to engines with free capacity, while engines join and leave."""

import asyncio
import time
from collections import Counter

import pytest

from rlpost.engines import places as module
from rlpost.engines.places import AVOID_S, STAY, GivenUp, Place, Places, Request, Use

OWN = Place("http://own", "k", 2)
FLEET = Place("http://fleet", "f", 4, is_own=False)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def places_of(own, **options):
    places = Places(**options)
    places.set_own(own)
    return places


async def request(places, log, release, wanted=None):
    async with places.take(wanted or Request()) as place:
        log.append(place.url)
        await release.wait()


async def test_the_place_with_the_largest_free_fraction_is_taken():
    places, log, release = places_of([OWN]), [], asyncio.Event()
    places.set_joined([FLEET])
    tasks = [asyncio.create_task(request(places, log, release)) for _ in range(8)]
    await settle()
    assert Counter(log) == {"http://own": 2, "http://fleet": 4}
    assert Counter(log[:3]) == {"http://own": 1, "http://fleet": 2}
    release.set()
    await asyncio.gather(*tasks)
    assert len(log) == 8


async def test_waiting_requests_go_to_an_engine_that_joins_and_never_to_one_that_left():
    places, log, release = places_of([OWN]), [], asyncio.Event()
    tasks = [asyncio.create_task(request(places, log, release)) for _ in range(9)]
    await settle()
    assert log == ["http://own"] * 2
    places.set_joined([FLEET])
    await settle()
    assert log[2:] == ["http://fleet"] * 4
    places.set_joined([])
    release.set()
    await asyncio.gather(*tasks)
    assert log[6:] == ["http://own"] * 3


async def test_without_any_place_requests_wait_for_the_first_engine():
    places, log, release = places_of([]), [], asyncio.Event()
    release.set()
    task = asyncio.create_task(request(places, log, release))
    await settle()
    assert not log
    places.set_joined([FLEET])
    await task
    assert log == ["http://fleet"]


async def test_a_failed_engine_is_avoided_for_a_while():
    clock, log, release = Clock(), [], asyncio.Event()
    places = places_of([OWN], clock=clock)
    places.set_joined([FLEET])
    places.failed(FLEET, "refused")
    tasks = [asyncio.create_task(request(places, log, release)) for _ in range(3)]
    await settle()
    assert log == ["http://own", "http://own"]  # the third waits for the engine that works
    release.set()
    await asyncio.gather(*tasks)
    assert log == ["http://own"] * 3
    places.failed(FLEET, "refused")
    clock.now = AVOID_S
    release.clear()
    tasks = [asyncio.create_task(request(places, log, release)) for _ in range(2)]
    await settle()
    assert set(log[3:]) == {"http://own", "http://fleet"}
    release.set()
    await asyncio.gather(*tasks)


async def test_an_engine_that_rejoins_is_not_avoided():
    places = places_of([OWN], clock=Clock())
    places.set_joined([FLEET])
    places.failed(FLEET, "refused")
    places.set_joined([])
    places.set_joined([FLEET])
    log, _ = await taken(places, 2)
    assert set(log) == {"http://own", "http://fleet"}


@pytest.mark.parametrize("is_woken", [False, True])
async def test_a_request_cancelled_while_it_waits_takes_no_capacity(is_woken):
    places, log, release = places_of([Place("http://own", "k", 1)]), [], asyncio.Event()
    first = asyncio.create_task(request(places, log, release))
    await settle()
    second = asyncio.create_task(request(places, log, release))
    third = asyncio.create_task(request(places, log, release))
    await settle()
    if is_woken:
        places.set_joined([FLEET])
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    async with asyncio.timeout(30):
        await asyncio.gather(first, third)
        await request(places, log, release)
    assert len(log) == 3


async def test_many_requests_never_exceed_a_capacity():
    places = places_of([OWN])
    places.set_joined([FLEET])
    inside, most = Counter(), Counter()

    async def one(number):
        async with places.take(Request()) as place:
            inside[place.url] += 1
            most[place.url] = max(most[place.url], inside[place.url])
            await asyncio.sleep(number % 3 * 0.001)
            inside[place.url] -= 1

    await asyncio.gather(*(one(number) for number in range(300)))
    assert most == {"http://own": 2, "http://fleet": 4}


async def test_a_failed_engine_is_used_if_it_is_the_only_place():
    places, log, release = places_of([]), [], asyncio.Event()
    release.set()
    places.set_joined([FLEET])
    places.failed(FLEET, "refused")
    await request(places, log, release)
    assert log == ["http://fleet"]


async def test_a_request_that_waits_for_a_failed_engine_is_woken_after_a_while(monkeypatch):
    monkeypatch.setattr(module, "AVOID_S", 0.05)
    places, log, release = places_of([Place("http://own", "k", 1)]), [], asyncio.Event()
    places.set_joined([FLEET])
    places.failed(FLEET, "refused")
    tasks = [asyncio.create_task(request(places, log, release)) for _ in range(2)]
    async with asyncio.timeout(30):
        while len(log) < 2:  # the run's own engine is busy all the time
            await asyncio.sleep(0.01)
    release.set()
    await asyncio.gather(*tasks)


async def test_no_later_request_overtakes_a_waiting_one():
    places, order = places_of([Place("http://own", "k", 1)]), []

    async def one(name):
        async with places.take(Request()):
            order.append(name)
            await asyncio.sleep(0.01)

    async def greedy():
        for _ in range(5):
            await one("again and again")

    busy = asyncio.create_task(greedy())
    await asyncio.sleep(0)
    await asyncio.gather(busy, one("waits"))
    assert order.index("waits") == 1


async def test_a_request_in_flight_to_a_lost_engine_is_given_up_and_its_capacity_is_freed():
    places, release, ends = places_of([]), asyncio.Event(), []
    places.set_joined([FLEET])

    async def one():
        try:
            async with places.take(Request()):
                await release.wait()
        except GivenUp as gone:
            ends.append(str(gone))

    tasks = [asyncio.create_task(one()) for _ in range(4)]
    await settle()
    places.give_up(FLEET.url)
    places.give_up(FLEET.url)
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)
    assert ends == ["http://fleet"] * 4
    log = []
    release.set()
    await asyncio.gather(*(request(places, log, release) for _ in range(4)))
    assert len(log) == 4


@pytest.mark.parametrize("comes_back", [False, True])
async def test_requests_that_an_engine_still_holds_after_it_left_are_given_up(
    monkeypatch, comes_back
):
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    places, log, release = places_of([]), [], asyncio.Event()
    places.set_joined([FLEET])
    held = asyncio.create_task(request(places, log, release))
    await settle()
    places.set_joined([])
    if comes_back:  # readmitted with new weights, while the request waits in its server
        places.set_joined([FLEET])
    await asyncio.wait([held], timeout=0.15 if comes_back else 30)
    assert held.done() != comes_back
    release.set()
    (end,) = await asyncio.gather(held, return_exceptions=True)
    assert (end is None) == comes_back and (isinstance(end, GivenUp) != comes_back)


async def test_thousands_of_waiting_requests_are_cancelled_quickly():
    places, log, release = places_of([Place("http://own", "k", 1)]), [], asyncio.Event()
    first = asyncio.create_task(request(places, log, release))
    waiting = [asyncio.create_task(request(places, log, release)) for _ in range(20_000)]
    await asyncio.sleep(0)
    started = time.thread_time()
    for task in reversed(waiting[1:]):
        task.cancel()
    await asyncio.gather(*waiting[1:], return_exceptions=True)
    assert time.thread_time() - started < 2.0
    release.set()
    await asyncio.gather(first, waiting[0])
    assert len(log) == 2


async def test_waiting_requests_fail_together():
    places, log, release = places_of([]), [], asyncio.Event()
    waiting = [asyncio.create_task(request(places, log, release)) for _ in range(3)]
    await settle()
    places.fail_waiting(None, KeyError)
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in found] == [KeyError] * 3
    places.set_joined([FLEET])
    release.set()
    await request(places, log, release)
    assert log == ["http://fleet"]


ENGINES = [Place(f"http://{name}", "k", 64) for name in "abcd"]


def taken(places, count, **wanted):
    """Take places for ``count`` requests that never end; return the address of each."""

    async def scenario():
        log, release = [], asyncio.Event()
        tasks = [
            asyncio.create_task(request(places, log, release, Request(**wanted)))
            for _ in range(count)
        ]
        await settle()
        return log, tasks

    return scenario()


async def test_the_answers_of_a_prompt_go_to_one_engine_and_prompts_to_different_ones():
    places = places_of(ENGINES)
    homes = []
    for number in range(8):
        log, _ = await taken(places, int(STAY), num_new=100, prompt=number)
        homes.append(Counter(log))
    assert all(len(home) == 1 for home in homes)
    assert Counter(next(iter(home)) for home in homes) == dict.fromkeys(
        (place.url for place in ENGINES), 2
    )


async def test_an_engine_of_a_prompt_is_never_busier_than_another_by_more_than_the_bound():
    places = places_of(ENGINES)
    log, _ = await taken(places, 100, num_new=100, prompt="the same")
    counts = Counter(log)
    assert max(counts.values()) - min(counts.values()) <= STAY + 1


async def test_a_turn_goes_to_the_engine_of_its_conversation_even_if_that_is_full():
    places = places_of([Place("http://a", "k", 1), Place("http://b", "k", 1)])
    release, log = asyncio.Event(), []
    release.set()
    await request(places, log, release, Request(conversation="x"))
    await taken(places, 4, num_new=5)  # both are full, and two wait
    await request(places, log, release, Request(conversation="x"))
    assert log == ["http://a"] * 2 and places.take_use()[1] == 0


async def test_a_conversation_moves_when_its_engine_leaves_and_the_move_is_counted():
    places = places_of(ENGINES[:2])
    release, log = asyncio.Event(), []
    release.set()
    await request(places, log, release, Request(conversation="x"))
    places.set_own(ENGINES[1:2])
    for _ in range(2):
        await request(places, log, release, Request(conversation="x"))
    assert log == ["http://a", "http://b", "http://b"]
    assert places.take_use()[1] == 1 and places.take_use()[1] == 0


async def test_a_free_slot_goes_to_a_waiting_answer_whose_prompt_is_there():
    places = places_of([Place("http://a", "k", 1), Place("http://b", "k", 1)])
    ends, log = {}, []

    async def one(name, prompt):
        ends[name] = asyncio.Event()
        async with places.take(Request(num_new=9, prompt=prompt)) as place:
            log.append((name, place.url))
            await ends[name].wait()

    tasks = []
    for name, prompt in (("1", "p"), ("2", "q"), ("3", "p"), ("4", "q")):
        tasks.append(asyncio.create_task(one(name, prompt)))
        await settle()
    assert log == [("1", "http://a"), ("2", "http://b")]
    ends["2"].set()
    await settle()
    assert log[2:] == [("4", "http://b")]  # the third waits for the engine of its prompt
    ends["4"].set()
    await settle()
    assert log[3:] == [("3", "http://b")]  # nobody else waits: better here than idle
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks)


async def test_an_engine_at_half_speed_gets_half_the_work():
    places = places_of(ENGINES[:3])
    for number in range(60):
        place = ENGINES[number % 3]
        seconds = 2.0 if place is ENGINES[0] else 1.0
        places.learn(place, Use(1, 100, 10, 0), seconds=seconds)
    log, _ = await taken(places, 50, num_new=100)
    counts = Counter(log)
    assert counts == {"http://a": 10, "http://b": 20, "http://c": 20}
    assert places.paces() == {"http://a": 0.5, "http://b": 1.0, "http://c": 1.0}


async def test_long_answers_count_more_than_short_ones_and_ended_ones_not_at_all():
    places = places_of(ENGINES[:2])
    await taken(places, 1, num_new=1000)
    log, tasks = await taken(places, 5, num_new=100)
    assert log == ["http://b"] * 5 and places.take_peak() == 1500
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert places.take_peak() == 1500 and places.take_peak() == 1000


async def test_the_work_of_a_request_is_the_mean_length_of_answers_once_some_ended():
    places = places_of(ENGINES[:1])
    places.learn(ENGINES[0], Use(1, 200, 10, 4), seconds=1.0)
    await taken(places, 1, num_new=32_768, num_input=160)
    assert places.take_peak() == 210
    use, _ = places.take_use()
    assert use == {"http://a": Use(1, 200, 10, 4)}


async def test_requests_of_a_prompt_and_of_a_conversation_go_to_one_rank_of_an_engine():
    places = places_of([Place("http://a", "k", 64, num_ranks=4)])
    release, log = asyncio.Event(), []
    release.set()
    first = [Request(prompt=number, conversation=number) for number in range(8)]
    again = [Request(prompt=number, conversation=number) for number in range(8)]
    sibling = [Request(prompt=number, conversation=number + 100) for number in range(8)]
    alone = Request()
    for one in (*first, *again, *sibling, alone):
        await request(places, log, release, one)
    assert [one.rank for one in first] == [0, 1, 2, 3] * 2
    assert [one.rank for one in again] == [one.rank for one in sibling] == [0, 1, 2, 3] * 2
    assert alone.rank is not None


async def test_an_engine_with_one_rank_chooses_no_rank():
    places, log, release = places_of(ENGINES[:1]), [], asyncio.Event()
    release.set()
    one = Request(prompt=1, conversation=1)
    await request(places, log, release, one)
    assert one.rank is None


async def test_the_share_of_busy_time_counts_engines_and_requests():
    now = [0.0]
    places = Places(clock=lambda: now[0])
    now[0] = 5.0
    assert places.take_busy() is None, "no engine"
    places.set_own([Place("http://a", "", 4), Place("http://b", "", 4)])
    now[0] = 6.0
    async with places.take(Request()), places.take(Request()):
        now[0] = 8.0  # both engines for 2 s
    async with places.take(Request()):
        now[0] = 9.0  # one of them for 1 s
    now[0] = 10.0
    assert places.take_busy() == (2 * 2 + 1 * 1) / (2 * 5)
    now[0] = 11.0
    assert places.take_busy() == 0.0
