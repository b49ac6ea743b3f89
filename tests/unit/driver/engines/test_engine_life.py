"""A busy engine is left alone; one that hangs is found within a stated time."""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pytest
from aiohttp import web

from rlpost.driver.engines.engine_life import (
    BUSY_LIMIT_S,
    SLOWER_IDLE,
    EngineLife,
    check_engine,
)
from rlpost.engines.engine_activity import cpu_seconds_below
from rlpost.engines.engine_client import EngineClient
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving

INTERVAL_S, TIMEOUT_S = 30.0, 20.0  # of checks, and of SGLang's own /health_generate
NO_LOAD, HUNG = 1.0, 0.0


@dataclass
class Forward:
    """An engine that computes passes of these seconds on ``cores``, then hangs with ``at_end``."""

    passes_s: tuple[float, ...]
    cores: float
    at_end: float | None = None  # cores in use once it hangs; None: it keeps answering

    def is_silent(self, began, now):
        """Whether no pass ended between these moments."""
        ends, at = [], 0.0
        for seconds in self.passes_s:
            at += seconds
            ends.append(at)
        if not any(began <= end <= now for end in ends):
            return began < ends[-1] or self.at_end is not None
        return False

    def cores_at(self, now):
        over = now > sum(self.passes_s)
        return self.at_end if over and self.at_end is not None else self.cores


def found_dead_at(engine, until_s=20_000.0):
    """Check an engine periodically; return when it counted as dead, None if never."""
    life, now = EngineLife("http://engine", INTERVAL_S), 0.0
    while now < until_s:
        began, now = now + INTERVAL_S, now + INTERVAL_S + TIMEOUT_S
        if not engine.is_silent(began, now):
            life.note_pass(now)
        elif life.silent(began, now, engine.cores_at(now)) is not None:
            return now
    return None


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Forward((5.0,) * 100, NO_LOAD), id="as fast as expected"),
        pytest.param(Forward((50.0,) * 60, NO_LOAD / 10), id="ten times slower"),
        pytest.param(Forward((50.0,) * 60, 0.02), id="ten times slower, beside other load"),
        pytest.param(Forward((280.0, 5.0, 280.0), NO_LOAD), id="long prefill"),
        pytest.param(Forward((200.0, 1500.0, 5.0), NO_LOAD), id="one pass longer than before"),
    ],
)
def test_an_engine_that_computes_is_alive_however_slow(engine):
    assert found_dead_at(engine) is None


@pytest.mark.parametrize(
    ("engine", "within_s"),
    [
        pytest.param(Forward((5.0,) * 4, NO_LOAD, HUNG), 80, id="blocked"),
        pytest.param(Forward((5.0,) * 4, NO_LOAD, 1.0), BUSY_LIMIT_S + 80, id="spinning"),
        pytest.param(Forward((100.0,), NO_LOAD, 1.0), 10 * 100 + 80, id="spinning, slow before"),
        pytest.param(Forward((100.0,), NO_LOAD, HUNG), 3 * 100 + 80, id="blocked, slow before"),
    ],
)
def test_an_engine_that_hangs_is_found_in_time(engine, within_s):
    hangs_at = sum(engine.passes_s)
    assert hangs_at <= found_dead_at(engine) <= hangs_at + within_s


def test_without_cpu_time_an_engine_has_a_multiple_of_its_longest_silence_since_its_restart():
    """Such as a pass on a device whose process waits for it without computing."""
    life, longest_s = EngineLife("http://engine", INTERVAL_S), 100.0
    assert life.silent(0.0, longest_s, NO_LOAD) is None
    life.note_pass(longest_s)
    limit_s = SLOWER_IDLE * longest_s
    assert life.silent(200.0, 199.0 + limit_s, HUNG) is None
    assert life.silent(200.0, 200.0 + limit_s, HUNG) is not None
    life.forget_silence()
    assert life.silent(1000.0, 999.0 + limit_s, HUNG) is None


@pytest.mark.parametrize("training_s", [0.0, 600.0, 3600.0])
@pytest.mark.parametrize("checks_a_batch", [1, 2, 100])
def test_time_in_which_no_engine_is_checked_is_no_silence(training_s, checks_a_batch):
    """An engine is found dead after as many checks, however long the policy is trained between."""

    def checks_until_dead(training_s):
        life, now = EngineLife("http://engine", INTERVAL_S), 0.0
        for number in range(1, 100):
            now += INTERVAL_S + (training_s if number % checks_a_batch == 0 else 0)
            if life.silent(now, now + TIMEOUT_S, NO_LOAD) is not None:
                return number
            now += TIMEOUT_S
        return None

    assert checks_until_dead(training_s) == checks_until_dead(0.0)


def test_time_in_which_no_engine_is_checked_lengthens_no_limit():
    life = EngineLife("http://engine", INTERVAL_S)
    assert life.silent(0.0, TIMEOUT_S, NO_LOAD) is None
    life.note_pass(3600.0)
    limit_s = SLOWER_IDLE * (TIMEOUT_S + INTERVAL_S)
    assert life.silent(4000.0, 4000.0 + limit_s, HUNG) is not None


class Silent(FakeEngine):
    """An engine whose health check fails as SGLang's does while its scheduler sends nothing."""

    knows_activity, is_deaf = True, False

    async def handle(self, request):
        if self.is_deaf:
            await asyncio.sleep(3600)
        if request.path == "/health_generate":
            await asyncio.sleep(0.2)
            return web.Response(status=503)
        if request.path == "/health_activity" and not self.knows_activity:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await super().handle(request)


def checked(engine, *, times=1):
    """Return the results of successive checks."""

    async def run():
        async with serving(engine):
            client = EngineClient(engine.url, KEY, timeout_s=0.5)
            life = EngineLife(engine.url, INTERVAL_S)
            return [await check_engine(client, life) for _ in range(times)]

    return asyncio.run(run())


def test_the_cpu_time_of_its_processes_decides_about_an_engine_that_answers_503(caplog):
    began = time.monotonic()
    assert checked(Silent(cpu_s=lambda: time.monotonic() - began), times=3) == [None] * 3
    assert "is busy and is not restarted: no answer for" in caplog.text
    (problem,) = checked(Silent())
    assert "answered 503" in problem and "CPU use 0.00 cores" in problem


def test_a_server_that_does_not_answer_at_all_is_dead():
    silent = Silent(cpu_s=time.monotonic)
    silent.is_deaf = True
    (problem,) = checked(silent)
    assert "not answered after" in problem


def test_an_external_server_that_answers_503_has_the_time_of_a_busy_one():
    external = Silent()
    external.knows_activity = False
    assert checked(external) == [None]


def test_the_cpu_time_of_an_engine_is_that_of_its_child_processes():
    """A child that computes, then one that is stopped, as by a debugger or a frozen cgroup."""
    program = "print('ready', flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            process, own = psutil.Process(child.pid), psutil.Process()
            before = cpu_seconds_below(own)
            deadline = time.monotonic() + 60
            while cpu_seconds_below(own) < before + 0.1:
                assert time.monotonic() < deadline
            process.suspend()
            while process.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
            stopped = cpu_seconds_below(own)
            time.sleep(0.3)
            assert cpu_seconds_below(own) == stopped
        finally:
            child.kill()
