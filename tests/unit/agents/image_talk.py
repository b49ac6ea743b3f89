"""A tiny model with images, and a fake engine that sees the pixels of its requests."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.image_requests import ImageRequests
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
from rlpost.tasks.prompt_images import image_frame
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.image_model import make_image_folder, noise
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

SIDE = 32  # pixels of a token of the tiny model
SAME_SIZE = [noise(64, 96, seed) for seed in range(3)]
OTHER_SIZE = noise(130, 70, 9)


@dataclass(frozen=True)
class ImageModel:
    folder: Path
    tokenizer: PromptTokenizer
    tokens: ImageTokens

    @classmethod
    def make(cls, folder: Path) -> ImageModel:
        make_image_folder(folder)
        return cls(
            folder, PromptTokenizer(folder, apply_chat_template=True), ImageTokens.of(folder)
        )

    def requests(self, run: Path) -> ImageRequests:
        """How a run in this folder sends images."""
        run.mkdir(exist_ok=True)
        tokenizer = self.tokenizer
        return ImageRequests(
            ImageStore(run),
            ImageProcessor.of(self.folder),
            self.tokens,
            ImageMarks.of(self.tokens, tokenizer.decode_with_special),
            frame=image_frame(tokenizer, tokenizer.encode, self.tokens),
        )

    def pixels(self, data: bytes) -> str:
        """Digest of the pixels that an engine has to get for a file."""
        return pixel_digest(ImageProcessor.of(self.folder).scaled(data))


def pixel_digest(image: Image.Image) -> str:
    return hashlib.sha256(f"{image.size}".encode() + image.convert("RGB").tobytes()).hexdigest()


def opened(reference: str) -> Image.Image:
    """An image as a request names it: a path or a data URL."""
    if reference.startswith("data:"):
        data = base64.b64decode(reference.partition(",")[2])
    else:
        data = Path(reference).read_bytes()
    return Image.open(io.BytesIO(data))


@dataclass
class SeeingEngine(FakeEngine):
    """Answers with what ``reply`` returns for the images of a request, and counts tokens as SGLang."""

    model: Any = None
    reply: Callable[[Sequence[Image.Image]], str] = lambda images: "ok"
    seen: list[tuple[list[int], list[str]]] = field(default_factory=list)
    """Tokens of each request, and the digests of its pixels."""

    def __post_init__(self) -> None:
        self.answer = self._look

    def _look(self, body: dict[str, Any]) -> dict[str, Any]:
        images = [opened(one) for one in body.get("image_data", ())]
        ids = body["input_ids"]
        assert ids.count(self.model.tokens.image) == len(images)
        self.seen.append((ids, [pixel_digest(one) for one in images]))
        text = self.reply(images)
        tokenizer = self.model.tokenizer
        made = generated([*tokenizer.encode(text), *tokenizer.encode("<|end|>")], text=text)
        count = sum((one.width // SIDE) * (one.height // SIDE) for one in images)
        made["meta_info"]["prompt_tokens"] = len(ids) - len(images) + count
        made["meta_info"]["finish_reason"]["matched"] = tokenizer.encode("<|end|>")[0]
        return made


@asynccontextmanager
async def seeing(engine: SeeingEngine, images: ImageRequests | None):
    async with (
        serving(engine),
        Connection(RunEngines.of([engine.url], KEY, capacity=16), images=images) as connection,
    ):
        yield connection


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
