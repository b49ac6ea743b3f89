"""Built roots of Harbor tasks: built once, the same in each episode, and out of an agent's reach."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlpost.agents.environments.harbor import root_cache
from rlpost.agents.environments.harbor.roots import BuildFailed
from rlpost.agents.environments.harbor.trial import Trial, TrialOptions, runnable
from rlpost.agents.sandbox.archives import Archives
from rlpost.agents.sandbox.local import Root
from rlpost.agents.sandbox.pool import LocalPool
from tests.contract.test_harbor import LIMITS, NODE, TOML, make_image, write_task
from tests.contract.test_sandbox import WHY_NOT

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
DRAWN = (
    "FROM some:1\nWORKDIR /app\nCOPY words.txt .\nRUN cat /proc/sys/kernel/random/uuid > drawn\n"
)
"""Each build of it is different."""

Begin = Callable[[], Awaitable[Trial]]


async def played(begin: Begin, command: str) -> str:
    """Begin an episode, run a command, and return its output."""
    one = await begin()
    try:
        return (await one.run(command)).text
    finally:
        await one.close()


def episodes(
    folder: Path,
    play: Callable[[Begin], Awaitable[None]],
    options: TrialOptions = NODE,
    *,
    root: Root | None = None,
    archives: Archives | None = None,
) -> None:
    """``play`` gets a function that begins an episode on the task ``count``."""

    async def whole() -> None:
        kept = archives or Archives(folder / "store")
        async with LocalPool(LIMITS, size=4, warm=0, root=root) as pool:

            async def begin() -> Trial:
                one = Trial(runnable(folder, "count", options), pool, kept)
                try:
                    await one.begin()
                except BaseException:
                    await one.close()
                    raise
                return one

            await play(begin)

    asyncio.run(whole())


def test_a_root_is_built_once_for_all_episodes_verifiers_and_attempts(tmp_path):
    tests = "#!/bin/sh\ncat /opt/drawn >&2\necho 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path, dockerfile=DRAWN + "RUN mkdir /opt && cp drawn /opt\n", tests=tests)
    seen = set[str]()

    async def play(begin: Begin) -> None:
        # All at once: one of them builds, the others wait.
        seen.update(await asyncio.gather(*(played(begin, "cat drawn") for _ in range(4))))
        one = await begin()
        reason = (await one.verify()).reason
        seen.add(re.search(r"[0-9a-f-]{36}", reason)[0])  # type: ignore[index]

    episodes(tmp_path, play)
    episodes(tmp_path, play)  # the next attempt
    assert len({each.strip() for each in seen}) == 1
    (tmp_path / "count/environment/words.txt").write_text("other\n")
    episodes(tmp_path, play)
    assert len({each.strip() for each in seen}) == 2, "another content is another root"


def test_what_an_episode_writes_is_in_no_other_one(tmp_path):
    write_task(tmp_path, dockerfile=DRAWN)

    async def play(begin: Begin) -> None:
        await played(begin, "true")
        spoil = "echo x > drawn; echo x > /tmp/new; rm words.txt; echo x > /.installers/curl"
        await played(begin, spoil)
        shown = await played(begin, "cat words.txt; ls /tmp; wc -c < drawn; grep -c x /.inst*/curl")
        assert shown.split()[:4] == ["c", "a", "b", "37"] and shown.split()[4] != "1"

    episodes(tmp_path, play)


def test_changes_and_deletions_in_an_image_are_repeated(tmp_path):
    image = make_image(tmp_path / "image")
    dockerfile = """\
FROM some:1
RUN rm old.txt && cat /proc/sys/kernel/random/uuid > drawn && chmod 750 drawn
RUN echo more >> /etc/app/conf; rmdir /home/old; ln -s drawn link; mkdir -m 700 private; mkfifo pipe
RUN touch -d 2001-01-01 dated; mkdir -p deep/er; echo x > deep/er/file; touch -d 2002-02-02 deep
"""
    write_task(tmp_path, dockerfile=dockerfile)
    options = TrialOptions(images={"some:1": str(tmp_path / "image")})
    show = (
        "cat drawn /etc/app/conf; ls -A /app /home; "
        "stat -c '%n %A %Y' dated deep deep/er/file drawn pipe private; readlink link"
    )

    async def play(begin: Begin) -> None:
        built, restored = await played(begin, show), await played(begin, show)
        assert restored == built and "old" not in built and "of the image\nmore\n" in built

    episodes(tmp_path, play, options, root=Root(None, image.read_only))


@pytest.mark.parametrize(
    ("dockerfile", "gib", "reason"),
    [
        (DRAWN, 1e-6, "would exceed its bound"),
        (DRAWN + "RUN sleep 60 &\n", 1.0, "run in the background"),
    ],
)
def test_a_root_that_is_not_kept_is_built_in_each_episode(
    tmp_path, caplog, dockerfile, gib, reason
):
    write_task(tmp_path, dockerfile=dockerfile)
    options = TrialOptions(images={"*": "node"}, root_cache_gib=gib)
    seen = set[str]()

    async def play(begin: Begin) -> None:
        for _ in range(2):
            seen.add(await played(begin, "cat drawn"))

    with caplog.at_level(logging.WARNING):
        episodes(tmp_path, play, options)
    assert len(seen) == 2
    (warning,) = [each.message for each in caplog.records if "each episode" in each.message]
    assert reason in warning


def test_a_damaged_root_is_built_again(tmp_path):
    write_task(tmp_path, dockerfile=DRAWN)
    seen = list[str]()

    async def play(begin: Begin) -> None:
        seen.append(await played(begin, "cat drawn"))

    episodes(tmp_path, play)
    for path in (tmp_path / root_cache.FOLDER / "contents").glob("??/*"):
        path.unlink()
    episodes(tmp_path, play)
    episodes(tmp_path, play)
    assert seen[0] != seen[1] == seen[2]


def test_an_episode_waits_for_a_build_at_most_the_time_of_a_build(tmp_path, monkeypatch):
    toml = TOML.replace("build_timeout_sec = 30.0", "build_timeout_sec = 1.0")
    write_task(tmp_path, dockerfile=DRAWN, toml=toml)

    async def slow(*_: object, **__: object) -> None:
        await asyncio.sleep(3)
        raise BuildFailed("the slow one")

    monkeypatch.setattr(root_cache, "build", slow)

    async def play(begin: Begin) -> None:
        failed = await asyncio.gather(begin(), begin(), return_exceptions=True)
        assert sorted(map(str, failed)) == [
            "environment/Dockerfile: another episode builds this root, for 1 s",
            "the slow one",
        ]

    episodes(tmp_path, play)
