"""What SGLang of the lock makes of open settings on sm90, sm100 and sm120.

With the packages of the lock it chooses kernels that it does not choose without them.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu_packages.processes import run

CODE = """
import json
from pathlib import Path
from tests.contract.resolved_kernels import chosen_alone, problems, write_configs
folders = write_configs(Path({folder!r}))
alone = {{gpu: sorted(chosen_alone(folders, gpu)) for gpu in ("sm90", "sm100")}}
print(json.dumps([problems(folders), alone]))
"""


def test_kernels_of_every_family_bear_updates_and_return_routes(tmp_path: Path) -> None:
    said = run(CODE.format(folder=str(tmp_path)), HF_HUB_OFFLINE="1").splitlines()[-1]
    problems, alone = json.loads(said)
    assert problems == []
    assert alone == {
        "sm90": ["triton_kernel"],
        "sm100": ["flashinfer_trtllm", "triton_kernel"],
    }
