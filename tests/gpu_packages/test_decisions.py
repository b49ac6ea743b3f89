"""What is chosen from the packages of the lock is what they can do."""

from __future__ import annotations

import importlib.util
import json

from tests.gpu_packages.processes import run

FLASH = """
import json
import rlpost.trainer
from rlpost.trainer import device
print(json.dumps(device.has_flash_attention()))
"""
DEEP_EP = """
import json
import rlpost.trainer
from megatron.core.transformer.moe import fused_a2a
from rlpost.trainer import optional_packages
print(json.dumps([fused_a2a.HAVE_DEEP_EP, optional_packages.deep_ep_problem()]))
"""


def test_the_lock_has_no_flash_attention_for_the_trainer_although_the_module_is_there() -> None:
    assert importlib.util.find_spec("flash_attn") is not None
    assert json.loads(run(FLASH).splitlines()[-1]) is False


def test_a_rank_that_does_not_dispatch_with_deep_ep_does_not_import_it() -> None:
    has, problem = json.loads(run(DEEP_EP).splitlines()[-1])
    assert not has and "is not imported in this process" in problem


def test_without_a_gpu_the_reason_of_deep_ep_is_its_own() -> None:
    has, problem = json.loads(run(DEEP_EP, RLPOST_DEEP_EP="1").splitlines()[-1])
    assert not has and "does not expose a usable CUDA device" in problem
