"""Samples with images: their files, transformers' results, and functions that ranks run on them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpost.config.tree import Config
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.types import ImageSpan, TrainSample
from tests.contract.actor_ranks import logits, my_batch, whole_tensors
from tests.contract.families import load_model, make_family

START, END, IMAGE = 92, 93, 90
"""Token ids of the tiny models."""
SIZES = {"a": (48, 64), "b": (64, 64), "c": (96, 32), "other": (48, 64)}
"""Height and width of each image."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
THREE_AXES = {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip


@dataclass(frozen=True)
class ImageModel:
    """A tiny model with images, and the folder of a run with images for it."""

    folder: Path
    run: Path

    @property
    def make(self) -> Any:
        """What makes an actor, for ``run_ranks``."""
        return partial(actor_of_run, str(self.run))

    def sample(self, *names: str, tail: int = 9, first: int = 7) -> TrainSample:
        """Return a sample with these images in its prompt."""
        store, processor = ImageStore(self.run), ImageProcessor.of(self.folder)
        ids, spans = [1, first, 5], []
        for name in names:
            data = png(name)
            _, grid = processor.pixel_values(data)
            ids.append(START)
            count = processor.tokens_of(grid)
            spans.append(ImageSpan(store.add(data), len(ids), count, grid))
            ids += [IMAGE] * count + [END]
        prompt_length = len(ids)
        ids += [(first + 11 * position) % 89 for position in range(tail)]
        return TrainSample(
            token_ids=ids,
            prompt_length=prompt_length,
            loss_mask=[1] * tail,
            rollout_logprobs=[-1.0] * tail,
            advantage=first / 7 - 2,
            images=tuple(spans),
        )

    def inputs(self, sample: TrainSample) -> dict[str, Any]:
        """Return the arguments of transformers' model for a sample."""
        ids = torch.tensor([list(sample.token_ids)])
        found: dict[str, Any] = {"input_ids": ids}
        if sample.images:
            store, processor = ImageStore(self.run), ImageProcessor.of(self.folder)
            pixels = [processor.pixel_values(store.read(one.hash)) for one in sample.images]
            of_image = torch.zeros_like(ids)
            for one in sample.images:
                of_image[0, one.start : one.end] = 1
            found |= {
                "pixel_values": torch.cat([torch.from_numpy(values) for values, _ in pixels]),
                "image_grid_thw": torch.tensor([grid for _, grid in pixels]),
                "mm_token_type_ids": of_image,
            }
        return found


def make_image_model(folder: Path, name: str) -> ImageModel:
    """Save the tiny model of a family with ids of image tokens, positions of three axes, a processor."""
    model, run = folder / name, folder / "run"
    make_family(model, name)
    run.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    text, tower = config["text_config"], config["vision_config"]
    if not text["rope_parameters"].get("mrope_interleaved"):
        text["rope_parameters"] = THREE_AXES
        tower.setdefault("deepstack_visual_indexes", [])  # as published; transformers leaves it out
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return ImageModel(model, run)


def png(name: str) -> bytes:
    """Return an image of random blocks."""
    from PIL import Image

    height, width = SIZES[name]
    source = np.random.default_rng(sum(map(ord, name)))
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((width, height)).save(file, "PNG")
    return file.getvalue()


def of_transformers(
    model: ImageModel, samples: Sequence[TrainSample]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' logits of all tokens, and the gradients of the policy's loss."""
    theirs = load_model(model.folder)
    rows, loss = [], torch.zeros(())
    for sample in samples:
        of_sample = theirs(**model.inputs(sample)).logits[0]
        rows.append(of_sample.detach())
        begin = sample.prompt_length - 1
        targets = torch.tensor(list(sample.token_ids[sample.prompt_length :]))
        logprobs = of_sample[begin:-1].log_softmax(-1).gather(1, targets[:, None])
        loss = loss - sample.advantage * logprobs.mean() / len(samples)  # type: ignore[operator]
    loss.backward()
    return torch.cat(rows), {
        name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None
    }


def actor_of_run(run: str, config: Config) -> Any:
    """Return an actor of a run with images."""
    from rlpost.trainer.actor import Actor

    return Actor(config, run_folder=run)


def look_at_images(
    actor: Any, samples: Sequence[TrainSample], without: Sequence[TrainSample]
) -> dict[str, Any]:
    """Compute the logits of samples, and of the same samples ``without`` images; train one step.

    Returns:
        ``logits`` and ``without`` of the packed row, ``held``: the token of each row, ``gradients``
        and ``metrics`` of the step.
    """
    from rlpost.trainer.packing import held_tokens

    actor.import_weights()
    found: dict[str, Any] = {
        "logits": logits(actor, samples),
        "without": logits(actor, without),
        "held": held_tokens(tuple(samples), actor.row_layout).numpy(),
    }
    prepare_grads = actor.optimizer.prepare_grads

    def take_gradients() -> Any:
        found["gradients"] = whole_tensors(actor, gradients=True)
        return prepare_grads()

    actor.optimizer.prepare_grads = take_gradients
    batch = my_batch(actor, samples, max_tokens=100)
    found["metrics"] = dict(actor.train_step(batch).metrics)
    return found


def move_and_resume(actor: Any, samples: Sequence[TrainSample], folder: str) -> dict[str, Any]:
    """Offload and restore, and save and load; return the logits after each, without kept features.

    ``held`` are the bytes of the encoder while it is offloaded.
    """
    images = actor.images
    weights = list(images.tower.module.parameters())

    def look() -> Any:
        images.forget()
        return logits(actor, samples)

    actor.import_weights()
    found = {"imported": look()}
    actor.memory.offload("weights", "grads", "optimizer")
    found["held"] = sum(weight.untyped_storage().nbytes() for weight in weights)
    actor.memory.restore("weights", "grads", "optimizer")
    found["restored"] = look()
    actor.save(folder, 1)
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    actor.load(folder)
    found["resumed"] = look()
    return found
