"""Samples with images: their files, transformers' results, and functions that ranks run on them."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection as pipes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.driver.batches import train_samples
from rlpost.engines.connection import Connection, RunEngines
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.trainer.lora.adapters import peft_settings
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.trainer.weights.peft_folder import adapter_inventory
from rlpost.types import ImageSpan, Prompt, Sample, SampleGroup, ScoredSample, TrainSample
from tests.contract.actor_ranks import in_processes, logits, my_batch, whole_tensors
from tests.contract.families import load_model, make_family
from tests.contract.float64 import use_float64
from tests.image_model import GLM_PROCESSOR, add_axes

START, END, IMAGE = 92, 93, 90
"""Token ids of the tiny models."""
SIZES = {"a": (48, 64), "b": (64, 64), "c": (96, 32), "other": (48, 64)}
"""Height and width of each image."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip

UNUSED = Connection(RunEngines.of(["http://127.0.0.1:1"], "", capacity=1))
"""Of builders that get all tokens without a request."""


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
        ids, spans = self._with_images([1, first, 5], names)
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

    def conversation(self, *names: str, seen: str, turn: int = 4) -> TrainSample:
        """Return a sample as a run makes it: two turns, and between them an environment's image.

        ``names`` are the images of the prompt, ``seen`` is that of the environment. No id is that of
        padding, 2, whose row of the embedding gets no gradient in transformers.
        """
        ids, spans = self._with_images([1, 8, 5], names)
        generated = [(7 + 11 * position) % 89 for position in range(2 * turn)]
        first = Sample(
            0, 0, ids, generated[:turn], [-1.0] * turn, "", "stop", 0, images=tuple(spans)
        )
        limits = SamplingParams(max_new_tokens=99)
        builder = ResponseBuilder(
            UNUSED, Prompt(0, "", ids, images=tuple(spans)), limits, so_far=first
        )
        before = len(ids) + turn
        whole, (span,) = self._with_images([0] * before + [9, 6], [seen])
        builder.insert_ids([*whole[before:], 4], [span])
        inserted = builder.sample()
        sample = replace(
            inserted,
            response_ids=[*inserted.response_ids, *generated[turn:]],
            rollout_logprobs=[*inserted.rollout_logprobs, *[-1.0] * turn],
            loss_mask=[*inserted.mask, *[1] * turn],
        )
        (made,) = train_samples(SampleGroup(0, (ScoredSample(sample, 1.0),)), [0.7])
        return made

    def _with_images(
        self, ids: Sequence[int], names: Sequence[str]
    ) -> tuple[list[int], list[ImageSpan]]:
        """Append the tokens of images to ids, and store the images."""
        store, processor = ImageStore(self.run), ImageProcessor.of(self.folder)
        whole, spans = list(ids), []
        for name in names:
            data = png(name)
            _, grid = processor.pixel_values(data)
            whole.append(START)
            count = processor.tokens_of(grid)
            spans.append(ImageSpan(store.add(data), len(whole), count, grid))
            whole += [IMAGE] * count + [END]
        return whole, spans

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
    (model / "config.json").write_text(json.dumps(config))
    add_axes(model)
    kind = GLM_PROCESSOR if name.startswith("glm") else PROCESSOR
    processor = kind | {"patch_size": config["vision_config"]["patch_size"]}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
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
    """Return transformers' logits of all tokens, and the gradients of the policy's loss.

    They are computed in float64, in another process: in float32, the logits of a Qwen3.5 of which
    the largest is 6 are off by 9e-5 themselves on some processors.
    """
    ((logits, gradients),) = in_processes(_send_of_transformers, [(model, samples)])
    return torch.from_numpy(logits), {
        name: torch.from_numpy(values) for name, values in gradients.items()
    }


def _send_of_transformers(
    pipe: pipes.Connection, model: ImageModel, samples: Sequence[TrainSample]
) -> None:
    try:
        pipe.send((True, _of_transformers(model, samples)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _of_transformers(
    model: ImageModel, samples: Sequence[TrainSample]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    theirs, single = load_model(model.folder), torch.float32
    theirs.set_experts_implementation("eager")  # grouped products know no float64
    use_float64()
    theirs = theirs.double()
    rows, loss = [], torch.zeros((), dtype=torch.float64)
    for sample in samples:
        inputs = {
            name: values.double() if values.is_floating_point() else values
            for name, values in model.inputs(sample).items()
        }
        of_sample = theirs(**inputs).logits[0]
        rows.append(of_sample.detach())
        begin = sample.prompt_length - 1
        targets = torch.tensor(list(sample.token_ids[sample.prompt_length :]))
        logprobs = of_sample[begin:-1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        trained = logprobs[torch.tensor(list(sample.loss_mask), dtype=torch.bool)]
        loss = loss - sample.advantage * trained.mean() / len(samples)  # type: ignore[operator]
    loss.backward()
    stored = HuggingFaceFolder(model.folder).file_of
    gradients: dict[str, np.ndarray] = {}
    for name, weight in theirs.named_parameters():
        if weight.grad is not None:
            of_folder = as_stored(name, weight.grad.to(single), stored)
            gradients |= {name: values.numpy() for name, values in of_folder.items()}
    return torch.cat(rows).to(single).numpy(), gradients


def as_stored(name: str, values: torch.Tensor, stored: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the values of a weight of transformers' model by the names in the folder."""
    older = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if older in stored or name in stored:
        return {older if older in stored else name: values}
    layer, _, kind = name.rpartition(".")  # the folder has each expert in its own tensors
    parts = {"down_proj": values}
    if kind == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), values.chunk(2, dim=1), strict=True))
    return {
        f"{layer}.{number}.{part}.weight": of_expert
        for part, of_experts in parts.items()
        for number, of_expert in enumerate(of_experts)
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


def step_of(actor: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Train one step, in micro-batches of at most 45 tokens.

    Returns:
        ``micro_batches``: the samples with images in each of this rank, ``before`` and ``after``:
        all weights, ``gradients`` of those that are trained, and ``metrics`` of the step.
    """
    actor.import_weights()
    batch = my_batch(actor, samples, max_tokens=45)
    found: dict[str, Any] = {
        "micro_batches": [sum(bool(one.images) for one in micro) for micro in batch.micro_batches],
        "before": whole_tensors(actor, gradients=False),
    }
    prepare_grads = actor.optimizer.prepare_grads

    def take_gradients() -> Any:
        held = actor.inventory.held.values()
        if all(getattr(one.tensor, "requires_grad", True) for one in held):
            found["gradients"] = whole_tensors(actor, gradients=True)
        return prepare_grads()

    actor.optimizer.prepare_grads = take_gradients
    found["metrics"] = dict(actor.train_step(batch).metrics)
    found["after"] = whole_tensors(actor, gradients=False)
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


def train_and_resume(
    actor: Any, samples: Sequence[TrainSample], folder: str, export: str
) -> dict[str, Any]:
    """Train a step, save, export, train another; load and train it again, without kept features.

    Returns:
        Hashes and metrics after each, and the names of all tensors in buckets for engines.
    """
    batch = my_batch(actor, samples, max_tokens=100)
    actor.import_weights()
    found: dict[str, Any] = {"imported": actor.weights_hash()}
    first = actor.train_step(batch)
    actor.save(folder, 1)
    actor.export(export)
    found |= {"first": dict(first.metrics), "saved": actor.weights_hash()}
    second = actor.train_step(batch)
    found |= {"second": dict(second.metrics), "trained": actor.weights_hash()}
    actor.load(folder)
    found["loaded"] = actor.weights_hash()
    again = actor.train_step(batch)
    found |= {"again": dict(again.metrics), "resumed": actor.weights_hash()}
    found["sent"] = sorted(name for bucket in actor.bucket_plan for name in bucket.names)
    return found


MOST_PIXELS = 128 * 128


def adapt(actor: Any, samples: Sequence[TrainSample], folder: str) -> dict[str, Any]:
    """Train adapters one step, export them merged and as they are, and train another step.

    Returns:
        ``logits`` between the steps, and ``gradients`` of all factors in the second; none with
        adapters of experts, which PEFT lacks.
    """
    batch = my_batch(actor, samples, max_tokens=100)
    actor.import_weights()
    actor.train_step(batch)
    found = {"logits": logits(actor, samples), "gradients": {}}
    actor.export(f"{folder}/merged")
    if "experts" in actor.config.lora.lora_targets:
        return found
    actor.config = with_values(actor.config, lora_export="peft", image_max_pixels=MOST_PIXELS)
    actor.export(f"{folder}/peft")
    factors = SimpleNamespace(
        inventory=adapter_inventory(actor.inventory, peft_settings(actor.config)),
        model=actor.model,
    )
    prepare_grads = actor.optimizer.prepare_grads

    def take_gradients() -> Any:
        found["gradients"] = whole_tensors(factors, gradients=True)
        return prepare_grads()

    actor.optimizer.prepare_grads = take_gradients
    actor.train_step(batch)
    return found


def resume_otherwise(actor: Any, folder: str) -> str:
    """Return why a checkpoint with another part of the encoder is refused."""
    from rlpost.errors import CheckpointError

    try:
        actor.load(folder)
    except CheckpointError as error:
        return str(error)
    return ""
