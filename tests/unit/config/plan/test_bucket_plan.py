"""The size of buckets, and the weights in each."""

from __future__ import annotations

import pytest

from rlpost.config.plan.weight_update import REQUESTS, SMALLEST, Travelling, bucket_bytes, deal

GB = 10**9
LIMIT = 4 * 2**30


@pytest.mark.parametrize(
    ("total", "limit", "num_engines", "device_bytes", "wanted"),
    [
        (8 * GB, LIMIT, 2, 80 * GB, SMALLEST),  # a small model: few requests anyway
        (706 * GB, LIMIT, 2, 80 * GB, LIMIT),  # the user's bound
        (706 * GB, 10**12, 2, 141 * GB, 2 * 706 * GB // REQUESTS),  # what makes so many requests
        (706 * GB, 10**12, 2, 80 * GB, 80 * GB // 18),  # three in a sixth of the GPU
        (8 * GB, LIMIT, 64, None, 2 * GB),  # many engines
        (8 * GB, 1000, 2, 80 * GB, 1000),
    ],
)
def test_the_size_of_a_bucket_depends_on_requests_memory_and_the_setting(
    total, limit, num_engines, device_bytes, wanted
):
    size = bucket_bytes(total, limit=limit, num_engines=num_engines, device_bytes=device_bytes)
    assert size == pytest.approx(wanted, abs=1)


def test_buckets_keep_the_order_of_weights_and_hold_one_stage_within_the_limit():
    weights = [
        Travelling(stage, size) for stage, size in [(1, 4), (0, 3), (0, 3), (0, 9), (1, 2), (0, 1)]
    ]
    assert deal(weights, 6) == [[1, 2], [3], [5], [0, 4]]


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (6, [[0], [1, 2], [3]]),  # the second would fit only without the third
        (4, [[0], [1, 2], [3]]),  # larger than the bound together
        (8, [[0, 1, 2], [3]]),
    ],
)
def test_weights_that_are_loaded_together_share_a_bucket(max_bytes, expected):
    weights = [
        Travelling(0, 3),
        Travelling(0, 2),
        Travelling(0, 3, joins=True),
        Travelling(1, 1),
    ]
    assert deal(weights, max_bytes) == expected
