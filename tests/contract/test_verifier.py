"""A verifier scores a copy in a fresh sandbox.

No trick of an agent raises its score.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits, SandboxLost, Snapshot, Verdict
from rlpost.extensions.agents.sandbox.verify import CaseVerifier, CommandVerifier, verify
from tests.contract.test_sandbox import WHY_NOT

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
LIMITS = Limits(
    memory_mib=256, processes=32, disk_mib=32, files=500, wall_seconds=20, snapshot_mib=1
)
HONEST = "import sys; print(sum(map(int, sys.stdin.read().split())))\n"
CASES = [(b"2 3", b"5"), (b"10 20 30", b"60"), (b"-1 1", b"0")]
TEST = b"""
import rlpost_verifier, sys
rlpost_verifier.begin()
right = 0
for given, expected in ((b"2 3", b"5"), (b"10 20 30", b"60")):
    done = rlpost_verifier.run([sys.executable, "/work/solution.py"], given, timeout=5)
    right += done.stdout.strip() == expected
rlpost_verifier.report(right / 2)
"""
BY_COMMAND = CommandVerifier(["python3", "/verifier/test.py"], {"test.py": TEST}, timeout=15)
BY_CASES = CaseVerifier(["python3", "/work/solution.py"], CASES)


async def scored_in(pool: LocalPool, solution: str, setup: str, verifier) -> Verdict:
    agent = await pool.acquire()
    await agent.write("/work/solution.py", solution.encode())
    await agent.run(setup)
    return await verify(agent, verifier, pool)


def scored(solutions: dict[str, tuple[str, str]], verifier, size: int = 3) -> dict[str, Verdict]:
    """Return the verdict on each agent's result: its solution, after its setup command."""

    async def whole() -> dict[str, Verdict]:
        async with LocalPool(LIMITS, size=size, warm=0) as pool:
            verdicts = await asyncio.gather(
                *(scored_in(pool, *solution, verifier) for solution in solutions.values())
            )
            assert pool.in_use == 0
        return dict(zip(solutions, verdicts, strict=True))

    return asyncio.run(whole())


def one(solution: str, setup: str, verifier) -> Verdict:
    """Score one solution with a pool of one sandbox.

    So the agent's sandbox must be released before the verifier's starts.
    """
    return scored({"": (solution, setup)}, verifier, size=1)[""]


@pytest.mark.parametrize("verifier", [BY_CASES, BY_COMMAND])
def test_an_honest_solution_scores_what_it_solves(verifier):
    assert one(HONEST, "true", verifier).score == 1.0
    half = one("import sys; print(sum(map(int, sys.stdin.read().split()[:2])))\n", "true", verifier)
    assert half.score == pytest.approx(0.5 if verifier is BY_COMMAND else 2 / 3)


CHEATS = {
    "exits at once": "import os; os._exit(0)",
    "prints a report": "print('reward 1.0'); print('PASSED')",
    "kills the verifier": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills everything": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "writes reward files": """
import itertools
for folder, name in itertools.product(("/", "/work", "/verifier", "/tmp"), ("reward.txt", "reward", "score.json")):
    open(f"{folder}/{name}", "w").write("1.0")
""",
    "patches the test": """
import glob
for path in glob.glob("/verifier/*.py"):
    open(path, "w").write("def begin(): pass\\ndef report(x): print('1.0')\\n")
""",
    "reads the token from the memory of the verifier": """
import os, re, signal
parent = os.getppid()
memory = open(f"/proc/{parent}/mem", "rb")
for line in open(f"/proc/{parent}/maps"):
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    try:
        memory.seek(first)
        found = re.findall(rb"[0-9a-f]{32}", memory.read(last - first))
    except (OSError, ValueError, OverflowError):
        continue
    for token in found:
        for number in range(1, 20):
            try: os.write(os.open(f"/proc/{parent}/fd/{number}", os.O_WRONLY), b"\\n" + token + b" 1.0\\n")
            except OSError: pass
os.kill(parent, signal.SIGKILL)
""",
    "answers on the descriptors of the verifier": """
import os
for number in range(3, 64):
    try: os.write(number, b"5")
    except OSError: pass
""",
    "leaves a daemon": "import os\nif os.fork() == 0:\n    os.setsid(); import time; time.sleep(60)\nos._exit(0)",
    "loops": "while True: pass",
    "bombs": "x = []\nwhile True: x.append(bytearray(1 << 20))",
}


# A solution that loops computes until each of these limits.
IMPATIENT = {"test.py": TEST.replace(b"timeout=5", b"timeout=2")}


@pytest.mark.parametrize(
    "verifier",
    [
        CommandVerifier(BY_COMMAND.command, IMPATIENT, timeout=8),
        CaseVerifier(BY_CASES.command, CASES[:2], timeout=1),
    ],
)
def test_a_dishonest_solution_scores_0(verifier):
    verdicts = scored({name: (text, "true") for name, text in CHEATS.items()}, verifier)
    assert {name: verdict.score for name, verdict in verdicts.items()} == dict.fromkeys(CHEATS, 0.0)


SETUPS = {
    "the reward file": "for d in / /work /tmp /verifier; do mkdir -p $d; echo 1.0 > $d/reward.txt; done",
    "the test beside": "mkdir -p /verifier; echo 'print(1)' > /verifier/test.py; cp -r /verifier /work",
    "a link in the way": "ln -s /verifier verifier; ln -s /verifier/test.py test.py",
    "compiled modules": (
        "mkdir -p __pycache__; echo 'def begin(): pass' > rlpost_verifier.py;"
        "python3 -c 'import py_compile as p;"
        'p.compile("rlpost_verifier.py", invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)\''
    ),
    "modules of Python": (
        "for m in sitecustomize usercustomize json; do echo 'raise SystemExit(0)' > $m.py; done"
    ),
    "a running process": "(while :; do echo 1.0 > /work/reward.txt; done) & sleep 0.1",
    "a result without end": "head -c 3M /dev/zero > big",
}


@pytest.mark.parametrize("verifier", [BY_CASES, BY_COMMAND])
def test_files_and_processes_left_beside_a_wrong_solution_score_0(verifier):
    verdicts = scored({name: ("print('wrong')", text) for name, text in SETUPS.items()}, verifier)
    assert {name: verdict.score for name, verdict in verdicts.items()} == dict.fromkeys(SETUPS, 0.0)


def test_a_lost_sandbox_of_the_verifier_is_retried_and_never_scored_0():
    class Flaky:
        calls = 0

        async def score(self, sandbox, snapshot: Snapshot) -> float:
            Flaky.calls += 1
            if Flaky.calls < 3:
                await sandbox.close()  # as a lost node does
            await sandbox.run("true")
            return 0.75

    async def whole(attempts: int) -> float:
        Flaky.calls = 0
        async with LocalPool(LIMITS, size=1) as pool:
            verdict = await verify(await pool.acquire(), Flaky(), pool, attempts=attempts)
            return verdict.score

    assert asyncio.run(whole(3)) == 0.75
    with pytest.raises(SandboxLost):
        asyncio.run(whole(2))


def test_a_result_that_cannot_be_copied_names_the_reason():
    verdict = one(HONEST, "rm -r /work; ln -s / /work", BY_CASES)
    assert verdict.score == 0.0 and "not a folder" in verdict.reason
    verdict = one(HONEST, "ln -s /etc/passwd link", BY_CASES)
    assert verdict.score == 1.0 and verdict.refused == ("link: link leads outside",)


def test_the_example_in_the_documentation_runs(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/agents.md").read_text()
    section = page.partition("## Sandboxes")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    asyncio.run(names["main"]())
    assert capsys.readouterr().out == "2\n exited\n1.0\n"
