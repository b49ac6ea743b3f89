"""Each prompt comes exactly once per epoch, and a restored cursor continues without a gap."""

import json
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.errors import DataError
from rlpost.tasks.cursor import PromptCursor, epoch_order
from rlpost.tasks.prompts import PromptFields, PromptSet
from tests.unit.tasks.sets import letters, numbered, write


def make_set(folder: Path, size: int) -> PromptSet:
    return PromptSet(
        numbered(folder / f"{size}.jsonl", size), tokenize=letters, fields=PromptFields("input")
    )


@given(
    size=st.integers(1, 200), epoch=st.integers(0, 50), seed=st.integers(), shuffle=st.booleans()
)
def test_an_epoch_has_every_position_once(size: int, epoch: int, seed: int, shuffle: bool) -> None:
    order = epoch_order(size, epoch, shuffle=shuffle, seed=seed)
    assert sorted(order) == list(range(size))
    assert order == epoch_order(size, epoch, shuffle=shuffle, seed=seed)


def test_epochs_and_seeds_differ() -> None:
    orders = [
        tuple(epoch_order(50, epoch, shuffle=True, seed=seed))
        for epoch in range(3)
        for seed in range(3)
    ]
    assert len(set(orders)) == 9


def test_the_order_of_a_seed_never_changes() -> None:
    """Old runs must resume with the same order, so these values must never change."""
    assert list(epoch_order(8, 2, shuffle=True, seed=42)) == [4, 7, 1, 6, 2, 0, 5, 3]


@given(size=st.integers(1, 2000), epoch=st.integers(0, 9), seed=st.integers(0, 99))
def test_the_order_is_that_of_pythons_own_sort(size: int, epoch: int, seed: int) -> None:
    """Checkpoints of earlier versions were made with that sort."""
    draw = random.Random(f"{seed}/{epoch}").random
    keys = [draw() for _ in range(size)]
    assert list(epoch_order(size, epoch, shuffle=True, seed=seed)) == sorted(
        range(size), key=keys.__getitem__
    )


def test_equal_keys_stay_in_order_of_position(monkeypatch) -> None:
    class Coarse(random.Random):
        def random(self) -> float:
            return round(super().random(), 1)

    monkeypatch.setattr("rlpost.tasks.cursor.random.Random", Coarse)
    draw = Coarse("1/0").random
    keys = [draw() for _ in range(500)]
    assert list(epoch_order(500, 0, shuffle=True, seed=1)) == sorted(
        range(500), key=keys.__getitem__
    )


def test_the_order_of_an_epoch_takes_few_bytes_per_prompt() -> None:
    """As Python integers of 36 bytes, the order of 10 million prompts took 400 MB, at peak 1 GB."""
    size = 100_000
    epoch_order(10, 0, shuffle=True, seed=1)  # imports
    tracemalloc.start()
    try:
        order = epoch_order(size, 0, shuffle=True, seed=1)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(order) == size
    assert held <= 8 * size + 10_000
    assert most <= 48 * size


@settings(max_examples=30)
@given(takes=st.lists(st.integers(0, 25), max_size=8), cut=st.integers(0, 8), shuffle=st.booleans())
def test_a_restored_cursor_continues(
    tmp_path_factory, takes: list[int], cut: int, shuffle: bool
) -> None:
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


@pytest.mark.parametrize("weights", [(), (1.0,)])
def test_a_copy_starts_at_the_same_position_and_is_independent(
    tmp_path: Path, weights: tuple[float, ...]
) -> None:
    cursor = PromptCursor(make_set(tmp_path, 5), shuffle=True, seed=1, weights=weights)
    cursor.take(3)
    other = cursor.copy()
    ahead = other.take(9)
    assert cursor.state() != other.state()
    assert cursor.take(9) == ahead


def test_the_global_random_generator_is_not_used(tmp_path: Path) -> None:
    random.seed(5)
    before = random.getstate()
    PromptCursor(make_set(tmp_path, 5), shuffle=True, seed=1).take(12)
    assert random.getstate() == before


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    state = PromptCursor(make_set(tmp_path, 5)).state()
    with pytest.raises(DataError, match="6 prompts, but the checkpoint was made with 5"):
        PromptCursor.from_state(make_set(tmp_path, 6), state)


def mixed(folder: Path, *sizes: int) -> PromptSet:
    files = [
        numbered(folder / f"{name}.jsonl", size, name)
        for name, size in zip("abc", sizes, strict=False)
    ]
    return PromptSet(files, tokenize=letters, fields=PromptFields("input"))


def test_files_without_weights_are_read_one_after_the_other(tmp_path: Path) -> None:
    texts = [prompt.text for prompt in PromptCursor(mixed(tmp_path, 2, 1, 2)).take(6)]
    assert texts == ["a0", "a1", "b0", "c0", "c1", "a0"]


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.7, 0.2, 0.1), (5, 1e-3)])
def test_files_are_mixed_by_weight_at_any_moment_and_each_in_whole_epochs(
    tmp_path: Path, weights
) -> None:
    sizes = (3, 5, 4)[: len(weights)]
    prompts = PromptCursor(mixed(tmp_path, *sizes), shuffle=True, seed=4, weights=weights).take(60)
    assert [prompt.prompt_id for prompt in prompts] == list(range(60))
    texts = [prompt.text for prompt in prompts]
    for number in range(1, 61):
        for name, weight in zip("abc", weights, strict=False):
            count = sum(text[0] == name for text in texts[:number])
            assert abs(count - number * weight / sum(weights)) < 1.5
    for name, size in zip("abc", sizes, strict=False):
        own = [text for text in texts if text[0] == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


@settings(max_examples=30)
@given(takes=st.lists(st.integers(0, 9), max_size=8), cut=st.integers(0, 8), shuffle=st.booleans())
def test_a_restored_weighted_cursor_continues(
    tmp_path_factory, takes: list[int], cut: int, shuffle: bool
) -> None:
    prompts = mixed(tmp_path_factory.getbasetemp(), 3, 5)
    options = {"shuffle": shuffle, "seed": 3, "weights": (0.3, 0.7)}
    whole = PromptCursor(prompts, **options)
    expected = [whole.take(n) for n in takes]
    first = PromptCursor(prompts, **options)
    got = [first.take(n) for n in takes[:cut]]
    second = PromptCursor.from_state(prompts, json.loads(json.dumps(first.state())), **options)
    assert got + [second.take(n) for n in takes[cut:]] == expected


def test_weights_that_do_not_match_the_files_or_the_checkpoint_are_refused(
    tmp_path: Path,
) -> None:
    prompts = mixed(tmp_path, 2, 2)
    with pytest.raises(DataError, match="3 weights for 2 files"):
        PromptCursor(prompts, weights=(1, 1, 1))
    with pytest.raises(DataError, match="2 weights, but the checkpoint was made with 0"):
        PromptCursor.from_state(prompts, PromptCursor(prompts).state(), weights=(1, 1))
    with pytest.raises(DataError, match="0 weights, but the checkpoint was made with 2"):
        PromptCursor.from_state(prompts, PromptCursor(prompts, weights=(1, 1)).state())


def test_a_state_from_before_weights_existed_is_restored(tmp_path: Path) -> None:
    """Earlier versions wrote it; at the end of an epoch its offset is the epoch's size."""
    prompts = make_set(tmp_path, 5)
    for state, text in (({"epoch": 1, "offset": 2}, "2"), ({"epoch": 0, "offset": 5}, "0")):
        cursor = PromptCursor.from_state(prompts, {**state, "num_prompts": 5})
        assert cursor.state() == {**state, "num_prompts": 5}
        assert cursor.take(1)[0].text == text


def test_a_weighted_state_without_counts_of_skipped_rows_is_restored(tmp_path: Path) -> None:
    """Earlier versions wrote it, and skipped rows counted for the share."""
    prompts, weights = mixed(tmp_path, 3, 5), (1, 1)
    cursor = PromptCursor(prompts, weights=weights)
    cursor.take(3)
    state = {key: value for key, value in cursor.state().items() if "skipped" not in key}
    assert PromptCursor.from_state(prompts, state, weights=weights).take(9) == cursor.take(9)


def test_skipped_rows_leave_gaps_in_the_ids_and_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", {"input": "ab"}, "no json", {"input": "far too long"}, {"input": "cd"}
    )
    prompts = PromptSet(
        path, tokenize=letters, max_prompt_len=4, skip_bad=True, fields=PromptFields("input")
    )
    cursor = PromptCursor(prompts)
    first = cursor.take(1)
    second = PromptCursor.from_state(prompts, cursor.state()).take(3)
    assert [(prompt.prompt_id, prompt.text) for prompt in first + second] == [
        (0, "ab"),
        (3, "cd"),
        (4, "ab"),
        (7, "cd"),
    ]
    assert prompts.counters() == {"rollout/bad_prompts": 2, "rollout/long_prompts": 2}
    assert set(prompts.counters().values()) == {0}


def some_bad(folder: Path, bad: list[list[bool]]) -> PromptSet:
    """One file for each list; a row is bad where its entry is true."""
    files = [
        write(
            folder / f"bad{name}.jsonl",
            *({} if is_bad else {"input": f"{name}{at}"} for at, is_bad in enumerate(rows)),
        )
        for name, rows in zip("abc", bad, strict=False)
    ]
    return PromptSet(files, tokenize=letters, skip_bad=True, fields=PromptFields("input"))


ROWS = st.lists(st.booleans(), min_size=1, max_size=6).filter(lambda rows: not all(rows))


@settings(max_examples=50, deadline=None)
@given(bad=st.lists(ROWS, min_size=2, max_size=3), takes=st.lists(st.integers(1, 9), max_size=5))
def test_shares_count_the_prompts_that_are_used_and_survive_any_resume(
    tmp_path_factory, bad: list[list[bool]], takes: list[int]
) -> None:
    prompts = some_bad(tmp_path_factory.getbasetemp(), bad)
    weights = (0.5, 0.3, 0.2)[: len(bad)]
    whole = PromptCursor(prompts, shuffle=True, weights=weights).take(sum(takes))
    state, resumed = {}, []
    for count in takes:
        cursor = PromptCursor.from_state(prompts, state, shuffle=True, weights=weights)
        resumed += cursor.take(count)
        state = json.loads(json.dumps(cursor.state()))
    assert resumed == whole
    for number in range(1, len(whole) + 1):
        for name, weight in zip("abc", weights, strict=False):
            count = sum(prompt.text[0] == name for prompt in whole[:number])
            assert abs(count - number * weight / sum(weights)) < 1.5


def test_a_file_of_which_no_row_is_left_ends_a_weighted_run(tmp_path: Path) -> None:
    prompts = some_bad(tmp_path, [[False] * 9, [True, True]])
    with pytest.raises(DataError, match="file 2 of --prompt-data: 5 consecutive rows are bad"):
        PromptCursor(prompts, weights=(1, 1)).take(2)


def test_a_run_that_would_skip_all_rows_ends(tmp_path: Path) -> None:
    prompts = PromptSet(
        numbered(tmp_path / "p.jsonl", 3, "long"),
        tokenize=letters,
        max_prompt_len=2,
        fields=PromptFields("input"),
    )
    with pytest.raises(DataError, match="--rollout-max-prompt-len"):
        PromptCursor(prompts).take(1)
    with pytest.raises(DataError, match="all 3 rows"):
        prompts.all()
