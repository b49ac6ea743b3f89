"""Create a complete Hugging Face model that reads images, and images of coloured squares, without any download.

Input: a folder, a seed. Output, in that folder: a Qwen3-VL of 0.8M parameters with the
tokenizer of ``tiny_model``; ``train.jsonl`` and ``heldout.jsonl`` with their images; and
``blind.jsonl``, the held-out rows without images. The right answer is the first letter of the
square's colour. A short supervised warm-up teaches the model to tell the colours apart: it answers
``NUMBER_QUESTION`` with the number of the colour. To ``QUESTION`` it teaches only the form of an answer,
with colours at random, so the model begins at chance. Reinforcement learning then connects these
features with the letters; it does not train the encoder. Each colour is equally frequent in each file,
so that greedy answers to ``blind.jsonl`` stay at chance.

``rlpost fetch jobs/recipes/small/tiny_images.toml`` calls this.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.extensions.fetching.arithmetic_data import Row, write_lines
from rlpost.extensions.fetching.tiny_model import (
    LEARNING_RATE,
    SPECIAL,
    TINY,
    make_tokenizer,
    produce,
)
from rlpost.images.processor import ImageProcessor
from rlpost.models.model_types import HfConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FOLDER = "tiny-images"
"""Name of the folder that ``rlpost fetch`` fills."""
FORMAT = 2  # increment it when existing folders become invalid
COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 60, 210),
    "yellow": (220, 200, 40),
}
SHADE = 30  # of 255, by which each channel of a square differs at most
SIDE, SQUARE, GRAIN = 64, 32, 8  # pixels: an image, its square, an area of one grey
QUESTION = "which colour?"
NUMBER_QUESTION = "number of the colour?"
"""Of the warm-up alone; its answer is 1 for the first of ``COLOURS``."""
NUM_IMAGES = {"train": 64, "heldout": 16}
"""Images of each colour, by file."""
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    f"{START}{IMAGE}{END}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PROCESSOR = dict(
    image_processor_type="Qwen2VLImageProcessorFast",
    processor_class="Qwen3VLProcessor",
    size={"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
)
VISION: HfConfig = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    patch_size=16,
    out_hidden_size=TINY["hidden_size"],
    num_position_embeddings=64,
    deepstack_visual_indexes=[0],
    initializer_range=0.1,  # features differ enough that the warm-up learns from them in 80 steps
)
BATCH_SIZE, NUM_STEPS = 32, 80


def draw(colour: str, rng: random.Random) -> bytes:
    """Return a PNG file: a square of a shade of ``colour``, somewhere on areas of grey."""
    from PIL import Image

    num_areas = SIDE // GRAIN
    greys = bytes(rng.randrange(256) for _ in range(num_areas**2))
    image = Image.frombytes("L", (num_areas, num_areas), greys)
    image = image.resize((SIDE, SIDE), Image.Resampling.NEAREST).convert("RGB")
    shade = tuple(value + rng.randint(-SHADE, SHADE) for value in COLOURS[colour])
    left, top = (rng.randint(0, SIDE - SQUARE) for _ in range(2))
    image.paste(shade, (left, top, left + SQUARE, top + SQUARE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_rows(folder: Path, seed: int) -> None:
    """Write the images and the files of rows; files with the right content are not rewritten."""
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, count in NUM_IMAGES.items():
        colours = [colour for colour in COLOURS for _ in range(count)]
        rng.shuffle(colours)
        rows: list[Row] = []
        for number, colour in enumerate(colours):
            path, data = f"images/{name}-{number:03d}.png", draw(colour, rng)
            if not (folder / path).is_file() or (folder / path).read_bytes() != data:
                (folder / path).write_bytes(data)
            rows.append({"prompt": f"<image>{QUESTION}", "images": [path], "label": colour[0]})
        write_lines(folder / f"{name}.jsonl", rows)
        print(f"{folder / name}.jsonl: {len(rows)} images")
    write_lines(folder / "blind.jsonl", [row | {"prompt": QUESTION, "images": []} for row in rows])


def make_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Random weights."""
    from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    start, end, image, video = tokenizer.convert_tokens_to_ids([START, END, IMAGE, VIDEO])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    rotary = {"rope_type": "default", "rope_theta": 1e6}
    rotary |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text = {key: value for key, value in TINY.items() if key != "model_type"}
    config = Qwen3VLConfig(
        text_config=text | ids | {"max_position_embeddings": 512, "rope_parameters": rotary},
        vision_config=VISION,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=TINY["tie_word_embeddings"],
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    processor: ImageProcessor,
    folder: Path,
    seed: int,
) -> None:
    """Teach numbers of colours, and the form of other answers with a colour at random.

    Each step has three batches of ``BATCH_SIZE`` rows: both questions with an image, and ``QUESTION`` without.
    """
    import torch

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    read = [processor.pixel_values((folder / row["images"][0]).read_bytes()) for row in rows]
    initials = [colour[0] for colour in COLOURS]
    seen = torch.tensor([initials.index(row["label"]) for row in rows])
    grid = torch.tensor([read[0][1]]).expand(BATCH_SIZE, 3)
    num_tokens = processor.tokens_of(read[0][1])
    with_image = _prompt(tokenizer, QUESTION, num_tokens)
    without = _prompt(tokenizer, QUESTION, 0)
    number = _prompt(tokenizer, NUMBER_QUESTION, num_tokens)
    letters, numbers = (
        torch.tensor([[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers])
        for answers in (initials, "1234")
    )
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, NUM_STEPS + 1):
        chosen = torch.randint(len(rows), (BATCH_SIZE,), generator=drawn)
        at_random = letters[torch.randint(len(letters), (BATCH_SIZE,), generator=drawn)]
        pixels = torch.cat([torch.from_numpy(read[row][0]) for row in chosen.tolist()])
        images = {"pixel_values": pixels, "image_grid_thw": grid}
        loss = (
            _answer_loss(model, with_image, at_random, images)
            + _answer_loss(model, without, at_random, {})
            + _answer_loss(model, number, numbers[seen[chosen]], images)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"  warm-up {step}/{NUM_STEPS} loss {loss.item():.3f}", flush=True)


def _prompt(tokenizer: PreTrainedTokenizerFast, question: str, num_tokens: int) -> list[int]:
    """The ids of a prompt with an image of ``num_tokens`` tokens, or without one at 0."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    image = f"{START}{IMAGE * num_tokens}{END}" if num_tokens else ""
    ids: list[int] = tokenizer.encode(text.replace(f"{START}{IMAGE}{END}", image))
    return ids


def _answer_loss(
    model: PreTrainedModel, prompt: list[int], answers: Tensor, images: dict[str, Tensor]
) -> Tensor:
    """The mean cross-entropy of ``answers`` [batch, length] after one prompt; a scalar."""
    import torch

    inputs = torch.cat([torch.tensor([prompt]).expand(len(answers), -1), answers], dim=1)
    kinds = (inputs == model.config.image_token_id).int()
    logits = model(inputs, mm_token_type_ids=kinds, **images).logits[:, len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())


def build(built: Path, data: Path, seed: int) -> float:
    """Make everything in ``built`` from the rows in ``data``; return the share of right answers by chance."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in a fixed order
    torch.manual_seed(seed)
    tokenizer = make_tokenizer((*SPECIAL, START, END, IMAGE, VIDEO), CHAT_TEMPLATE)
    for name, kind in (
        ("preprocessor", {}),
        ("video_preprocessor", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (built / f"{name}_config.json").write_text(json.dumps(PROCESSOR | kind, indent=1) + "\n")
    model = make_model(tokenizer)
    warm_up(model, tokenizer, ImageProcessor.of(built), data, seed)
    tokenizer.save_pretrained(built)
    model.save_pretrained(built)
    print(f"  {sum(weight.numel() for weight in model.parameters())} parameters")
    return 1 / len(COLOURS)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("assets") / FOLDER, help="folder of the model"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of images, weights and warm-up")
    arguments = parser.parse_args(argv)
    out, seed = arguments.out, arguments.seed
    make_rows(out, seed)
    settings = {"format": FORMAT, "seed": seed, "warmup_steps": NUM_STEPS, "vision": VISION}
    produce(out, settings, lambda built: build(built, out, seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
