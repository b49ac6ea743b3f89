"""The plugin that batches the attention of single tokens, against SGLang's own, one by one."""

from __future__ import annotations

import inspect

import pytest
import torch

HEADS, GROUPS, WIDTH, PLACES = 6, 2, 16, 400
CASES = [
    (lengths, window)
    for lengths in ((1,), (7, 64, 3, 65, 120, 1, 8))  # tokens of each request
    for window in (None, 5)
]


def attended(lengths: tuple[int, ...], window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what SGLang's loop and what the plugin computes for random requests.

    Places beyond a request's length hold another's, or none that exist.
    """
    import rlpost_decode_on_cpu as plugin
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend = object.__new__(TorchNativeAttnBackend)  # without a model
    torch.manual_seed(len(lengths))
    keys, values = torch.randn(2, PLACES, GROUPS, WIDTH)
    keys[0] = values[0] = torch.nan  # SGLang's place for padding holds what nobody wrote
    places = torch.randint(1, PLACES, (9, 130), dtype=torch.int32)
    for request, length in enumerate(lengths):
        places[request + 1, length:] = 10**6
    query = torch.randn(len(lengths), HEADS, WIDTH)
    given = (keys, values, places, torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
    more = {"scaling": 0.3, "enable_gqa": True, "causal": False, "sliding_window_size": window}
    expected, found = torch.empty_like(query), torch.full_like(query, torch.nan)
    loop = inspect.unwrap(TorchNativeAttnBackend._run_sdpa_forward_decode)
    loop(backend, query, expected, *given, None, **more)

    def one_by_one(*_args, **_options):
        raise AssertionError("SGLang's loop was used")

    plugin.forward(one_by_one, backend, query, found, *given, None, **more)
    return expected, found


def all_attended() -> dict[tuple[tuple[int, ...], int | None], tuple[torch.Tensor, torch.Tensor]]:
    return {case: attended(*case) for case in CASES}


@pytest.fixture(scope="module")
def results(forked):
    return forked.call(all_attended)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_equals_its_requests_one_by_one(results, case):
    expected, found = results[case]
    torch.testing.assert_close(found, expected)
