"""Weights received in slices are bit for bit those that SGLang's own ``load_weights`` makes.

Every family, on each rank of engines with one and two ranks, and with the experts of two.
"""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpost.engines.engine_client import EngineClient
from rlpost.engines.load_check import check_ranks
from rlpost.engines.shards import messages
from rlpost.errors import EngineNotPrepared, RolloutError
from rlpost.extensions.converting.fp8_folder import write_fp8_folder
from rlpost.models.regions import Box, Boxes, group_from_json
from rlpost.trainer.weights.engine_group import EngineGroup
from tests.contract.families import (
    FAMILIES,
    LATENT_MTP,
    MTP,
    SERVED,
    VARIANTS,
    WITH_IMAGES,
    load_folder,
    make_family,
)
from tests.contract.float32_ranks import FLOAT32, make_published
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.forked.shard_models import (
    Compared,
    Layout,
    answers_of_two_ranks,
    compare_all,
    cut,
    flushes,
    other_values,
)
from tests.contract.forked.test_engine_parameters import (
    BLOCK,
    IN_FP8,
    WITHOUT_INTERVAL,
)
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(900)
KEY, GROUP = "shards-key", "shards"
DEADLINE = timedelta(seconds=120)
SAME_TENSORS = {"gemma3-capped", "llama3.1", "llama3.1-shorter", "qwen2-moe-window", "qwen2.5-linear",
                "qwen2.5-yarn", "qwen3-long", "qwen3-moe-window", "qwen3-yarn"}  # fmt: skip
"""Models with the class and the tensors of another: their positions or windows differ, and no loader
reads these."""
ALL = tuple(
    name
    for name in (*FAMILIES, *VARIANTS, *SERVED, MTP, LATENT_MTP, *WITH_IMAGES)
    if name not in WITHOUT_INTERVAL | SAME_TENSORS and name != "gemma3-published"
)
"""Without Gemma-3 as published: SGLang 0.5.21 finds no parameter for the names that transformers 5
gives the encoder, on either way of an update."""
WHOLE, FIRST, SECOND = Layout(), Layout(tp_size=2, rank=0), Layout(tp_size=2, rank=1)
EXPERTS = Layout(tp_size=2, ep_size=2, rank=1)
ON_FIRST = ("qwen3", "gpt-oss-moe", "deepseek-v3-moe")
"""Families whose first rank of two is compared: it has the biases that others leave out, and slices
that begin as those of a whole model."""
DRAFTS = (
    (MTP, Layout(tp_size=2, draft="Glm4MoeForCausalLMNextN")),
    (LATENT_MTP, Layout(tp_size=2, draft="DeepseekV3ForCausalLMNextN")),
)
NO_EXPERT_PARALLEL = {"gpt-oss-moe"}
"""SGLang 0.5.21 cannot load its experts in bfloat16 with expert parallelism."""
LEFT_OUT = (MTP, LATENT_MTP, "qwen3-moe")
"""Families of which a policy needs not all: those with a draft layer, and one with a dense layer, for
which SGLang 0.5.21 has experts (``rlpost check`` refuses it)."""
NOT_WHOLE_BLOCKS = "is not divisible by weight quantization block"
"""In SGLang's refusal of FP8 shards; ``rlpost check`` refuses them as well."""
REFUSED_IN_FP8 = {"deepseek-v3-wide-moe", "qwen3-next-even-moe", "qwen3.5-even-moe"}
BY_NAME = {
    "kv_a_proj_with_mqa.weight": "cat",
    "kv_a_proj_with_mqa.weight_scale_inv": "cat",
    "q_a_proj.weight": "cat",
    "q_a_proj.weight_scale_inv": "cat",
    "experts.down_proj_bias": "zero_",
    "norm.weight": "add.out",
}
"""Ends of the names of tensors that are loaded by name, and the function that is the reason."""


def cases(names: tuple[str, ...], layouts: tuple[Layout, ...]) -> list[tuple[str, Layout]]:
    return [
        (name, layout)
        for name in names
        for layout in layouts
        if layout.ep_size == 1 or ("moe" in name and name not in NO_EXPERT_PARALLEL)
    ]


def compare_families(
    forked: ForkedSglang, base: Path, chosen: list[tuple[str, Layout]]
) -> dict[tuple[str, Layout], Compared | str]:
    folders = {name: base / name for name, _ in chosen}
    for name, folder in folders.items():
        make_family(folder, name)
    outcomes = compare_folders(forked, [(folders[name], layout) for name, layout in chosen])
    return dict(zip(chosen, outcomes, strict=True))


def compare_folders(
    forked: ForkedSglang, chosen: list[tuple[Path, Layout]]
) -> list[Compared | str]:
    """Compare in one process for each layout, because SGLang fixes the sizes of its groups."""
    outcomes: dict[tuple[Path, Layout], Compared | str] = {}
    for layout in dict.fromkeys(layout for _, layout in chosen):
        of_layout = [case for case in chosen if case[1] == layout]
        answers = forked.call(compare_all, of_layout)
        outcomes |= zip(of_layout, answers, strict=True)
    return [outcomes[case] for case in chosen]


def check(case: tuple[str, Layout], outcome: Compared | str) -> None:
    assert isinstance(outcome, Compared), f"{case}: {outcome}"
    assert outcome.changed == [], f"{case}: the recording changed tensors"
    assert outcome.differing == [], f"{case}: tensors differ from those of load_weights"
    for name, reason in outcome.reasons.items():
        end = next((end for end in BY_NAME if name.endswith(end)), None)
        assert end is not None and BY_NAME[end] in reason, f"{case}: {name} {reason}"


def test_an_update_in_slices_is_what_sglang_loads(forked: ForkedSglang, tmp_path: Path) -> None:
    chosen = cases(ALL, (WHOLE, SECOND, EXPERTS)) + cases(ON_FIRST, (FIRST,))
    outcomes = compare_families(forked, tmp_path, [*chosen, *DRAFTS])
    for case, outcome in outcomes.items():
        check(case, outcome)
        if case[1] == WHOLE and case[0] not in LEFT_OUT:
            assert not outcome.problem, f"{case}: the trainer's own model is refused"
    of_layouts = ([outcomes[name, one] for one in (WHOLE, SECOND)] for name in ALL)
    for whole_model, half in of_layouts:
        assert isinstance(whole_model, Compared) and isinstance(half, Compared)
        check_ranks("here", [whole_model.answer, half.answer], half.names)
        assert len(half.answer["filled"]) > 10, "what fills the parameters is not known"
    needed = outcomes["qwen3-moe", EXPERTS]
    assert isinstance(needed, Compared)
    assert needed.num_bytes < 0.7 * needed.total_bytes, "a rank gets tensors that it does not hold"


def test_float32_weights_of_a_model_in_bfloat16_in_slices(
    forked: ForkedSglang, tmp_path: Path
) -> None:
    """The engine has the decay in float32, and rounds the norm while it loads it."""
    chosen = []
    for name in ("qwen3.5-even", "qwen3-next-even-moe"):
        make_published(tmp_path / name, name)
        chosen += [(tmp_path / name, layout) for layout in (WHOLE, SECOND)]
    for (folder, layout), outcome in zip(chosen, compare_folders(forked, chosen), strict=True):
        check((folder.name, layout), outcome)
        assert isinstance(outcome, Compared)
        ends = {name: kind for name, kind in outcome.types.items() if name.endswith(FLOAT32)}
        assert ends == {
            name: "torch.float32" if name.endswith("A_log") else "torch.bfloat16" for name in ends
        }
        assert ends


def test_fp8_blocks_and_their_scales_in_slices(forked: ForkedSglang, tmp_path: Path) -> None:
    folders = []
    for name in IN_FP8:
        make_family(tmp_path / name, name)
        folders.append(tmp_path / f"{name}-fp8")
        write_fp8_folder(tmp_path / name, folders[-1], block=BLOCK)
    chosen = [(folder, layout) for folder in folders for layout in (WHOLE, SECOND)]
    refused = set()
    for (folder, layout), outcome in zip(chosen, compare_folders(forked, chosen), strict=True):
        name = folder.name.removesuffix("-fp8")
        if layout == SECOND and isinstance(outcome, str) and NOT_WHOLE_BLOCKS in outcome:
            refused.add(name)
        else:
            check((name, layout), outcome)
            if layout == WHOLE and name not in LEFT_OUT:
                assert not outcome.problem, f"{name}: the trainer's own model is refused"
    assert refused <= REFUSED_IN_FP8


def test_what_one_rank_of_an_engine_cannot_load_is_the_answer_of_all(
    forked: ForkedSglang, tmp_path: Path
) -> None:
    """SGLang 0.5.21 returns the answer of the first rank alone, which is a success here."""
    make_family(tmp_path / "model", "qwen3")
    answers = forked.call(answers_of_two_ranks, tmp_path / "model", tmp_path / "store")
    assert answers[0] == answers[1]
    assert not answers[0][0] and answers[0][1].startswith("rank 1: Failed to update parameter")


def test_a_flush_fails_if_a_data_parallel_rank_keeps_its_cache(forked: ForkedSglang) -> None:
    """SGLang 0.5.21 answers with what the first of them says."""
    answers = forked.call(flushes, [[True], [True, True], [True, False, True], [False, True]])
    assert answers == [(True, "rank 0"), (True, "rank 0"), (False, "rank 1"), (False, "rank 0")]


class Trainer:
    """One sender, which holds all tensors, and an engine of two ranks."""

    def __init__(self, client: EngineClient, folder: Path, num_ranks: int) -> None:
        self.client, self.folder, self.num_ranks, self.count = client, folder, num_ranks, 0

    async def send(self, version: int | None = None, **fields: object) -> None:
        """Send a message to each rank; ``{rank}`` in a field is its number."""
        self.count += 1
        payloads = []
        for rank in range(self.num_ranks):
            message = {"id": self.count} | fields
            for key, value in fields.items():
                if isinstance(value, str):
                    message[key] = value.replace("{rank}", str(rank))
            if "rank" in fields:
                message["rank"] = 1 + rank
            payloads.append(messages.serialised(message))
        await self.client.send_to_loader(payloads, version=version)

    async def record(self, tensors: dict[str, torch.Tensor]) -> None:
        """Record, and plan two buckets for each rank: whole tensors, and slices."""
        types = {
            name: (tuple(one.shape), str(one.dtype).removeprefix("torch."))
            for name, one in tensors.items()
        }
        (self.folder / "tensors.json").write_text(json.dumps(types))
        answer = str(self.folder / "answer-{rank}.json")
        await self.send(do="record", tensors=str(self.folder / "tensors.json"), answer=answer)
        self.buckets: list[list[list[Box]]] = []
        for rank in range(self.num_ranks):
            recorded = json.loads((self.folder / f"answer-{rank}.json").read_text())
            groups = tuple(group_from_json(one, list(types)) for one in recorded["boxes"])
            boxes = list(Boxes(groups))
            by_name = [box for box in boxes if box.tensor in recorded["reasons"]]
            slices = list(dict.fromkeys(box for box in boxes if box not in by_name))
            self.buckets.append([by_name, slices])
            plan = messages.plan_to_json(
                types, [[(0, Boxes.of(bucket))] for bucket in self.buckets[-1]]
            )
            (self.folder / f"plan-{rank}.json").write_text(json.dumps(plan))
        await self.send(do="plan", file=str(self.folder / "plan-{rank}.json"))

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of all tensors of each rank."""
        await self.send(do="checksum", answer=str(self.folder / "sums-{rank}.json"))
        files = [self.folder / f"sums-{rank}.json" for rank in range(self.num_ranks)]
        return [json.loads(file.read_text()) for file in files]

    def meeting(self, port: int) -> dict[str, object]:
        """The fields of ``connect``."""
        return {
            "do": "connect", "host": "127.0.0.1", "port": port, "rank": 0,
            "world_size": 1 + self.num_ranks, "name": GROUP, "backend": "gloo",
            "join_s": 120, "timeout_s": 120, "folder": str(self.folder),
        }  # fmt: skip

    async def connect(self) -> None:
        port = free_ports(1)[0]
        joining = asyncio.to_thread(self.join, port)
        await asyncio.gather(joining, self.send(**self.meeting(port)))

    def join(self, port: int) -> None:
        self.group = EngineGroup.form(
            ("127.0.0.1", port),
            name=GROUP,
            num_engine_ranks=self.num_ranks,
            backend="gloo",
            timeout=DEADLINE,
            join=DEADLINE,
            secret=KEY,
            cancelled=threading.Event(),
            joined_as=GROUP,
        )
        self.group.meet(torch.device("cpu"), within=DEADLINE)

    async def update(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        for number in range(2):
            last = version if number == 1 else None
            sending = asyncio.to_thread(self.transmit, tensors, number)
            await asyncio.gather(self.send(last, do="receive", bucket=number), sending)

    def transmit(self, tensors: dict[str, torch.Tensor], number: int) -> None:
        self.group.send_messages(
            {
                1 + rank: torch.cat([cut(tensors[box.tensor], box) for box in buckets[number]])
                for rank, buckets in enumerate(self.buckets)
            }
        )


def test_an_engine_of_two_ranks_receives_its_slices(forked: ForkedSglang, tmp_path: Path) -> None:
    """Two updates over a process group; checksums are those after SGLang read a folder.

    A failure on one rank is an answer of the engine, which takes the next message. The trainer leaves
    the group while the engine waits for a bucket, and sends it over another.
    """
    name, ranks = "deepseek-v3-moe", 2
    old, new = tmp_path / "old", tmp_path / "new"
    make_family(old, name)
    make_family(new, name)
    first = load_folder(old)
    second = other_values(first, 3)
    (new / "model.safetensors").unlink()
    save_file(second, new / "model.safetensors", metadata={"format": "pt"})

    async def run(url: str) -> None:
        client = EngineClient(url, KEY, timeout_s=300)
        assert await client.has_shard_loader()
        await client.pause()
        trainer = Trainer(client, tmp_path, ranks)
        await client.begin_weight_update()
        with pytest.raises(EngineNotPrepared, match=r"rank 0: .*rank 1: .* has not recorded"):
            await trainer.send(do="receive", bucket=0)
        await trainer.record(first)
        (tmp_path / "half-0.json").write_bytes((tmp_path / "plan-0.json").read_bytes())
        with pytest.raises(RolloutError, match=r"failed: rank 1: FileNotFoundError"):
            await trainer.send(do="plan", file=str(tmp_path / "half-{rank}.json"))
        with pytest.raises(RolloutError, match=r"rank 0: .* not complete after 1 s.*rank 1: "):
            await trainer.send(**trainer.meeting(free_ports(1)[0]) | {"join_s": 1})
        await trainer.connect()
        await trainer.update(first, 1)
        await client.end_weight_update()
        assert await client.weight_version() == "1"
        ours = [await sums(trainer)]
        await client.begin_weight_update()
        leaving = asyncio.to_thread(trainer.group.leave)
        with pytest.raises(RolloutError, match=r"rank 0: .*; rank 1: "):
            await asyncio.gather(trainer.send(do="receive", bucket=0), leaving)
        await trainer.connect()
        await trainer.update(second, 2)
        await trainer.send(do="disconnect")
        await client.end_weight_update()
        assert await client.weight_version() == "2"
        ours.append(await sums(trainer))
        trainer.group.leave()
        theirs = []
        for version, folder in enumerate((old, new), start=3):
            await client.update_weights_from_disk(str(folder), version=version)
            theirs.append(await sums(trainer))
        assert ours == theirs
        assert ours[0] != ours[1]

    async def sums(trainer: Trainer) -> list[dict[str, str]]:
        await trainer.client.begin_weight_update()
        sums = await trainer.checksums()
        await trainer.client.end_weight_update()
        return sums

    try:
        address = forked.start(
            old, KEY, tmp_path / "engine.log", load_format="dummy", tp_size=ranks
        )
        asyncio.run(run(address.url))
    finally:
        forked.stop()
