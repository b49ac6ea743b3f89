"""Screenshots of sandboxes as images of an episode."""

from __future__ import annotations

import asyncio

import pytest
from PIL import Image

from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from tests.contract.test_sandbox import SMALL, WHY_NOT
from tests.unit.agents.image_talk import ImageModel, SeeingEngine, pixel_digest, seeing

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

PNG = """
import struct, zlib
def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
rows = b"".join(b"\\0" + bytes((255, 0, 0)) * 64 for _ in range(32))
head = struct.pack(">IIBBBBB", 64, 32, 8, 2, 0, 0, 0)
parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
open("shot.png", "wb").write(b"\\x89PNG\\r\\n\\x1a\\n" + b"".join(parts))
"""


def test_a_screenshot_of_a_sandbox_reaches_the_engine(tmp_path):
    """A program inside draws it; the engine gets its pixels, and the file is in the run folder."""
    model = ImageModel.make(tmp_path / "model")
    engine = SeeingEngine(model=model, reply=lambda images: f"{len(images)}")

    class Screen:
        async def reset(self, prompt: Prompt) -> list[str | bytes]:
            self.sandbox = await pool.acquire()
            await self.sandbox.write("/work/draw.py", PNG.encode())
            return await self.shot()

        async def step(self, turn: Turn) -> Step:
            return Step(await self.shot() if turn.text == "1" else "", done=turn.text != "1")

        async def shot(self) -> list[str | bytes]:
            assert (await self.sandbox.run("python3 draw.py")).exit_code == 0
            return [await self.sandbox.read("/work/shot.png"), "go: "]

        async def close(self) -> None:
            await self.sandbox.close()

    async def play() -> None:
        nonlocal pool
        async with LocalPool(SMALL, size=1) as pool, seeing(engine, images) as connection:
            prompt = Prompt(5, "", model.tokenizer.encode("look"))
            sampling = SamplingParams(max_new_tokens=200)
            builder = ResponseBuilder(connection, prompt, sampling, codec=model.tokenizer)
            await PlainRunner("pkg.mod:Screen", Screen, 4).run(builder, prompt)

    pool, images = None, model.requests(tmp_path / "run")
    asyncio.run(play())
    red = pixel_digest(Image.new("RGB", (64, 32), (255, 0, 0)))
    assert [pixels for _, pixels in engine.seen] == [[red], [red, red]]
    stored = [each for each in (tmp_path / "run" / "images").rglob("*") if each.is_file()]
    assert sum("-" not in each.name for each in stored) == 1, "equal screenshots are one file"
