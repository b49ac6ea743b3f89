"""Rows and features of images: positions as in transformers, spans, the bound of kept features."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlpost.config.plan.vision import vision_shape
from rlpost.errors import DataError
from rlpost.models.families import FAMILIES
from rlpost.models.rope import AxisSections
from rlpost.trainer.packing import RowLayout, held_tokens, pack
from rlpost.trainer.rotary import angles_of_rows
from rlpost.trainer.shared_rows import RowParams, row_params
from rlpost.trainer.vision.images import Images
from rlpost.trainer.vision.rows import token_positions
from rlpost.trainer.vision.tower import Tower
from rlpost.trainer.vision.trained import MERGERS
from rlpost.types import ImageSpan, TrainSample

MERGE = 2


def sample(length: int, *images: ImageSpan, prompt: int | None = None) -> TrainSample:
    prompt = length - 2 if prompt is None else prompt
    return TrainSample(
        token_ids=[7] * length,
        prompt_length=prompt,
        loss_mask=[1] * (length - prompt),
        rollout_logprobs=[0.0] * (length - prompt),
        advantage=1.0,
        images=images,
    )


def span(start: int, rows: int, columns: int, *, digest: str = "a") -> ImageSpan:
    """An image of ``rows`` x ``columns`` tokens."""
    return ImageSpan(digest, start, rows * columns, (1, MERGE * rows, MERGE * columns))


def random_sample(source: random.Random) -> TrainSample:
    images, at = [], 0
    for _ in range(source.randint(0, 4)):
        at += source.randint(1, 6)  # transformers separates images by the tokens between them
        rows, columns = source.randint(1, 5), source.randint(1, 5)
        images.append(span(at, rows, columns, digest=f"{rows} x {columns}"))
        at = images[-1].end
    return sample(at + source.randint(3, 9), *images)


@pytest.mark.parametrize(
    "name", ["qwen3_vl.Qwen3VL", "qwen2_5_vl.Qwen2_5_VL", "glm4v.Glm4v", "glm4v_moe.Glm4vMoe"]
)
def test_positions_are_those_of_transformers(name):
    package, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    theirs_model = getattr(module, f"{kind}Model")
    sizes = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=sizes))
    model.get_vision_position_ids = theirs_model.get_vision_position_ids.__get__(model)
    source = random.Random(4)
    for _ in range(40):
        one = random_sample(source)
        kinds = torch.zeros(1, len(one.token_ids), dtype=torch.int64)
        for image in one.images:
            kinds[0, image.start : image.end] = 1
        grids = torch.tensor([image.grid for image in one.images]) if one.images else None
        theirs, _ = theirs_model.get_rope_index(
            model, torch.tensor([list(one.token_ids)]), kinds, grids
        )
        assert torch.equal(token_positions(one), theirs[:, 0])


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([span(6, 2, 3)], "an image at tokens 6 to 12 of a sample of 10 tokens"),
        ([span(1, 2, 2), span(4, 1, 1)], "an image at tokens 4 to 5 .* after one that ends at 5"),
        ([ImageSpan("a", 1, 5, (1, 4, 4))], "1 x 4 x 4 patches has 5 tokens"),
        ([ImageSpan("a", 1, 0, (1, 4, 4))], "1 x 4 x 4 patches has 0 tokens"),
        ([ImageSpan("a", 1, 4, (0, 0, 0))], "0 x 0 x 0 patches has 4 tokens"),
    ],
)
def test_a_wrong_span_is_refused(images, reason):
    with pytest.raises(DataError, match=reason):
        token_positions(sample(10, *images))


def test_a_model_without_an_encoder_refuses_images():
    with pytest.raises(DataError, match="built without its encoder of images"):
        pack((sample(10, span(1, 2, 2)),))


def features_by_token(
    micro_batch: Sequence[TrainSample], images: Sequence[ImageSpan]
) -> dict[int, int]:
    """Return the feature of each token that stands for an image, among those of ``images``."""
    first = [0, *itertools.accumulate(image.num_tokens for image in images)]
    begin_of = {image.hash: begin for image, begin in zip(images, first, strict=False)}
    found, begin = {}, 0
    for one in micro_batch:
        for image in one.images:
            tokens = range(begin + image.start, begin + image.end)
            features = range(begin_of[image.hash], begin_of[image.hash] + image.num_tokens)
            found |= dict(zip(tokens, features, strict=True))
        begin += len(one.token_ids)
    return found


@pytest.mark.parametrize("context", [1, 2, 4])
def test_the_rows_of_all_ranks_hold_each_token_of_an_image_once(context):
    """Whatever the layout, a row has the feature of the token that it holds."""
    source = random.Random(context)
    for _ in range(20):
        micro_batch = (random_sample(source), random_sample(source), sample(20, span(3, 2, 2)))
        tokens: list[int] = []
        for rank in range(context):
            layout = RowLayout(
                sequence_multiple=2 * context if context > 1 else 1,
                row_multiple=4 * context,
                context_rank=rank,
                context_size=context,
                takes_images=True,
            )
            rows = pack(micro_batch, layout).images
            assert rows is not None
            assert len({image.hash for image in rows.images}) == len(rows.images)
            expected = features_by_token(micro_batch, rows.images)
            held = held_tokens(micro_batch, layout)[rows.rows].tolist()
            assert [expected[token] for token in held] == rows.features.tolist()
            tokens += held
        assert sorted(tokens) == sorted(expected)


def test_a_micro_batch_without_images_has_megatrons_own_parameters():
    """Megatron then does what it does for a model without an encoder, bit for bit."""
    packed = pack((sample(12), sample(9)), RowLayout(takes_images=True))
    assert packed.images is None
    assert type(row_params(packed)).__module__ == "megatron.core.packed_seq_params"


@pytest.mark.parametrize(
    ("interleaved", "neighbours"), [(True, False), (False, False), (False, True)]
)
def test_a_text_has_the_same_angles_beside_images(interleaved, neighbours):
    """Its three positions are one number, so each turn of the frequencies has the same angle."""
    angles = torch.outer(torch.arange(20.0), torch.rand(8))
    twice = angles.repeat_interleave(2, dim=1) if neighbours else angles.repeat(1, 2)
    table = twice[:, None, None]
    packed = pack((sample(12), sample(20, span(3, 2, 3))), RowLayout(takes_images=True))
    params = row_params(packed)
    assert isinstance(params, RowParams) and params.positions is not None
    sections = AxisSections((3, 3, 2), interleaved)
    angles = angles_of_rows(table, params.positions, sections, rotates_neighbours=neighbours)
    assert torch.equal(angles[:12], table[:12])
    assert not torch.equal(angles[12:], table)


class CountingTower:
    """An encoder whose features are the number of its call."""

    num_deep_layers = 0
    trained = None

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, values: np.ndarray, grid: tuple[int, int, int]) -> torch.Tensor:
        self.calls += 1
        return torch.full((math.prod(grid) // MERGE**2, 1, 8), float(self.calls))


def features_of(
    grids: dict[str, tuple[int, int, int]], *, cache_bytes: int
) -> tuple[Images, CountingTower]:
    tower = CountingTower()
    pixels_of = lambda digest: (np.zeros((1, 1), dtype=np.float32), grids[digest])  # noqa: E731
    return Images(tower, pixels_of, cache_bytes=cache_bytes), tower  # type: ignore[arg-type]


def test_an_image_is_encoded_once_while_its_features_fit():
    grids = {name: (1, 4, 4) for name in "abc"}
    one, tower = features_of(grids, cache_bytes=2 * 4 * 8 * 4)  # of two images
    a, b, c = (span(1, 2, 2, digest=name) for name in "abc")
    assert one.features([a, b, a]).size(0) == 12
    assert tower.calls == 2
    one.features([c])  # b was used before a, and leaves
    one.features([a])
    assert tower.calls == 3
    one.features([b])
    assert tower.calls == 4


def test_an_image_larger_than_the_bound_is_used_and_not_kept():
    one, tower = features_of({"a": (1, 8, 8)}, cache_bytes=1)
    image = span(1, 4, 4)
    for number in (1, 2):
        assert one.features([image]).unique().tolist() == [number]
    assert tower.calls == 2


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ((1, 8, 2), r"\(1, 8, 2\) patches now and had \(1, 4, 4\)"),
        ((1, 4, 4), "4 features for 5 tokens"),
    ],
)
def test_an_image_that_is_not_as_its_span_says_is_refused(grid, reason):
    one, _ = features_of({"a": grid}, cache_bytes=100)
    image = ImageSpan("a", 1, 4 if grid != (1, 4, 4) else 5, (1, 4, 4))
    with pytest.raises(DataError, match=reason):
        one.features([image])


WITH_VISION = [name for name, one in FAMILIES.items() if one.vision is not None]


@pytest.mark.parametrize("name", WITH_VISION)
def test_parameters_are_bf16_and_buffers_those_of_from_pretrained(name, tmp_path):
    """The angles of a large image need frequencies in float32."""
    vision = FAMILIES[name].vision
    module, _, kind = vision.tower.rpartition(".")
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    sizes = dict(depth=2, hidden_size=96, intermediate_size=64, num_heads=2, out_hidden_size=64)
    positions = {"num_position_embeddings": 64} if vision.layers == "plain" else {}
    config = theirs.config_class(**sizes, **positions)
    theirs(config).save_pretrained(tmp_path)
    reference = theirs.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tower = Tower(vision, {"vision_config": config.to_dict()}, torch.bfloat16).module
    buffers, expected = dict(tower.named_buffers()), dict(reference.named_buffers())
    assert buffers.keys() == expected.keys() and any("inv_freq" in one for one in buffers)
    for key, value in expected.items():
        assert buffers[key].dtype == value.dtype and torch.equal(buffers[key], value)
    dtypes = {key: one.dtype for key, one in tower.named_parameters()}
    assert dtypes == {key: one.dtype for key, one in reference.named_parameters()}


@pytest.mark.parametrize("name", WITH_VISION)
def test_the_plan_counts_the_parameters_of_transformers(name):
    vision = FAMILIES[name].vision
    module, _, kind = vision.tower.rpartition(".")
    tower = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    config = tower.config_class()  # the sizes of a published model
    with torch.device("meta"):
        made = tower(config)
    total = sum(weight.numel() for weight in made.parameters())
    mergers = [one for name, one in made.named_parameters() if name.startswith(MERGERS)]
    hf = {"vision_config": config.to_dict()}
    if vision.layers == "glm":  # the trainer runs encoders whose config.json lacks these
        del hf["vision_config"]["image_size"], hf["vision_config"]["intermediate_size"]
    shape = vision_shape(
        hf["vision_config"],
        layers=vision.layers,
        num_deep_layers=vision.num_deep_layers(hf),
    )
    assert shape.parameters == total
    assert shape.of_mergers == sum(weight.numel() for weight in mergers)
