"""A tiny Qwen3-VL or GLM-V with a tokenizer of bytes, a chat template with images; images of noise."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.unit.tasks.sets import byte_tokenizer

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    f"{START}{IMAGE}{END}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}, "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
GLM_PROCESSOR = PROCESSOR | {
    "image_processor_type": "Glm46VImageProcessor", "processor_class": "Glm46VProcessor",
    "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14,
}  # fmt: skip
QWEN_2_5_PROCESSOR = {key: one for key, one in PROCESSOR.items() if key != "size"} | {
    "processor_class": "Qwen2_5_VLProcessor", "min_pixels": 784, "max_pixels": 512 * 512,
    "patch_size": 14,
}  # fmt: skip
"""With the older keys of the published file."""
PROCESSORS = {
    "Qwen3VL": (PROCESSOR, "Qwen3VLVideoProcessor"),
    "Qwen2_5_VL": (QWEN_2_5_PROCESSOR, "Qwen2VLVideoProcessor"),
    "Glm4v": (GLM_PROCESSOR, "Glm46VVideoProcessor"),
    "Glm4vMoe": (GLM_PROCESSOR, "Glm46VVideoProcessor"),
}
"""Of images and of videos, by the prefix of transformers' classes; others have Qwen3-VL's."""
THREE_AXES = {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
QWEN_MARKS = {
    "vision_start_token_id": START, "vision_end_token_id": END, "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}  # fmt: skip
GLM_MARKS = {
    "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
    "image_token_id": "<|image|>", "video_token_id": "<|video|>",
    "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip


def make_image_folder(folder: Path) -> Any:
    """Save tokenizer, processor and config.json, without weights; return transformers' config."""
    import transformers

    marks = (START, END, IMAGE, VIDEO)
    special = ("<|end|>", "<|user|>", "<|assistant|>", *marks)
    tokenizer = byte_tokenizer(folder, TEMPLATE, special=special)
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in marks]
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text = dict(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, **sections},
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tower = dict(
        depth=3, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=16,
        out_hidden_size=64, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=tower, vision_start_token_id=ids[0],
        vision_end_token_id=ids[1], image_token_id=ids[2], video_token_id=ids[3],
        tie_word_embeddings=False, architectures=["Qwen3VLForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    video = PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return config


def make_published_folder(folder: Path, name: str) -> Any:
    """The same for a model of ``WITH_IMAGES``, with the marks that SGLang has for its family."""
    import transformers

    from tests.contract.families import COMMON, WITH_IMAGES

    kind, text, tower = WITH_IMAGES[name]
    settings, video_type = PROCESSORS.get(kind, PROCESSORS["Qwen3VL"])
    marks = GLM_MARKS if kind.startswith("Glm") else QWEN_MARKS
    start, end, image, *_ = marks.values()
    template = TEMPLATE.replace(f"{START}{IMAGE}{END}", f"{start}{image}{end}")
    special = ("<|end|>", "<|user|>", "<|assistant|>", *marks.values())
    tokenizer = byte_tokenizer(folder, template, special=special)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    ids = {key: tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()}
    options = COMMON | text | {"vocab_size": 320, "max_position_embeddings": 4096}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(
        text_config=options | ends, vision_config=tower, **ids,
        tie_word_embeddings=options["tie_word_embeddings"],
        architectures=[f"{kind}ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    video = settings | {"video_processor_type": video_type}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return config


def add_axes(folder: Path) -> None:
    """Give the config.json of a Qwen3.5 positions of three axes, and a key that transformers drops."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if "mrope_section" not in config["text_config"]["rope_parameters"]:
        config["text_config"] |= {"rope_parameters": THREE_AXES, "partial_rotary_factor": 0.5}
        config["vision_config"].setdefault("deepstack_visual_indexes", [])
        file.write_text(json.dumps(config))


def noise(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """An image of coarse noise, as the bytes of a file."""
    small = (height // 8 + 1, width // 8 + 1, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, small, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(file, kind)
    return file.getvalue()
