"""The plugin that batches the attention of single tokens, against SGLang's own, one by one."""

from __future__ import annotations

import pytest
import torch

from rlpost.rollout.server import use_stand_ins

HEADS, GROUPS, WIDTH, PLACES = 6, 2, 16, 400


@pytest.fixture(scope="module")
def backend():
    """SGLang's backend without a model, and the plugin."""
    use_stand_ins()
    import rlpost_decode_on_cpu as plugin
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return object.__new__(TorchNativeAttnBackend), plugin


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[1], [7, 64, 3, 65, 120, 1, 8]])
def test_a_batch_equals_its_requests_one_by_one(backend, lengths, window):
    """Also where places beyond a request's length hold another's, or none that exist."""
    native, plugin = backend
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
    native._run_sdpa_forward_decode(query, expected, *given, None, **more)

    def one_by_one(*_args, **_options):
        raise AssertionError("SGLang's loop was used")

    plugin.forward(one_by_one, native, query, found, *given, None, **more)
    torch.testing.assert_close(found, expected)
