"""A failure of one rank alone is raised on every rank, within seconds: two ranks over gloo."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlpost.errors import CheckpointError, ConfigError, RlpostError, WeightError
from tests.contract.actor_ranks import run_ranks
from tests.contract.families import make_family
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
WITHIN_S = 20
"""Of a failure; the ranks would wait for each other 10 minutes."""


def no_file() -> object:
    raise OSError(5, "Input/output error")


def no_json() -> object:
    return json.loads("")


def no_weight() -> object:
    raise WeightError("no tensor 'a'")


def no_setting() -> object:
    raise ConfigError("--rank-alone")


ALONE: dict[str, tuple[Callable[[], object], type[RlpostError], str]] = {
    "a file": (no_file, CheckpointError, "rank 1: [Errno 5] Input/output error"),
    "JSON": (no_json, CheckpointError, "rank 1: Expecting value: line 1 column 1 (char 0)"),
    "a weight": (no_weight, WeightError, "rank 1: no tensor 'a'"),
    "a setting": (no_setting, ConfigError, "rank 1: --rank-alone"),
}


def raised(act: Callable[[], object]) -> tuple[str, str, float]:
    """Return class and text of what ``act`` raises, and after how many seconds."""
    started = time.monotonic()
    try:
        act()
    except RlpostError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "nothing was raised", 0.0


def fail_alone(actor: Any, saved: str) -> dict[str, tuple[str, str, float]]:
    """Let each read fail on rank 1, one after the other: the ranks stay in step in between."""
    import torch.distributed as dist

    from rlpost.trainer import initial_weights, megatron_checkpoint
    from rlpost.trainer.outcomes import on_every_rank, same_on_every_rank
    from rlpost.trainer.weights import folder_export

    rank = dist.get_rank()
    found = {}
    for name, (fail, _, _) in ALONE.items():
        act = fail if rank == 1 else list
        found[name] = raised(partial(on_every_rank, act, CheckpointError))
    found["alike"] = raised(lambda: on_every_rank(no_file, CheckpointError))
    found["differing"] = raised(lambda: same_on_every_rank(lambda: rank, CheckpointError))
    assert on_every_rank(lambda: rank, CheckpointError) == rank
    assert same_on_every_rank(lambda: 5, CheckpointError) == 5
    actor.import_weights()
    actor.save(saved, 1)

    def fails(*args: object, **options: object) -> object:
        return no_file()

    for module, read, call in (
        (initial_weights, "find_checkpoint", actor.import_weights),
        (initial_weights, "HuggingFaceFolder", actor.import_weights),
        (megatron_checkpoint, "stored_keys", lambda: actor.load(saved)),
        (
            megatron_checkpoint.dist_checkpointing,
            "load_common_state_dict",
            lambda: actor.load(saved),
        ),
    ):
        with ExitStack() as stack:
            if rank == 1:
                stack.enter_context(patch.object(module, read, fails))
            found[read] = raised(call)
    with patch.object(folder_export, "HuggingFaceFolder", fails if rank == 0 else None):
        found["export"] = raised(lambda: actor.export(f"{saved}/exported"))
    with patch.object(folder_export, "TensorFile", fails):  # only rank 0 has a file
        found["file"] = raised(lambda: actor.export(f"{saved}/exported"))
    found["between collectives"] = fail_between_collectives(actor, f"{saved}/exported")
    return found


def fail_between_collectives(actor: Any, folder: str) -> tuple[str, str, float]:
    """Let rank 1 fail in an exchange, in which rank 0 waits for it."""
    import torch.distributed as dist

    from rlpost.trainer.weights.box_exchange import BoxExchange

    def no_memory(*args: object) -> None:
        raise MemoryError("out of memory")

    if dist.get_rank() == 0:
        return raised(lambda: actor.export(folder))
    with patch.object(BoxExchange, "pack", no_memory):
        return raised(lambda: actor.export(folder))


def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    make_family(tmp_path / "model", "qwen3")
    settings = rank_config(
        str(tmp_path / "model"), distributed_timeout_minutes=10, tensor_model_parallel_size=2
    )
    ranks = run_ranks(fail_alone, 2, settings, saved=str(tmp_path / "saved"))
    texts = [{name: each[:2] for name, each in rank.items()} for rank in ranks]
    assert texts[0] == texts[1]
    for name, (_, kind, text) in ALONE.items():
        assert texts[0].pop(name) == (kind.__name__, text)
    kind, text = texts[0].pop("alike")
    assert (kind, text) == ("CheckpointError", "[Errno 5] Input/output error")
    assert "rank 0 reads 0 and rank 1 reads 1" in texts[0].pop("differing")[1]
    kind, text = texts[0].pop("between collectives")
    assert kind == "CheckpointError" and "rank 1: out of memory" in text
    for export in (texts[0].pop("export"), texts[0].pop("file")):
        assert export[0] == "CheckpointError" and "Input/output error" in export[1]
    assert set(texts[0]) >= {"find_checkpoint", "stored_keys", "load_common_state_dict"}
    for read, (kind, text) in texts[0].items():
        assert kind in ("CheckpointError", "WeightError"), (read, kind, text)
        assert text.startswith("rank 1: ") and "Input/output error" in text, (read, text)
    assert max(seconds for rank in ranks for _, _, seconds in rank.values()) < WITHIN_S
