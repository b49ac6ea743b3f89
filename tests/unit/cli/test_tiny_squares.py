"""The images of rlpost.extensions.fetching.tiny_squares: the label is what they show."""

import json
import random
from collections import Counter

import pytest
from PIL import Image

from rlpost.extensions.fetching.tiny_squares import COLOURS, NUM_IMAGES, make_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("squares")
    make_rows(path, seed=3)
    return path


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def shown(path):
    """The colour next to that of the most colourful pixels."""
    pixels = list(Image.open(path).get_flattened_data())
    square = max(Counter(pixels).items(), key=lambda one: (max(one[0]) - min(one[0]), one[1]))[0]
    distance = {
        name: sum(abs(a - b) for a, b in zip(square, rgb, strict=True))
        for name, rgb in COLOURS.items()
    }
    return min(distance, key=distance.get)


@pytest.mark.parametrize("name", NUM_IMAGES)
def test_the_label_is_the_colour_of_the_square(folder, name):
    rows = rows_of(folder, name)
    assert [row["label"] for row in rows] == [shown(folder / row["images"][0])[0] for row in rows]
    labels = Counter(row["label"] for row in rows)
    assert labels == dict.fromkeys((colour[0] for colour in COLOURS), NUM_IMAGES[name])
    assert len({(folder / row["images"][0]).read_bytes() for row in rows}) == len(rows)


def test_the_control_has_the_same_questions_without_images(folder):
    blind, heldout = rows_of(folder, "blind"), rows_of(folder, "heldout")
    assert [row["label"] for row in blind] == [row["label"] for row in heldout]
    assert {(row["prompt"], *row["images"]) for row in blind} == {("which colour?",)}


def test_the_same_seed_gives_the_same_files_and_damaged_ones_are_made_again(folder, tmp_path):
    make_rows(tmp_path, seed=3)
    damaged = tmp_path / rows_of(folder, "train")[random.Random(1).randrange(9)]["images"][0]
    damaged.write_bytes(b"half")
    make_rows(tmp_path, seed=3)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 3 + len(COLOURS) * sum(NUM_IMAGES.values())
    assert all((tmp_path / file).read_bytes() == (folder / file).read_bytes() for file in files)
