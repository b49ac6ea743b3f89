"""Sizes, token counts and pixels are those of transformers' processor, as the folder configures it."""

import io
import json
import random

import numpy as np
import pytest
from PIL import Image
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from rlpost.errors import ConfigError, ImageError
from rlpost.images.processor import ImageProcessor, write_bound
from rlpost.images.tokens import check_encoder

QWEN3_VL = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
"""preprocessor_config.json of Qwen3-VL and Qwen3.5 as published."""
QWEN2_5_VL = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056,
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
GLM_4_6V = {
    "image_processor_type": "Glm46VImageProcessor", "processor_class": "Glm46VProcessor",
    "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": QWEN2_5_VL["image_mean"], "image_std": QWEN2_5_VL["image_std"],
}  # fmt: skip
"""The sizes count both frames of a patch."""
OF_TRANSFORMERS = {
    "qwen3-vl": (QWEN3_VL, Qwen2VLImageProcessorPil),
    "qwen2.5-vl": (QWEN2_5_VL, Qwen2VLImageProcessorPil),
    "glm-4.6v": (GLM_4_6V, Glm46VImageProcessorPil),
    "both keys": (
        QWEN2_5_VL | {"size": {"shortest_edge": 12544, "longest_edge": 2508800}, "max_pixels": 200704,
                      "image_mean": 0.5, "image_std": 0.25},
        Qwen2VLImageProcessorPil,
    ),
}  # fmt: skip
SIZES = [(1, 1), (640, 480), (90, 130), (5, 1000), (8000, 100), (1024, 1024), (333, 77), (31, 31)]


def folder(path, settings, name="preprocessor_config.json"):
    (path / name).write_text(json.dumps(settings))
    return path


def noise(width, height):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("key", [None, "image_processor"])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_an_export_scales_images_as_in_training(tmp_path, name, key):
    """OpenWebRL/OpenWebRL#3: trained with 252 tokens of a screenshot, and served with 1240."""
    settings, kind = OF_TRANSFORMERS[name]
    file = "preprocessor_config.json" if key is None else "processor_config.json"
    folder(tmp_path, settings if key is None else {key: settings, "a": 1}, file)
    trained = ImageProcessor.of(tmp_path, max_pixels=150_000)
    write_bound(tmp_path, 150_000)
    exported = ImageProcessor.of(tmp_path)
    written = json.loads((tmp_path / file).read_text())
    (tmp_path / "plain").mkdir()
    plain = folder(tmp_path / "plain", written if key is None else written[key])
    reference = kind.from_pretrained(plain)
    for size in [(640, 480), (90, 130), (1024, 1024), (333, 77), (1280, 1000)]:
        expected = trained.grid(*size)
        image = reference(images=[Image.open(io.BytesIO(noise(*size)))], return_tensors="np")
        assert exported.grid(*size) == expected == tuple(image["image_grid_thw"][0])


def test_files_of_no_processor_of_images_are_left_alone(tmp_path):
    texts = {"processor_config.json": "{}", "preprocessor_config.json": '{"a": [1]}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    write_bound(tmp_path, 150_000)
    assert {name: (tmp_path / name).read_text() for name in texts} == texts


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_counts_are_those_of_transformers(tmp_path, name, size):
    settings, kind = OF_TRANSFORMERS[name]
    reference = kind.from_pretrained(folder(tmp_path, settings))
    processor, data = ImageProcessor.of(tmp_path), noise(*size)
    expected = reference(images=[Image.open(io.BytesIO(data))], return_tensors="np")
    values, grid = processor.pixel_values(data)
    assert [list(grid)] == expected["image_grid_thw"].tolist() == [list(processor.grid(*size))]
    assert values.dtype == np.float32 and np.array_equal(values, expected["pixel_values"])
    assert processor.num_tokens(*size) == values.shape[0] // 4
    # what an engine reads: its own processor neither scales nor changes it
    served = processor.png(data)
    assert Image.open(io.BytesIO(served)).size == processor.size_of(grid)
    again = reference(images=[Image.open(io.BytesIO(served))], return_tensors="np")
    assert np.array_equal(again["pixel_values"], values)
    width, height = processor.size_of(grid)
    assert reference.get_number_of_image_patches(height, width, {}) == len(values)


def test_a_folder_of_glm_with_a_larger_maximum_needs_fewer_pixels(tmp_path):
    """Within the bounds that an engine counts with, it keeps the size, whatever the folder's maximum."""
    size = {"shortest_edge": 12544, "longest_edge": 47040000}
    reference = Glm46VImageProcessorPil.from_pretrained(folder(tmp_path, GLM_4_6V | {"size": size}))
    with pytest.raises(ConfigError, match="--image-max-pixels of at most 5880000"):
        ImageProcessor.of(tmp_path, max_pixels=5880001)
    assert ImageProcessor.of(tmp_path, max_pixels=5880000).max_pixels == 5880000
    processor = ImageProcessor.of(tmp_path, max_pixels=1_000_000)
    grid = processor.grid(4000, 3000)
    width, height = processor.size_of(grid)
    scaled = reference(images=[Image.new("RGB", (width, height))], return_tensors="np")
    assert scaled["image_grid_thw"].tolist() == [list(grid)]
    assert reference.get_number_of_image_patches(height, width, {}) == np.prod(grid)


@pytest.mark.parametrize("most", [None, 131_072, 150_000, 200_000, 1_000_000])
def test_a_scaled_image_keeps_its_size_under_the_folders_own_bounds(tmp_path, most):
    processor = ImageProcessor.of(folder(tmp_path, QWEN3_VL), max_pixels=most)
    draw, refused = random.Random(7), 0
    for _ in range(2000):
        width, height = (int(10 ** draw.uniform(0.5, 3.9)) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            continue
        try:
            size = processor.scaled_size(width, height)
        except ImageError:
            refused += 1
            continue
        assert smart_resize(size[1], size[0], 32, 65536, 16777216) == size[::-1], (width, height)
    assert refused < 60  # thin ones, which transformers refuses itself at the second pass


def test_fewer_pixels_give_fewer_tokens_and_impossible_ones_are_refused(tmp_path):
    folder(tmp_path, QWEN3_VL)
    whole, small = ImageProcessor.of(tmp_path), ImageProcessor.of(tmp_path, max_pixels=256 * 1024)
    assert whole.num_tokens(1024, 1024) == 1024 and small.num_tokens(1024, 1024) == 256
    for most in (131071, 16777217):
        with pytest.raises(
            ConfigError, match=f"--image-max-pixels {most}: .*use 131072 to 16777216"
        ):
            ImageProcessor.of(tmp_path, max_pixels=most)
    with pytest.raises(ImageError, match="at most 200 times the other"):
        whole.num_tokens(2001, 10)


def test_settings_are_read_in_the_order_of_transformers(tmp_path):
    folder(tmp_path, QWEN2_5_VL)
    folder(tmp_path, {"image_processor": QWEN3_VL}, "processor_config.json")
    assert ImageProcessor.of(tmp_path).patch_size == 16
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).patch_size == 16
    folder(tmp_path, {"processor_class": "Qwen3VLProcessor"}, "processor_config.json")
    assert ImageProcessor.of(tmp_path).patch_size == 14
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).patch_size == 14


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (QWEN3_VL | {"image_processor_type": "Gemma3ImageProcessor"}, "'Gemma3ImageProcessor' is not known"),
        (QWEN3_VL | {"do_resize": False}, "do_resize = False; images need True"),
        (QWEN3_VL | {"resample": 2}, "resample = 2; images need 3"),
        (QWEN3_VL | {"image_mean": None}, "image_mean = None; images need 3 numbers"),
        (QWEN3_VL | {"image_std": [0.5]}, r"image_std = \[0.5\]; images need 3 numbers"),
        (QWEN3_VL | {"size": {"height": 448, "width": 448}}, "size = .*; give shortest_edge and longest_edge"),
        (QWEN3_VL | {"size": {"min_pixels": 3136, "max_pixels": 6272}}, "give shortest_edge and longest_edge"),
        (GLM_4_6V | {"size": {"shortest_edge": 12544, "longest_edge": 47040000}}, "12544 to 47040000 pixels, and"),
        (GLM_4_6V | {"size": {"shortest_edge": 3136, "longest_edge": 9633792}}, "engines .* from 12544 to 11760000"),
    ],
)  # fmt: skip
def test_another_processor_is_refused(tmp_path, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        ImageProcessor.of(folder(tmp_path, settings))


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        (
            {"patch_size": 14},
            "patch_size of vision_config is 14, and patch_size of the processor is 16",
        ),
        ({"spatial_merge_size": 4}, "spatial_merge_size of vision_config is 4, and merge_size"),
        ({}, "its vision_config has no deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [16, 8]}, r"is \[16, 8\], .*; engines give its mergers"),
        (
            {"deepstack_visual_indexes": [8, 27], "depth": 27},
            r"is \[8, 27\], with depth = 27; engines give",
        ),
    ],
)
def test_an_encoder_of_other_patches_is_refused(tmp_path, vision, reason):
    processor = ImageProcessor.of(folder(tmp_path, QWEN3_VL))
    sizes = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": "qwen3_5", "image_token_id": 5, "vision_config": sizes | vision}
    folder(tmp_path, config, "config.json")
    with pytest.raises(ConfigError, match=reason):
        check_encoder(tmp_path, processor)
    config["vision_config"] = sizes | {"deepstack_visual_indexes": []}
    check_encoder(folder(tmp_path, config, "config.json"), processor)
    experts = config | {"model_type": "qwen3_vl_moe"}
    with pytest.raises(ConfigError, match="has 0 layers, and the first image would end an engine"):
        check_encoder(folder(tmp_path, experts, "config.json"), processor)
    glm = config | {"model_type": "glm4v_moe"}
    with pytest.raises(ConfigError, match="no video_start_token_id, which engines"):
        check_encoder(folder(tmp_path, glm, "config.json"), processor)
    check_encoder(folder(tmp_path, glm | {"video_start_token_id": 6}, "config.json"), processor)
    folder(tmp_path, config | {"image_token_id": None}, "config.json")
    with pytest.raises(ConfigError, match="no image_token_id; images need a model"):
        check_encoder(tmp_path, processor)


def test_a_folder_without_a_processor_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no processor_config.json or preproc"):
        ImageProcessor.of(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"patch_size": 0}, "patch_size = 0; images need an integer of at least 1"),
        ({"patch_size": 16.0}, "patch_size = 16.0; images need an integer"),
        ({"merge_size": True}, "merge_size = True; images need an integer"),
        ({"max_pixels": "9999"}, "max_pixels = '9999'; images need an integer"),
        ({"size": {"shortest_edge": -1, "longest_edge": 9}}, "shortest_edge = -1; images need"),
        ({"size": {"shortest_edge": 99, "longest_edge": 9}}, "at least 99 and at most 9 pixels"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std = .* images need numbers above 0"),
        ({"image_mean": float("nan")}, "image_mean = nan; images need 3 numbers"),
        ({"image_mean": True}, "image_mean = True; images need 3 numbers"),
        ({"merge_size": 4}, "merge_size = 4, and spatial_merge_size = 2 of the encoder"),
        ({"patch_size": 14}, "patch_size = 14, and patch_size = 16 of the encoder"),
    ],
)
def test_settings_that_no_processor_can_have_are_refused(tmp_path, change, reason):
    """A division by 0, pixels that are not finite, or tokens without a feature for each."""
    name = "Qwen2VLImageProcessor"
    fitting = {"image_processor_type": name, "patch_size": 16, "merge_size": 2}
    encoder = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(encoder))
    assert ImageProcessor.of(folder(tmp_path, fitting)).patch_size == 16
    with pytest.raises(ConfigError, match=reason):
        ImageProcessor.of(folder(tmp_path, fitting | change))
