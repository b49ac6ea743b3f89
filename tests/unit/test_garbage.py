"""Full garbage collections of the driver come between steps.

In a process of its own: the settings are global.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = """
import gc
from rlpost.garbage import between_steps, collect_between_steps_only

full = 0
def count(phase, info):
    global full
    full += phase == "start" and info["generation"] == 2

def grow():
    return [[number] for number in range(600_000)]  # live containers, as of requests in flight

gc.callbacks.append(count)
if {spared}:
    collect_between_steps_only()
full = 0
kept = grow()
while_growing = full
class Cycle:
    alive = 0
    def __init__(self):
        self.me, Cycle.alive = self, Cycle.alive + 1
    def __del__(self):
        Cycle.alive -= 1
for _ in range(50_000):
    Cycle()
most, before = Cycle.alive, full
between_steps()
print(while_growing, full - before, most, Cycle.alive)
"""


def run(*, spared: bool) -> list[int]:
    """Full collections while objects grow in number, those afterwards; cycles alive before and
    after the step.
    """
    code = COUNT.replace("{spared}", str(spared))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_no_full_collection_comes_while_requests_begin_and_one_comes_between_steps() -> None:
    while_growing, afterwards, cycles_before, cycles_after = run(spared=True)
    assert while_growing == 0
    assert afterwards == 1
    assert cycles_before < 50_000, "young garbage is collected as ever"
    assert cycles_after == 0


def test_a_process_that_did_not_ask_for_it_is_left_alone() -> None:
    while_growing, afterwards, *_ = run(spared=False)
    assert while_growing > 0, "what the driver is spared"
    assert afterwards == 0
