"""A real SGLang engine of each family, with the stand-ins for a CPU that docs/actor.md lists.

It starts with random weights. After a training step and an update its log-probs are those of the
trainer, so the update brings everything.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlpost.config.engine_groups import teacher_url_group
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import WeightUpdate
from rlpost.engines.group_client import GroupClient
from rlpost.engines.model_module import MODULE, PACKAGE, environment, modules_by_class
from rlpost.engines.places import Place, Places
from rlpost.rollout.teacher import TeacherServer
from rlpost.types import EngineAddress, Sample, TrainSample
from tests.contract.actor_ranks import run_ranks, step_and_score
from tests.contract.engines.test_sglang import Sender, buckets_of
from tests.contract.families import load_folder, load_model, make_family
from tests.contract.float32_ranks import make_published
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(900)
KEY, NEW_TOKENS = "families-key", 6
BUCKET_BYTES = 50_000
"""Small enough that a layer is in several buckets."""
SERVED = (
    "qwen2-moe",
    pytest.param("minimax-m2-moe", marks=pytest.mark.slow),
    pytest.param("glm4.7-flash-moe", marks=pytest.mark.slow),
    pytest.param("deepseek-v3-moe", marks=pytest.mark.slow),
    pytest.param("gemma3", marks=pytest.mark.slow),
    pytest.param("qwen3-yarn", marks=pytest.mark.slow),
    pytest.param("qwen2.5-yarn", marks=pytest.mark.slow),
    pytest.param("gpt-oss-moe", marks=pytest.mark.slow),
    pytest.param("qwen3-next-even-moe", marks=pytest.mark.slow),
    pytest.param("qwen3.5-even", marks=pytest.mark.slow),
    pytest.param("qwen3.5-even-moe", marks=pytest.mark.slow),
    pytest.param("qwen3-vl-moe", marks=pytest.mark.slow),
    pytest.param("qwen3.5-moe-published", marks=pytest.mark.slow),
    pytest.param("gemma3-published", marks=pytest.mark.slow),
    pytest.param("mistral3", marks=pytest.mark.slow),
)


def modules_of_models() -> dict[str, list[str]]:
    """Return the modules of each class that SGLang serves, in a process that imported all of them."""
    modules: dict[str, list[str]] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("sglang.srt.models.") and hasattr(module, "EntryClass"):
            listed = module.EntryClass
            for entry in listed if isinstance(listed, list) else [listed]:
                modules.setdefault(entry.__name__, []).append(name.rpartition(".")[2])
    return modules


def test_the_file_of_each_model_is_found_without_importing_it(forked: ForkedSglang) -> None:
    """Files that cannot be imported on this machine are found as well."""
    folder = Path(str(find_spec("sglang").origin)).parent / "srt" / "models"  # type: ignore[union-attr]
    served = forked.call(modules_of_models)
    found = modules_by_class(folder.glob("*.py"))
    assert len(served) > 200
    assert {name: found.get(name) for name in served} == served
    chosen = environment(["Qwen3MoeForCausalLM"], {})
    assert chosen[MODULE] == "sglang.srt.models.qwen3_moe"
    assert environment(["Unknown"], {}) == environment(None, {}) == environment([], {}) == {}
    assert environment(["Qwen3MoeForCausalLM"], {PACKAGE: "their_models"}) == {}


def as_answer(sample: TrainSample) -> Sample:
    prompt, response = (
        sample.token_ids[: sample.prompt_length],
        sample.token_ids[sample.prompt_length :],
    )
    return Sample(0, 0, prompt, response, (0.0,) * len(response), "", "length", 0)


async def scores(address: EngineAddress, samples: list[TrainSample]) -> list[list[float]]:
    """Return the engine's log-probs of given responses."""
    group, places = teacher_url_group(address.url, 120), Places()
    places.set_own([Place(group.settings.url[0], KEY, 64)])
    client = GroupClient(group, places)
    engine = TeacherServer(client)
    try:
        scored = [await engine.score(as_answer(sample)) for sample in samples]
        return [list(sample.teacher_logprobs or ()) for sample in scored]
    finally:
        await client.close()


async def generated(address: EngineAddress, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return a sampled answer and its log-probs."""
    client = EngineClient(address.url, KEY)
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer: Any = await client.request("POST", "/generate", body)
    entries = answer["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


async def update(address: EngineAddress, folder: Path, buckets: list[list[str]]) -> None:
    """Send the weights of a folder over a process group."""
    weights = load_folder(folder)
    whole = WeightUpdate([address], api_key=KEY, timeout_s=120)
    sender = Sender(weights, buckets_of(weights, buckets), secret=KEY)
    await sender.meet(whole)
    await whole.update(1, sender.mover)
    await sender.part(whole)


def difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Return the largest difference over all tokens."""
    pairs = zip(chain(*ours), chain(*theirs), strict=True)
    return max(abs(one - other) for one, other in pairs)


@torch.no_grad()
def transformers_logprobs(folder: Path, prompt: list[int], response: list[int]) -> list[float]:
    model = load_model(folder)
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("name", SERVED)
def test_an_updated_engine_has_the_log_probs_of_the_trainer(
    forked: ForkedSglang, tmp_path: Path, name: str
) -> None:
    old, new, samples = tmp_path / "old", tmp_path / "new", STEPS[0]
    make_family(old, name)
    settings = rank_config(str(old), lr=3e-2, distributed_timeout_minutes=5)
    (trained,) = run_ranks(
        step_and_score, 1, settings, samples=samples, export=str(new), bucket_bytes=BUCKET_BYTES
    )
    try:
        address = forked.start(old, KEY, tmp_path / "engine.log", load_format="dummy")
        before = asyncio.run(scores(address, samples))
        asyncio.run(update(address, new, trained["buckets"]))
        after = asyncio.run(scores(address, samples))
        prompt = [5, 6, 7]
        response, logprobs = asyncio.run(generated(address, prompt))
    finally:
        forked.stop()
    assert difference(before, after) > 0.1
    assert difference(trained["logprobs"], after) < 1e-4
    assert difference([transformers_logprobs(new, prompt, response)], [logprobs]) < 1e-4


def test_an_engine_in_bfloat16_has_the_decay_of_the_trainer_in_float32(
    forked: ForkedSglang, tmp_path: Path
) -> None:
    """After an update, as after a start from the exported folder; not with a rounded decay."""
    old, new, rounded, samples = tmp_path / "old", tmp_path / "new", tmp_path / "rounded", STEPS[0]
    make_published(old, "qwen3.5-even")
    settings = rank_config(str(old), bf16=True, lr=1e-4, distributed_timeout_minutes=5)
    (trained,) = run_ranks(
        step_and_score, 1, settings, samples=samples, export=str(new), bucket_bytes=BUCKET_BYTES
    )
    shutil.copytree(new, rounded)
    tensors = {
        name: one.bfloat16() if name.endswith("A_log") else one
        for name, one in load_folder(new).items()
    }
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    found = {}
    for case, folder, load_format in (
        ("updated", old, "dummy"),
        ("from disk", new, "auto"),
        ("rounded", rounded, "auto"),
    ):
        try:
            address = forked.start(
                folder, KEY, tmp_path / "log", load_format=load_format, dtype="bfloat16"
            )
            if case == "updated":
                asyncio.run(update(address, new, trained["buckets"]))
            found[case] = asyncio.run(scores(address, samples))
        finally:
            forked.stop()
    assert found["updated"] == found["from disk"]
    exact, other = (
        mean_difference(trained["logprobs"], found[case]) for case in ("updated", "rounded")
    )
    assert exact * 2 < other


def mean_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Return the mean difference over all tokens."""
    pairs = list(zip(chain(*ours), chain(*theirs), strict=True))
    return sum(abs(one - other) for one, other in pairs) / len(pairs)
