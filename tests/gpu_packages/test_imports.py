"""What the processes of a run import on a GPU node: everything that they need, and no more."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.gpu_packages.processes import run

NATIVE = {"deep_ep", "deep_gemm", "flashinfer", "sgl_kernel", "sglang", "ray"}
"""Packages whose import runs native code, or takes seconds."""


@dataclass(frozen=True)
class Role:
    """A process of a run."""

    modules: tuple[str, ...]
    native: frozenset[str] = frozenset()
    """The packages of NATIVE that it needs."""


ROLES = {
    "trainer rank": Role(("rlpost.trainer.actor",)),
    "converter": Role(
        ("rlpost.extensions.converting.convert", "rlpost.extensions.converting.conversion")
    ),
    "driver": Role(("rlpost.driver.driver", "rlpost.driver.workers"), frozenset({"ray"})),
    "engine": Role(
        (
            "rlpost.engines.server",
            "rlpost.engines.engine_processes",
            "sglang.srt.entrypoints.http_server",
            "sglang.srt.managers.scheduler",
        ),
        frozenset({"sglang", "sgl_kernel", "flashinfer", "deep_gemm"}),
    ),
    "agent": Role(("bootstrap.agent.__main__", "bootstrap.doctor.examination")),
    "login node": Role(("rlpost.cli.main", "rlpost.cli.check_settings")),
}
CODE = """
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps([name for name in {native!r} if sys.modules.get(name) is not None]))
"""


@pytest.mark.parametrize("name", ROLES)
def test_a_process_imports_the_packages_that_it_needs_alone(name: str) -> None:
    role = ROLES[name]
    code = CODE.format(modules=role.modules, native=sorted(NATIVE))
    imported = set(json.loads(run(code).splitlines()[-1]))
    assert imported <= role.native, f"{imported - role.native} are not used"
