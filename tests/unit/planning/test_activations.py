"""The planner's sums of activations against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

from rlpost.config.plan.shape import Layout
from rlpost.extensions.planning.activations import (
    Pass,
    logits_bytes,
    stage_activations,
    transient_bytes,
)
from rlpost.extensions.planning.rank_memory import frozen_note
from tests.unit.planning.test_plan import DENSE, config


def test_logits_are_kept_with_their_gradient_and_chunks_in_float32():
    shape = replace(DENSE, vocab=30)
    assert (
        logits_bytes(shape, Layout(2, tensor=2), Pass(tokens=10), 4)
        == 2 * 10 * 15 * 2 + 5 * 4 * 15 * 4
    )


def test_a_chunk_of_all_rows_has_no_next_one():
    shape = replace(DENSE, vocab=30)
    one = logits_bytes(shape, Layout(2, tensor=2), Pass(tokens=4), 4)
    assert one == 2 * 4 * 15 * 2 + 4 * 4 * 15 * 4


def test_a_recomputed_layer_and_logits_are_not_there_at_the_same_time():
    shape = replace(DENSE, vocab=4000)
    one = Pass(tokens=10, recompute="full", method="uniform")
    found = stage_activations(shape, Layout(), one, 0, chunk_tokens=4)
    assert found.logits > found.layer
    assert found.peak == found.kept + found.logits
    narrow = stage_activations(replace(shape, vocab=4), Layout(), one, 0, chunk_tokens=4)
    assert narrow.peak == narrow.kept + narrow.layer == found.kept + found.layer


def test_each_chunk_of_an_interleaved_stage_keeps_what_it_sends():
    """Two stages, two chunks each: (2 (1 - s) + 2 + 1) / 2 micro-batches under way."""
    one, boundary = Pass(tokens=10, recompute="full", method="uniform"), 10 * 8 * 2
    layout = Layout(2, pipeline=2, chunk=1)
    first, last = (
        stage_activations(DENSE, layout, one, stage, chunk_tokens=4).kept for stage in (0, 1)
    )
    received, gradients, final_norm = 2, 2, 1
    assert first == (2.5 * (received + 2) + gradients) * boundary
    assert last == (1.5 * (received + 1) + gradients + final_norm) * boundary


def test_rows_for_experts_are_four_times_in_memory_if_several_ranks_have_several():
    """In order of experts, received, returned by experts, and back in order."""
    shape = replace(DENSE, sparse=(True,) * 4, num_experts=8, expert_ffn=4, topk=4)
    one, spread = Pass(tokens=10), Layout(4, expert=4, expert_tensor=1)
    rows = 10 * 4 * 8 * 2
    assert transient_bytes(shape, spread, one, is_sparse=True) == 4 * rows
    assert transient_bytes(shape, Layout(8, expert=8), one, is_sparse=True) == 3 * rows
    assert transient_bytes(shape, Layout(), one, is_sparse=True) == 3 * rows
    assert transient_bytes(shape, spread, one, is_sparse=False) == 10 * 2 * (2 * 16 + 2 * 8)


def test_weights_frozen_by_name_are_told_and_counted_as_trained():
    assert frozen_note(config()) is None
    frozen = config(optimizer={"freeze_params_name_list": ["embedding"]})
    note = frozen_note(frozen)
    assert note is not None
    assert note.startswith("--freeze-params-name-list: all weights are counted as trained")
