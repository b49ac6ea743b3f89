"""Tasks in Harbor's format in sandboxes of this kernel: images, agents, verifiers out of reach."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.columns import IntColumn
from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.extensions.agents.environments.harbor.check import main as check
from rlpost.extensions.agents.environments.harbor.runnable import TrialOptions, runnable
from rlpost.extensions.agents.environments.harbor.trial import Trial
from rlpost.extensions.agents.environments.make import make_environments
from rlpost.extensions.agents.environments.of_harbor import HarborEnvironment
from rlpost.extensions.agents.environments.protocol import Turn
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.images import PREFIX, ImageCache
from rlpost.extensions.agents.sandbox.local import LocalSandbox, Root
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits, Verdict
from rlpost.extensions.agents.sandbox.remote import RemotePool
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from tests.contract.test_sandbox import WHY_NOT
from tests.contract.test_sandbox_servers import servers
from tests.unit.agents import test_environment_episodes as episodes
from tests.unit.agents.harbor_tasks import SOLUTION, TOML, write_task

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
PROGRAMS = ("/usr", "/lib64", "/lib")
"""Folders of the node that an image of ``make_image`` needs."""
READ_ONLY = [word for folder in PROGRAMS for word in ("--read-only", folder)]
LIMITS = Limits(memory_mib=256, disk_mib=64, processes=64)
Work = Callable[[Trial], Awaitable[object]]


OWNER = 54321


def make_image(folder: Path) -> str:
    """Make a folder with the root of an image with /app/words.txt, which needs PROGRAMS."""
    for name in ("bin", "etc/app", "lib64", "usr/lib", "dev", "app", "home/old"):
        (folder / name).mkdir(parents=True)
    for link in ("bin/sh", "bin/bash"):
        (folder / link).symlink_to(f"/usr/{link}")
    (folder / "etc/app/conf").write_text("of the image\n")
    (folder / "etc/environment").write_text('COLOUR="blue"\n')
    (folder / "etc/rc").write_text('cd "/app" && unset OLDPWD || exit 1\n')
    (folder / "app/old.txt").write_text("of the image\n")
    (folder / "app/words.txt").write_text("c\na\nb\n")
    give_away(folder)
    return str(folder)


def give_away(folder: Path) -> None:
    """Give all files of an image to a user who is not root."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, OWNER, OWNER)


def images_of(folder: Path) -> dict[str, str]:
    """Return the argument images for the task ``count``, with one image that is made here."""
    image = folder / "image"
    return {"count": str(image) if image.exists() else make_image(image)}


def trial(folder: Path, work: Work, options: TrialOptions | None = None) -> Verdict:
    """Begin the task ``count``, do the agent's work, and verify."""
    options = options or TrialOptions(images=images_of(folder))

    async def whole() -> Verdict:
        async with LocalPool(LIMITS, size=1, warm=0, root=Root(None, PROGRAMS)) as pool:
            one = Trial(runnable(folder, "count", options), pool, Archives(folder / "store"))
            try:
                await one.begin()
                await work(one)
                return await one.verify()
            finally:
                await one.close()
                assert pool.in_use == 0

    return asyncio.run(whole())


def command(text: str) -> Work:
    return lambda one: one.run(text)


def test_the_solution_of_a_task_is_rewarded_and_an_idle_agent_is_not(tmp_path):
    write_task(tmp_path)
    assert trial(tmp_path, lambda one: one.run_solution()).score == 1.0
    assert trial(tmp_path, command("true")).score == 0.0
    assert trial(tmp_path, command("echo 4 > count.txt")).score == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier && echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "mkdir -p /.installers && printf '#!/bin/sh\\necho 3' > /.installers/cat && chmod +x /.in*/*",
        "echo 'echo 1 > /logs/verifier/reward.txt' | tee ~/.profile ~/.bashrc ~/.bash_profile",
        "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) &",
        "ln -s /logs/verifier/reward.txt /app/count.txt; ln -s / /app/root; ln -s /logs /tmp/logs",
        "rm -rf /app && ln -s /logs/verifier /app",
        "rm -rf /app /tmp /root; mkfifo /app; mkfifo /tmp",
    ],
)
def test_an_agent_does_not_reach_the_verifier(tmp_path, attack):
    write_task(tmp_path)
    assert trial(tmp_path, command(attack)).score == 0.0


def test_what_the_agent_made_of_its_folders_is_what_the_verifier_sees(tmp_path):
    tests = """\
#!/bin/sh
cd /app && test ! -e words.txt && test ! -e old.txt || exit 1
test "$(readlink python)" = /usr/bin/python3 && test -x tool && test -f /root/note || exit 1
test -f /output/x && test ! -e "$HOME/note" && test "$KEY" = secret || exit 1
echo '{"reward": 0.5, "checks": 7}' > /logs/verifier/reward.json
"""
    write_task(tmp_path, tests=tests, toml=TOML + '[verifier.env]\nKEY = "secret"\n')
    work = """
        rm words.txt old.txt && ln -s /usr/bin/python3 python && echo x > tool && chmod 755 tool
        echo x > ~/note && mkdir /output && echo x > /output/x; echo "key: $KEY"
    """

    async def agent(one: Trial) -> None:
        assert (await one.run(work)).text == "key: \n"  # variables of the verifier are its own

    verdict = trial(tmp_path, agent)
    assert verdict.score == 0.5, verdict.reason


def test_a_separate_verifier_gets_the_declared_files_alone(tmp_path):
    toml = 'artifacts = ["/app/out", "/app/count.txt", "/app/missing"]\n' + TOML.replace(
        "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
    )
    tests = """\
#!/bin/sh
ls /app > /tmp/seen
test "$(cat /app/count.txt /app/out/x | tr '\\n' ' ')" = "3 y " || exit 1
test -e /tests/truth && test ! -e /app/words.txt && test ! -e /tmp/hidden || exit 1
echo 1 > /logs/verifier/reward.txt
"""
    write_task(tmp_path, toml=toml, tests=None, more={"tests/Dockerfile": "FROM a\n"})
    (tmp_path / "count/tests/test.sh").write_text("#!/bin/sh\nexit 1\n")  # that of the image counts
    of_verifier = Path(make_image(tmp_path / "verifier"))
    (of_verifier / "app/words.txt").unlink()
    (of_verifier / "tests").mkdir()
    (of_verifier / "tests/test.sh").write_text(tests)
    (of_verifier / "tests/truth").write_text("42\n")
    give_away(of_verifier / "tests")
    options = TrialOptions(images={"count-tests": str(of_verifier), **images_of(tmp_path)})
    work = "mkdir out /tests; echo y > out/x; echo 3 > count.txt; touch /tmp/hidden /tests/truth"
    verdict = trial(tmp_path, command(work), options)
    assert verdict.score == 1.0, verdict.reason
    assert trial(tmp_path, command("mkdir out; echo y > out/x"), options).score == 0.0
    large = trial(tmp_path, command(f"{work}; truncate -s 65M count.txt"), options)
    assert large.score == 0.0 and "artifact /app/count.txt: larger than 67108864" in large.reason


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("#!/bin/sh\nsleep 60\n", "timeout"),
        ("#!/bin/sh\necho 1 > /logs/verifier/reward.txt; sleep 60\n", "timeout"),
        ("#!/bin/sh\nexit 3\n", "no file with a reward"),
        ("#!/bin/sh\necho nan > /logs/verifier/reward.txt\n", "not a finite number"),
        ("#!/no/such/shell\n", "no file with a reward"),
        ("#!/bin/sh\necho key $A_KEY | tee /logs/verifier/reward.txt\n", "exited 0: key ***"),
        (
            "#!/bin/sh\n(sleep 1; echo 1 > /logs/verifier/reward.txt) &\necho 0 > "
            "/logs/verifier/reward.txt\n",
            "exited 0",
        ),
    ],
)
def test_a_verifier_without_a_reward_gives_none_and_says_why(tmp_path, tests, reason, caplog):
    toml = TOML.replace("timeout_sec = 20.0", "timeout_sec = 1.0")
    write_task(tmp_path, tests=tests, toml=toml + '[verifier.env]\nA_KEY = "${HOST_KEY}"\n')
    options = TrialOptions(images=images_of(tmp_path), env={"HOST_KEY": "sk-of-a-user"})
    verdict = trial(tmp_path, command("true"), options)
    assert verdict.score == 0.0 and reason in verdict.reason
    assert "sk-of" not in verdict.reason + caplog.text
    scored_zero = reason == "exited 0"
    assert ("its verifier gave no reward" in caplog.text) is not scored_zero


def turn(text: str) -> Turn:
    return Turn(0, text, IntColumn(), "stop", "</bash>")


def test_an_interrupted_episode_goes_on_in_another_sandbox(tmp_path):
    write_task(tmp_path)

    async def whole() -> tuple[bytes, float]:
        async with LocalPool(LIMITS, size=2, warm=0, root=Root(None, PROGRAMS)) as pool:

            def environment() -> HarborEnvironment:
                made = HarborEnvironment(str(tmp_path), images=images_of(tmp_path))
                made.sandboxes, made.archives = pool, Archives(tmp_path / "store")
                return made

            first, second = environment(), environment()
            await first.reset(Prompt(0, "x", (1,), metadata={"task": "count"}))
            step = await first.step(turn("<bash>wc -l < words.txt | tee /tmp/n; rm old.txt"))
            assert step.text == "\n<output>\n3\n[exit code 0]\n</output>\n" and not step.done
            state = await first.save()
            await first.close()
            await second.restore(state)
            step = await second.step(turn("<bash>ls; cp /tmp/n count.txt"))
            assert step.text == "\n<output>\nwords.txt\n[exit code 0]\n</output>\n"
            assert (await second.step(turn("done"))).done
            try:
                return state, await second.score()
            finally:
                await second.close()

    state, score = asyncio.run(whole())
    assert score == 1.0
    assert len(state) < 300 and json.loads(state)["seconds"] > 0


async def test_an_episode_ends_when_the_agents_time_is_used_up(tmp_path):
    write_task(tmp_path, toml=TOML.replace("timeout_sec = 60.0", "timeout_sec = 1.0"))
    async with LocalPool(LIMITS, size=1, warm=0, root=Root(None, PROGRAMS)) as pool:
        environment = HarborEnvironment(str(tmp_path), images=images_of(tmp_path))
        environment.sandboxes, environment.archives = pool, Archives(tmp_path / "store")
        await environment.reset(Prompt(0, "x", (1,), metadata={"task": "count"}))
        step = await environment.step(turn("<bash>sleep 60"))
        assert step.done and "[timeout]" in step.text
        await environment.close()


def test_a_run_makes_the_environment_and_plays_an_episode(tmp_path, monkeypatch):
    """Through the settings of a run, with an engine that writes given turns."""
    write_task(tmp_path / "tasks")
    monkeypatch.setattr(episodes, "CHARACTERS", episodes.CHARACTERS + "<>/\n[]_.~W")
    values = {
        "env": {
            "env": [f"h=harbor:{tmp_path}/tasks"],
            "env_args": {"h": {"images": images_of(tmp_path)}},
        },
        "sandbox": {
            "sandbox_places": 1,
            "sandbox_memory_mib": 256,
            "sandbox_disk_mib": 64,
            "sandbox_read_only": PROGRAMS,
        },
    }
    environments, gateway = make_environments(load([], values).config, tmp_path)
    assert gateway is None

    async def play() -> float:
        command = "<bash>\nwc -l < words.txt > count.txt\n</bash>"
        engine = episodes.Script(command, "ok")
        given = episodes.prompt("q", task="count")
        async with episodes.connected(engine) as connection:
            sampling = SamplingParams(max_new_tokens=500, stop_token_ids=(1,))
            builder = ResponseBuilder(connection, given, sampling, codec=episodes.CODEC)
            try:
                result = await environments.run("h", builder, given)
            finally:
                await environments.close()
        first, _ = result.turns
        assert first.said == "\n<output>\n\n[exit code 0]\n</output>\n" and first.tool == "bash"
        return result.reward

    assert asyncio.run(play()) == 1.0


STEPS = """\
[verifier]
timeout_sec = 20.0
[environment]
memory_mb = 256
[[steps]]
name = "count"
min_reward = 0.5
[steps.agent]
timeout_sec = 60.0
[[steps]]
name = "sort"
[steps.healthcheck]
command = "test -f /app/ready"
interval_sec = 0.1
start_interval_sec = 0.1
[steps.agent]
timeout_sec = 30.0
"""
OF_SORT = """\
#!/bin/sh
test -e /tests/helper && test "$(cat /app/count.txt)" = 3 || exit 1
if [ "$(tr '\\n' ' ' < /app/sorted.txt)" = "a b c " ]; then echo 1; else echo 0; fi > \
/logs/verifier/reward.txt
"""


def write_steps(folder: Path, *, toml: str = STEPS, setup: str = "touch ready\n") -> None:
    """Write the task ``count`` with two steps, of which the second needs the files of the first."""
    more = {
        "steps/count/instruction.md": "Count the lines of words.txt.\n",
        "steps/count/solution/solve.sh": SOLUTION,
        "steps/sort/instruction.md": "Sort the lines of words.txt into sorted.txt.\n",
        "steps/sort/tests/test.sh": OF_SORT,
        "steps/sort/workdir/setup.sh": setup,
        "steps/sort/workdir/notes/hint": "use sort\n",
        "tests/helper": "of all steps\n",
    }
    solution = "#!/bin/sh\ncat notes/hint && sort words.txt > sorted.txt\n"
    write_task(folder, toml=toml, solution=solution, more=more)


def play(
    folder: Path, *commands: str, env_args: dict[str, object] | None = None
) -> HarborEnvironment:
    """Play an episode of the task ``count``; '' is a turn without a command. Returns it scored."""

    async def whole() -> HarborEnvironment:
        async with LocalPool(LIMITS, size=1, warm=0, root=Root(None, PROGRAMS)) as pool:
            made = HarborEnvironment(str(folder), images=images_of(folder), **(env_args or {}))
            made.sandboxes, made.archives = pool, Archives(folder / "store")
            await made.reset(Prompt(0, "x", (1,), metadata={"task": "count"}))
            steps = [
                await made.step(turn(f"<bash>{each}" if each else "done")) for each in commands
            ]
            reward = await made.score()
            made.info = {**made.info, "reward": reward, "said": steps}
            await made.close()
            assert pool.in_use == 0
            return made

    return asyncio.run(whole())


RIGHT = ("wc -l < words.txt > count.txt", "", "sort words.txt > sorted.txt", "")


@pytest.mark.parametrize(
    ("commands", "rewards", "reward"),
    [
        (RIGHT, [1.0, 1.0], 1.0),
        (("true", ""), [0.0], 0.0),
        ((*RIGHT[:2], "true", ""), [1.0, 0.0], 0.5),
        (RIGHT[:2], [1.0, 0.0], 0.5),
        (RIGHT[:1], [1.0], 0.5),
        ((*RIGHT[:2], "rm count.txt", ""), [1.0, None], 0.5),
        (("rm -rf /app; touch /app", ""), [0.0], 0.0),
    ],
    ids=[
        *("solved", "a first step that is not enough", "an unsolved second step"),
        *("cut off in the second step", "cut off in the first step", "no verdict"),
        "no folder",
    ],
)
def test_the_steps_of_a_task_follow_each_other_and_are_scored_each(
    tmp_path, commands, rewards, reward
):
    write_steps(tmp_path)
    made = play(tmp_path, *commands)
    results = [each.rewards and each.rewards["reward"] for each in made.trial.results]
    assert (results, made.info["reward"]) == (rewards, reward), made.info
    said = made.info["said"]
    if len(commands) > 2:
        assert not said[1].done and said[1].text == (
            "\n<next-step>\nSort the lines of words.txt into sorted.txt.\n</next-step>\n"
        )
    is_cut_off = commands in (RIGHT[:1], RIGHT[:2])
    assert said[-1].done is not is_cut_off


def test_a_step_does_not_see_tests_and_processes_of_those_before(tmp_path):
    write_steps(tmp_path)
    listed = (
        "ls -d /tests /logs/verifier /solution; cat count.txt notes/hint; ps x | grep -c 'slee[p]'"
    )
    first = "wc -l < words.txt > count.txt; sleep 600 &"
    made = play(tmp_path, first, "", listed)
    shown_text = made.info["said"][-1].text
    assert "3\nuse sort\n0\n" in shown_text and "\n/tests" not in shown_text


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("echo no room; exit 3\n", "it could not begin: setup.sh: exited 3: no room"),
        ("true\n", "it could not begin: the health check 'test -f /app/ready'"),
    ],
)
def test_a_step_that_cannot_begin_counts_as_0_because_the_agent_may_be_the_cause(
    tmp_path, setup, why
):
    write_steps(tmp_path, setup=setup)
    made = play(tmp_path, RIGHT[0], "")
    assert made.info["said"][-1].done and made.info["reward"] == 0.5
    assert made.trial.results[1].rewards is None and why in str(made.info["verifier"])


def test_an_interrupted_episode_goes_on_in_its_step(tmp_path):
    write_steps(tmp_path)

    async def whole() -> tuple[float, bool]:
        async with LocalPool(LIMITS, size=1, warm=0, root=Root(None, PROGRAMS)) as pool:

            def environment() -> HarborEnvironment:
                made = HarborEnvironment(str(tmp_path), images=images_of(tmp_path))
                made.sandboxes, made.archives = pool, Archives(tmp_path / "store")
                return made

            first, second = environment(), environment()
            await first.reset(Prompt(0, "x", (1,), metadata={"task": "count"}))
            for text in (f"<bash>{RIGHT[0]}", "done"):
                assert not (await first.step(turn(text))).done
            state = await first.save()
            await first.close()
            await second.restore(state)
            await second.step(turn(f"<bash>{RIGHT[2]}"))
            over = (await second.step(turn("done"))).done
            try:
                return await second.score(), over
            finally:
                await second.close()

    assert asyncio.run(whole()) == (1.0, True)


def test_check_runs_the_solution_and_the_verifier_of_each_task(tmp_path, capsys):
    tasks = tmp_path / "tasks"
    write_task(tasks)
    write_task(tasks, "wrong", solution=SOLUTION.replace("wc -l", "wc -c"))
    write_task(tasks, "unbuilt")
    write_task(tasks, "other", toml=TOML + "gpus = 1\n")
    write_task(tasks, "unsolved", solution=None)
    write_steps(tmp_path / "steps")
    (tmp_path / "steps/count").rename(tasks / "steps-count")
    out = tmp_path / "prompts.jsonl"
    names = ("count", "wrong", "other", "unsolved", "steps-count")
    images = dict.fromkeys(names, images_of(tmp_path)["count"])
    arguments = ["--env-args", json.dumps({"images": images}), "--disk-mib", "64", *READ_ONLY]
    assert check([str(tasks), *arguments, "--oracle", "--out", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 of 6 tasks run"
    for line in (
        "other: it needs 1 GPUs",
        "unsolved: it has no solution/solve.sh",
        "wrong: the solution gets 0",
    ):
        assert line in lines
    assert any(line.startswith("unbuilt: environment/Dockerfile describes") for line in lines)
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert [row["task"] for row in rows] == ["count", "steps-count"]
    assert ["the first of 2 steps" in row["prompt"] for row in rows] == [False, True]
    assert "Count the lines of words.txt." in rows[1]["prompt"]


async def test_the_files_of_an_image_belong_to_the_agent(tmp_path):
    root = Root(make_image(tmp_path / "image"), PROGRAMS)
    async with await LocalSandbox.start(LIMITS, root) as sandbox:
        changed = "echo new > /etc/app/conf && rm /app/old.txt && mkdir /home/old/x && id -u"
        assert (await sandbox.run(changed)).text == "1000\n"
    assert (tmp_path / "image/etc/app/conf").read_text() == "of the image\n"


def test_a_task_has_the_variables_the_folder_and_the_files_of_its_image(tmp_path):
    write_task(tmp_path)

    async def work(one: Trial) -> None:
        shown = await one.run("pwd; echo $COLOUR $HOME; cat old.txt")
        assert shown.text == "/app\nblue /root\nof the image\n"
        await one.run("rm old.txt; echo 3 > count.txt")

    verdict = trial(tmp_path, work)
    assert verdict.score == 1.0, verdict.reason


ENROOT = """#!/bin/sh
# A stand-in for enroot: create --name root IMAGE
echo "$4" >> "$(dirname "$4")/unpacked"
mkdir -p "$ENROOT_DATA_PATH/root/etc" && cp "$4" "$ENROOT_DATA_PATH/root/etc/name"
"""


def test_an_image_file_is_unpacked_once_and_removed_when_others_are_used(tmp_path, monkeypatch):
    program = tmp_path / "bin/enroot"
    program.parent.mkdir()
    program.write_text(ENROOT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    images = [tmp_path / f"{name}.sqsh" for name in "abc"]
    for image in images:
        image.write_text(image.stem)
    gone = tmp_path / f"{PREFIX}process-999999999-x"
    gone.mkdir()
    (gone / ".made-by").write_text("process-999999999-x")

    async def whole() -> None:
        cache = ImageCache(max_unused=1)
        a, b, c = map(str, images)
        first, same = await asyncio.gather(cache.take(a), cache.take(a))
        assert first == same and Path(first, "etc/name").read_text() == "a" and not gone.exists()
        for image in (b, c):
            await cache.take(image)
            await cache.give_back(image)
        assert Path(first).exists()  # in use
        assert (tmp_path / "unpacked").read_text().split() == [a, b, c]
        await cache.take(c)
        await cache.take(b)  # had to make room for c
        assert (tmp_path / "unpacked").read_text().split() == [a, b, c, b]
        with pytest.raises(ConfigError, match="neither a folder nor"):
            await cache.take(str(tmp_path / "missing.sqsh"))
        await cache.close()

    asyncio.run(whole())
    assert not list(tmp_path.glob(f"{PREFIX}*"))


async def test_a_sandbox_server_starts_a_task_with_its_image(tmp_path):
    image = make_image(tmp_path / "image")
    with servers(tmp_path, 1, more=READ_ONLY):
        async with RemotePool(tmp_path, LIMITS) as pool:
            sandbox = await pool.acquire(replace(LIMITS, cores=2), image)
            assert (await sandbox.run("cat /etc/app/conf")).text == "of the image\n"
            await sandbox.close()
            with pytest.raises(ConfigError, match=r"missing\.sqsh is neither a folder"):
                await pool.acquire(LIMITS, str(tmp_path / "missing.sqsh"))
            other = await pool.acquire()  # the server still serves
            assert not (await other.run("cat /etc/app/conf")).ok
            await other.close()
