"""docs/recipes.md: the recipes of jobs/recipes, with a row of their plan, and one whole plan.

Input: the recipes, with their models from the table [model]. Output: the text of the page, the same
on every machine.
"""

from __future__ import annotations

import io
import itertools

from rich.console import Console

from common.units import counted
from rlpost.cli.planned_gpus import GPU_MEMORY, parse_size
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.cards import RESERVE
from rlpost.extensions.planning.estimate import Estimate, estimate
from rlpost.extensions.planning.layout_search import layout_words
from rlpost.extensions.planning.nccl_memory import CUDA_CONTEXT
from rlpost.extensions.planning.plan_verb import WIDTH, Speed, bars, model_of, table

WITHOUT_PLAN = "tiny"  # half a million parameters, and its config.json is made by `make assets`

SHOWN = "glm45_355b"
"""The recipe whose whole plan is on the page; ``rlpost plan RECIPE`` prints those of the others."""

_HEAD = """\
# Recipes

Written by `make docs` from `jobs/recipes/*.toml`. Each has a batch script of its name in `jobs/`.
`jobs/recipes/small/` has the tiny model with adapters ([LoRA](lora.md)), with a teacher
([distillation](distillation.md)), with a critic ([PPO](ppo.md)), with [Muon](actor.md#muon), with
[supervised rows](data.md#supervised-rows) and for [environment packages](agents.md#adapters);
`tiny_images` is a tiny model that reads [images](data.md#images).

Configure the site once: fill in `jobs/clusters/site.toml` and run `make jobs`, or set three variables:

```bash
export RLPOST_IMAGE=/shared/images/rlpost.sqsh   # container image; not needed without containers
export RLPOST_ASSETS=/shared/assets              # folder with models and data
export SBATCH_ACCOUNT=rl                         # read by sbatch itself; not where there are no accounts
sbatch jobs/qwen3_4b.sbatch
```

The same file runs with pyxis, raw enroot or no container ([containers](containers.md#choosing-one)). If a variable is
missing, the job names it and exits with code 78; `./jobs/qwen3_4b.sbatch` checks this and more on the login node, then
submits itself.

Your own recipe may begin with `base = "qwen3_4b"` (a name here, or the path of a file): its keys then override those of
that recipe, as in `jobs/recipes/glm46_355b.toml`.

## Models and data

```bash
rlpost fetch RECIPE --sizes-only
rlpost fetch RECIPE
sbatch jobs/convert_qwen3_4b.sbatch
```

`rlpost fetch` downloads what the recipe's table `[assets]` names from the Hugging
Face hub into `$RLPOST_ASSETS`, each repository to the folder of its last name (`Qwen3-4B`, `dapo-math-17k`,
`aime-2024`). It needs `huggingface_hub` and `filelock`. First it prints the present files, the remaining downloads and
the free space, and rejects a download that does not fit (quotas are not visible to it).

- A folder appears under its name when every file in it has the size and the digest that the hub names (SHA-256
  of large files, git's of small ones). Until then it is in `$RLPOST_ASSETS/.fetch`. `.rlpost-asset.json` in it
  keeps commit and digests; `--compare` checks all files against them and fetches damaged ones again.
- After an interruption, the next call checks the present files and downloads incomplete files again.
- If two processes fetch one repository, on any nodes, one downloads. The other waits (`--wait-s`) and prints the
  process that it waits for. The lock is a file with a heartbeat and does not depend on `flock`. When its holder dies,
  fetches on the same node continue at once, those on other nodes after three minutes.
- Present files are not requested again; if all are present, or with `HF_HUB_OFFLINE=1`, no network is used. A folder
  that another tool has created is compared with the hub; its files are never changed.
- Private and gated repositories: `HF_TOKEN` in the environment, `hf auth login`, or `--token-file FILE` (mode 600;
  the token alone, or as `HF_TOKEN=...` such as in `secrets.env`). The token is sent to the hub only and appears in no
  command line or log.
- `name@revision` in `[assets]` pins a commit. Weights in other formats are skipped where there are safetensors.
- Through a mirror: `HF_ENDPOINT`. Downloads are those of `huggingface_hub`.

If a recipe names weights in Megatron's format (`--ref-load`), `rlpost convert RECIPE` (or
`sbatch jobs/convert_NAME.sbatch`) converts the fetched folder, on two nodes for GLM-4.5; `--ref-load` also accepts the
model's own folder. The converted folder, too, appears only when it is complete. The rendezvous address of the ranks is
the first node's name unless `MASTER_ADDR` is set.

`rlpost check RECIPE` validates a recipe, `rlpost plan RECIPE` prints its resource needs. The values are those of the
published scripts; where these are inconsistent, a comment in the recipe names the correct value and the reason.
`tests/golden/recipes.md` lists both, key by key.

"""

_PLAN = """\
## The planner

```bash
rlpost plan RECIPE
rlpost plan RECIPE --gpus 16 --gpu-memory 141GB
rlpost plan RECIPE --suggest
```

It needs neither GPUs nor the weights: the model is that of `config.json`, or of the recipe's line `model`. Exit code 2
means that the layout does not fit; the output then names the nearest layout that does, with its flags. `--suggest`
searches all layouts of the model on this number of GPUs.

| | how it is counted | checked against |
|---|---|---|
| parameters | matrix by matrix, for each pipeline stage, experts apart | Megatron-core's modules on every rank of every recipe, and transformers' model, at full size on the meta device: equal |
| weights, gradients, optimizer | ZeRO ([1910.02054](https://arxiv.org/abs/1910.02054)): 2 + 4 + 12 bytes a parameter in BF16, the 12 over all ranks with the same weights; in host memory 16 | buffers and optimizer shards of every rank of every recipe: equal but for padding; memory under the tensors of small models after a step: within a tenth |
| activations | Korthikanti et al. ([2205.05198](https://arxiv.org/abs/2205.05198)) for gated MLPs, grouped queries, experts, attention without stored scores | what autograd keeps for small models: within a tenth; the peak of a [rehearsal](rehearsal.md): 4 % below to 4 % above it |
| micro-batches in flight | Narayanan et al. ([2104.04473](https://arxiv.org/abs/2104.04473)) | |
| weight update | all weights, in FP8 without embeddings, norms and routers; buffers three times the largest bucket | the plan of every rank of every recipe: equal |
| engine weights | SGLang's sharding: attention over its replica, embedding and head too with DP attention, routers and narrow projections whole on each GPU | parameters of SGLang's models at full size on the meta device, with the settings of the recipes: within 5 % |
| KV cache | `mem_fraction_static` of the memory that is free when the first engine starts, less the weights; 2 x layers x KV heads x width x 2 bytes a token | SGLang's own functions for the free memory, the default of `mem_fraction_static` and the bytes of a token: within 5 % |
| CUDA graphs | SGLang's allowance of 2 MiB for each request of the largest batch; on the GPU while engines generate, in host memory while the trainer works | SGLang's own function |
| CUDA, NCCL | {context:.1f} GB for each process, and the buffers of each communicator from NCCL's source, by its size, the ranks on a node and NVLink SHARP (`NCCL_NVLS_ENABLE`) | the communicators of a rehearsed rank: equal; their bytes: read, not measured (`rlpost/extensions/planning/nccl_memory.py` names its sources) |
| host memory | pinned gradients of an offloaded optimizer rounded up to powers of two, as torch does | the line of torch |
| export, hash of the weights | two buckets of at most 512 MiB with the largest tensor, and NCCL's group of a stage's ranks | not measured |
| what fits | sums up to {reserve:.0%} of a GPU | |

`--gpu-memory` is the memory that CUDA reports: 79.11 GiB = 84.9 GB for an H100 that is sold with 80 GB. The trainer's
communicators exist from the first step on, and NCCL keeps their buffers while engines generate. An engine that starts
later finds less free memory, and its KV cache is smaller by `mem_fraction_static` of the difference.

Not included: imbalance between experts, fragmentation beyond that reserve, and DeepEP. Linear attention and sliding
windows are counted in the KV cache as full attention. For
TransformerEngine's fused kernels the sums use their documented activations; they were checked without these kernels
only. The time of a step, and with it the order of `--suggest`, is [arithmetic](speed.md#what-the-planner-predicts).

## All recipes on {memory} GPUs

`rlpost plan RECIPE` prints the whole plan, as [below](#{shown}).

| recipe | parameters | trainer | peak of a GPU | host a node | checkpoint |
|---|---|---|---|---|---|
{rows}
"""  # noqa: E501


def recipes_page() -> str:
    """The text of docs/recipes.md."""
    names = sorted(
        path.stem for path in (JOBS / "recipes").glob("*.toml") if path.stem != WITHOUT_PLAN
    )
    plans = {name: _planned(name) for name in names}
    rows = "\n".join(_row(name, made) for name, made in plans.items())
    text = _PLAN.format(
        context=CUDA_CONTEXT / 1e9,
        reserve=RESERVE,
        memory=GPU_MEMORY,
        shown=SHOWN,
        rows=rows,
    )
    return _HEAD + text + "".join(_section(name, made) for name, made in plans.items())


def _planned(name: str) -> Estimate:
    config = load(files_of(JOBS / "recipes" / f"{name}.toml"), {}).config
    shape, width = model_of(config)
    return estimate(config, shape, gpu_bytes=parse_size(GPU_MEMORY), engine_width=width)


def _row(name: str, made: Estimate) -> str:
    peak = max(made.phases, key=lambda phase: phase.total)
    layout = layout_words(made)
    cells = (
        f"[{name}](../jobs/recipes/{name}.toml)",
        f"{made.shape.parameters.total / 1e9:.2f}B",
        f"{counted(made.layout.world, 'GPU')}: {layout}",
        f"{peak.total / 1e9:.0f} GB ({peak.name})",
        f"{made.host_bytes_per_node / 1e9:.0f} GB",
        f"{made.checkpoint_bytes / 1e9:.0f} GB",
    )
    return f"| {' | '.join(cells)} |"


def _section(name: str, made: Estimate) -> str:
    if name != SHOWN:
        return f"\n## {name}\n\n{_head_of(name)}\n"
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, highlight=False)
    console.print(table(made, Speed()))
    console.print(bars(made))
    body = "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
    return f"\n## {name}\n\n{_head_of(name)}\n\n```text\n{body}\n```\n"


def _head_of(name: str) -> str:
    """The comment at the beginning of a recipe, which describes it."""
    lines = (JOBS / "recipes" / f"{name}.toml").read_text().splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").strip() for line in head)
