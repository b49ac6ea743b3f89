"""Mistakes of newcomers, by subject: the command, its files and variables, and the remedies that
its message proposes.

Data for ``test_mistakes``. Each command runs in a folder that has ``recipe.toml``, a model,
prompts, and in ``assets`` the files that the recipes of jobs/recipes name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlpost.durable.commit import checkpoint_name

PROMPT = '{"prompt": "1+1=", "label": "2"}\n'
ASSETS = {"RLPOST_ASSETS": "assets"}
NO_ASSETS: Mapping[str, str] = {}
FILTER = "def keep(group):\n    return True\n"


@dataclass(frozen=True)
class Mistake:
    """One command that is refused.

    Attributes:
        fixed: commands that follow the remedies of the message; each must run.
        files: text of files by path, written before; None removes the file or folder.
        environ: variables; a value is a path relative to the folder, unless it begins with '='.
        lacking: packages that appear as not installed.
        on_gpus: whether torch appears as built for GPUs.
    """

    title: str
    command: str
    fixed: tuple[str, ...] = ()
    files: Mapping[str, str | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: ASSETS)
    lacking: tuple[str, ...] = ()
    on_gpus: bool = False


def _of_check(
    title: str, words: str, *fixed: str, recipe: str = "recipe.toml", **more: object
) -> Mistake:
    """A mistake of ``rlpost check``; ``fixed`` holds the arguments of the remedies."""
    command = f"rlpost check {recipe} {words}".rstrip()
    return Mistake(
        title, command, tuple(f"rlpost check {recipe} {one}".rstrip() for one in fixed), **more
    )


COMMAND_LINE = [
    _of_check(
        "An abbreviation of the field",
        "--tp 4",
        "--tensor-model-parallel-size 4",
        recipe="qwen3_4b",
    ),
    _of_check("The learning rate by its long name", "--learning-rate 1e-6", "--lr 1e-6"),
    _of_check(
        "An ambiguous batch size", "--bs 8", "--rollout-batch-size 8", "--global-batch-size 8"
    ),
    _of_check("The data-parallel size", "--dp 2"),
    _of_check("A short option", "-n 8", "--n-samples-per-prompt 8"),
    _of_check("A misspelt flag", "--n-sample-per-prompt 8", "--n-samples-per-prompt 8"),
    _of_check("An unknown flag", "--frobnicate 1"),
    _of_check("A flag without its value", "--nodes", "--nodes 1"),
    _of_check("An invalid value of a switch", "--colocate maybe", "--colocate true"),
    _of_check("An invalid number", "--lr fast", "--lr 1e-5"),
    _of_check("A number out of range", "--rollout-top-p 1.5", "--rollout-top-p 1"),
    _of_check("A count of zero", "--nodes 0", "--nodes 1"),
    _of_check("A misspelt choice", "--advantage-estimator grp", "--advantage-estimator grpo"),
    _of_check("A recipe after the flags", "--nodes 1 recipe.toml", "--nodes 1"),
    Mistake(
        "A recipe's name after a switch",
        "rlpost submit --dry-run qwen3_4b",
        ("rlpost submit qwen3_4b --dry-run",),
    ),
    _of_check("Two values for a flag that takes one", "--nodes 1 2", "--nodes 1"),
    Mistake("A misspelt verb", "rlpost chek recipe.toml", ("rlpost check recipe.toml",)),
    Mistake(
        "A verb of another tool",
        "rlpost train recipe.toml",
        ("rlpost submit recipe.toml --dry-run",),
    ),
    Mistake(
        "A memory size without its unit",
        "rlpost plan qwen3_4b --gpu-memory 80",
        ("rlpost plan qwen3_4b --gpu-memory 80GB",),
    ),
    _of_check(
        "A size in megabytes where bytes are meant",
        "--ray-object-store-memory 100MB",
        "--ray-object-store-memory 100000000",
    ),
    _of_check(
        "An object store that is smaller than Ray's minimum",
        "--ray-object-store-memory 100",
        "--ray-object-store-memory 78643200",
    ),
    Mistake("A recipe without a verb", "rlpost recipe.toml", ("rlpost check recipe.toml",)),
    Mistake("No recipe at all", "rlpost check", ("rlpost check qwen3_4b",)),
]

FILES = [
    Mistake("A recipe's name misspelt", "rlpost check qwen3-4b", ("rlpost check qwen3_4b",)),
    Mistake("An unknown recipe", "rlpost check mistral"),
    Mistake("A recipe's path misspelt", "rlpost check recipes.toml", ("rlpost check recipe.toml",)),
    _of_check("A cluster profile misspelt", "--cluster sit", "--cluster local"),
    _of_check("A model's file misspelt", "--model qwen3-4b"),
    Mistake(
        "Tables and keys of a recipe misspelt",
        "rlpost check mine.toml",
        files={"mine.toml": "[clutser]\nnodes = 2\n[cluster]\nnods = 2\nlr = 1\n[perf]\ntp = 2\n"},
    ),
    Mistake(
        "A recipe that is not valid TOML",
        "rlpost check mine.toml",
        files={"mine.toml": "[cluster\nnodes = 2\n"},
    ),
    Mistake(
        "A text without quotes in a recipe",
        "rlpost check mine.toml",
        files={"mine.toml": "[rollout]\nrm_type = exact_match\n"},
    ),
    Mistake(
        "A key twice in a recipe",
        "rlpost check mine.toml",
        files={"mine.toml": "[cluster]\nnodes = 1\nnodes = 2\n"},
    ),
    Mistake(
        "A number for a text, and a text for a list, in a recipe",
        "rlpost check mine.toml",
        files={"mine.toml": "[cluster]\ntime = 30\n[eval]\neval_prompt_data = 'prompts.jsonl'\n"},
    ),
    _of_check(
        "Two files with a comma between them",
        "--prompt-data prompts.jsonl,more.jsonl",
        "--prompt-data prompts.jsonl more.jsonl",
        files={"more.jsonl": PROMPT},
    ),
    _of_check(
        "The key of an evaluation file",
        "--eval-prompt-data test questions.jsonl --eval-interval 5",
        "--eval-prompt-data test questions.jsonl --eval-interval 5 --eval-input-key question",
        files={"questions.jsonl": PROMPT.replace("prompt", "question")},
    ),
    _of_check(
        "No evaluation",
        "--eval-prompt-data test prompts.jsonl --eval-interval 0",
        "--eval-prompt-data test prompts.jsonl --eval-interval none",
    ),
    Mistake(
        "A wrong value in a recipe",
        "rlpost check mine.toml",
        files={"mine.toml": "[cluster]\nnodes = 'two'\n[optimizer]\nlr = -1.0\n"},
    ),
]

LAYOUT = [
    _of_check(
        "A tensor-parallel size that does not divide the GPUs",
        "--tensor-model-parallel-size 3",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 8",
        recipe="qwen3_4b",
    ),
    _of_check(
        "An odd number of GPUs",
        "--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2 --rollout-num-gpus 1",
        "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --rollout-num-gpus 1",
        "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --rollout-num-gpus 1",
    ),
    _of_check(
        "GLM-4.5 on a quarter of its nodes",
        "--actor-num-nodes 2",
        "--actor-num-nodes 8",
        recipe="glm45_355b",
    ),
    _of_check(
        "GLM-4.5 in an allocation of half its nodes",
        "--nodes 4",
        "--nodes 8",
        "--nodes 4 --actor-num-nodes 4 --expert-model-parallel-size 4",
        recipe="glm45_355b",
    ),
    _of_check(
        "More training GPUs than a node has",
        "--actor-num-gpus-per-node 8",
        "--actor-num-gpus-per-node 4",
        "--actor-num-gpus-per-node 8 --num-gpus-per-node 8",
    ),
    _of_check(
        "Experts over more GPUs than a pipeline stage has",
        "--expert-model-parallel-size 32",
        "--expert-model-parallel-size 8",
        recipe="glm45_355b",
    ),
    _of_check(
        "A tensor-parallel size above the number of heads",
        "--tensor-model-parallel-size 16 --actor-num-nodes 2",
        "--tensor-model-parallel-size 8 --actor-num-nodes 2",
        recipe="qwen3_4b",
    ),
    _of_check(
        "Layers that the stages do not divide",
        "--pipeline-model-parallel-size 8 --tensor-model-parallel-size 1 --sequence-parallel false",
        "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 1 --sequence-parallel false",
        recipe="qwen3_4b",
    ),
    _of_check(
        "Expert parallelism for a model without experts",
        "--expert-model-parallel-size 2",
        "--expert-model-parallel-size 1",
        recipe="qwen3_4b",
    ),
    _of_check(
        "A size of the first stage without pipeline stages",
        "--decoder-first-pipeline-num-layers 1",
        "--decoder-first-pipeline-num-layers none",
    ),
    _of_check(
        "An incomplete recomputation setting",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    _of_check(
        "An overlap that requires another",
        "--overlap-param-gather",
        "--overlap-param-gather --overlap-grad-reduce true",
    ),
    _of_check(
        "--colocate switched off alone",
        "--colocate false",
        "--colocate false --rollout-num-gpus 32",
        recipe="glm45_355b",
    ),
    _of_check(
        "Engines whose size does not divide the GPUs of the trainer",
        "--rollout-num-gpus-per-engine 3",
        "--rollout-num-gpus-per-engine 2",
        "--rollout-num-gpus-per-engine 8",
        recipe="qwen3_4b",
    ),
    _of_check(
        "An engine of a node and a half",
        "--rollout-num-gpus-per-engine 12 --rollout-num-gpus 24 --colocate false",
        "--rollout-num-gpus-per-engine 8 --rollout-num-gpus 24 --colocate false",
        "--rollout-num-gpus-per-engine 24 --rollout-num-gpus 24 --colocate false",
        recipe="qwen3_4b",
    ),
    _of_check(
        "More engines than the GPUs allow",
        "--nodes 1 --rollout-num-gpus 6",
        "--nodes 1 --rollout-num-gpus 2",
        "--nodes 2 --actor-num-nodes 1 --rollout-num-gpus 6",
    ),
]

BATCH = [
    _of_check(
        "A batch that the ranks do not divide",
        "--rollout-batch-size 33 --n-samples-per-prompt 7",
        "--rollout-batch-size 32 --n-samples-per-prompt 7",
        "--rollout-batch-size 36 --n-samples-per-prompt 7",
        "--rollout-batch-size 33 --n-samples-per-prompt 4",
        recipe="qwen3_4b",
    ),
    _of_check(
        "A smaller --global-batch-size, as guides advise against NCCL errors",
        "--global-batch-size 100",
        "--global-batch-size 64",
        "--global-batch-size 128",
        recipe="glm_z1_9b",
    ),
    _of_check(
        "--global-batch-size against the optimizer steps of the recipe",
        "--global-batch-size 64",
        "--global-batch-size 64 --num-steps-per-rollout 4",
        "--global-batch-size 256",
        recipe="qwen3_4b",
    ),
    _of_check(
        "Optimizer steps that do not divide a rollout",
        "--num-steps-per-rollout 3",
        "--num-steps-per-rollout 2",
        "--num-steps-per-rollout 4",
        recipe="qwen3_4b",
    ),
    _of_check(
        "A --global-batch-size that is not a multiple of the ranks",
        "--global-batch-size 2 --num-steps-per-rollout none",
        "--global-batch-size 4 --num-steps-per-rollout none",
        recipe="qwen3_4b",
    ),
    _of_check(
        "Dynamic batches without a token limit",
        "--use-dynamic-batch-size",
        "--use-dynamic-batch-size --max-tokens-per-gpu 8192",
    ),
    _of_check(
        "One response per prompt",
        "--n-samples-per-prompt 1",
        "--n-samples-per-prompt 2",
        "--n-samples-per-prompt 1 --advantage-estimator reinforce_plus_plus",
    ),
]

ALGORITHM = [
    _of_check(
        "A KL coefficient without a KL loss",
        "--kl-loss-coef 0.01",
        "--kl-loss-coef 0.01 --use-kl-loss true",
        "--kl-loss-coef 0",
    ),
    _of_check(
        "The KL divergence twice",
        "--kl-coef 0.01 --kl-loss-coef 0.01 --use-kl-loss",
        "--kl-coef 0 --kl-loss-coef 0.01 --use-kl-loss",
        "--kl-coef 0.01 --kl-loss-coef 0 --use-kl-loss",
    ),
    _of_check(
        "A custom loss without its function", "--loss-type custom_loss", "--loss-type policy_loss"
    ),
    _of_check("Swapped bounds of the importance ratio", "--tis-clip-low 3", "--tis-clip-low 0"),
    _of_check(
        "Several responses per line of supervised data",
        "--loss-type sft_loss",
        "--loss-type sft_loss --n-samples-per-prompt 1",
    ),
    _of_check(
        "A coefficient that supervised training ignores",
        "--loss-type sft_loss --n-samples-per-prompt 1 --entropy-coef 0.1",
        "--loss-type sft_loss --n-samples-per-prompt 1 --entropy-coef 0",
    ),
    _of_check(
        "A warm-up longer than the run",
        "--lr-decay-style cosine --lr-warmup-iters 5 --num-rollout 3",
        "--lr-decay-style cosine --lr-warmup-iters 0 --num-rollout 3",
    ),
    _of_check("A minimum learning rate above the maximum", "--min-lr 1", "--min-lr 0"),
    _of_check(
        "A decay without its length",
        "--lr-decay-style WSD --num-rollout 20",
        "--lr-decay-style WSD --num-rollout 20 --lr-wsd-decay-iters 2",
    ),
    _of_check(
        "Low-precision moments without the precision-aware optimizer",
        "--exp-avg-dtype bf16",
        "--exp-avg-dtype fp32",
        "--exp-avg-dtype bf16 --use-precision-aware-optimizer true",
    ),
    _of_check(
        "Optimizer offload without the distributed optimizer",
        "--optimizer-cpu-offload --use-distributed-optimizer false",
        "--optimizer-cpu-offload --use-distributed-optimizer true",
    ),
]

FUNCTIONS = [
    _of_check("A function in a missing file", "--dynamic-sampling-filter-path mine.py:keep"),
    _of_check(
        "A function's name misspelt",
        "--dynamic-sampling-filter-path mine.py:kep",
        "--dynamic-sampling-filter-path mine.py:keep",
        files={"mine.py": FILTER},
    ),
    _of_check(
        "A function with other arguments",
        "--custom-rm-path mine.py:keep",
        files={"mine.py": FILTER},
    ),
    _of_check("A path without a function", "--custom-rm-path mine.py", files={"mine.py": FILTER}),
    _of_check(
        "A rollout function of slime",
        "--rollout-function-path fully_async_rollout.generate_rollout_fully_async",
        "--rollout-function-path fully_async_rollout.generate_rollout_fully_async --rollout-mode fully_async",
    ),
    _of_check("A custom rollout function", "--rollout-function-path mine.rollout"),
]

ROLLOUT = [
    _of_check(
        "Sampling masks of unbounded size",
        "--use-rollout-sampling-mask --rollout-top-p 0.9",
        "--use-rollout-sampling-mask --rollout-top-p 0.9 --rollout-top-k 1024",
    ),
    _of_check(
        "Over-sampling without additional prompts",
        "--over-sampling-batch-size 2",
        "--over-sampling-batch-size 4",
        "--over-sampling-batch-size none",
    ),
    _of_check(
        "Generation beside training on the same GPUs",
        "--rollout-mode fully_async",
        "--rollout-mode sync",
        "--rollout-mode fully_async --colocate false --rollout-num-gpus 8",
        recipe="qwen3_4b",
    ),
    _of_check(
        "A staleness limit without asynchronous rollouts",
        "--max-staleness 2",
        "--max-staleness none",
        "--max-staleness 2 --rollout-mode fully_async",
    ),
    _of_check(
        "Off-policy masking without partial rollouts",
        "--mask-offpolicy-in-partial-rollout",
        "--mask-offpolicy-in-partial-rollout --partial-rollout true",
    ),
    _of_check(
        "Evaluation without prompts",
        "--eval-interval 5",
        "--eval-interval 5 --eval-prompt-data x prompts.jsonl",
        "--eval-interval none",
    ),
    _of_check(
        "Evaluation sets without names",
        "--eval-prompt-data a prompts.jsonl b",
        "--eval-prompt-data prompts.jsonl",
        "--eval-prompt-data a prompts.jsonl b prompts.jsonl",
    ),
    _of_check(
        "Two evaluation sets with the same name",
        "--eval-prompt-data a prompts.jsonl a prompts.jsonl",
        "--eval-prompt-data a prompts.jsonl a-2 prompts.jsonl",
    ),
    _of_check(
        "A key of a file of evaluation sets misspelt",
        "--eval-config sets.toml",
        files={"sets.toml": "[[datasets]]\nname = 'a'\npath = 'prompts.jsonl'\ntemperatur = 1\n"},
    ),
    _of_check(
        "A recording path without the step",
        "--save-debug-rollout-data recorded.jsonl",
        "--save-debug-rollout-data recorded.jsonl.{rollout_id}",
    ),
    _of_check(
        "Train-only mode without recordings",
        "--debug-train-only",
        "--debug-train-only false",
        "--debug-train-only --load-debug-rollout-data recorded-{rollout_id}",
    ),
    _of_check(
        "Adapters for engines without an adapter",
        "--update-weight-mode adapter --update-weight-transport disk",
        "--update-weight-mode adapter --update-weight-transport disk --lora-rank 8",
        "--update-weight-mode full --update-weight-transport disk",
    ),
    _of_check(
        "Adapters for engines through memory",
        "--update-weight-mode adapter --lora-rank 8",
        "--update-weight-mode adapter --lora-rank 8 --update-weight-transport disk",
        "--update-weight-mode full --lora-rank 8",
    ),
]

OBSERVE = [
    _of_check(
        "A profile of steps after the end of the run",
        "--profile --num-rollout 3",
        "--profile --num-rollout 3 --profile-step-start 3 --profile-step-end 4",
    ),
    _of_check(
        "A profile that ends before it begins",
        "--profile --profile-step-end 5 --num-rollout 20",
        "--profile --profile-step-end 11 --num-rollout 20",
    ),
    _of_check(
        "A profile of a missing rank",
        "--profile --profile-ranks 0 7 --num-rollout 20",
        "--profile --profile-ranks 0 --num-rollout 20",
    ),
    _of_check(
        "Traces of steps that never come",
        "--trace-steps 5:6 --num-rollout 3",
        "--trace-steps 3 --num-rollout 3",
    ),
    _of_check(
        "A metrics writer whose package is not installed",
        "--use-tensorboard",
        "--use-tensorboard false",
        lacking=("tensorboard",),
    ),
]

MODEL = [
    Mistake(
        "Models and data that are not downloaded",
        "rlpost check qwen3_4b",
        environ={"RLPOST_ASSETS": "elsewhere"},
    ),
    Mistake(
        "Models and data missing in --assets-dir",
        "rlpost check qwen3_4b --assets-dir elsewhere --ref-load none",
        environ=NO_ASSETS,
    ),
    Mistake(
        "The folder of models and data is not set",
        "rlpost check qwen3_4b",
        ("rlpost check qwen3_4b --assets-dir assets",),
        environ=NO_ASSETS,
    ),
    Mistake(
        "A wrong flag, and the folder is not set",
        "rlpost check qwen3_4b --global-batch-size 64",
        environ=NO_ASSETS,
    ),
    _of_check("A missing model folder", "--hf-checkpoint nowhere/model", "--hf-checkpoint model"),
    _of_check("A repository name instead of a folder", "--hf-checkpoint Qwen/Qwen3-4B"),
    _of_check("A model's folder without its config.json", "", files={"model/config.json": None}),
    _of_check("A model's folder without weights", "", files={"model/model.safetensors": None}),
    _of_check("A truncated model file", "", files={"model/model.safetensors": "abc"}),
    _of_check("A model's folder without a tokenizer", "", files={"model/tokenizer.json": None}),
    _of_check(
        "An unknown model family",
        "",
        files={
            "model/config.json": '{"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2}'
        },
    ),
    _of_check(
        "Model sizes in the recipe that belong to another model", "--num-layers 3", "--num-layers 2"
    ),
    Mistake(
        "A reference that was not converted",
        "rlpost check qwen3_4b",
        ("rlpost check qwen3_4b --ref-load none",),
        files={"assets/Qwen3-4B_torch_dist": None},
    ),
    _of_check(
        "Another trainer's checkpoints in --save",
        "--save saved",
        "--save none",
        "--save other",
        files={f"saved/{checkpoint_name(19)}/common.pt": ""},
    ),
    _of_check("An export onto the model itself", "--save-hf model", "--save-hf hf/{step}"),
]

PROMPTS = [
    _of_check("A missing prompt file", "--prompt-data promts.jsonl", "--prompt-data prompts.jsonl"),
    _of_check("A wrong prompt key", "--input-key question", "--input-key prompt"),
    _of_check(
        "A line that is not valid JSON",
        "",
        "--bad-prompts skip",
        files={"prompts.jsonl": PROMPT + '{"prompt": \n'},
    ),
    _of_check(
        "Messages without a chat template",
        "",
        "--apply-chat-template",
        files={
            "prompts.jsonl": '{"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}\n'
        },
    ),
    _of_check(
        "A number of weights that differs from the number of files",
        "--prompt-data-weights 1 2",
        "--prompt-data-weights 1",
    ),
    _of_check(
        "An invalid slice", "--prompt-data prompts.jsonl@[1]", "--prompt-data prompts.jsonl@[1:]"
    ),
    _of_check("A misspelt reward", "--rm-type exact", "--rm-type exact_match"),
    _of_check(
        "A reward model without its address",
        "--rm-type remote_rm",
        "--rm-type remote_rm --rm-url http://localhost:8000",
    ),
    _of_check("Group grading without a function", "--group-rm", "--group-rm false"),
]

JOB = [
    _of_check("A container without an image", "--container enroot", "--container none"),
    _of_check(
        "The variable of the image is not set",
        "--container enroot --container-image '$RLPOST_IMAGE' --container-mounts {here}",
        "--container enroot --container-image /images/train.sqsh --container-mounts {here}",
    ),
    Mistake(
        "No image, and the job chooses the container",
        "rlpost check qwen3_4b",
        environ={**ASSETS, "RLPOST_CONTAINER": "=enroot"},
    ),
    _of_check(
        "Paths that are not visible in the container",
        "--container enroot --container-image /images/train.sqsh",
        "--container enroot --container-image /images/train.sqsh --container-mounts {here}",
    ),
    _of_check(
        "An image that is a relative path",
        "--container enroot --container-image ./train.sqsh --container-mounts {here}",
        "--container enroot --container-image /images/train.sqsh --container-mounts {here}",
    ),
    _of_check("A time limit that Slurm cannot parse", "--time soon", "--time 10"),
    _of_check("A time limit shorter than its warning", "--time 1", "--time 1 --signal-lead-s 30"),
    _of_check("A job's name with blanks", "--job-name 'my run'", "--job-name my-run"),
    _of_check(
        "An infinite InfiniBand timeout",
        "--environment NCCL_IB_TIMEOUT=50",
        "--environment NCCL_IB_TIMEOUT=22",
    ),
    _of_check(
        "A pattern instead of an interface name",
        "--environment GLOO_SOCKET_IFNAME==eth0",
        "--environment GLOO_SOCKET_IFNAME=eth0",
    ),
    _of_check(
        "A variable without a value", "--environment NCCL_DEBUG", "--environment NCCL_DEBUG=INFO"
    ),
    _of_check("An API key among the variables of the job", "--environment WANDB_API_KEY=hush"),
    Mistake(
        "Eight nodes without Slurm",
        "rlpost submit glm45_355b --local",
        ("rlpost submit glm45_355b --dry-run",),
    ),
    Mistake(
        "Two nodes without Slurm",
        "rlpost submit recipe.toml --local --nodes 2",
        ("rlpost submit recipe.toml --nodes 1 --dry-run",),
    ),
    Mistake(
        "A container without Slurm",
        "rlpost submit recipe.toml --local --container enroot --container-image /i.sqsh",
        ("rlpost submit recipe.toml --container none --dry-run",),
    ),
    Mistake(
        "A Slurm query without Slurm",
        "rlpost submit recipe.toml --test-only",
        ("rlpost submit recipe.toml --dry-run",),
    ),
    Mistake("Weights & Biases without a key", "rlpost submit recipe.toml --local --use-wandb"),
    Mistake(
        "A run folder that is taken",
        "rlpost submit recipe.toml --local --run-folder runs/first --num-rollout 9",
    ),
]

OPTIONS = [
    _of_check(
        "An option of SGLang misspelt",
        "--sglang-mem-fraction-statik 0.7",
        "--sglang-mem-fraction-static 0.7",
    ),
    _of_check(
        "An option of SGLang that rlpost sets",
        "--sglang-tp-size 2",
        "--rollout-num-gpus-per-engine 2",
    ),
    _of_check(
        "A cache whose prefixes have the routes of other tokens",
        "--use-rollout-routing-replay true --sglang-enable-hierarchical-cache true",
        "--use-rollout-routing-replay true",
        "--use-rollout-routing-replay false --sglang-enable-hierarchical-cache true",
        recipe="glm45_355b",
    ),
    _of_check(
        "A backend of CUDA graphs that cannot be released",
        "--environment SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 --sglang-cuda-graph-backend-prefill breakable",
        "--environment SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 --sglang-cuda-graph-backend-prefill full",
        "--sglang-cuda-graph-backend-prefill breakable",
        recipe="qwen3_4b",
    ),
    _of_check(
        "An invalid value of the CUDA graph switch",
        "--environment SGLANG_MEMORY_SAVER_CUDA_GRAPH=yes",
        "--environment SGLANG_MEMORY_SAVER_CUDA_GRAPH=1",
    ),
    _of_check("An option of Megatron-core misspelt", "--moe-z-loss-coef 0.001"),
    _of_check(
        "An option of Megatron-core that rlpost sets", "--num-layers-in-first-pipeline-stage 1"
    ),
    _of_check(
        "An option of Megatron-core without an effect",
        "--masked-softmax-fusion",
        "--masked-softmax-fusion false",
    ),
    _of_check(
        "Training in FP8 with scales of earlier passes",
        "--fp8 hybrid",
        "",
    ),
    _of_check(
        "Shared beginnings with context parallelism",
        "--share-prefix true --context-parallel-size 2",
        "--share-prefix false --context-parallel-size 2",
        recipe="qwen3_4b",
    ),
    _of_check("Engines in another precision", "--sglang-dtype float16", "--sglang-dtype bfloat16"),
    _of_check(
        "Expandable segments beside engines that release memory",
        "--environment PYTORCH_ALLOC_CONF=expandable_segments:True",
        "--environment PYTORCH_ALLOC_CONF=expandable_segments:False",
        recipe="qwen3_4b",
    ),
    _of_check(
        "Fused attention without TransformerEngine",
        "--attention-backend fused",
        "",
        on_gpus=True,
    ),
    _of_check(
        "Routing replay for a model without experts",
        "--use-routing-replay true",
        "--use-routing-replay false",
    ),
    _of_check(
        "Routing replay with a router that chooses experts in its kernel",
        "--use-rollout-routing-replay true --moe-router-fusion true",
        "--use-rollout-routing-replay true",
        "--use-rollout-routing-replay false --moe-router-fusion true",
        recipe="qwen3_30b_a3b",
    ),
]

RUNS = [
    Mistake("The status of a missing run", "rlpost status frist", ("rlpost status first",)),
    Mistake(
        "A flag of status misspelt", "rlpost status first --jsn", ("rlpost status first --json",)
    ),
    Mistake("An invalid number of runs", "rlpost list --num all", ("rlpost list --num 5",)),
    Mistake(
        "Runs in another folder",
        "rlpost status --runs-dir nowhere",
        ("rlpost status --runs-dir runs",),
    ),
    Mistake("The logs of a missing run", "rlpost logs 4711"),
    Mistake("A command on a run that never ran", "rlpost exec hostname"),
    Mistake("No command to run", "rlpost exec"),
    Mistake("Attaching to a missing run", "rlpost attach --run frist"),
    Mistake("Cancelling a missing run", "rlpost cancel frist"),
    Mistake("A comparison of one run", "rlpost compare first"),
    Mistake(
        "A plan for GPUs that are no whole nodes",
        "rlpost plan qwen3_4b --gpus 12",
        ("rlpost plan qwen3_4b --gpus 16",),
    ),
    Mistake("Nothing to fetch", "rlpost fetch recipe.toml --sizes-only"),
    Mistake("No folder to fetch to", "rlpost fetch qwen3_4b --sizes-only", environ=NO_ASSETS),
]

MANY = [
    _of_check(
        "Several mistakes at once",
        "--tensor-model-parallel-size 3 --prompt-data nowhere.jsonl --rm-type x --kl-loss-coef 1",
    ),
    _of_check(
        "More mistakes than fit on a screen",
        "--kl-coef 1 --kl-loss-coef 1 --min-lr 1 --lr-warmup-init 1 --tis-clip-low 3 --max-staleness 2 "
        "--eval-interval 5 --profile --trace-steps 7 --debug-train-only --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16 --update-weight-mode adapter --rm-type x --sequence-parallel",
    ),
]

MISTAKES: Mapping[str, list[Mistake]] = {
    "Words of the command line": COMMAND_LINE,
    "Recipes and other files": FILES,
    "Layout": LAYOUT,
    "Batch": BATCH,
    "Algorithm and optimizer": ALGORITHM,
    "Functions of one's own": FUNCTIONS,
    "Rollout, evaluation, debugging, weights": ROLLOUT,
    "Observing a run": OBSERVE,
    "Models, references, checkpoints": MODEL,
    "Prompts and rewards": PROMPTS,
    "Jobs, containers, variables": JOB,
    "Options of SGLang and Megatron-core": OPTIONS,
    "Runs": RUNS,
    "Several at once": MANY,
}
