"""Each family compared with Hugging Face: logits, import and export of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.contract.actor_ranks import look, run_ranks
from tests.contract.families import (
    FAMILIES,
    FROM_OUTSIDE,
    VARIANTS,
    WITH_IMAGES,
    WITH_TENSOR_PARALLEL,
    load_folder,
    load_model,
    make_family,
)
from tests.contract.samples import STEPS
from tests.examples import install, write_examples
from tests.settings import rank_config
from tests.weights_hash import hash_of

pytestmark = pytest.mark.timeout(300)
SAMPLES = STEPS[0]
LAYOUTS = {
    "alone": (1, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
OF_PROCESSOR = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "chat_template.json",
)  # fmt: skip
EXPERT_PARALLEL = (2, {"expert_model_parallel_size": 2})
SHARDED = {"qwen3-vl-moe": "ep2", "qwen3.5-moe-published": "tp2-sp"}
CASES = [
    *((name, "tp2-sp") for name in (*FAMILIES, *FROM_OUTSIDE)),
    *((name, "alone") for name in (*VARIANTS, *WITH_IMAGES) if name not in SHARDED),
    *SHARDED.items(),
    ("qwen3-vl-moe", "tp2-sp"),
    ("minimax-m2-moe", "ep2"),
    ("qwen3.5-moe", "ep2"),
]


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Path, torch.Tensor]]]:
    """Return a function that makes a family's folder, and transformers' logits of the samples.

    The logits are computed one sequence at a time.
    """
    monkeypatch = pytest.MonkeyPatch()  # module scope; ranks inherit sys.path
    packages = tmp_path_factory.mktemp("packages")
    monkeypatch.syspath_prepend(
        str(install(write_examples(packages / "from") / "ernie", packages / "to"))
    )

    @cache
    def made(name: str) -> tuple[Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp("families") / name
        make_family(folder, name)
        for file in OF_PROCESSOR if name in WITH_IMAGES else ():
            (folder / file).write_text(f'{{"file":   "{file}"}}')  # no writer has these spaces
        theirs = load_model(folder)
        with torch.no_grad():
            logits = [theirs(torch.tensor([s.token_ids])).logits[0] for s in SAMPLES]
        return folder, torch.cat(logits)

    yield made
    monkeypatch.undo()


@pytest.mark.parametrize(("name", "layout_name"), CASES)
def test_packed_logits_equal_those_of_transformers_and_an_export_equals_its_import(
    model, tmp_path, name, layout_name
):
    folder, expected = model(name)
    num_ranks, layout = EXPERT_PARALLEL if layout_name == "ep2" else LAYOUTS[layout_name]
    if layout_name == "tp2-sp":
        layout = layout | WITH_TENSOR_PARALLEL.get(name, {})
    settings = rank_config(str(folder), distributed_timeout_minutes=2, **layout)
    for seen in run_ranks(look, num_ranks, settings, samples=SAMPLES, export=str(tmp_path)):
        ours = torch.from_numpy(seen["logits"])[: expected.size(0)]
        assert (ours - expected).abs().max().item() < 1e-5 * max(1.0, expected.abs().max().item())
    exported, original = load_folder(tmp_path), load_folder(folder)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)
    assert seen["hash"] == hash_of({key: original[key] for key in seen["hashed"]})
    if name in WITH_IMAGES:
        for file in ("config.json", *OF_PROCESSOR):
            assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


def test_experts_as_transformers_saves_them_are_refused_with_the_tensor_and_the_remedy(tmp_path):
    """It saves those of Qwen3-VL-MoE transposed, which SGLang does not read either."""
    make_family(tmp_path / "model", "qwen3-vl-moe", as_published=False)
    settings = rank_config(
        str(tmp_path / "model"), distributed_timeout_minutes=2, **LAYOUTS["tp2-sp"][1]
    )
    named = r"layers\.0\.mlp\.experts\.gate_up_proj in .*/model: each expert is \(96, 64\)"
    with pytest.raises(AssertionError, match=f"{named}.*transpose the last two dimensions"):
        run_ranks(look, 2, settings, samples=SAMPLES, export=str(tmp_path))
