"""The page shows the images that answers name, small and whatever their files have become."""

import base64
import io
import json
import re

import pytest
from PIL import Image

from rlpost.extensions.watching.report import images
from rlpost.extensions.watching.report.images import (
    MAX_IMAGES,
    MAX_OF_ANSWER,
    NOT_SHOWN,
    SIDE,
    pictures,
)
from rlpost.extensions.watching.report.page import report_page
from rlpost.extensions.watching.report.run_facts import read_facts
from rlpost.images.store import ImageStore
from tests.image_model import noise
from tests.unit.watching.report.runs import HOSTILE, make_run

SHOWN = re.compile(r'<img src="data:image/jpeg;base64,([^"]+)" alt="image ([0-9a-f]{12})"')


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", num_steps=2, preempted_at=())


def answer(*digests, prompt_id=1, text="said"):
    common = {"reward": 1.0, "num_tokens": 3, "finish": "stop", "label": "x"}
    return {
        "prompt_id": prompt_id,
        "prompt": "<p>",
        "answer": text,
        "images": list(digests),
        **common,
    }


def page_of(run, *answers, name="samples"):
    lines = [{"step": step, "samples": [one]} for step, one in enumerate(answers, 1)]
    path = run.report / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report_page(read_facts(run))


def test_a_page_has_a_small_copy_of_the_image_that_was_seen(run):
    data = noise(900, 300, 1)
    digest = ImageStore(run.root).add(data)
    ((copy, named),) = SHOWN.findall(page_of(run, answer(digest)))
    shown = Image.open(io.BytesIO(base64.b64decode(copy)))
    assert named == digest[:12] and shown.size == (SIDE, SIDE // 3) and len(copy) < 40_000
    original = Image.open(io.BytesIO(data)).convert("RGB").resize((6, 2))
    pairs = zip(shown.resize((6, 2)).tobytes(), original.tobytes(), strict=True)
    assert max(abs(ours - theirs) for ours, theirs in pairs) < 40


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda path: path.unlink(), "missing: no file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged: .*not those that were"),
        (lambda path: path.write_bytes(b""), "damaged: "),
    ],
    ids=["removed", "truncated", "empty"],
)
def test_a_missing_or_damaged_file_is_named_and_the_others_are_shown(run, break_it, reason):
    store = ImageStore(run.root)
    bad, good = store.add(noise(40, 40, 1)), store.add(noise(40, 40, 2))
    assert len(SHOWN.findall(page_of(run, answer(bad, good)))) == 2
    break_it(store.path(bad))
    page = page_of(run, answer(bad, good))
    assert [named for _, named in SHOWN.findall(page)] == [good[:12]]
    assert re.search(rf"image {bad[:12]} {reason}", page)


def test_what_is_no_digest_opens_no_file_and_stays_text(run):
    odd = ["../../../etc/passwd", HOSTILE, "", 7, None, "A" * 64, {"a": 1}]
    page = page_of(run, answer(*odd), answer(prompt_id=2))
    assert page.count("not a digest of an image") == len(odd) and HOSTILE not in page
    assert "said" in page_of(run, answer() | {"images": "ab"}, answer() | {"images": 3})


def test_the_images_of_a_page_are_bounded(run, monkeypatch):
    monkeypatch.setattr(images, "_copy", lambda *_: "data:image/jpeg;base64,AA")
    store = ImageStore(run.root)
    digests = [store.add(b"%d" % number) for number in range(MAX_IMAGES + 3)]
    found = pictures(run.root, [answer(digest) for digest in digests])
    assert [one for one in found.values()].count(NOT_SHOWN) == 3
    page = page_of(run, answer(*digests[: MAX_OF_ANSWER + 2]))
    assert len(SHOWN.findall(page)) == MAX_OF_ANSWER and "and 2 more" in page


def test_storage_that_fails_is_asked_once(run, monkeypatch):
    asked = []

    def fail(*_):
        asked.append(1)
        raise OSError(5, "Input/output error")

    store = ImageStore(run.root)
    digests = [store.add(b"%d" % number) for number in range(3)]
    monkeypatch.setattr(images, "_copy", fail)
    page = page_of(run, answer(*digests))
    assert page.count("cannot be read: Input/output error") == 3 and len(asked) == 1


def test_the_same_words_about_two_images_are_two_prompts(run):
    store = ImageStore(run.root)
    one, other = store.add(noise(40, 40, 1)), store.add(noise(40, 40, 2))
    told = [answer(one, text="a1"), answer(other, text="b1")]
    assert "prompt over time" not in page_of(run, *told, name="eval_samples")
    told += [answer(one, text="a3")]
    assert page_of(run, *told, name="eval_samples").count('<details class="sample">') == 1
