"""The time of a step by arithmetic: sums, monotony, published runs, and the layouts it prefers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlpost.cli.planned_gpus import NAMED_CARDS
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.layout import layout_problems
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.cards import CARDS, card_of
from rlpost.config.plan.shape import Layout, Shape, layers_of, rank_parameters
from rlpost.config.plan.vision import image_tokens
from rlpost.config.wording import with_values
from rlpost.extensions.planning import plan_verb as plan
from rlpost.extensions.planning import step_time as step_time_module
from rlpost.extensions.planning import train_time
from rlpost.extensions.planning.estimate import Estimate, Sizes, estimate
from rlpost.extensions.planning.layout_search import FittingLayout, end_stages, suggest
from rlpost.extensions.planning.planned_slices import slice_figures, slice_plan
from rlpost.extensions.planning.rates import nearest_card
from rlpost.extensions.planning.step_time import faster_settings, step_time
from rlpost.extensions.planning.train_time import Training, mfu, train_step
from rlpost.extensions.planning.vision_memory import NO_VISION
from tools.pages.published_runs import DOCS, NEAR, NOT_NEAR, speed_page, training_runs

H100, GPU_BYTES = CARDS["H100"], plan.parse_size("H100")
DENSE = Shape(4096, 14336, 32, 8, 128, 128256, (False,) * 32)
SPARSE = replace(DENSE, sparse=(True,) * 32, num_experts=64, expert_ffn=2048, topk=8, vocab=32000)


def job(shape: Shape = DENSE, layout: Layout | None = None, **more: object) -> Training:
    layout = layout or Layout(8, 2, expert_tensor=1, sequence_parallel=True)
    given: dict[str, object] = {"tokens": 8192, "batches": 8, "attended": 4096} | more
    return Training(shape, layout, H100, 8, **given)  # type: ignore[arg-type]


def seconds(made: Training) -> float:
    return sum(train_step(made).values())


def recipe(name: str, **groups: dict[str, object]) -> Estimate:
    config = load(files_of(JOBS / f"recipes/{name}.toml"), groups).config
    shape, width = plan.model_of(config)
    return estimate(config, shape, gpu_bytes=GPU_BYTES, engine_width=width)


@pytest.fixture(scope="module")
def layouts_of_glm() -> list[FittingLayout]:
    made = recipe("glm45_355b")
    return suggest(made.config, made.shape, gpu_bytes=GPU_BYTES)


def test_recomputation_costs_the_forward_pass_of_the_layers():
    plain, again = train_step(job()), train_step(job(recompute=True))
    assert again.pop(train_time.AGAIN) > 0
    assert again == {name: part for name, part in plain.items() if name != train_time.AGAIN}


def test_stages_wait_for_the_first_and_the_last_micro_batch():
    """Equal stages without logits: (p - 1) / m of the time that a stage computes."""
    shape = replace(DENSE, vocab=0, tied=True)
    layout = Layout(8, 1, 4, expert_tensor=1)
    parts = train_step(job(shape, layout))
    held = rank_parameters(shape, layout, 1)
    after = parts[train_time.OPTIMIZER] + train_time._reduction(job(shape, layout), held)
    busy = sum(parts.values()) - parts[train_time.IDLE] - after
    assert parts[train_time.IDLE] == pytest.approx(busy * 3 / 8)
    chunked = train_step(job(shape, replace(layout, chunk=2)))
    assert chunked[train_time.IDLE] == pytest.approx(parts[train_time.IDLE] / 4)


def test_experts_inside_a_node_are_faster_and_deduplication_helps_between_nodes():
    sizes = {"expert_tensor": 1, "sequence_parallel": True}
    inside = job(SPARSE, Layout(32, 2, expert=8, **sizes))
    across = job(SPARSE, Layout(32, 2, expert=32, **sizes))
    once = replace(across, deduplicates=True)
    times = [train_step(one)[train_time.EXPERTS] for one in (inside, once, across)]
    assert times == sorted(times) and times[0] < times[2] / 3
    rack = replace(across, card=CARDS["GB200"])
    assert train_step(rack)[train_time.EXPERTS] < times[0]


@pytest.mark.parametrize("shape", [DENSE, SPARSE])
def test_a_faster_card_and_more_gpus_never_take_longer(shape):
    one = job(shape)
    for field in ("tflops", "memory_gbps", "nvlink_gbps", "network_gbps"):
        card = replace(H100, **{field: 2 * getattr(H100, field)})
        assert seconds(replace(one, card=card)) <= seconds(one)
    assert 0 < mfu(one, seconds(one)) < one.rates.products
    assert seconds(replace(one, batches=16)) > seconds(one)
    assert train_step(replace(one, on_host=1.0))["optimizer"] > train_step(one)["optimizer"]


def test_the_operations_of_a_model_do_not_depend_on_its_layout():
    whole = train_time.model_flops(job())
    layers = 32 * (2 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336) * 8192)
    attention = 32 * 2 * 2048 * 2 * 128 * 32 * 8192
    assert whole == pytest.approx(layers + attention + 2 * 8192 * 128256 * 4096)
    assert train_time.model_flops(job(layout=Layout(8, 4, 2))) == whole


@pytest.mark.parametrize("name", ["qwen3_4b", "glm_z1_9b", "qwen3_30b_a3b", "glm45_355b"])
def test_a_recipe_s_parts_add_up_and_the_settings_named_save_what_they_say(name):
    made = recipe(name)
    time = step_time(made, H100)
    assert time.generation > 0 and time.update > 0 and 0.05 < time.mfu < 0.6
    both = max if time.is_parallel else lambda *parts: sum(parts)
    assert time.total == pytest.approx(both(time.generation, time.training) + time.update)
    sizes = Sizes(gpu_bytes=GPU_BYTES, engine_width=2)
    saved = [option.saved for option in faster_settings(made, H100, sizes)]
    assert saved == sorted(saved, reverse=True) and all(0 < share < 1 for share in saved)


@pytest.mark.parametrize("part", ["frozen", "merger", "all"])
def test_the_encoder_counts_in_the_operations_of_training_and_in_its_seconds(part):
    made = recipe("qwen3_vl_4b_geo3k", optimizer={"vision_tower": part})
    text = replace(made, ranks=tuple(replace(rank, vision=NO_VISION) for rank in made.ranks))
    no_images = with_values(text.config, multimodal_keys={}, vision_tower="frozen")
    text = replace(text, config=no_images)

    def of_peak(planned: Estimate) -> float:
        """Operations of a step on each GPU, as seconds at its peak."""
        time = step_time(planned, H100)
        outside = (step_time_module.OFFLOAD, step_time_module.UPDATE, step_time_module.GENERATION)
        return time.mfu * sum(value for name, value in time.parts.items() if name not in outside)

    config, shape = made.config, made.shape.vision
    assert shape is not None
    patches = image_tokens(config, shape) * shape.merge**2
    images = config.rollout.rollout_batch_size
    images *= 1 if part == "frozen" else config.rollout.n_samples_per_prompt
    one = shape.needed_operations(patches, part, config.num_logprob_passes)
    expected = images * one / made.layout.world / (H100.tflops * 1e12)
    assert of_peak(made) - of_peak(text) == pytest.approx(expected)


@pytest.mark.parametrize(("num_nodes", "crosses"), [(1, False), (2, True)])
def test_slices_use_the_network_card_only_between_nodes(num_nodes, crosses):
    """Each node is divided into 4 GPUs for the trainer and 4 for an engine."""
    cluster = {
        "colocate": False,
        "nodes": num_nodes,
        "actor_num_nodes": num_nodes,
        "actor_num_gpus_per_node": 4,
        "rollout_num_gpus": 4 * num_nodes,
        "rollout_num_gpus_per_engine": 4,
    }
    update = recipe("qwen3_4b", sync={"update_weight_transport": "slices"}, cluster=cluster).update
    assert update is not None and update.slices is not None
    figures = slice_figures(update.slices)
    assert (figures.between_nodes > 0, figures.once_a_node > 0) == (crosses, crosses)
    assert figures.between_nodes < figures.received, "less what comes from the own node"


TENSOR_PARALLEL_EXPERTS = {"sglang_ep_size": 1}


@pytest.mark.parametrize("sglang", [{}, TENSOR_PARALLEL_EXPERTS])
def test_an_update_in_slices_gives_engine_ranks_the_weights_that_they_hold(sglang):
    """The plan of the update agrees with the memory of an engine, which is counted apart from it."""
    way = {"update_weight_transport": "slices"}
    gathered, sliced = recipe("glm45_355b"), recipe("glm45_355b", sync=way, sglang=sglang)
    assert gathered.update is not None and sliced.update is not None and sliced.engine is not None
    assert gathered.update.slices is None and sliced.update.slices is not None
    figures, config = slice_figures(sliced.update.slices), sliced.config
    assert figures.received == pytest.approx(sliced.engine.weights, rel=0.02), "less its own"
    num_engine_ranks = config.num_engines * config.cluster.rollout_num_gpus_per_engine
    received = sliced.engine.weights * num_engine_ranks
    assert figures.sent * sliced.layout.world < 1.1 * received, "stages are of nearly equal size"
    assert figures.once_a_node <= figures.between_nodes <= max(figures.sent, figures.received)
    times = [step_time(one, H100).update for one in (sliced, gathered)]
    assert times[0] < times[1] / 10
    moved = recipe("glm45_355b", sync=way, sglang=sglang | {"sglang_enable_eplb": True}).update
    assert moved is not None and moved.slices is None, "the run broadcasts"
    few = recipe("glm45_355b", sync={"update_weight_transport": "disk"}).update
    assert few is not None and few.slices is None


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "qwen3_4b_fp8", "glm45_355b_fp8"])
def test_the_plan_of_slices_brings_an_engine_on_other_gpus_all_its_weights(name):
    """Planning fails for an element that no trainer rank holds."""
    made = recipe(name, sync={"update_weight_transport": "slices"})
    assert made.update is not None and made.update.slices is not None and made.engine is not None
    slices = made.update.slices
    alone = replace(slices, receivers=replace(slices.receivers, on_trainer=False))
    plan = slice_plan(alone)
    assert max(plan.received.values()) == pytest.approx(made.engine.weights, rel=0.001)
    assert len(plan.received) == made.config.num_engines * slices.receivers.shares.gpus


def test_what_shortens_a_step_of_qwen3_4b_is_named():
    sizes = Sizes(gpu_bytes=GPU_BYTES, engine_width=2)
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    slow = recipe("qwen3_4b", perf=full, grpo={"use_kl_loss": True})
    words = [option.words for option in faster_settings(slow, H100, sizes)]
    assert "--use-kl-loss no" in words
    assert any(word.startswith("--recompute-granularity none") for word in words)
    long = recipe("qwen3_4b", perf=full | {"max_tokens_per_gpu": 40_000})
    words = [option.words for option in faster_settings(long, H100, sizes)]
    assert not any("recompute" in word for word in words)  # does not fit


@pytest.mark.parametrize("pipeline", [1, 2, 4, 8, 16])
def test_stages_hold_every_layer_once(pipeline):
    for num_layers in range(pipeline, 130):
        ends = end_stages(num_layers, pipeline)
        if ends is None:
            assert num_layers % pipeline
            continue
        layout = Layout(pipeline, 1, pipeline, first=ends[0], last=ends[1])
        stages = [layers_of(layout, num_layers, stage) for stage in range(pipeline)]
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert all(stages)


def test_the_search_keeps_the_experts_of_a_large_model_inside_a_node(layouts_of_glm):
    assert all(choice.estimate.layout.expert <= 8 for choice in layouts_of_glm[:5])
    assert any(choice.estimate.layout.context > 1 for choice in layouts_of_glm[:5])
    sizes = [
        (one.tensor, one.pipeline, one.context, one.expert, one.first, one.last)
        for one in (choice.estimate.layout for choice in layouts_of_glm)
    ]
    assert sizes.index((8, 8, 1, 8, 10, 10)) < sizes.index((8, 4, 2, 16, None, None))


@pytest.mark.parametrize("name", ["glm45_355b", "qwen3_235b_a22b", "qwen3_30b_a3b"])
def test_a_recipe_with_experts_trains_as_fast_as_the_best_layout_of_the_search(name):
    """Within 3 % of its training, and its experts share an NVLink domain."""
    made = recipe(name)
    best = min(
        choice.time.training for choice in suggest(made.config, made.shape, gpu_bytes=GPU_BYTES)
    )
    assert step_time(made, H100).training < 1.03 * best
    assert made.layout.expert <= 8 and not made.problems


def test_shared_experts_hide_at_most_the_all_to_all():
    shape = replace(SPARSE, shared_ffn=2048)
    for layout in (Layout(8, 2, expert=8, expert_tensor=1), Layout(8, 2, expert_tensor=1)):
        plain, hidden = job(shape, layout), job(shape, layout, overlaps_shared=True)
        saved = seconds(plain) - seconds(hidden)
        assert 0 <= saved <= train_step(plain)[train_time.EXPERTS] + 1e-9
        assert (saved > 0) == (layout.expert > 1)


def test_no_layout_is_proposed_that_check_refuses(layouts_of_glm):
    for choice in layouts_of_glm:
        config = choice.config
        assert layout_problems(config) == batch_problems(config) == []
        assert plan.size_problems(config) == []


def test_published_runs_stand_in_the_page_with_their_deviations():
    assert (DOCS / "speed.md").read_text() == speed_page()
    near = [abs(run.deviation) <= NEAR for run in training_runs()]
    reasons = [any(name in run.name + run.source for name in NOT_NEAR) for run in training_runs()]
    assert sum(near) >= 12
    unexplained = zip(training_runs(), near, reasons, strict=True)
    assert [r.name for r, is_near, said in unexplained if not is_near and not said] == []


def test_one_table_has_the_cards_of_the_planner_and_of_mfu():
    names = {
        "NVIDIA GB200": 2500, "NVIDIA B200": 2250, "NVIDIA B300 SXM6 AC": 2250, "NVIDIA GB300": 2500,
        "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989.4,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": 503.8, "NVIDIA A100-SXM4-80GB": 312,
    }  # fmt: skip
    for name, peak in names.items():
        card = card_of(name)
        assert card is not None and card.tflops == peak
    assert card_of("NVIDIA T4") is None
    for name in NAMED_CARDS:
        assert nearest_card(plan.parse_size(name)) == name
    assert nearest_card(80 * 10**9) == "H100"
