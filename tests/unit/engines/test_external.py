"""External engines of a run with images: their settings are compared before any request."""

import asyncio

import pytest

from rlpost.config.engine_args import IMAGE_ARGS
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.external import external_addresses
from rlpost.errors import RolloutError

INFO = {"tp_size": 2, "pp_size": 3}


def addresses(monkeypatch, info, required):
    async def server_info(self):
        return INFO | info

    monkeypatch.setattr(EngineClient, "server_info", server_info)
    return asyncio.run(external_addresses(["node:1"], "key", required))


@pytest.mark.parametrize("info", [IMAGE_ARGS, {**IMAGE_ARGS, "enable_multimodal": None}])
def test_an_engine_with_the_settings_of_images_is_taken(monkeypatch, info):
    (address,) = addresses(monkeypatch, info, IMAGE_ARGS)
    assert (address.url, address.num_gpus) == ("http://node:1", 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_processor_backend", "auto"),
        ("image_processor_backend", None),
        ("enable_multimodal", False),
    ],
)
def test_an_engine_that_would_read_other_pixels_is_refused(monkeypatch, name, value):
    info, flag = {**IMAGE_ARGS, name: value}, f"--{name.replace('_', '-')}"
    with pytest.raises(RolloutError, match=f"addrs node:1: its {flag} is {value}, and images need"):
        addresses(monkeypatch, info, IMAGE_ARGS)
    assert addresses(monkeypatch, info, {})  # a run on text does not ask
