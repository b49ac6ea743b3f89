"""Requests with images: one token an image, and nothing that an engine would misread in silence."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rlpost.columns import IntColumn
from rlpost.durable.journal import Journal
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.image_requests import ImageRequests
from rlpost.errors import ImageError, RolloutError
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
from rlpost.rollout.answer_log import AnswerLog
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import ImageSpan, Prompt
from tests.image_model import make_image_folder, make_published_folder, noise
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

IMAGE, VIDEO = 7, 8
TOKENS = ImageTokens(IMAGE, frozenset([VIDEO]))
TEXTS = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}


def decode(ids) -> str:
    """The text of ids: letters, but for the tokens of images."""
    return "".join(TEXTS.get(token) or chr(token) for token in ids)


MARKS = ImageMarks.of(TOKENS, decode)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], tuple[ImageSpan, ...]]:
    """Ids with one token an image, the same expanded, and the spans."""
    short, whole, spans = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        text = draw(st.lists(st.integers(20, 30), min_size=1, max_size=5))
        short, whole = [*short, *text], [*whole, *text]
        count = draw(st.integers(1, 6))
        spans.append(ImageSpan("ab", len(whole), count, (1, 2, 2 * count)))
        short, whole = [*short, IMAGE], [*whole, *[IMAGE] * count]
    text = draw(st.lists(st.integers(20, 30), min_size=1, max_size=5))
    return [*short, *text], [*whole, *text], tuple(spans)


@given(sequences())
def test_an_engine_gets_one_token_for_each_image(case):
    short, whole, spans = case
    assert list(TOKENS.collapse(IntColumn(whole), spans)) == short


@given(sequences(), st.data())
def test_images_and_tokens_that_do_not_match_are_never_sent(case, data):
    _, whole, spans = case
    changes = [("a token more", [*whole, IMAGE], spans), ("a video", [VIDEO, *whole], spans)]
    if spans:
        which = data.draw(st.integers(0, len(spans) - 1))
        span = spans[which]
        one_less = [*spans[:which], *spans[which + 1 :]]
        longer = replace(span, num_tokens=span.num_tokens + 1)
        moved = replace(span, start=span.start - 1)
        changes += [
            ("an image without tokens", [token for token in whole if token != IMAGE], spans),
            ("an image less", whole, one_less),
            ("an image twice", whole, [*spans, spans[-1]]),
            ("a longer span", whole, [*spans[:which], longer, *spans[which + 1 :]]),
            ("a moved span", whole, [*spans[:which], moved, *spans[which + 1 :]]),
        ]
    for what, ids, images in changes:
        with pytest.raises(RolloutError, match="request"):
            assert TOKENS.collapse(IntColumn(ids), images) is what


def test_no_request_has_a_start_of_a_video(tmp_path):
    """SGLang takes images of GLM-V that follow one for frames of a video that is not there."""
    start = 9
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "video_start_token_id": start}
    (tmp_path / "config.json").write_text(json.dumps(ids))
    tokens = ImageTokens.of(tmp_path)
    assert tokens.all == (IMAGE, VIDEO, start)
    with pytest.raises(RolloutError, match="1 tokens of images or videos beside those of its 1"):
        tokens.collapse(IntColumn([start, 20, IMAGE, 21]), [ImageSpan("ab", 2, 1, (1, 2, 2))])


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> ImageRequests:
    model, run = (tmp_path_factory.mktemp(name) for name in ("model", "run"))
    make_image_folder(model)
    return ImageRequests(ImageStore(run), ImageProcessor.of(model), TOKENS, MARKS)


@pytest.fixture
def prompt(images) -> Prompt:
    data = noise(90, 130, 1, "JPEG")
    digest, grid = images.store.add(data), images.processor.grid(90, 130)
    count = images.processor.tokens_of(grid)
    span = ImageSpan(digest, 2, count, grid)
    return Prompt(3, "text", [20, 21, *[IMAGE] * count, 22], images=(span,))


def counted(num_read):
    """An engine's answer that says how many tokens it read."""

    def answer(body):
        made = generated([30, 31], text="a")
        made["meta_info"]["prompt_tokens"] = num_read
        return made

    return answer


SAMPLING = SamplingParams(4)


def write(
    engine: FakeEngine, images: ImageRequests | None, prompt: Prompt, sampling=SAMPLING, **options
):
    async def run():
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=4), images=images) as connection,
        ):
            builder = ResponseBuilder(connection, prompt, sampling, **options)
            await builder.write()
            await builder.write()
            return builder.sample()

    return asyncio.run(run())


@pytest.mark.parametrize("is_inline", [False, True])
def test_an_engine_reads_the_scaled_image_as_png(images, prompt, is_inline):
    lengths = iter([len(prompt.token_ids), len(prompt.token_ids) + 2])
    engine = FakeEngine(answer=lambda body: counted(next(lengths))(body))
    sample = write(engine, replace(images, is_inline=is_inline), prompt)
    assert sample.images == prompt.images and sample.prompt_ids == prompt.token_ids
    first, second = engine.bodies
    assert first["input_ids"] == [20, 21, IMAGE, 22] and second["input_ids"] == [
        20,
        21,
        IMAGE,
        22,
        30,
        31,
    ]
    (reference,) = first["image_data"]
    assert second["image_data"] == [reference]
    if is_inline:
        data = base64.b64decode(reference.removeprefix("data:image/png;base64,"))
    else:
        assert reference.startswith(str(images.store.folder)) and reference.endswith(".png")
        data = Path(reference).read_bytes()
    expected = images.processor.scaled(images.store.read(prompt.images[0].hash))
    assert Image.open(io.BytesIO(data)).tobytes() == expected.tobytes()


def test_a_request_that_waits_for_a_place_holds_no_image(images, prompt):
    """A data URL is made when there is capacity, so no more exist than places."""
    encoded, sent = [], []

    class Counting(ImageRequests):
        def fields(self, files):
            encoded.append(len(sent))
            return ImageRequests.fields(self, files)

    def answer(body):
        sent.append(body)
        return counted(len(prompt.token_ids))(body)

    async def run() -> None:
        engine = FakeEngine(answer=answer)
        inline = Counting(images.store, images.processor, TOKENS, MARKS, is_inline=True)
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=1), images=inline) as connection,
        ):
            builders = [ResponseBuilder(connection, prompt, SAMPLING) for _ in range(4)]
            await asyncio.gather(*(builder.write() for builder in builders))

    asyncio.run(run())
    assert encoded == [0, 1, 2, 3]


def test_text_has_no_field_of_images(images):
    engine = FakeEngine(answer=lambda _: generated([30, 31], text="a"))
    write(engine, images, Prompt(3, "text", [20, 21]))
    assert "image_data" not in engine.bodies[0]


@pytest.mark.parametrize("num_read", [4, 24, None])
def test_an_engine_that_reads_other_tokens_is_an_error(images, prompt, num_read):
    with pytest.raises(
        RolloutError, match=f"an engine read {num_read} tokens of a prompt that has 15 "
    ):
        write(
            FakeEngine(answer=counted(num_read)),
            images,
            replace(prompt, token_ids=prompt.token_ids),
        )


@pytest.mark.parametrize("ids", [[30, IMAGE], [30, VIDEO], [30, IMAGE, 31]])
def test_a_sampled_token_of_an_image_ends_the_answer(images, ids):
    """A second turn would have an image without a file."""

    def answer(body):
        return generated(ids, text="a")

    engine = FakeEngine(answer=answer)
    sample = write(engine, images, Prompt(3, "text", [20, 21]))
    assert list(sample.response_ids) == ids and len(engine.bodies) == 1


@pytest.mark.parametrize("mark", ["<image>", "<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_an_answer_that_spells_an_image_is_not_continued(images, prompt, mark, reason):
    """Nor is its part continued by a later attempt; an engine would refuse both."""
    ids = [ord(letter) for letter in f"an {mark}!"]

    def answer(body):
        made = generated(ids, text="a", reason=reason)
        made["meta_info"]["prompt_tokens"] = len(prompt.token_ids)
        return made

    engine = FakeEngine(answer=answer)
    sampling = SamplingParams(100)
    sample = write(engine, images, prompt, sampling=sampling)
    assert list(sample.response_ids) == ids and sample.finish_reason == "length"
    assert len(engine.bodies) == 1
    later = FakeEngine(answer=answer)
    again = write(later, images, prompt, sampling=sampling, so_far=sample)
    assert again == sample and not later.bodies


def test_an_engine_of_qwen2_5_vl_gets_no_request_that_ends_before_an_image(tmp_path, prompt):
    """Only if it has images, and for other models never: SGLang reads the token after each."""
    folder = tmp_path / "model"
    make_published_folder(folder, "qwen2.5-vl")
    tokens = ImageTokens.of(folder)
    config = json.loads((folder / "config.json").read_text())
    assert tokens.not_last == config["vision_start_token_id"]
    before = replace(tokens, image=IMAGE, not_last=21)
    requests = ImageRequests(ImageStore(tmp_path), ImageProcessor.of(folder), before, MARKS)
    ids = prompt.token_ids
    assert requests.is_readable(ids + IntColumn([21, 22]), prompt.images)
    assert not requests.is_readable(ids + IntColumn([21]), prompt.images)
    assert requests.is_readable(IntColumn([20, 21]), ())
    make_image_folder(tmp_path / "other")
    assert ImageTokens.of(tmp_path / "other").not_last is None


def test_an_answer_to_text_may_spell_an_image(images):
    """Engines read the text of a request only if it has images."""
    ids = [ord(letter) for letter in "<image>"]
    engine = FakeEngine(answer=lambda body: generated(ids, text="a"))
    write(engine, images, Prompt(3, "text", [20, 21]), sampling=SamplingParams(100))
    assert len(engine.bodies) == 2


def test_a_missing_file_is_named(images, prompt):
    (span,) = prompt.images
    lost = replace(prompt, images=(replace(span, hash="0" * 64),))
    with pytest.raises(ImageError, match=f"{'0' * 64}: cannot be read"):
        write(FakeEngine(), images, lost)


def test_a_recorded_answer_is_not_replayed_to_another_image(prompt):
    """The second path of a resume: same ids, same parameters, other image."""
    other = replace(prompt, images=(replace(prompt.images[0], hash="f" * 64),))
    asked = []

    async def ask(*, watch):
        asked.append(watch)
        raise LookupError

    for each, is_recorded in ((prompt, True), (other, False)):
        log = AnswerLog(Journal.off(), each, 0)
        from rlpost.rollout.answer_log import request_digest

        log._responses[request_digest(prompt.token_ids, {}, prompt.images)].append("the answer")
        respond = log.respond(each.token_ids, {}, ask, images=each.images)
        if is_recorded:
            assert asyncio.run(respond) == "the answer"
        else:
            with pytest.raises(LookupError):
                asyncio.run(respond)
    assert len(asked) == 1
