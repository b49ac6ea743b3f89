"""Images of environments: stored before a record names them, and seen after a crash as before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlpost.durable.journal import Journal
from rlpost.errors import ConfigError, GradingLost
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.harness import HarnessRunner
from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.protocol import Episode, Step, Turn
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.extensions.agents.examples import browser
from rlpost.extensions.agents.gateway import Gateway
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Prompt, SampleGroup, Unfinished
from tests.browser import find_browser
from tests.unit.agents.image_talk import (
    OTHER_SIZE,
    SAME_SIZE,
    ImageModel,
    SeeingEngine,
    data_url,
    seeing,
)

SAMPLING = SamplingParams(max_new_tokens=400)
TURNS = 3


class Killed(BaseException):
    """The driver dies."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return ImageModel.make(tmp_path_factory.mktemp("qwen3-vl"))


def prompt_of(model: ImageModel, text: str = "look", **fields: Any) -> Prompt:
    return Prompt(5, text, model.tokenizer.encode(text), **fields)


def runner_of(kind: Any, resumption: str | None = None) -> PlainRunner:
    return PlainRunner("pkg.mod:Show", kind, TURNS, resumption or resumption_of(kind))


async def play(
    model: ImageModel, run: Path, engine: SeeingEngine, kind: Any, prompt: Prompt
) -> Any:
    images = model.requests(run)
    async with seeing(engine, images) as connection:
        builder = ResponseBuilder(connection, prompt, SAMPLING, codec=model.tokenizer)
        return await runner_of(kind).run(builder, prompt)


def shows(*files: bytes, first: bytes = OTHER_SIZE) -> Any:
    """The class of an environment that shows an image before each turn."""

    class Show:
        def reset(self, prompt: Prompt) -> Any:
            return ("see ", first, ":")

        def step(self, turn: Turn) -> Step:
            done = turn.number + 1 == TURNS
            return Step([files[turn.number], "?"] if not done else "bye", done=done)

    return Show


def test_an_environment_shows_images_before_each_turn(model: ImageModel, tmp_path: Path) -> None:
    engine = SeeingEngine(model=model)
    result = asyncio.run(play(model, tmp_path, engine, shows(*SAME_SIZE[:2]), prompt_of(model)))
    files = [OTHER_SIZE, *SAME_SIZE[:2]]
    pixels = [model.pixels(data) for data in files]
    assert [seen for _, seen in engine.seen] == [pixels[:1], pixels[:2], pixels]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = model.tokenizer.decode_with_special(engine.seen[-1][0])
    assert text == f"looksee {mark}:ok<|end|>{mark}?ok<|end|>{mark}?"
    (sample,) = result.samples
    store = model.requests(tmp_path).store
    assert [store.read(span.hash) for span in sample.images] == files
    whole = sample.prompt_ids + sample.response_ids
    model.tokens.collapse(whole, sample.images)
    for span in sample.images:
        start = span.start - len(sample.prompt_ids)
        assert sample.mask[start : start + span.num_tokens].total() == 0
    assert [turn.said for turn in result.turns] == ["<image>?", "<image>?", "bye"]
    assert [len(turn.images) for turn in result.turns] == [2, 1, 0]
    assert result.turns[0].to_json()["images"] == [span.hash for span in sample.images[:2]]


def test_a_prompt_with_an_image_is_followed_by_those_of_the_environment(
    model: ImageModel, tmp_path: Path
) -> None:
    images = model.requests(tmp_path)
    ids, spans = images.tokens.expand(images.frame, [images.keep(SAME_SIZE[2])])
    prompt = Prompt(5, "", ids, images=spans)
    engine = SeeingEngine(model=model)
    result = asyncio.run(play(model, tmp_path, engine, shows(*SAME_SIZE[:2]), prompt))
    expected = [model.pixels(data) for data in (SAME_SIZE[2], OTHER_SIZE, *SAME_SIZE[:2])]
    assert [seen for _, seen in engine.seen] == [expected[:2], expected[:3], expected]
    assert result.samples[0].images[:1] == spans


@given(room=st.integers(0, 60), image=st.sampled_from([OTHER_SIZE, SAME_SIZE[0]]))
@settings(max_examples=40, deadline=None)
def test_an_image_is_inserted_whole_or_not_at_all(model_and_run, room: int, image: bytes) -> None:
    model, run = model_and_run
    images = model.requests(run)

    async def insert() -> ResponseBuilder:
        async with seeing(SeeingEngine(model=model), images) as connection:
            sampling = SamplingParams(max_new_tokens=room)
            builder = ResponseBuilder(connection, prompt_of(model), sampling, codec=model.tokenizer)
            builder.insert(["ab", images.keep(image), "cd"])
            return builder

    builder, known = asyncio.run(insert()), images.keep(image)
    sample, whole = builder.sample(), 2 + len(images.frame) - 1 + known.num_tokens
    count = sum(span.num_tokens for span in sample.images)
    assert images.tokens.count(sample.response_ids) == count
    fits = room >= 2 + images.frame.index(images.tokens.image) + known.num_tokens
    assert count == (known.num_tokens if fits else 0)
    if room <= whole:
        assert builder.remaining_tokens == 0, (
            "an answer never goes on behind a part of what was shown"
        )
    assert builder.text == "ab<image>cd" or room < whole + 2


@pytest.fixture(scope="module")
def model_and_run(model: ImageModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model, tmp_path_factory.mktemp("run")


# After a crash.


def environment_of(kind: str, *, dies_at: int | None, files: list[bytes]) -> Any:
    base = shows(*files)

    class Show(base):
        def step(self, turn: Turn) -> Step:
            if turn.number == dies_at:
                raise Killed
            return base.step(self, turn)

    class Replayed(Show):
        deterministic = True

    class Restored(Show):
        def save(self) -> bytes:
            return b"state"

        def restore(self, data: bytes) -> None:
            assert data == b"state"

    return {"replayed": Replayed, "restored": Restored}[kind]


async def attempt(
    model: ImageModel, run: Path, kind: Any, watch: Any = None
) -> tuple[SampleGroup | None, SeeingEngine]:
    """Complete a group of one answer from the journal in a folder."""
    engine, written = SeeingEngine(model=model), None
    journal = Journal.resume(run, 0, step=3, settings="s")
    prompt = prompt_of(model)
    env = EnvConfig(env=("pkg.mod:Show",), env_retries=0)
    runners = {"Show": runner_of(kind)}
    function = Episodes(EnvironmentSet(parse_envs(env.env), runners, env), seed=1)
    if watch is not None:
        add = journal.add_part
        journal.add_part = lambda part, *rest: (watch(part), add(part, *rest))[1]  # type: ignore[method-assign]
    finished = (await journal.kept_answers()).get(prompt.prompt_id, ())
    try:
        async with seeing(engine, model.requests(run)) as connection:
            writer = GroupWriter(
                connection, SAMPLING, n=1, grader=InlineGrader(lambda *_: 1.0), function=function,
                codec=model.tokenizer, journal=journal,
            )  # fmt: skip
            with contextlib.suppress(Killed):
                written = await writer.write(Unfinished(prompt, tuple(finished)))
    finally:
        journal.close()
    return written, engine


@pytest.mark.parametrize("dies_at", range(TURNS))
@pytest.mark.parametrize("kind", ["replayed", "restored"])
def test_a_killed_conversation_goes_on_with_its_images(
    model: ImageModel, tmp_path: Path, kind: str, dies_at: int
) -> None:
    undisturbed, _ = asyncio.run(
        attempt(model, folder(tmp_path / "a"), environment_of(kind, dies_at=None, files=SAME_SIZE))
    )
    run = folder(tmp_path / "b")
    none, before = asyncio.run(
        attempt(model, run, environment_of(kind, dies_at=dies_at, files=SAME_SIZE))
    )
    assert none is None and len(before.seen) == dies_at + 1
    group, after = asyncio.run(
        attempt(model, run, environment_of(kind, dies_at=None, files=SAME_SIZE))
    )
    assert group == undisturbed
    assert len(after.seen) == TURNS - 1 - dies_at, "each turn was generated once"


def test_an_answer_is_not_replayed_after_another_image(model: ImageModel, tmp_path: Path) -> None:
    """The same tokens: an environment that shows another screenshot of the same size asks again."""
    run = folder(tmp_path / "b")
    asyncio.run(attempt(model, run, environment_of("replayed", dies_at=2, files=SAME_SIZE)))
    other = [SAME_SIZE[0], SAME_SIZE[2]]
    group, after = asyncio.run(
        attempt(model, run, environment_of("replayed", dies_at=None, files=other))
    )
    assert group is not None and len(after.seen) == 1
    assert after.seen[0][1][1:] == [model.pixels(data) for data in other]


def test_a_record_names_images_that_are_stored(model: ImageModel, tmp_path: Path) -> None:
    run, named = folder(tmp_path / "run"), list[str]()

    def watch(part: Any) -> None:
        if part.kind == "step" and isinstance(part.value["text"], list):
            digests = [one[0] for one in part.value["text"] if isinstance(one, list)]
            assert all(model.requests(run).store.read(digest) for digest in digests)
            named.extend(digests)
            assert len(json.dumps(part.value)) < 300, "no pixels in a record"

    asyncio.run(
        attempt(model, run, environment_of("restored", dies_at=None, files=SAME_SIZE), watch)
    )
    assert len(named) == TURNS


def folder(path: Path) -> Path:
    path.mkdir()
    return path


# Bad content.


@pytest.mark.parametrize(
    ("content", "error", "why"),
    [
        ([b"no image"], GradingLost, "part 1 of what step returned: not an image"),
        (["a", SAME_SIZE[0][:100]], GradingLost, "part 2 of what step returned"),
        (b"bytes", ConfigError, "step returned b'bytes' as text"),
        ([1], ConfigError, "step returned"),
        (None, ConfigError, "step returned None as text"),
    ],
)
def test_a_bad_image_costs_an_attempt_and_other_content_ends_the_run(
    model: ImageModel, tmp_path: Path, content: Any, error: type[Exception], why: str
) -> None:
    class Bad:
        def reset(self, prompt: Prompt) -> str:
            return ":"

        def step(self, turn: Turn) -> Step:
            return Step(content)

    with pytest.raises(error, match=why):
        asyncio.run(play(model, tmp_path, SeeingEngine(model=model), Bad, prompt_of(model)))


def test_a_run_on_text_names_the_setting_that_it_lacks(model: ImageModel, tmp_path: Path) -> None:
    async def run() -> None:
        async with seeing(SeeingEngine(model=model), None) as connection:
            prompt = prompt_of(model)
            builder = ResponseBuilder(connection, prompt, SAMPLING, codec=model.tokenizer)
            await runner_of(shows(*SAME_SIZE)).run(builder, prompt)

    with pytest.raises(ConfigError, match="this run reads text alone; add --multimodal-keys"):
        asyncio.run(run())


# A harness, and a browser.


def test_a_harness_gets_the_images_of_its_prompt(model: ImageModel, tmp_path: Path) -> None:
    import aiohttp

    images = model.requests(tmp_path)
    ids, spans = images.tokens.expand(images.frame, [images.keep(SAME_SIZE[0])])
    prompt, engine = Prompt(5, "", ids, images=spans), SeeingEngine(model=model)

    class Shown:
        async def run(self, episode: Episode) -> float:
            parts = [
                {"type": "image_url", "image_url": {"url": data_url(data)}}
                for data in episode.images
            ]
            body = {"messages": [{"role": "user", "content": parts}]}
            key = {"Authorization": f"Bearer {episode.api_key}"}
            async with (
                aiohttp.ClientSession(headers=key) as client,
                client.post(f"{episode.base_url}/chat/completions", json=body) as response,
            ):
                return float(response.status == 200)

    async def run() -> Any:
        async with seeing(engine, images) as connection, Gateway(str(model.folder)) as gateway:
            builder = ResponseBuilder(connection, prompt, SAMPLING, codec=model.tokenizer)
            runner = HarnessRunner("pkg.mod:Shown", Shown(), gateway, 4)
            with pytest.raises(ValueError, match="takes its tasks from its own data"):
                await replace(runner, reads_prompts=False).run(builder, prompt)
            return await runner.run(builder, prompt)

    result = asyncio.run(run())
    assert result.score == 1.0 and engine.seen[0][1] == [model.pixels(SAME_SIZE[0])]
    assert [span.hash for span in result.samples[0].images] == [spans[0].hash]


RGB = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}


def place_of(image: Image.Image, colour: str) -> str | None:
    """The middle of a square in thousandths of the sides; None if the image has none."""
    pixels = [
        (x, y)
        for y in range(0, image.height, 4)
        for x in range(0, image.width, 4)
        if image.convert("RGB").getpixel((x, y)) == RGB[colour]
    ]
    if not pixels:
        return None
    x, y = (sum(values) / len(pixels) for values in zip(*pixels, strict=True))
    return f"{1000 * x / image.width:.0f} {1000 * y / image.height:.0f}"


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
def test_a_policy_that_sees_clicks_the_square_in_a_real_browser(
    model: ImageModel, tmp_path: Path
) -> None:
    """The engine decides by the pixels of its request; the control clicks without looking."""
    prompt = prompt_of(model, label="blue")
    seen: list[Image.Image] = []

    def look(images: Any) -> str:
        seen.append(images[-1].copy())
        # the first click misses, so that a second screenshot is read
        return place_of(images[-1], "red" if len(images) == 1 else "blue") or "none"

    engine = SeeingEngine(model=model, reply=look)
    result = asyncio.run(play(model, tmp_path, engine, browser.ClickSquare, prompt))
    assert result.reward == 1.0 and len(result.turns) == 2
    assert all(place_of(image, colour) for image in seen for colour in RGB)
    blind = SeeingEngine(model=model, reply=lambda images: "none")
    assert asyncio.run(play(model, tmp_path, blind, browser.ClickSquare, prompt)).reward == 0.0


@pytest.fixture
def crowded() -> Iterator[int]:
    """The process holds descriptors up to this one, above the 1023 of select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = 1100
    if hard != resource.RLIM_INFINITY and hard < 2 * highest:
        pytest.skip(f"a process here may have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * highest), hard))
    with open(os.devnull) as null, contextlib.ExitStack() as held:
        while (copy := os.dup(null.fileno())) < highest:
            held.callback(os.close, copy)
        os.close(copy)
        yield highest
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
def test_a_browser_that_ended_by_itself_leaves_no_descriptor(crowded: int) -> None:
    held = set(os.listdir("/proc/self/fd"))
    page = browser.Browser(find_browser() or "", browser.SIDE)
    assert max(page._in.fileno(), page._out.fileno()) > crowded
    page._process.kill()
    with pytest.raises(GradingLost, match="ended"):
        page.title()
    page.close()
    page.close()
    assert set(os.listdir("/proc/self/fd")) <= held
