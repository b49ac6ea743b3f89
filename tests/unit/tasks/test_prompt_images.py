"""Rows with images: which image a mark is, what is refused with file and line, how ids are expanded."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlpost.errors import DataError
from rlpost.images import read_file
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.fingerprint import image_states
from rlpost.tasks.prompt_images import PromptImages
from rlpost.tasks.prompts import PromptFields, PromptSet, check_prompt_file, parse
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.image_model import END, IMAGE, START, TEMPLATE, VIDEO, make_image_folder, noise
from tests.unit.tasks.sets import write, write_parquet

FIELDS = PromptFields("input", image_key="images")
A, B = noise(90, 130, 1), noise(200, 75, 2, "JPEG")


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_image_folder(folder)
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "images/a.png").write_bytes(A)
    (tmp_path / "images/b.jpg").write_bytes(B)
    return tmp_path


def prompt_images(model: Path, tokenizer: PromptTokenizer, **keep) -> PromptImages:
    tokens = ImageTokens.of(model)
    marks = ImageMarks.of(tokens, tokenizer.decode_with_special)
    return PromptImages(ImageProcessor.of(model), tokens, marks, **keep)


def prompts(model: Path, source: Path, run: Path | None = None, **options) -> PromptSet:
    keep = {} if run is None else {"keep": ImageStore(run).add}
    tokenize = PromptTokenizer(model, apply_chat_template=True)
    images = prompt_images(model, tokenize, **keep)
    return PromptSet(source, tokenize=tokenize, fields=FIELDS, images=images, **options)


def seen(*parts: dict[str, object], **row: object) -> dict[str, object]:
    """A row with these parts in its one message."""
    return {"input": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]} | row


PATHS = ["images/a.png", "images/b.jpg"]
MESSAGES = [
    {"role": "system", "content": "Look."},
    {"role": "user", "content": [
        {"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}, {"type": "text", "text": "?"}
    ]},
]  # fmt: skip
ROWS = {
    "marks": {"input": "<image> and <image>?", "images": ["images/a.png", "images/b.jpg"]},
    "marks in messages": {
        "input": [{"role": "user", "content": "<image> and <image>?"}],
        "images": [url(A), {"path": "images/b.jpg"}],
    },
    "parts": {"input": MESSAGES, "images": ["images/a.png", "images/b.jpg"]},
    "parts with sources": {
        "input": [{"role": "user", "content": [
            {"type": "image", "image": "images/a.png"}, {"type": "text", "text": " and "},
            {"type": "image_url", "image_url": {"url": url(B)}}, {"type": "text", "text": "?"},
        ]}]
    },
    "messages as text": {"input": json.dumps(MESSAGES), "images": [url(A), url(B)]},
    "parts with numbers, as in llava-instruct-mix-vsft": seen(
        {"type": "image", "index": 0, "text": ""}, {"type": "text", "text": " and "},
        {"type": "image", "index": 1.0, "text": None}, images=PATHS,
    ),
    "descriptions": seen(
        {"type": "image", "path": PATHS[0], "width": 90, "height": 130}, {"type": "text", "text": " and "},
        {"type": "image_url", "image_url": {"url": url(B), "detail": "auto"}}, images="",
    ),
    "descriptions of COCO, and parts in the list": seen(
        {"type": "image", "caption": "a cat"}, {"type": "text", "text": " and "}, {"type": "image"},
        images=[
            {"path": PATHS[0], "caption": "a cat", "license": 4, "coco_url": "http://x/1.jpg", "source": "coco"},
            {"type": "image_url", "image_url": {"url": PATHS[1]}, "uuid": "b", "tags": []},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_marks_and_parts_become_the_images_in_order(model, data, name):
    source = write(data / "rows.jsonl", ROWS[name])
    (prompt,) = prompts(model, source, data / "run").all()
    assert [span.hash for span in prompt.images] == [
        hashlib.sha256(each).hexdigest() for each in (A, B)
    ]
    assert ImageStore(data / "run").read(prompt.images[1].hash) == B
    assert prompt.text.endswith(f"{START}{IMAGE}{END} and {START}{IMAGE}{END}?<|end|><|assistant|>")
    assert "images" not in prompt.metadata  # it would be stored with each prompt
    assert check_prompt_file(source, FIELDS, processor=ImageProcessor.of(model)) == 1


def test_ids_have_the_tokens_that_transformers_counts(model, data):
    """The reference is the processor's own grid: rows x columns / 4 of each image."""
    source = write(data / "rows.jsonl", ROWS["marks"])
    (prompt,) = prompts(model, source).all()
    from PIL import Image

    process = Qwen2VLImageProcessorPil.from_pretrained(model)
    files = [Image.open(data / f"images/{name}") for name in ("a.png", "b.jpg")]
    grids = process(images=files, return_tensors="np")["image_grid_thw"].tolist()
    token = ImageTokens.of(model).image
    assert [list(span.grid) for span in prompt.images] == grids
    for span, (frames, rows, columns) in zip(prompt.images, grids, strict=True):
        assert span.num_tokens == frames * rows * columns // 4
        assert set(prompt.token_ids[span.start : span.end]) == {token}
        assert token not in (prompt.token_ids[span.start - 1], prompt.token_ids[span.end])
    assert list(prompt.token_ids).count(token) == sum(span.num_tokens for span in prompt.images)


def test_the_limit_counts_the_tokens_of_images_and_never_cuts_one(model, data):
    source = write(data / "rows.jsonl", ROWS["marks"], {"input": "short", "images": []})
    (whole, _) = prompts(model, source).all()
    length = len(whole.token_ids)
    assert prompts(model, source, max_prompt_len=length).prompt(0, 0) == whole
    limited = prompts(model, source, max_prompt_len=length - 1)
    assert limited.prompt(0, 0) is None and limited.prompt(1, 1).images == ()
    assert limited.counters()["rollout/long_prompts"] == 1


@pytest.mark.parametrize("form", ["objects", "bytes", "one"])
def test_parquet_has_images_as_bytes(model, data, form):
    """The column of Hugging Face's ``Image`` feature, plain bytes, and one image a row."""
    values = {
        "objects": [{"bytes": A, "path": "a.png"}, {"bytes": None, "path": "images/b.jpg"}],
        "bytes": [A, B],
        "one": {"bytes": A, "path": None},
    }[form]
    text = "<image>?" if form == "one" else "<image><image>?"
    source = write_parquet(data / "rows.parquet", [{"input": text, "images": values}] * 3)
    found = prompts(model, source).all()
    wanted = [hashlib.sha256(each).hexdigest() for each in (A, B)]
    assert [span.hash for span in found[2].images] == wanted[: len(found[2].images)]
    assert len(found[2].images) == (1 if form == "one" else 2)


BAD = {
    "more marks": ({"input": "<image><image>", "images": ["images/a.png"]}, "more marks of images than its 1"),
    "no images": ({"input": "<image>", "images": []}, "more marks of images than its 0"),
    "no key": ({"input": "<image>"}, "more marks of images than its 0"),
    "more images": ({"input": "<image>", "images": ["images/a.png"] * 2}, "2 images and 1 marks"),
    "no mark": ({"input": "what?", "images": ["images/a.png"]}, "1 images and 0 marks"),
    "missing": ({"input": "<image>", "images": ["images/c.png"]}, "image 1: .*c.png: cannot be read: No such"),
    "long": ({"input": "<image>", "images": ["a/" * 2000]}, r"image 1: .{300}\.\.\.: cannot be read: "),
    "folder": ({"input": "<image>", "images": ["images"]}, "image 1: .*not a regular file|Is a directory"),
    "remote": ({"input": "<image>", "images": ["https://example.org/a.png"]}, "image 1: the address .*files"),
    "s3": ({"input": "<image>", "images": ["s3://bucket/a.png"]}, "image 1: the address"),
    "file url": ({"input": "<image>", "images": ["file:///etc/passwd"]}, "image 1: the address"),
    "second": (
        {"input": "<image><image>", "images": ["images/a.png", "images/none.png"]}, "image 2: .*No such"
    ),
    "not an image": ({"input": "<image>", "images": [url(b"GIF?")]}, "image 1: not an image: 4 bytes"),
    "not base64": ({"input": "<image>", "images": ["data:image/png;base64,%%%"]}, "not base64"),
    "base64 alone": (
        {"input": "<image>", "images": [base64.b64encode(A * 9).decode()]}, "a text of .* neither a path nor"
    ),
    "no name of a file": ({"input": "<image>", "images": ["a\0.png"]}, "neither a path nor a data URL"),
    "data url in text": ({"input": "<image>", "images": ["data:image/png,abc"]}, "image 1: the address"),
    "empty object": ({"input": "<image>", "images": [{"path": ""}]}, "without a source"),
    "number": ({"input": "<image>", "images": [7]}, "image 1: an image is 7; give a path"),
    "null": ({"input": "<image>", "images": [None]}, "more marks|an image is None"),
    "thin": ({"input": "<image>", "images": [url(noise(4000, 10))]}, "image 1: an image of 4000 x 10"),
    "video": (
        {"input": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "part of type 'video'"
    ),
    "other order": (
        seen({"type": "image", "index": 1}, {"type": "image", "index": 0}, images=PATHS),
        "part with index 1 where image 0",
    ),
    "size of Qwen": (
        seen({"type": "image", "image": PATHS[0], "resized_height": 32, "resized_width": 32}),
        "part of type image with resized_height, resized_width, which would have no effect",
    ),
    "size in an object": (
        {"input": "<image>", "images": [{"image": PATHS[0], "max_pixels": 2048}]},
        "image 1: an object with max_pixels, which would have no effect",
    ),
    "base64 of transformers": (
        seen({"type": "image", "base64": "iVBO"}, images=PATHS[:1]), "type image with base64, .* one of bytes, image"
    ),
    "source of Anthropic": (
        seen({"type": "image", "source": {"type": "base64", "data": "iVBO"}}, images=PATHS[:1]),
        "type image with source",
    ),
    "text beside a path": (
        seen({"type": "image", "image": PATHS[0], "text": "look"}), "type image with text, which would have no"
    ),
    "text of an image": (seen({"type": "image", "text": "look"}, images=PATHS[:1]), "type image with text"),
    "video mark": (
        {"input": "<image><video>", "images": PATHS[:1], "videos": ["a.mp4"]}, "<video> in its text and 'videos'"
    ),
    "truncated": ({"input": "<image>", "images": [url(A[:300])]}, "image 1: an image that cannot be decoded"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_file_and_line_before_and_during_a_run(model, data, name):
    row, reason = BAD[name]
    good = {"input": "<image>", "images": ["images/a.png"]}
    source = write(data / "rows.jsonl", good, row)
    with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*({reason})"):
        check_prompt_file(source, FIELDS, processor=ImageProcessor.of(model))
    rows = prompts(model, source)
    assert rows.prompt(0, 0) is not None
    with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*({reason})"):
        rows.prompt(1, 1)
    assert image_states(source, FIELDS) == image_states(source, FIELDS)
    skipping = prompts(model, source, skip_bad=True)
    assert skipping.prompt(1, 1) is None and skipping.counters()["rollout/bad_prompts"] == 1


@pytest.mark.parametrize("mark", [IMAGE, VIDEO])
def test_the_text_of_a_prompt_cannot_write_a_token_of_an_image(model, data, mark):
    row = {"input": f"<image> {mark} what?", "images": ["images/a.png"]}
    with pytest.raises(
        DataError, match="line 1: the prompt has 2 tokens of images or videos for 1 image"
    ):
        prompts(model, write(data / "rows.jsonl", row)).prompt(0, 0)


def test_a_mark_that_the_template_writes_is_refused(model, data):
    """An engine would look for a second image; without images it does not look at the text."""
    one, text = {"input": "<image>?", "images": ["images/a.png"]}, {"input": "what?"}
    options = {"template_kwargs": {"chat_template": "an <image>: " + TEMPLATE}}
    tokenize = PromptTokenizer(model, apply_chat_template=True, **options)
    images, source = prompt_images(model, tokenize), write(data / "rows.jsonl", one, text)
    rows = PromptSet(source, tokenize=tokenize, fields=FIELDS, images=images)
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 1: engines find 2 images in the rendered"
    ):
        rows.prompt(0, 0)
    assert rows.prompt(1, 1) is not None


@pytest.mark.parametrize("metadata_key", [None, "extra"])
@pytest.mark.parametrize("form", [dict, json.dumps])
def test_metadata_has_no_bytes_of_images_under_a_nested_key(form, metadata_key):
    extra = {"images": [url(A)], "level": 3}
    fields = PromptFields("input", metadata_key=metadata_key, image_key="extra.images")
    row = parse({"input": "<image>", "extra": form(extra), "id": 4}, "line 1", fields)
    assert row.images == (url(A),)
    kept = {"level": 3}
    expected = kept if metadata_key else {"extra": form(kept), "id": 4}
    assert row.metadata == expected
    assert extra["images"] == [url(A)]  # the row itself is unchanged


def test_metadata_has_no_bytes_of_images_in_a_nested_prompt():
    parts = [{"type": "image", "image": url(A)}]
    raw = {"extra": {"chat": [{"role": "user", "content": parts}], "level": 3}}
    row = parse(raw, "line 1", PromptFields("extra.chat", image_key="images"))
    assert row.images == (url(A),) and row.metadata == {"extra": {"level": 3}}


def test_a_fault_of_the_storage_is_no_bad_row(model, data, monkeypatch):
    source = write(data / "rows.jsonl", {"input": "<image>", "images": ["images/a.png"]})
    rows = prompts(model, source, skip_bad=True)

    def fail(path, max_bytes):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(read_file, "read_regular", fail)
    monkeypatch.setattr(read_file, "PAUSES_S", ())
    with pytest.raises(OSError, match="Stale"):
        rows.prompt(0, 0)
    assert rows.counters()["rollout/bad_prompts"] == 0


def test_a_file_without_an_image_is_refused_where_images_are_trained(data):
    """A misspelled key would train on text in silence."""
    source = write(data / "rows.jsonl", {"input": "what?", "pictures": ["images/a.png"]})
    with pytest.raises(DataError, match=r'no row has an image under --multimodal-keys .*"images"'):
        check_prompt_file(source, FIELDS, needs_images=True)
    assert check_prompt_file(source, FIELDS) == 1


def test_a_video_beside_other_columns_is_found_and_a_tag_is_text(data):
    fields = PromptFields("input", metadata_key="extra", image_key="images")
    row = {
        "input": "<image><video>",
        "images": [A],
        "videos": [b"\xff\0mp4"],
        "extra": {"level": 3},
    }
    source = write_parquet(data / "rows.parquet", [row])
    with pytest.raises(DataError, match="row 1: <video> in its text and 'videos' beside it"):
        check_prompt_file(source, fields)
    source = write_parquet(data / "without.parquet", [row | {"input": "<image>"}])
    assert check_prompt_file(source, fields) == 1
    with pytest.raises(DataError, match="name the columns to read"):  # it would be metadata
        check_prompt_file(source, FIELDS)
    page = {"input": "write HTML with a <video> of <image>", "images": ["images/a.png"]}
    assert check_prompt_file(write(data / "rows.jsonl", page), FIELDS) == 1


def test_without_the_key_a_mark_is_text_and_a_part_is_refused(data):
    plain = write(data / "plain.jsonl", {"input": "an <image> tag"})
    assert check_prompt_file(plain, PromptFields("input")) == 1
    parts = write(data / "parts.jsonl", {"input": MESSAGES})
    with pytest.raises(
        DataError, match="line 1: 'input': a message with images, which --multimodal-keys"
    ):
        check_prompt_file(parts, PromptFields("input"))


def test_a_message_with_images_that_the_template_leaves_out_is_refused(model, data):
    tokenize = PromptTokenizer(model, apply_chat_template=True, template_kwargs={"documents": None})
    tokenize._tokenizer.chat_template = "{{ messages[0].content[0].type }}"
    row = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    ]
    with pytest.raises(DataError, match="leaves out message 1"):
        tokenize(row)


@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_images_are_read_ahead_in_the_order_of_the_run_and_counted_once(model, data, weights):
    """Bad rows are counted when they are taken; what was read ahead is not stored again."""
    rows = [{"input": "<image>", "images": [url(noise(40 + 8 * at, 40, at))]} for at in range(6)]
    rows[2] = {"input": "<image>", "images": ["images/none.png"]}
    files = [
        write(data / "one.jsonl", *rows[:4]),
        write(data / "two.jsonl", *rows[4:]),
    ]
    stored: list[bytes] = []

    def keep(image: bytes) -> str:
        stored.append(image)
        return hashlib.sha256(image).hexdigest()

    tokenize = PromptTokenizer(model, apply_chat_template=True)
    images = prompt_images(model, tokenize, keep=keep)
    found = PromptSet(files, tokenize=tokenize, fields=FIELDS, images=images, skip_bad=True)
    cursor = PromptCursor(found, shuffle=True, seed=3, weights=weights)
    state = cursor.state()
    cursor.read_ahead(4)
    assert cursor.state() == state and found.counters()["rollout/bad_prompts"] == 0
    ahead = [hashlib.sha256(each).hexdigest() for each in stored]
    taken = [prompt.images[0].hash for prompt in cursor.take(3)]
    assert set(taken) <= set(ahead) and len(stored) == len(ahead) == len(set(ahead))
