"""The file of an image that is rewritten during a run, between two attempts, or while it is read.

With the run's own parts: rows, cursor, store, journal. A prompt has the digest of the bytes that were
read when it was taken; the store has these bytes before anything can name the digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rlpost.durable.group_records import backlog_from, backlog_json
from rlpost.durable.journal_format import GROUP, Record, prompt_digest
from rlpost.errors import DataError
from rlpost.images.store import ImageStore
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.replay import fit
from rlpost.tasks import prompt_images as prompt_images_module
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.fingerprint import data_fingerprint
from rlpost.types import Backlog, Prompt
from tests.image_model import make_image_folder, noise
from tests.unit.tasks.sets import write
from tests.unit.tasks.test_prompt_images import FIELDS, prompts

OLD, NEW, OTHER = noise(90, 130, 1), noise(400, 150, 2), noise(64, 64, 3)
RULES = Rules(batch_size=2, start_size=2, num_steps=9)
ROWS = [{"input": "<image>?", "images": [f"{name}.png"]} for name in ("a", "b")]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_image_folder(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "a.png").write_bytes(OLD)
    (tmp_path / "b.png").write_bytes(OTHER)
    return write(tmp_path / "rows.jsonl", *ROWS)


def cursor_of(model: Path, data: Path, **state: int) -> PromptCursor:
    return PromptCursor.from_state(prompts(model, data, data.parent / "run"), state)


def stored(data: Path, prompt: Prompt) -> bytes:
    (image,) = prompt.images
    return ImageStore(data.parent / "run").read(image.hash)


def test_a_prompt_keeps_the_image_that_it_was_taken_with(model, data, monkeypatch):
    """Also after the checkpoint, whose reader never opens the file of the data set."""
    cursor = cursor_of(model, data)
    cursor.read_ahead(2)
    (first,) = cursor.take(1)
    (data.parent / "a.png").write_bytes(NEW)
    buffer = RolloutBuffer(RULES, Backlog(), step=0)
    buffer.add_prompts([first])
    read: list[Path] = []
    monkeypatch.setattr(prompt_images_module, "read_file", read.append)
    again = backlog_from(json.loads("".join(backlog_json(buffer.backlog()))))
    (waiting,) = [each.prompt for each in again.unfinished]
    assert waiting.images == first.images and waiting.token_ids == first.token_ids
    assert first.images[0].hash == digest(OLD) and stored(data, waiting) == OLD
    assert not read


def test_a_prompt_of_the_next_epoch_has_the_new_image(model, data):
    cursor = cursor_of(model, data)
    first, _ = cursor.take(2)
    (data.parent / "a.png").write_bytes(NEW)
    (second,) = cursor.take(1)
    assert [stored(data, one) for one in (first, second)] == [OLD, NEW]
    assert first.images[0].grid != second.images[0].grid
    assert first.token_ids != second.token_ids, "the tokens are those of the image"


def test_the_newest_bytes_count_if_the_file_is_rewritten_after_it_was_read_ahead(model, data):
    cursor = cursor_of(model, data)
    cursor.read_ahead(2)
    (data.parent / "a.png").write_bytes(NEW)
    (first,) = cursor.take(1)
    assert stored(data, first) == NEW and first.images[0].hash == digest(NEW)


def test_a_file_that_is_rewritten_while_a_prompt_is_taken_is_read_once(model, data, monkeypatch):
    """What is decoded, counted, stored and named are the same bytes."""
    decode, path = prompt_images_module.open_image, data.parent / "a.png"

    def rewritten(image, *limits):
        path.write_bytes(NEW)
        return decode(image, *limits)

    monkeypatch.setattr(prompt_images_module, "open_image", rewritten)
    (first,) = cursor_of(model, data).take(1)
    assert first.images[0].hash == digest(OLD) and stored(data, first) == OLD


def test_half_of_an_image_is_a_bad_row_that_is_named_and_never_stored(model, data):
    (data.parent / "a.png").write_bytes(NEW[: len(NEW) // 2])
    with pytest.raises(DataError, match=r"rows\.jsonl.*1.*image 1"):
        cursor_of(model, data).take(1)
    assert not list((data.parent / "run").rglob("??/*"))


def answered(prompt: Prompt) -> Record:
    """The journal's record of a group of answers to a prompt."""
    about = {"prompt": prompt_digest(prompt), "oldest_version": 0, "newest_version": 0}
    meta = {"prompt_id": prompt.prompt_id, "wanted": True, "num_tokens": 3}
    return Record(GROUP, meta | about, Path("journal"), 0, 0)


@pytest.mark.parametrize("name", ["a.png", None])
def test_a_resume_uses_the_answers_to_unchanged_images_and_names_what_changed(model, data, name):
    records = [answered(prompt) for prompt in cursor_of(model, data).take(2)]
    before = data_fingerprint([data], FIELDS)
    if name is not None:
        (data.parent / name).write_bytes(NEW)
    found = fit(records, RolloutBuffer(RULES, Backlog(), step=0), cursor_of(model, data))
    is_same = name is None
    assert (data_fingerprint([data], FIELDS) == before) is is_same
    assert found.position == (2 if is_same else 0)
    assert (found.why is None) is is_same
    assert is_same or ("prompt 0" in found.why and "the file of an image" in found.why)
