"""Places: which engine gets a request. Engines restart, move, join from other jobs and leave.

Input: the engines that serve, and for each request the tokens to come, its prompt and its
conversation. Output: an engine with free capacity; requests wait in order while there is none.

- Load is the sum of tokens to come, divided by the measured pace of the engine: seconds of work.
- The next turn of a conversation goes to the engine that has its KV cache, until that engine leaves.
- Another answer to a prompt goes to the prompt's engine, unless that has more work than the least
  busy one by ``STAY`` such answers. While requests wait, a slot goes to the first of ``WINDOW``
  waiting ones whose prompt is on that engine or on none, else to the oldest.
- An engine with several data-parallel ranks gets the rank of the prompt or conversation, too.
- An engine that failed gets no request for a while, unless there is no other: it has few requests
  in flight, so it would attract all of them until it is dismissed.
- An engine that is removed gets no new requests. Those in flight that remain after GRACE_S, or at
  once if it is lost (``give_up``), are sent again elsewhere. The answer of a request that was given
  up is never read.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

AVOID_S = 5.0
GRACE_S = 10.0
"""A request that reaches an engine just after its requests were aborted is never answered there."""
STAY = 8.0
"""Answers by which the engine of a prompt may be busier than another before they go there."""
WINDOW = 128
"""Waiting requests among which a free slot looks for one that belongs to its engine."""
MAX_PASSED = 128  # slots that may pass the oldest waiting request
MAX_REMEMBERED = 1 << 16  # prompts, and conversations
PREFILL_COST = 1 / 16
"""Cost of a prompt's token relative to a generated one, which needs a whole pass of its own."""
_SMOOTHING = 0.1  # weight of the newest answer in averages
NOWHERE = ("", 0)
FIRST_PACE = 32.0  # tokens a second of a request, before the first answer
MAX_EVENTS_PER_S = 500
SLOWEST_PACE = 0.1  # relative to the median: an engine that stalled once is tried again


class GivenUp(Exception):
    """The place of a request was removed; the request will not be answered."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server that answers ``POST /generate``. ``capacity``: most requests in flight.

    ``is_own``: an engine of the run's job, which the driver restarts; others joined from other jobs.
    ``num_ranks``: its data-parallel ranks (SGLang's ``dp_size``), each with a KV cache of its own.
    """

    url: str
    api_key: str = field(repr=False)
    capacity: int
    is_own: bool = True
    num_ranks: int = 1


@dataclass(eq=False, slots=True)
class Request:
    """What decides the place of a request.

    ``num_new`` is the most tokens that it may generate. Requests with the same ``prompt`` share its
    KV cache; those with the same ``conversation`` share everything before the new turn.
    """

    num_input: int = 0
    num_new: int = 1
    prompt: Hashable = None
    conversation: Hashable = None
    owner: object = None
    cost: float = 0.0  # tokens to come, when it was placed
    rank: int | None = None  # of its place, where that has several


@dataclass(slots=True)
class _Waiting:
    request: Request
    place: asyncio.Future[Place]
    num_passed: int = 0


@dataclass(slots=True)
class Use:
    """What an engine has done since the last ``take_use``; tokens."""

    num_answers: int = 0
    num_generated: int = 0
    num_input: int = 0
    num_cached: int = 0  # of num_input, found in the KV cache

    def add(self, other: Use) -> None:
        """Add the numbers of another one."""
        self.num_answers += other.num_answers
        self.num_generated += other.num_generated
        self.num_input += other.num_input
        self.num_cached += other.num_cached


class Places:
    """Hands out the engines of a run to requests."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own: tuple[Place, ...] = ()
        self._joined: tuple[Place, ...] = ()
        self._all: tuple[Place, ...] = ()
        self._by_url: dict[str, Place] = {}
        self._in_flight: Counter[str] = Counter()
        self._load: defaultdict[str, float] = defaultdict(float)  # tokens to come by address
        self._visits: dict[str, set[asyncio.Timeout]] = {}
        """The requests in flight by address; rescheduling one to now gives it up."""
        self._avoid_until: dict[str, float] = {}
        self._waiting: deque[_Waiting] = deque()
        self._homes: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()
        """Address and rank by prompt and by conversation."""
        self._next_rank: Counter[str] = Counter()
        self._mean_length: float | None = None  # tokens of an answer to one request
        self._pace: dict[str, float] = {}  # generated tokens of a request per second, by address
        self._usual_pace = 1.0  # the median
        self._use: dict[str, Use] = {}
        self._num_moved = 0
        self._total_load = self._peak_load = 0.0  # tokens to come of all requests
        self._counted_at, self._engine_s, self._busy_s = clock(), 0.0, 0.0  # since ``take_busy``
        self._listener: Callable[[str, str], None] = lambda _url, _problem: None

    # -- engines -----------------------------------------------------------------------------------

    def all(self) -> tuple[Place, ...]:
        return self._all

    @property
    def joined(self) -> tuple[Place, ...]:
        """The engines in other jobs that serve now."""
        return self._joined

    def set_own(self, places: Sequence[Place]) -> None:
        """Replace the engines of the run's job; a new one is not avoided."""
        self._own = tuple(places)
        self._replace()

    def set_joined(self, places: Sequence[Place]) -> None:
        """Replace the engines in other jobs; a new one is not avoided."""
        self._joined = tuple(places)
        self._replace()

    def _replace(self) -> None:
        self._count_time()
        before = {place.url for place in self._all}
        self._all = (*self._own, *self._joined)
        self._by_url = {place.url: place for place in self._all}
        now = self._by_url.keys()
        for url in before ^ now:
            self._avoid_until.pop(url, None)
            self._pace.pop(url, None)
        for url in before - now:
            if self._visits.get(url):
                asyncio.get_running_loop().call_later(GRACE_S, self._give_up_if_gone, url)
        self._hand_out()

    def give_up(self, url: str) -> None:
        """Raise GivenUp in all requests that are in flight to a place."""
        now = asyncio.get_running_loop().time()
        for visit in self._visits.pop(url, ()):
            visit.reschedule(now)

    def _give_up_if_gone(self, url: str) -> None:
        if url not in self._by_url:
            self.give_up(url)

    def listen(self, listener: Callable[[str, str], None]) -> None:
        """Call ``listener`` with address and problem of each failed request to an engine that joined."""
        self._listener = listener

    def failed(self, place: Place, problem: str) -> None:
        """Avoid a place for AVOID_S seconds, unless there is no other."""
        self._avoid_until[place.url] = self._clock() + AVOID_S
        # No other event may wake the waiting requests until then.
        asyncio.get_running_loop().call_later(AVOID_S, self._hand_out)
        if not place.is_own:
            self._listener(place.url, problem)

    # -- requests ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def take(self, request: Request) -> AsyncIterator[Place]:
        """Wait for capacity; yield the place of a request.

        Raises GivenUp at any point of the block when its place is lost.
        """
        place = await self._one(request)
        try:
            # No deadline yet: ``give_up`` sets it to now, which raises TimeoutError in the block.
            async with asyncio.timeout(None) as visit:
                self._visits.setdefault(place.url, set()).add(visit)
                yield place
        except TimeoutError:
            if visit.expired():
                raise GivenUp(place.url) from None
            raise
        finally:
            if visits := self._visits.get(place.url):
                visits.discard(visit)
            self._release(place, request)

    def learn(self, place: Place, use: Use, *, seconds: float | None) -> None:
        """Learn from an answer; ``seconds`` is None if it is only the beginning of one."""
        self._use.setdefault(place.url, Use()).add(use)
        if seconds is None or not use.num_generated:
            return
        mean = use.num_generated if self._mean_length is None else self._mean_length
        self._mean_length = mean + _SMOOTHING * (use.num_generated - mean)
        rate = use.num_generated / max(seconds, 1e-3)
        pace = self._pace.get(place.url, rate)
        self._pace[place.url] = pace + _SMOOTHING * (rate - pace)
        self._usual_pace = statistics.median(self._pace.values())

    def take_use(self) -> tuple[dict[str, Use], int]:
        """Return the use of each engine, and the conversations that moved, since the last call."""
        use, moved = self._use, self._num_moved
        self._use, self._num_moved = {}, 0
        return use, moved

    def take_peak(self) -> float:
        """Return the most tokens to come of all requests in flight since the last call."""
        peak, self._peak_load = self._peak_load, self._total_load
        return peak

    def take_busy(self) -> float | None:
        """Return the share of the engines' time in which they had a request, since the last call.

        None if there was no engine.
        """
        self._count_time()
        busy_s, engine_s = self._busy_s, self._engine_s
        self._busy_s = self._engine_s = 0.0
        return busy_s / engine_s if engine_s else None

    def _count_time(self) -> None:
        """Add the time since the last change of engines or requests."""
        now = self._clock()
        elapsed, self._counted_at = now - self._counted_at, now
        self._engine_s += elapsed * len(self._all)
        self._busy_s += elapsed * min(len(self._in_flight), len(self._all))

    def tokens_within(self, place: Place, seconds: float) -> int:
        """Return the tokens that a request generates in some seconds, at least 1.

        Events of a stream cost the loop some time each: beyond MAX_EVENTS_PER_S of all requests in
        flight, they come less often.
        """
        pace = self._pace.get(place.url, self._usual_pace if self._pace else FIRST_PACE)
        num_requests = sum(self._in_flight.values())
        return max(1, round(pace * max(seconds, num_requests / MAX_EVENTS_PER_S)))

    def paces(self) -> dict[str, float]:
        """Return each engine's pace over the median of all; engines without an answer lack."""
        return {
            place.url: max(self._pace[place.url] / self._usual_pace, SLOWEST_PACE)
            for place in self._all
            if place.url in self._pace
        }

    def fail_waiting(self, owner: object, error: type[Exception]) -> None:
        """Raise an error in the requests of ``owner`` that wait for a place."""
        for waiting in self._waiting:
            if waiting.request.owner is owner and not waiting.place.done():
                waiting.place.set_exception(error())
        self._drop_ended()

    async def _one(self, request: Request) -> Place:
        """Return a place whose capacity is taken for the caller."""
        self._drop_ended()
        place = self._home_of_conversation(request)
        if place is None and not self._waiting:
            place = self._choose(request)
        if place is not None:
            self._take(place, request)
            return place
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            place = await waiting.place
        except asyncio.CancelledError:
            if not waiting.place.cancelled() and waiting.place.exception() is None:
                self._release(waiting.place.result(), request)  # handed out at the same time
            raise
        # Each iteration of the event loop starts one request: hundreds at once would block it.
        self._hand_out()
        return place

    def _take(self, place: Place, request: Request) -> None:
        self._count_time()
        request.cost = self._cost(request)
        self._in_flight[place.url] += 1
        self._load[place.url] += request.cost
        self._total_load += request.cost
        self._peak_load = max(self._peak_load, self._total_load)
        conversation_home = self._homes.get(("conversation", request.conversation))
        prompt_home = self._homes.get(("prompt", request.prompt))
        known = [home for home in (conversation_home, prompt_home) if home and home[0] == place.url]
        rank = known[0][1] if known else self._next_rank[place.url] % place.num_ranks
        self._next_rank[place.url] += not known
        request.rank = rank if place.num_ranks > 1 else None
        if request.conversation is not None:
            self._num_moved += conversation_home is not None and conversation_home[0] != place.url
            self._remember(("conversation", request.conversation), (place.url, rank))
        if request.prompt is not None and self._home_of_prompt(request) is None:
            self._remember(("prompt", request.prompt), (place.url, rank))

    def _remember(self, key: Hashable, home: tuple[str, int]) -> None:
        self._homes[key] = home
        self._homes.move_to_end(key)
        while len(self._homes) > 2 * MAX_REMEMBERED:
            self._homes.popitem(last=False)

    def _release(self, place: Place, request: Request) -> None:
        self._count_time()
        self._in_flight[place.url] -= 1
        self._load[place.url] -= request.cost
        self._total_load -= request.cost
        if not self._in_flight[place.url]:
            del self._in_flight[place.url], self._load[place.url]
            if not self._visits.get(place.url):
                self._visits.pop(place.url, None)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give a free slot, if any, to a waiting request, which calls this again."""
        self._drop_ended()
        if not self._waiting or (place := self._least_busy(self._usable())) is None:
            return
        waiting = self._next_for(place)
        self._waiting.remove(waiting)
        self._take(place, waiting.request)
        waiting.place.set_result(place)

    def _next_for(self, place: Place) -> _Waiting:
        """Return the first waiting request that belongs to ``place`` or nowhere, else the oldest."""
        oldest = self._waiting[0]
        if oldest.num_passed >= MAX_PASSED:
            return oldest
        for waiting in itertools.islice(self._waiting, WINDOW):
            home = self._home_of_prompt(waiting.request)
            if not waiting.place.done() and (home is None or home == place):
                oldest.num_passed += waiting is not oldest
                return waiting
        return oldest

    def _drop_ended(self) -> None:
        while self._waiting and self._waiting[0].place.done():
            self._waiting.popleft()

    # -- choice ------------------------------------------------------------------------------------

    def _cost(self, request: Request) -> float:
        """Return the tokens to come: those that an answer has on average, and the prompt's."""
        expected = request.num_new
        if self._mean_length is not None:
            expected = min(expected, math.ceil(self._mean_length))
        return expected + PREFILL_COST * request.num_input

    def _seconds(self, place: Place, more: float = 0.0) -> float:
        """Return the time of the work of a place and ``more`` tokens, if all its slots were in use.

        An unknown pace is the usual one.
        """
        pace = self._pace.get(place.url, self._usual_pace)
        rate = place.capacity * max(pace, SLOWEST_PACE * self._usual_pace)
        return (self._load[place.url] + more) / rate

    def _usable(self) -> list[Place]:
        """Return the places with capacity; those that failed lately only if there are no others."""
        now = self._clock()
        usual = [
            place for place in self._all if now >= self._avoid_until.get(place.url, now)
        ] or self._all
        return [place for place in usual if self._in_flight[place.url] < place.capacity]

    def _least_busy(self, places: Sequence[Place]) -> Place | None:
        """Return the place with least work; of equal ones, that with the smallest share in use."""
        return min(
            places,
            key=lambda place: (self._seconds(place), self._in_flight[place.url] / place.capacity),
            default=None,
        )

    def _home_of_conversation(self, request: Request) -> Place | None:
        """Return the place of a conversation, whatever its load, while it serves."""
        if request.conversation is None:
            return None
        home = self._by_url.get(self._homes.get(("conversation", request.conversation), NOWHERE)[0])
        is_avoided = home is not None and self._clock() < self._avoid_until.get(home.url, -math.inf)
        return None if is_avoided else home

    def _home_of_prompt(self, request: Request) -> Place | None:
        if request.prompt is None:
            return None
        return self._by_url.get(self._homes.get(("prompt", request.prompt), NOWHERE)[0])

    def _choose(self, request: Request) -> Place | None:
        """Return a free place: that of the prompt, or the least busy one."""
        usable = self._usable()
        least, home = self._least_busy(usable), self._home_of_prompt(request)
        if least is None or home not in usable:
            return least
        ahead = self._seconds(home) - self._seconds(least, STAY * self._cost(request))
        return home if ahead <= 0 else least
