"""Messages to the loader of a rank, as SGLang passes them: policy first, then draft models."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from common.torch_store import close_store, open_store, replace_rendezvous
from rlpost.engines.shards import loader, messages
from rlpost.models.regions import Box, Boxes, group_from_json
from tests.ports import free_port

TYPES = {"a": ((4, 6), "float32"), "b": ((4, 6), "float32"), "e": ((3, 2), "bfloat16")}
PLAN = [
    [(0, [Box("b", (0, 0), (2, 6))]), (1, [Box("b", (2, 0), (2, 6)), Box("e", (0, 0), (3, 2))])],
    [],
    [(1, [Box("a", (1, 0), (2, 6))])],
]


class Policy(torch.nn.Module):
    """Holds rows 1 and 2 of a and all of e; b is loaded as a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(2, 6))
        self.total = torch.nn.Parameter(torch.zeros(6))
        self.embedding = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "a":
                self.rows.data.copy_(tensor[1:3])
            elif name == "b":
                self.total.data.copy_(tensor.sum(0))
            else:
                self.embedding.data.copy_(tensor)


class Draft(torch.nn.Module):
    """Holds the transposed second column of b, and the embedding in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.column = torch.nn.Parameter(torch.zeros(1, 4))
        self.embedding = torch.nn.Parameter(torch.zeros(3, 2))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "b":
                self.column.data.copy_(tensor[:, 1:2].T)
            elif name == "e":
                self.embedding.data.copy_(tensor)


class Engine:
    """A rank with two models, in the order in which SGLang's updater calls the loader."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.folder, self.count = loader.ShardedRank(), folder, 0
        self.policy, self.draft = Policy(), Draft()
        self.models: tuple[Policy, Draft] = (self.policy, self.draft)

    def send(self, data: torch.Tensor | None = None, **fields: Any) -> None:
        self.count += 1
        for model in self.models:
            data = torch.empty(0, dtype=torch.uint8) if data is None else data
            self.rank.handle(model, {"id": self.count} | fields, data)

    def record(self, plan: list[Any] = PLAN) -> dict[str, Any]:
        planned = [[(sender, Boxes.of(boxes)) for sender, boxes in bucket] for bucket in plan]
        (self.folder / "tensors").write_text(json.dumps(TYPES))
        (self.folder / "plan").write_text(json.dumps(messages.plan_to_json(TYPES, planned)))
        answer = self.folder / "answer"
        self.send(do="record", tensors=str(self.folder / "tensors"), answer=str(answer))
        self.send(do="plan", file=str(self.folder / "plan"))
        recorded: dict[str, Any] = json.loads(answer.read_text())
        return recorded


def flat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])


def values() -> dict[str, torch.Tensor]:
    return {
        name: torch.rand(shape).to(getattr(torch, dtype)) for name, (shape, dtype) in TYPES.items()
    }


def test_the_answer_has_the_boxes_of_all_models(tmp_path: Path) -> None:
    answer = Engine(tmp_path).record()
    groups = [group_from_json(one, list(TYPES)) for one in answer["boxes"]]
    assert {
        (name, one.start, one.size, one.is_by_name) for one in groups for name in one.tensors
    } == {
        ("a", (1, 0), (2, 6), False),
        ("e", (0, 0), (3, 2), False),
        ("b", (0, 1), (4, 1), False),
        ("b", (0, 0), (4, 6), True),
    }
    assert answer["models"] == 2
    assert answer["reasons"].keys() == {"b"}
    assert answer["filled"] == {
        "0:rows": [0], "0:total": [1], "0:embedding": [2], "1:column": [1], "1:embedding": [2],
    }  # fmt: skip


def test_a_rank_records_once_until_its_model_or_the_tensors_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer is that of the first recording."""
    calls: list[Any] = []
    record = loader.record
    monkeypatch.setattr(
        loader, "record", lambda model, types: calls.append(model) or record(model, types)
    )
    engine = Engine(tmp_path)
    first = engine.record()
    assert engine.record() == first and calls == [engine.policy, engine.draft]
    engine.draft.embedding.data = torch.zeros(6, 2)[::2]
    engine.record()
    assert calls[2:] == [engine.draft]
    monkeypatch.setitem(TYPES, "e", ((3, 2), "float32"))
    engine.record()
    assert calls[3:] == [engine.policy, engine.draft]


def test_messages_of_several_senders_reach_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tensors = Engine(tmp_path), values()
    engine.record()
    b, received = tensors["b"], []
    sent = [[flat(b[:2]), flat(b[2:], tensors["e"])], [], [flat(tensors["a"][1:3])]]

    def receive(bucket: Any, device: torch.device) -> list[torch.Tensor]:
        received.append(bucket)
        return sent[len(received) - 1]

    monkeypatch.setattr(engine.rank, "_receive", receive)
    for number in range(3):
        engine.send(do="receive", bucket=number)
    assert len(received) == 3, "a message is received once for both models"
    for model in engine.models:
        expected = type(model)()
        expected.load_weights(tensors.items())
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)


def test_bytes_of_the_message_itself_are_applied(tmp_path: Path) -> None:
    engine, tensors = Engine(tmp_path), values()
    engine.record([[(0, [Box("e", (1, 0), (2, 2))])], [(0, [Box("e", (0, 0), (1, 2))])]])
    engine.send(flat(tensors["e"][1:]), do="apply", bucket=0)
    engine.send(flat(tensors["e"][:1]), do="apply", bucket=1)
    for model in engine.models:
        assert torch.equal(model.embedding, tensors["e"].to(model.embedding.dtype))


@pytest.mark.parametrize(("buckets", "expected"), [((1,), 0), ((0, 2), 1), ((0, 1, 1), 2)])
def test_a_bucket_out_of_order_is_refused(
    buckets: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    """Else an engine reports a version of which it lacks a part."""
    engine, tensors = Engine(tmp_path), values()
    engine.record([[(0, [Box("e", (row, 0), (1, 2))])] for row in range(3)])

    def apply(bucket: int) -> None:
        engine.send(flat(tensors["e"][bucket : bucket + 1]), do="apply", bucket=bucket)

    *before, last = buckets
    for bucket in before:
        apply(bucket)
    with pytest.raises(RuntimeError, match=f"bucket {last} came instead of bucket {expected}"):
        apply(last)
    for bucket in range(3):
        apply(bucket)
    assert torch.equal(engine.policy.embedding, tensors["e"])


def test_a_whole_tensor_may_come_beside_the_box_of_another_model(tmp_path: Path) -> None:
    engine, tensors = Engine(tmp_path), values()
    engine.record([[(0, [Box("b", (0, 1), (4, 1)), Box("b", (0, 0), (4, 6))])]])
    engine.send(flat(tensors["b"][:, 1], tensors["b"]), do="apply", bucket=0)
    assert torch.equal(engine.policy.total, tensors["b"].sum(0))
    assert torch.equal(engine.draft.column[0], tensors["b"][:, 1])


def test_what_a_rank_cannot_load_is_an_error(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    with pytest.raises(RuntimeError, match="record it first"):
        engine.send(do="receive", bucket=0)
    with pytest.raises(RuntimeError, match="record it first"):
        engine.send(do="plan", file="restarted since it recorded")
    engine.record()
    with pytest.raises(RuntimeError, match="connect it first"):
        engine.send(do="receive", bucket=0)
    engine.record([[(3, [Box("a", (0, 0), (1, 6))])]])
    with pytest.raises(RuntimeError, match="rank 3 has 23 bytes instead of 24"):
        engine.send(torch.zeros(23, dtype=torch.uint8), do="apply", bucket=0)
    engine.record([[(0, [Box("b", (0, 0), (3, 6))])]])
    with pytest.raises(RuntimeError, match=r"b is loaded by name, .* 18 of 24 elements"):
        engine.send(torch.zeros(72, dtype=torch.uint8), do="apply", bucket=0)
    column = engine.policy.total.data
    engine.record([[(0, [Box("b", (0, 0), (4, 6))])]])
    engine.policy.total.data = torch.zeros(5)
    with pytest.raises(RuntimeError):
        engine.send(torch.zeros(96, dtype=torch.uint8), do="apply", bucket=0)
    assert engine.rank._kept is None, "the engine lives on, without the bucket"
    engine.policy.total.data = column


@pytest.mark.parametrize("listens", [False, True])
def test_a_rank_that_connects_late_ends_its_wait_when_the_driver_has_given_up(
    listens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another group is formed at the address; the deadline of joining is far."""
    handlers = import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(handlers, "_rendezvous_handlers", dict(handlers._rendezvous_handlers))
    replace_rendezvous("secret")
    port, folder = free_port(), tmp_path / "late"
    place = {"world_size": 2, "secret": "secret", "timeout": timedelta(seconds=60)}
    store = open_store("127.0.0.1", port, rank=0, **place) if listens else None
    message = {
        **{"do": "connect", "host": "127.0.0.1", "port": port, "name": "late", "rank": 1},
        **{"world_size": 2, "backend": "gloo", "join_s": 600, "timeout_s": 600},
    }
    if listens:
        folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(Engine(tmp_path).send, **message, folder=str(folder))
        if store is not None:
            store.wait(["joined/late/1"])
            folder.rmdir()
        with pytest.raises(RuntimeError, match="the driver no longer forms group 'late'"):
            connecting.result(timeout=60)
    close_store(store)


def test_digests_tell_models_and_values_apart(tmp_path: Path) -> None:
    engine, digests = Engine(tmp_path), []
    for _ in range(2):
        engine.send(do="checksum", answer=str(tmp_path / "sums"))
        digests.append(json.loads((tmp_path / "sums").read_text()))
        engine.draft.column.data[0, 3] += 1e-6
    assert digests[0].keys() == {"0:rows", "0:total", "0:embedding", "1:column", "1:embedding"}
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} == {"1:column"}


def test_a_message_is_a_pickle_of_one_named_empty_tensor() -> None:
    """SGLang's unpickler admits ``torch.ByteTensor``; test_shards.py sends one to an engine."""
    message = {"do": "connect", "host": "node-ü", "port": 1}
    pickled = base64.b64decode(messages.serialised(message))
    ((text, data),) = pickle.load(io.BytesIO(pickled))
    assert json.loads(text) == message
    assert data.dtype == torch.uint8 and data.numel() == 0


def test_the_name_of_the_loader_is_its_function() -> None:
    module, _, function = messages.LOADER.rpartition(".")
    assert module == loader.__name__ and getattr(loader, function) is loader.load
