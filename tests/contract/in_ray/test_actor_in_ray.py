"""The actor inside a real Ray worker, a process with threads and with Ray's ``__main__``."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlpost.types import TrainBatch
from tests.contract.actor_ranks import Files, run_ranks, train
from tests.contract.samples import STEPS
from tests.contract.test_actor import models, settings  # noqa: F401
from tests.ports import free_port

pytestmark = pytest.mark.timeout(300)
ray = pytest.importorskip("ray")


def _is_profile_of_two_steps(paths: list[str]) -> None:
    """Assert that the only file is a Chrome trace of two training steps.

    It names the operators of forward, backward and optimizer as torch does.
    """
    (path,) = paths
    assert Path(path).name == "profile-rank0-steps-1-2.json.gz"
    with gzip.open(path) as file:
        names = Counter(
            event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"
        )
    assert names["aten::mm"] > 0
    assert names["autograd::engine::evaluate_function: EmbeddingBackward0"] == 2
    assert names["Optimizer.step#AdamW.step"] == 2


class Holder:
    """A Ray actor that makes the trainer's actor in its own process, as a worker does."""

    def train_and_save(self, actor_settings: Any, steps: list, folder: str) -> dict[str, Any]:
        import sys
        import threading

        import psutil

        from rlpost.driver.startup import make_actor
        from rlpost.observe.spans import SPANS

        actor: Any = make_actor(actor_settings)
        actor.setup(0, 1, "127.0.0.1", free_port())
        actor.import_weights()
        metrics = []
        actor.profiling.begin([0], operators=True, memory=False)
        for samples in steps[:2]:
            num_tokens = sum(sum(sample.loss_mask) for sample in samples)
            batch = TrainBatch((tuple(samples),), num_samples=len(samples), num_tokens=num_tokens)
            metrics.append(dict(actor.train_step(batch).metrics))
        written = actor.profiling.end(folder + "-traces", "1-2")
        actor.profiling.begin([1], operators=True, memory=False)  # a profile of another rank
        assert actor.profiling.end(folder + "-traces", "3-3") == []
        started: list[int] = []
        watching, stop = threading.Event(), threading.Event()

        def watch() -> None:
            while not stop.is_set():
                started.extend(child.pid for child in psutil.Process().children())
                watching.set()
                stop.wait(0.002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        watching.wait(10)
        actor.save(folder, 2)
        stop.set()
        watcher.join()
        result = {
            "metrics": metrics,
            "children": sorted(set(started)),
            "hash": actor.weights_hash(),
        }
        result |= {"profiles": written, "memory": actor.memory_use, "spans": SPANS.since(0.0)}
        result["modules"] = {"wandb", "torch", "megatron.core"} & set(sys.modules)
        actor.close()
        return result


def test_a_save_in_a_ray_worker_starts_no_process_and_is_resumed_outside(
    node,
    models,  # noqa: F811
    tmp_path,
):
    one, folder = settings(models, "untied", "tp1"), str(tmp_path / "saved")
    holder = (
        ray.remote(Holder)
        .options(num_cpus=0, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}})
        .remote()
    )
    inside = ray.get(holder.train_and_save.remote(one, STEPS, folder), timeout=240)
    ray.kill(holder)
    assert inside["children"] == []
    assert inside["modules"] == {"torch", "megatron.core"}, "a rank does not load wandb"
    _is_profile_of_two_steps(inside["profiles"])
    assert [one[0] for one in inside["spans"]] == [
        "forward, backward",
        "gradient norm",
        "optimizer",
    ] * 2
    assert inside["memory"]["memory/actor_gb"] > 0.1
    (resumed,) = run_ranks(train, 1, one, steps=STEPS, files=Files(load=folder), max_tokens=200)
    (whole,) = run_ranks(train, 1, one, steps=STEPS, max_tokens=200)
    assert whole["metrics"][:2] == [
        pytest.approx(metrics, rel=1e-5, abs=1e-6) for metrics in inside["metrics"]
    ]
    assert resumed["metrics"] == [pytest.approx(whole["metrics"][2], rel=1e-5, abs=1e-6)]
    assert Path(folder, ".metadata").is_file()
