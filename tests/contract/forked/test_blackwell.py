"""On Blackwell engines keep weights in the layout of the checkpoint, also where SGLang would not.

SGLang resolves the settings of an engine as on a GPU of sm100; nothing is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.engines.blackwell import DENSE, EXPERTS, TRITON, updatable_kernels
from tests.contract.families import FAMILIES, make_family_config
from tests.contract.forked.forked_sglang import ForkedSglang

SM100 = (10, 0)
WITH_EXPERTS = sorted(name for name in FAMILIES if "moe" in name)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def resolved(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The kernels that SGLang chooses on sm100, for model folders with given settings."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    facts = {"is_cuda": True, "is_sm100": True, "is_blackwell": True, "is_sm90": False}
    chosen = []
    with override_platform(**facts):
        for folder, given in cases:
            args = ServerArgs(model_path=folder, skip_tokenizer_init=True, device="cpu", **given)
            args.resolve_once()
            view = resolving_view(args)
            chosen.append({name: getattr(view, name) for name in (EXPERTS, DENSE)})
    return chosen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blackwell")
    for name in WITH_EXPERTS:
        make_family_config(root / name, name)
        file = root / name / "config.json"
        quantised = json.loads(file.read_text()) | {"quantization_config": FP8}
        (root / f"{name}-fp8").mkdir()
        (root / f"{name}-fp8/config.json").write_text(json.dumps(quantised))
    return root


@pytest.mark.parametrize("suffix", ["", "-fp8"])
def test_experts_of_every_family_stay_as_they_are_stored(
    forked: ForkedSglang, folders: Path, suffix: str
) -> None:
    paths = [folders / f"{name}{suffix}" for name in WITH_EXPERTS]
    configs = [json.loads((path / "config.json").read_text()) for path in paths]
    ours = [updatable_kernels({}, config, SM100) for config in configs]
    cases = list(zip(map(str, paths), ours, strict=True))
    by_itself = [(folder, {}) for folder, _ in cases]
    kernels = forked.call(resolved, [*cases, *by_itself])
    for name, chosen in zip(WITH_EXPERTS, kernels, strict=False):
        assert chosen[EXPERTS] == TRITON, name
        assert not suffix or chosen[DENSE] == TRITON, name
    alone = {chosen[EXPERTS] for chosen in kernels[len(cases) :]}
    assert "flashinfer_trtllm" in alone, "SGLang chooses no other kernel any more"
