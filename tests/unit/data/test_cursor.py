"""Every prompt comes exactly once an epoch, and a cursor taken up again goes on as if nothing had happened."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.data.cursor import PromptCursor, epoch_order
from rlpost.data.prompts import PromptSet
from rlpost.errors import DataError


def make_set(folder: Path, size: int) -> PromptSet:
    path = folder / f"{size}.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}"}) + "\n" for i in range(size)))
    return PromptSet(path, tokenize=lambda text: (text, (1,)))


@given(size=st.integers(1, 200), epoch=st.integers(0, 50), seed=st.integers(), shuffle=st.booleans())
def test_an_epoch_has_every_position_once(size: int, epoch: int, seed: int, shuffle: bool) -> None:
    order = epoch_order(size, epoch, shuffle=shuffle, seed=seed)
    assert sorted(order) == list(range(size))
    assert order == epoch_order(size, epoch, shuffle=shuffle, seed=seed)


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(epoch_order(50, epoch, shuffle=True, seed=seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9


def test_the_order_of_a_seed_is_the_same_for_ever() -> None:
    """A resumed run of years ago must find its order: written down once, never to change."""
    assert epoch_order(8, 2, shuffle=True, seed=42) == [4, 7, 1, 6, 2, 0, 5, 3]


@settings(max_examples=30)
@given(takes=st.lists(st.integers(0, 25), max_size=8), cut=st.integers(0, 8), shuffle=st.booleans())
def test_a_cursor_taken_up_again_goes_on(tmp_path_factory, takes: list[int], cut: int, shuffle: bool) -> None:
    prompts = make_set(tmp_path_factory.getbasetemp(), 7)
    whole = PromptCursor(prompts, shuffle=shuffle, seed=3)
    expected = [whole.take(n) for n in takes]
    first = PromptCursor(prompts, shuffle=shuffle, seed=3)
    got = [first.take(n) for n in takes[:cut]]
    state = json.loads(json.dumps(first.state()))
    second = PromptCursor.from_state(prompts, state, shuffle=shuffle, seed=3)
    got += [second.take(n) for n in takes[cut:]]
    assert got == expected
    seen = [prompt for batch in got for prompt in batch]
    assert [prompt.prompt_id for prompt in seen] == list(range(len(seen)))
    for start in range(0, len(seen) - 6, 7):
        assert {prompt.text for prompt in seen[start : start + 7]} == {str(i) for i in range(7)}


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    random.seed(5)
    before = random.getstate()
    PromptCursor(make_set(tmp_path, 5), shuffle=True, seed=1).take(12)
    assert random.getstate() == before


def test_another_size_of_the_file_is_refused(tmp_path: Path) -> None:
    state = PromptCursor(make_set(tmp_path, 5)).state()
    with pytest.raises(DataError, match="6 prompts, but the checkpoint was made with 5"):
        PromptCursor.from_state(make_set(tmp_path, 6), state)
