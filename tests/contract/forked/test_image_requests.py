"""Prompts with images on a real SGLang engine, from the row of a data file to the answer.

The reference is transformers' model with its own processor on the same files.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from rlpost.columns import IntColumn
from rlpost.config.engine_args import IMAGE_ARGS
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.image_requests import ImageRequests
from rlpost.errors import RolloutError
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
from rlpost.rollout.response_builder import ResponseBuilder, write_answer
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.prompt_images import PromptImages, digest_of
from rlpost.tasks.prompts import PromptFields, PromptSet
from rlpost.tasks.tokenizer import PromptTokenizer, hf_tokenizer
from rlpost.types import Prompt, Sample
from tests.contract.families import load_model, set_weights
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.image_model import make_image_folder, noise
from tests.unit.tasks.sets import write

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
KEY = "image-key-51c7"
SAMPLING = SamplingParams(max_new_tokens=8)


@dataclass(frozen=True)
class Served:
    """A tiny model with images on an engine."""

    folder: Path
    images: ImageRequests
    prompts: PromptSet
    engines: RunEngines


@pytest.fixture(scope="module")
def served(forked: ForkedSglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from transformers import Qwen3VLForConditionalGeneration

    folder, run = (tmp_path_factory.mktemp(name) for name in ("qwen3-vl", "run"))
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(make_image_folder(folder))
    set_weights(model, "Qwen3VL")
    model.save_pretrained(folder)
    for name, data in FILES.items():
        (run / name).write_bytes(data)
    rows = ({"input": text, "images": names} for text, names in ROWS.values())
    processor, tokens = ImageProcessor.of(folder), ImageTokens.of(folder)
    tokenizer = PromptTokenizer(folder, apply_chat_template=True)
    marks = ImageMarks.of(tokens, tokenizer.decode_with_special)
    images = ImageRequests(ImageStore(run), processor, tokens, marks)
    prompts = PromptSet(
        write(run / "rows.jsonl", *rows),
        tokenize=tokenizer,
        fields=PromptFields("input", image_key="images"),
        images=PromptImages(processor, tokens, marks, images.store.add),
    )
    arguments = {"skip_tokenizer_init": False, **IMAGE_ARGS}
    address = forked.start(folder, KEY, run / "engine.log", **arguments)
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

    return asyncio.run(run())


def reference(folder: Path, sample: Sample, *, with_images: bool = True) -> torch.Tensor:
    """transformers' log-probs of a response, with the files as transformers reads them."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model, process = load_model(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
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
    for sample in samples:
        ours = torch.tensor(list(sample.rollout_logprobs))
        assert len(ours) and (reference(served.folder, sample) - ours).abs().max() < 1e-4
        if sample.images:
            blind = reference(served.folder, sample, with_images=False)
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

    resumed = asyncio.run(resume())
    assert resumed.images == prompt.images and len(resumed.response_ids) > 3
    ours = torch.tensor(list(resumed.rollout_logprobs))
    assert (reference(served.folder, resumed) - ours).abs().max() < 1e-4


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
