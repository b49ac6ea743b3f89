"""Images at the gateway: each request has exactly those of its messages, and nothing else is read."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from PIL import Image, ImageFile

from rlpost.columns import IntColumn
from rlpost.engines import image_requests
from rlpost.engines.connection import Connection
from rlpost.extensions.agents import request_images
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.episode import OpenEpisode
from rlpost.extensions.agents.gateway import Gateway
from rlpost.extensions.agents.openai_format import chat_request
from rlpost.extensions.agents.policy import EpisodeLimits, Policy
from rlpost.images import limits, store
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from tests.image_model import IMAGE, VIDEO, noise
from tests.unit.agents.image_talk import (
    OTHER_SIZE,
    SAME_SIZE,
    ImageModel,
    SeeingEngine,
    data_url,
    seeing,
)

SAMPLING = SamplingParams(max_new_tokens=40, max_context_len=3000)
PROMPT = Prompt(7, "", ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return ImageModel.make(tmp_path_factory.mktemp("qwen3-vl"))


def open_episode(model: ImageModel, connection: Connection) -> OpenEpisode:
    policy = Policy(ChatTemplate(str(model.folder)))
    return OpenEpisode(
        PROMPT, SAMPLING, index=0, connection=connection, policy=policy, url="", api_key="",
        limits=EpisodeLimits(),
    )  # fmt: skip


# Same tokens, another image.


def image_part(data: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def random_message(draw: random.Random) -> dict[str, Any]:
    """A message of the user with up to two images among texts."""
    parts: list[dict[str, object]] = []
    for _ in range(draw.randint(0, 2)):
        parts.append({"type": "text", "text": draw.choice(["a", "look: ", ""])})
        parts.append(image_part(draw.choice([*SAME_SIZE, OTHER_SIZE])))
    parts.append({"type": "text", "text": draw.choice(["?", "and now?"])})
    return {"role": "user", "content": parts}


def files_of(messages: list[dict[str, Any]]) -> list[bytes]:
    """The files of the images of messages, in order: what the engine has to see."""
    parts = [part for one in messages if one["role"] == "user" for part in one["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def with_another_image(draw: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with one image replaced by one of the same size; itself without one."""
    places = [
        (at, number)
        for at, one in enumerate(messages)
        if one["role"] == "user"
        for number, part in enumerate(one["content"])
        if part["type"] == "image_url" and files_of([one | {"content": [part]}])[0] in SAME_SIZE
    ]
    if not places:
        return messages
    at, number = draw.choice(places)
    content = list(messages[at]["content"])
    old = files_of([messages[at] | {"content": [content[number]]}])[0]
    content[number] = image_part(draw.choice([each for each in SAME_SIZE if each != old]))
    return [*messages[:at], messages[at] | {"content": content}, *messages[at + 1 :]]


async def converse(model: ImageModel, run: Path, seed: int) -> tuple[int, int]:
    """Run a random conversation; return its trajectories and how often an image was exchanged."""
    draw, num_exchanged = random.Random(seed), 0
    images, engine = model.requests(run), SeeingEngine(model=model)
    asked: list[list[bytes]] = []
    async with seeing(engine, images) as connection:
        episode = open_episode(model, connection)
        messages = [random_message(draw)]
        for _ in range(5):
            completion = await episode.answer(chat_request({"messages": messages}))
            asked.append(files_of(messages))
            text = "".join(
                f"<|{one['role']}|>{written(one)}<|end|>" for one in messages
            ) + "<|assistant|>"  # fmt: skip
            ids, pixels = engine.seen[-1]
            assert ids == list(model.tokenizer.encode(text))
            assert pixels == [model.pixels(data) for data in asked[-1]]
            answer = completion.choices[0].message
            messages = [*messages, answer.for_openai(), random_message(draw)]
            if draw.random() < 0.4:
                exchanged = with_another_image(draw, messages)
                num_exchanged += exchanged != messages
                messages = exchanged
        trajectories = episode.trajectories()
    for each in trajectories:
        sample = each.to_sample(7, 0)
        whole = sample.prompt_ids + sample.response_ids
        assert model.tokens.count(whole) == sum(span.num_tokens for span in sample.images)
        model.tokens.collapse(whole, sample.images)  # tokens and spans agree
        for turn in each.turns:
            before = [span.hash for span in sample.images if span.start < turn.start]
            assert [images.store.read(digest) for digest in before] == asked[turn.request]
        assert not any(
            sample.mask[span.start - each.prompt_length : span.end - each.prompt_length].total()
            for span in sample.images
            if span.start >= each.prompt_length
        )
    return len(trajectories), num_exchanged


def written(message: dict[str, Any]) -> str:
    """The content of a message as the template writes it."""
    content = message["content"]
    if isinstance(content, str):
        return content
    mark = f"<|vision_start|>{IMAGE}<|vision_end|>"
    return "".join(mark if part["type"] == "image_url" else part["text"] for part in content)


def test_an_engine_sees_the_images_of_the_request_whatever_was_seen_before(
    model: ImageModel, tmp_path: Path
) -> None:
    runs = [asyncio.run(converse(model, tmp_path / str(seed), seed)) for seed in range(12)]
    assert any(count == 1 and not exchanged for count, exchanged in runs), runs
    assert sum(exchanged for _, exchanged in runs) > 5


def test_another_image_of_the_same_size_is_another_conversation(
    model: ImageModel, tmp_path: Path
) -> None:
    """The texts, the tokens and the answer are the same."""

    async def talk(*firsts: bytes) -> list[list[str]]:
        engine = SeeingEngine(model=model)
        images = model.requests(tmp_path)
        async with seeing(engine, images) as connection:
            episode = open_episode(model, connection)
            more: list[dict[str, Any]] = []
            for data in firsts:
                first = {"role": "user", "content": [image_part(data)]}
                request = chat_request({"messages": [first, *more]})
                completion = await episode.answer(request)
                answer = completion.choices[0].message.for_openai()
                more = [answer, {"role": "user", "content": "and?"}]
            return [[span.hash for span in each.images] for each in episode.trajectories()]

    one, other = (model.requests(tmp_path).keep(data).hash for data in SAME_SIZE[:2])
    assert asyncio.run(talk(SAME_SIZE[0], SAME_SIZE[0])) == [[one]]
    assert asyncio.run(talk(SAME_SIZE[0], SAME_SIZE[1])) == [[one], [other]]


# The three formats.

ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}


def anthropic_image(data: bytes) -> dict[str, object]:
    source = {**ANTHROPIC["source"], "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def bodies(data: bytes) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of a request with an image, in each format and each place of a message."""
    ask = {"type": "text", "text": "which?"}
    given = {"type": "input_image", "image_url": data_url(data), "detail": "auto"}
    use = {"type": "tool_use", "id": "c1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [ask, anthropic_image(data)]}
    call = {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1"}
    user = {"role": "user", "content": "go"}
    return {
        "chat": ("/v1/chat/completions", {"messages": [
            {"role": "user", "content": [ask, image_part(data)]}]}),
        "chat, a tool": ("/v1/chat/completions", {"messages": [
            user, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [ask, image_part(data)]}]}),
        "messages": ("/v1/messages", {"max_tokens": 9, "messages": [
            {"role": "user", "content": [ask, anthropic_image(data)]}]}),
        "messages, a tool": ("/v1/messages", {"max_tokens": 9, "messages": [
            user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}),
        "responses": ("/v1/responses", {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "which?"}, given]}]}),
        "responses, a tool": ("/v1/responses", {"input": [
            user, call, output | {"output": [{"type": "input_text", "text": "which?"}, given]}]}),
    }  # fmt: skip


class Setup:
    """A gateway with one episode, and a client."""

    engine: SeeingEngine
    episode: OpenEpisode
    client: aiohttp.ClientSession
    run: Path

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        key = {"Authorization": f"Bearer {self.episode.api_key}"}
        url = self.episode.anthropic_url + path
        async with self.client.post(url, json=body, headers=key) as response:
            return response.status, await response.json()


@asynccontextmanager
async def setup(model: ImageModel, run: Path, *, takes_images: bool = True):
    made = Setup()
    made.engine, made.run = SeeingEngine(model=model), run
    async with (
        seeing(made.engine, model.requests(run) if takes_images else None) as connection,
        Gateway(str(model.folder)) as gateway,
        await gateway.open(PROMPT, SAMPLING, connection=connection) as made.episode,
        aiohttp.ClientSession() as made.client,
    ):
        yield made


@pytest.mark.parametrize("name", bodies(b""))
async def test_each_format_brings_its_image_to_the_engine(
    model: ImageModel, tmp_path: Path, name: str
) -> None:
    data = noise(90, 130, 4, "JPEG")
    path, body = bodies(data)[name]
    async with setup(model, tmp_path) as made:
        status, answer = await made.post(path, body)
        assert status == 200, answer
        ((ids, pixels),) = made.engine.seen
        assert pixels == [model.pixels(data)]
        text = model.tokenizer.decode_with_special(ids)
        assert f"which?<|vision_start|>{IMAGE}<|vision_end|>" in text
        (trajectory,) = made.episode.trajectories()
        (span,) = trajectory.images
        assert model.requests(tmp_path).store.read(span.hash) == data
        usage = answer["usage"]
        count = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert count == len(ids) - 1 + span.num_tokens == trajectory.turns[0].start


@pytest.mark.parametrize("name", ["messages", "messages, a tool"])
async def test_count_tokens_counts_all_tokens_of_images(
    model: ImageModel, tmp_path: Path, name: str
) -> None:
    path, body = bodies(OTHER_SIZE)[name]
    async with setup(model, tmp_path) as made:
        _, counted = await made.post(f"{path}/count_tokens", body)
        assert not (tmp_path / "images").exists(), "nothing is stored for a count"
        _, answer = await made.post(path, body)
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]


async def test_a_previous_response_brings_its_images(model: ImageModel, tmp_path: Path) -> None:
    path, body = bodies(SAME_SIZE[0])["responses"]
    async with setup(model, tmp_path) as made:
        _, first = await made.post(path, body)
        status, _ = await made.post(path, {"input": "and?", "previous_response_id": first["id"]})
        assert status == 200
        assert [pixels for _, pixels in made.engine.seen] == [[model.pixels(SAME_SIZE[0])]] * 2
        (trajectory,) = made.episode.trajectories()
        assert len(trajectory.turns) == 2 and len(trajectory.images) == 1


# Refused.


def with_url(url: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


def bomb(side: int = 20_000) -> bytes:
    """A small file of many pixels."""
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SECRET = "secret.png"


def refused(folder: Path) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Path, body and a part of the reason. The file ``SECRET`` is an image that can be read."""
    secret = str(folder / SECRET)
    addresses = [
        secret, f"file://{secret}", "http://127.0.0.1:9/a.png", "https://example.org/a.png",
        f"DATA:{secret}", "ftp://a/b", "data:text/plain;base64,AAAA", "data:image/png,AAAA", "~/a.png",
    ]  # fmt: skip
    rows = {
        f"chat {url}": (CHAT, with_url({"url": url}), "reads no addresses") for url in addresses
    }
    rows |= {
        f"chat, as a text {url}": (CHAT, with_url(url), "reads no addresses") for url in addresses
    }
    for url in addresses:
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        rows[f"responses {url}"] = (RESPONSES, {"input": [item]}, "reads no addresses")
    for source in (
        {"type": "url", "url": "https://example.org/a.png"}, {"type": "file", "file_id": "f1"},
        {"type": "path", "data": secret}, {"type": "base64", "url": secret}, secret, None,
    ):  # fmt: skip
        block = {"type": "image", "source": source}
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
        rows[f"messages {source}"] = (MESSAGES, body, "reads no addresses")
    by_id = {"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}
    rows["a file of the server"] = (RESPONSES, {"input": [by_id]}, "without a data URL")
    good = SAME_SIZE[0]
    files = {
        "no base64": ("data:image/png;base64,!!!!", "not base64"),
        "broken": (data_url(good[:200]), "cannot be decoded"),
        "no image": (data_url(b"plain text, no image"), "not an image"),
        "empty": ("data:image/png;base64,", "not an image"),
        "animated": (data_url(animated(), "gif"), "animated"),
        "many pixels": (data_url(bomb()), "400000000|20000 x 20000"),
        "a line": (data_url(noise(8000, 8, 1)), "one side"),
        "another format": (data_url(tiff(), "tiff"), "not an image"),
    }
    for name, (url, why) in files.items():
        rows[name] = (CHAT, with_url({"url": url}), why)
        both = with_url({"url": data_url(good)})
        both["messages"] += with_url({"url": url})["messages"]
        rows[f"{name}, the second"] = (CHAT, both, "image 2 of the request")
    marked = [{"type": "text", "text": "an <image>"}, image_part(good)]
    rows["a text that spells an image"] = (CHAT, say(marked), "spells a mark")
    for mark in (IMAGE, VIDEO):
        rows[f"the token {mark}"] = (CHAT, say([{"type": "text", "text": mark}]), "for 0 images")
        both = [{"type": "text", "text": mark}, image_part(good)]
        rows[f"the token {mark} beside an image"] = (CHAT, say(both), "2 tokens of images")
    rows["in the system prompt"] = (CHAT, say([image_part(good)], role="system"), "only text")
    told = {"type": "text", "text": "x"}
    spoken = [{"role": "assistant", "content": [image_part(good)]}, say([told])["messages"][0]]
    rows["in an answer"] = (CHAT, {"messages": spoken}, "only text")
    many = say([image_part(good)] * (request_images.MAX_IMAGES + 1))
    rows["too many"] = (CHAT, many, "a request may have 1024")
    long = say([image_part(noise(512, 512, 1))] * 12)  # 256 tokens each
    rows["longer than the context"] = (CHAT, long, "3072 tokens of images")
    return rows


def say(parts: list[dict[str, object]], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": parts}]}


def tiff() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "TIFF")
    return file.getvalue()


async def test_what_is_no_image_of_the_request_is_refused_with_its_reason(
    model: ImageModel, tmp_path: Path
) -> None:
    """No engine is asked, no file is read or written, and the episode serves the next request."""
    (tmp_path / SECRET).write_bytes(SAME_SIZE[1])
    async with setup(model, tmp_path / "run") as made:
        for name, (path, body, why) in refused(tmp_path).items():
            status, answer = await made.post(path, body)
            message = answer["error"]["message"]
            assert status == 400 and any(word in message for word in why.split("|")), (name, answer)
        assert not made.engine.bodies and not made.episode.trajectories()
        assert not (tmp_path / "run" / "images").exists()
        status, _ = await made.post(CHAT, say([image_part(SAME_SIZE[0])]))
        assert status == 200


@pytest.mark.parametrize("name", bodies(b""))
async def test_a_model_that_reads_text_refuses_images(
    model: ImageModel, tmp_path: Path, name: str
) -> None:
    path, body = bodies(SAME_SIZE[0])[name]
    async with setup(model, tmp_path, takes_images=False) as made:
        status, answer = await made.post(path, body)
        assert status == 400 and "reads text only (--multimodal-keys)" in answer["error"]["message"]


async def test_all_bounds_are_checked_before_a_pixel_is_decoded(
    model: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the images before the one that breaks a bound."""
    loaded: list[int] = []
    load = ImageFile.ImageFile.load

    def counted(self: ImageFile.ImageFile) -> Any:
        loaded.append(self.width)
        return load(self)

    good, wide = image_part(SAME_SIZE[0]), noise(900, 900, 3)
    big = image_part(bomb())
    with monkeypatch.context() as patch:
        patch.setattr("PIL.ImageFile.ImageFile.load", counted)
        async with setup(model, tmp_path) as made:
            for parts in ([good, big], [good] + [image_part(wide)] * 12):
                status, _ = await made.post(CHAT, say(parts))
                assert status == 400 and not loaded
            patch.setattr(request_images, "MAX_NEW_PIXELS", 2 * 64 * 96)
            three = say([image_part(data) for data in SAME_SIZE])
            status, answer = await made.post(CHAT, three)
            assert "18432 pixels; at most 12288" in answer["error"]["message"] and not loaded
            for data in SAME_SIZE:  # one by one they are read, and known from then on
                await made.post(CHAT, say([image_part(data)]))
            status, _ = await made.post(CHAT, three)
            assert status == 200 and loaded


async def test_no_image_is_decoded_or_written_in_the_event_loop(
    model: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the bytes of the request: a file of 400 bytes may have eight million pixels."""
    threads: list[tuple[str, threading.Thread]] = []

    def recorded(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    recorded(image_requests, "open_image")
    recorded(store.ImageStore, "_write")
    draw = random.Random(5)
    async with seeing(SeeingEngine(model=model), model.requests(tmp_path)) as connection:
        episode = open_episode(model, connection)
        for number in range(6):
            side, kind = draw.choice([32, 64, 300]), draw.choice(["PNG", "WEBP", "GIF", "BMP"])
            file = io.BytesIO()
            Image.new("RGB", (side, side + number), (number, 3, 5)).save(file, kind)
            message = {"role": "user", "content": [image_part(file.getvalue())]}
            request = chat_request({"messages": [message]})
            sized = replace(request, size=draw.choice([0, len(file.getvalue())]))
            await episode.count_tokens(sized)
            await episode.answer(sized)
    assert {name for name, _ in threads} == {"open_image", "_write"}
    assert threading.current_thread() not in {thread for _, thread in threads}


async def test_a_webp_may_have_fewer_pixels_because_its_decoder_stops_the_loop(
    model: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_images, "MAX_WEBP_PIXELS", 96 * 64)
    async with setup(model, tmp_path) as made:
        for kind, height, wanted in (("WEBP", 64, 200), ("WEBP", 65, 400), ("PNG", 65, 200)):
            file = io.BytesIO()
            Image.new("RGB", (96, height)).save(file, kind)
            status, answer = await made.post(CHAT, say([image_part(file.getvalue())]))
            assert status == wanted, (kind, height)
            if wanted == 400:
                message = answer["error"]["message"]
                assert "a WebP of 96 x 65 pixels; at most 6144 are read" in message


async def test_text_beside_an_image_is_bounded_as_without_one(
    model: ImageModel, tmp_path: Path
) -> None:
    big = noise(1600, 1600, 5, "BMP")  # 7.7 MB, more than a text of this context may have
    async with setup(model, tmp_path) as made:
        status, _ = await made.post(CHAT, say([image_part(big)]))
        assert status == 200
        padded = say([image_part(big)]) | {"metadata": {"a": "x" * (5 << 20)}}
        status, answer = await made.post(CHAT, padded)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


async def test_a_sampled_mark_ends_the_conversation_and_the_episode_is_scored(
    model: ImageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine would refuse the next turn; the policy caused it, so it counts as a limit."""
    caplog.set_level("INFO")
    async with setup(model, tmp_path) as made:
        made.engine.reply = lambda images: "an <image>"
        first = say([image_part(SAME_SIZE[0])])
        _, answer = await made.post(CHAT, first)
        message = answer["choices"][0]["message"]
        more = {"messages": [*first["messages"], message, {"role": "user", "content": "and?"}]}
        status, refusal = await made.post(CHAT, more)
        assert status == 400 and refusal["error"]["code"] == "episode_images_limit"
        assert made.episode.limit_reached == "images" and made.episode.error is None
        assert "no text of an answer has a mark" not in caplog.text


async def test_a_mark_of_the_harness_beside_an_image_is_reported_in_the_log(
    model: ImageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The episode is scored all the same, and a person has to know that the policy is innocent."""
    caplog.set_level("INFO")
    async with setup(model, tmp_path) as made:
        text = {"type": "text", "text": "write <image>"}
        status, refusal = await made.post(CHAT, say([image_part(SAME_SIZE[0]), text]))
        assert status == 400 and refusal["error"]["code"] == "episode_images_limit"
    assert caplog.text.count("no text of an answer has a mark") == 1


@pytest.mark.parametrize("seed", range(3))
async def test_an_episode_stores_images_within_its_bound_and_each_once(
    model: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Conversations send the same images again; files with bytes behind the image count in full."""
    most, draw = 100_000, random.Random(seed)
    monkeypatch.setattr(request_images, "MAX_EPISODE_BYTES", most)
    files = [data + draw.randbytes(draw.randint(0, 40_000)) for data in SAME_SIZE * 3]
    sent: set[bytes] = set()
    async with setup(model, tmp_path) as made:
        for _ in range(12):
            chosen = draw.choices(files, k=draw.randint(1, 3))
            fits = sum(map(len, sent | set(chosen))) <= most
            status, answer = await made.post(CHAT, say([image_part(data) for data in chosen]))
            assert status == (200 if fits else 400)
            if fits:
                sent |= set(chosen)
            else:
                assert answer["error"]["code"] == "episode_images_limit"
                assert f"at most {most} are stored" in answer["error"]["message"]
            there = [path for path in tmp_path.rglob("images/*/*") if "-" not in path.name]
            assert {path.read_bytes() for path in there} == sent
        assert len(sent) < len(files) and made.episode.limit_reached == "images"


def test_a_template_that_moves_images_is_refused(model: ImageModel, tmp_path: Path) -> None:
    """With other images before the base than those of the messages, tokens would name the wrong ones."""
    images = model.requests(tmp_path)
    one, other = (images.keep(data) for data in SAME_SIZE[:2])
    ids, spans = images.tokens.expand(images.frame, [one])
    before = SimpleNamespace(prompt_ids=ids, response_ids=IntColumn([1]), images=spans)
    message = SimpleNamespace(images=(request_images.MessageImage(0, other),))
    with pytest.raises(request_images.UnreadableImages, match="moved images"):
        request_images.with_images(images, before, IntColumn([2]), [message])
    same = replace(request_images.MessageImage(0, one))
    added = request_images.with_images(
        images, before, IntColumn(images.frame), [SimpleNamespace(images=(same,)), message]
    )
    assert [span.hash for span in added[1]] == [other.hash]
    assert limits.LIMITS.max_bytes == images.processor.limits.max_bytes
