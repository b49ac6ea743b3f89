"""Prompts with images on a real SGLang engine, from the row of a data file to the answer.

The reference is transformers' model with its own processor on the same files.
"""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlpost.columns import IntColumn
from rlpost.config.engine_args import IMAGE_ARGS, engine_variables
from rlpost.driver.batches import train_samples
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.image_requests import ImageRequests
from rlpost.errors import RolloutError
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
from rlpost.rollout.response_builder import ResponseBuilder, write_answer
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.prompt_images import PromptImages, digest_of, image_frame
from rlpost.tasks.prompts import PromptFields, PromptSet
from rlpost.tasks.tokenizer import PromptTokenizer, hf_tokenizer
from rlpost.types import EngineAddress, Prompt, Sample, SampleGroup, ScoredSample
from tests.contract.actor_ranks import run_ranks, step_and_score
from tests.contract.families import load_folder, load_model, set_weights, stack_experts
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.forked.test_served_families import BUCKET_BYTES, KEY, update
from tests.image_model import add_axes, make_image_folder, make_published_folder, noise
from tests.settings import rank_config
from tests.unit.tasks.sets import write

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SAMPLING = SamplingParams(max_new_tokens=8)
ANSWERS_S = 120.0


@dataclass(frozen=True)
class Served:
    """A tiny model with images on an engine."""

    folder: Path
    images: ImageRequests
    prompts: PromptSet
    engines: RunEngines


@pytest.fixture(scope="module")
def served(forked: ForkedSglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, run = (tmp_path_factory.mktemp(name) for name in ("qwen3-vl", "run"))
    with serve(forked, folder, run) as model:
        yield model


@contextmanager
def serve(
    forked: ForkedSglang,
    folder: Path,
    run: Path,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Run an engine of a model of ``WITH_IMAGES``, or of a smaller one, with random weights."""
    import transformers

    config = make_image_folder(folder) if name is None else make_published_folder(folder, name)
    torch.manual_seed(0)
    (architecture,) = config.architectures
    model = getattr(transformers, architecture)(config)
    set_weights(model, architecture.removesuffix("ForConditionalGeneration"))
    model.save_pretrained(folder)
    add_axes(folder)
    stack_experts(folder, name or "")
    for file, data in FILES.items():
        (run / file).write_bytes(data)
    rows = ({"input": text, "images": names} for text, names in ROWS.values())
    processor, tokens = ImageProcessor.of(folder), ImageTokens.of(folder)
    tokenizer = PromptTokenizer(folder, apply_chat_template=True)
    marks = ImageMarks.of(tokens, tokenizer.decode_with_special)
    frame = image_frame(tokenizer, tokenizer.encode, tokens)
    images = ImageRequests(ImageStore(run), processor, tokens, marks, frame=frame)
    prompts = PromptSet(
        write(run / "rows.jsonl", *rows),
        tokenize=tokenizer,
        fields=PromptFields("input", image_key="images"),
        images=PromptImages(processor, tokens, marks, images.store.add),
    )
    arguments = {"skip_tokenizer_init": False, **IMAGE_ARGS}
    address = forked.start(folder, KEY, run / "engine.log", environment=environment, **arguments)
    try:
        yield Served(folder, images, prompts, RunEngines.of([address.url], KEY, capacity=8))
    finally:
        forked.stop()


FILES = {
    "a.png": noise(90, 130, 1),
    "b.jpg": noise(200, 75, 2, "JPEG"),
    "same-size.png": noise(90, 130, 3),
    "one-token.png": noise(20, 20, 4),
}
ROWS = {
    "text": ("What is 1+1?", []),
    "one": ("<image>What is it?", ["a.png"]),
    "photo": ("Look: <image>", ["b.jpg"]),
    "two": ("<image> and <image>: which?", ["a.png", "b.jpg"]),
    "other image of the same size": ("<image>What is it?", ["same-size.png"]),
    "the same twice": ("<image> and <image>", ["b.jpg", "b.jpg"]),
    "one token": ("<image><image>", ["one-token.png", "a.png"]),
}


def answered(served: Served, prompts: list[Prompt], *, is_inline: bool = False) -> list[Sample]:
    async def run() -> list[Sample]:
        images = replace(served.images, is_inline=is_inline)
        async with Connection(served.engines, images=images) as connection:
            sampling = replace(SAMPLING, stop_token_ids=served.images.tokens.all)
            builders = [ResponseBuilder(connection, prompt, sampling) for prompt in prompts]
            return [await write_answer(each, each.prompt, sampling) for each in builders]

    return asyncio.run(asyncio.wait_for(run(), ANSWERS_S))


@lru_cache(1)
def loaded(folder: Path) -> Any:
    return load_model(folder)


def reference(folder: Path, sample: Sample, *, with_images: bool = True) -> torch.Tensor:
    """transformers' log-probs of a response, with the files as transformers reads them."""
    from PIL import Image
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = loaded(folder)
    is_glm = model.config.model_type.startswith("glm4v")
    process = (Glm46VImageProcessorPil if is_glm else Qwen2VLImageProcessorPil).from_pretrained(
        folder
    )
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    more = {}
    if sample.images and with_images:
        by_digest = {digest_of(data): data for data in FILES.values()}
        files = [Image.open(io.BytesIO(by_digest[span.hash])) for span in sample.images]
        more = dict(process(images=files, return_tensors="pt"))
        more["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        # without the last token, which may be one of an image
        more = {
            name: one[:, :-1] if name == "mm_token_type_ids" else one for name, one in more.items()
        }
        logits = model(ids[:, :-1], **more).logits[0, len(sample.prompt_ids) - 1 :]
    chosen = ids[0, len(sample.prompt_ids) :, None]
    return logits.log_softmax(-1).gather(-1, chosen)[:, 0]


def test_log_probs_with_images_are_those_of_transformers(served):
    """The control: without its image the same answer has other log-probs."""
    prompts = served.prompts.all()
    samples = answered(served, prompts)
    samples += answered(served, prompts[1:2])  # again, from the engine's cache of prefixes
    samples += answered(served, prompts[2:3], is_inline=True)
    compare_with_transformers(served.folder, samples)


def compare_with_transformers(folder: Path, samples: list[Sample]) -> None:
    """Compare log-probs of ``ROWS`` with those of a model that sees the images, and one that does not."""
    for sample in samples:
        ours = torch.tensor(list(sample.rollout_logprobs))
        assert len(ours) and (reference(folder, sample) - ours).abs().max() < 1e-4
        if sample.images:
            blind = reference(folder, sample, with_images=False)
            assert (blind - ours).abs().max() > 0.05
    one, other = samples[1], samples[4]
    assert one.prompt_ids == other.prompt_ids and one.images != other.images


def test_an_aborted_answer_is_resumed_with_its_images(served):
    (prompt,) = [served.prompts.prompt(3, 3)]
    (whole,) = answered(served, [prompt])
    while whole.finish_reason == "stop":  # one that goes on behind its third token
        (whole,) = answered(served, [prompt])
    part = replace(
        whole, response_ids=whole.response_ids[:3], rollout_logprobs=whole.rollout_logprobs[:3],
        loss_mask=None, version_spans=(), finish_reason="abort",
    )  # fmt: skip

    async def resume() -> Sample:
        async with Connection(served.engines, images=served.images) as connection:
            sampling = replace(SAMPLING, stop_token_ids=served.images.tokens.all)
            builder = ResponseBuilder(connection, prompt, sampling, so_far=part)
            return await write_answer(builder, prompt, sampling)

    resumed = asyncio.run(asyncio.wait_for(resume(), ANSWERS_S))
    assert resumed.images == prompt.images and len(resumed.response_ids) > 3
    ours = torch.tensor(list(resumed.rollout_logprobs))
    assert (reference(served.folder, resumed) - ours).abs().max() < 1e-4


@pytest.mark.parametrize("row", [0, 1])
def test_images_between_turns_are_read_as_transformers_reads_them(served, row):
    """After a prompt of text, and after one with an image."""
    images, tokenizer = served.images, PromptTokenizer(served.folder)
    prompt = served.prompts.prompt(row, row)

    async def talk() -> Sample:
        async with Connection(served.engines, images=images) as connection:
            sampling = replace(SAMPLING, max_new_tokens=300, stop_token_ids=images.tokens.all)
            builder = ResponseBuilder(connection, prompt, sampling, codec=tokenizer)
            for name in ("b.jpg", "same-size.png"):
                await builder.write(max_new_tokens=4)
                builder.insert(["seen: ", images.keep(FILES[name]), "?"])
            await builder.write(max_new_tokens=4)
            return builder.sample()

    sample = asyncio.run(asyncio.wait_for(talk(), ANSWERS_S))
    while len(sample.images) < len(prompt.images) + 2 or sample.mask.total() < 6:
        # one that sampled no token of an image
        sample = asyncio.run(asyncio.wait_for(talk(), ANSWERS_S))
    mask = torch.tensor(list(sample.mask), dtype=torch.bool)
    ours = torch.tensor(list(sample.rollout_logprobs))[mask]
    assert (reference(served.folder, sample)[mask] - ours).abs().max() < 1e-4
    others = [replace(span, hash=digest_of(FILES["a.png"])) for span in sample.images[-1:]]
    blind = replace(sample, images=(*sample.images[:-1], *others))  # an image of the same size
    behind = int(mask[: sample.images[-1].start - len(sample.prompt_ids)].sum())
    last = (reference(served.folder, blind)[mask] - ours).abs()[behind:]
    assert last.max() > 0.01, "the control: the last turn depends on the last image"


def test_an_engine_that_cuts_an_image_in_another_way_is_noticed(served):
    """A span of more tokens than the engine makes of the image, which the ids agree with."""
    prompt = served.prompts.prompt(1, 1)
    (span,) = prompt.images
    ids = list(prompt.token_ids)
    longer = replace(
        prompt,
        token_ids=ids[: span.start] + [ids[span.start]] * 2 + ids[span.start :],
        images=(replace(span, num_tokens=span.num_tokens + 2),),
    )
    with pytest.raises(RolloutError, match=r"an engine read \d+ tokens of a prompt that has \d+"):
        answered(served, [longer])


TEXTS_OF_ANSWERS = {
    "an <image>": False, "<|vision_start|><|image_pad|><|vision_end|>": False, "<|video_pad|>": False,
    "<Image>": True, "< image>": True, "<image": True, "<|vision_start|><|vision_end|>": True,
    "<|image|>": True, "<video>": True, "<audio>": True, "image": True,
}  # fmt: skip


def taken_by_sglang(folder: Path, image: Path, requests: list[list[int]]) -> list[bool]:
    """Whether SGLang loads the image of each request: its own function, with its own marks."""
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace

    from sglang.srt.multimodal.processors import qwen_vl
    from transformers import AutoConfig

    tokenizer = hf_tokenizer(str(folder))

    def begin(self, config, *_, **__) -> None:
        self.hf_config, self._tokenizer = config, tokenizer
        self.skip_tokenizer_init, self.io_executor = False, ThreadPoolExecutor(2)

    qwen_vl.SGLangBaseProcessor.__init__ = begin
    processor = qwen_vl.QwenVLImageProcessor(
        AutoConfig.from_pretrained(folder), None, SimpleNamespace(tokenizer=tokenizer)
    )

    def takes(ids: list[int]) -> bool:
        loading = processor.load_mm_data(ids, processor.mm_tokens, image_data=[str(image)])
        try:
            return len(asyncio.run(loading).images) == 1
        except (RuntimeError, ValueError):
            return False

    return [takes(ids) for ids in requests]


def test_the_marks_are_those_that_sglang_takes_for_images(served, forked):
    """Ordinary tokens spell them, so the decoded text alone says so."""
    prompt, images = served.prompts.prompt(1, 1), served.images
    tokenizer = PromptTokenizer(served.folder)
    wholes = [
        prompt.token_ids + IntColumn([one for letter in text for one in tokenizer.encode(letter)])
        for text in TEXTS_OF_ANSWERS
    ]
    requests = [list(images.input_ids(whole, prompt.images)) for whole in wholes]
    (file,) = images.files(prompt.images)
    taken = forked.call(taken_by_sglang, served.folder, file, requests)
    assert dict(zip(TEXTS_OF_ANSWERS, taken, strict=True)) == TEXTS_OF_ANSWERS
    assert [images.is_readable(whole, prompt.images) for whole in wholes] == taken


def test_an_engine_lives_after_all_that(served):
    first, second = answered(served, served.prompts.all()[:2])
    assert first.response_ids and second.response_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3-vl-moe", "qwen2.5-vl", "qwen3.5-published", "glm4.1v", "glm4.5v-moe"]
)
def test_an_updated_encoder_reaches_images_that_an_engine_has_read(forked, tmp_path, name):
    """Log-probs are those of transformers before and after a step that trains the whole model.

    The encoder is sent first, alone. The engine has the features of all images by then, and would
    keep them without the variables of a run.

    Last in this file: ``forked`` runs one engine at a time, so this ends that of ``served``.
    """
    # here: forks of SGLang import this module, and have no Megatron
    from tests.contract.image_ranks import actor_of_run

    old, run, new, mixed = (tmp_path / part for part in ("old", "run", "new", "mixed"))
    old.mkdir()
    run.mkdir()
    images = {"multimodal_keys": {"image": "images"}}
    settings = rank_config(str(old), lr=3e-3, vision_tower="all", **images)
    variables = engine_variables(settings)
    with serve(forked, old, run, name, variables) as model:
        prompts = model.prompts.all()
        samples = answered(model, prompts)
        compare_with_transformers(old, samples)
        groups = [SampleGroup(0, (ScoredSample(one, 1.0),)) for one in samples]
        (trained,) = run_ranks(
            step_and_score,
            1,
            settings,
            make=partial(actor_of_run, str(run)),
            samples=[one for group in groups for one in train_samples(group, [0.7])],
            export=str(new),
            bucket_bytes=BUCKET_BYTES,
        )
        buckets = trained["buckets"]
        of_encoder = [[key for key in bucket if "visual." in key] for bucket in buckets]
        (place,) = model.engines.places.all()
        address = EngineAddress(url=place.url, num_gpus=1)
        asyncio.run(update(address, new, [bucket for bucket in of_encoder if bucket]))
        mix(old, new, mixed)
        compare_with_transformers(mixed, sent := answered(model, prompts))
        asyncio.run(update(address, new, buckets))
        compare_with_transformers(new, answered(model, prompts))
    for sample in sent:
        if sample.images:
            ours = torch.tensor(list(sample.rollout_logprobs))
            assert (reference(old, sample) - ours).abs().max() > 0.01, "the step changed little"
    log = (run / "engine.log").read_text()
    assert "retokenize" not in log, "engines keep the ids of a request"


def mix(old: Path, new: Path, folder: Path) -> None:
    """Write a folder with the language model of one and the encoder of images of another."""
    shutil.copytree(old, folder)
    encoder = {key: one for key, one in load_folder(new).items() if "visual." in key}
    save_file(load_folder(old) | encoder, folder / "model.safetensors", metadata={"format": "pt"})
