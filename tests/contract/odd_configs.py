"""Random configurations of all families: odd sizes, ties, groups, rope forms, windows, missing keys.

``odd_config(seed)`` is a config.json as a person may write it. transformers reads it, and its model
with random weights is the truth; ``compare`` computes the same logits with the trainer's model, or
returns the reason for which the trainer refuses the configuration.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpost.errors import ConfigError, WeightError
from rlpost.types import TrainSample
from tests.contract.families import COMMON, FAMILIES, VOCAB_SIZE, set_weights
from tests.contract.samples import random_sample

KINDS = tuple(dict.fromkeys(kind for kind, _ in FAMILIES.values()))
OPTIONAL = (
    "attention_bias", "attention_dropout", "decoder_sparse_step", "first_k_dense_replace",
    "full_attention_interval", "hidden_act", "layer_types", "max_window_layers", "mlp_layer_types",
    "mlp_only_layers", "n_group", "norm_topk_prob", "partial_rotary_factor", "qkv_bias",
    "query_pre_attn_scalar", "rope_interleave", "rope_scaling", "routed_scaling_factor",
    "swiglu_limit", "tie_word_embeddings", "topk_group", "use_qk_norm", "use_sliding_window",
)  # fmt: skip
RARELY_ABSENT = (
    "head_dim", "max_position_embeddings", "n_shared_experts", "rms_norm_eps", "rope_parameters",
    "rope_theta", "sliding_window",
)  # fmt: skip
"""Keys that a configuration may leave out; the classes have no useful default for other sizes."""
SEQUENCES = 2
LIMIT = 1e-4


@dataclass(frozen=True)
class Compared:
    """The outcome of one configuration."""

    hf: dict[str, Any]
    difference: float | None = None
    """Largest difference of a logit, relative to the largest logit where that is above 1."""
    refusal: str | None = None
    differences: tuple[str, ...] = ()
    """What ``rlpost check`` would say of trainer and engines; it must agree with the logits."""

    @property
    def is_wrong(self) -> bool:
        """Whether it was computed, and differs."""
        return self.refusal is None and (not self.difference < LIMIT or bool(self.differences))


class Chooser:
    """Choices of one configuration."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.one_of = self.random.choice

    def rarely(self, chance: float = 0.2) -> bool:
        return self.random.random() < chance


def odd_config(seed: int) -> dict[str, Any]:
    """Return a config.json; each seed has its own."""
    choose = Chooser(seed)
    kind = KINDS[seed % len(KINDS)]
    one_of = choose.one_of
    heads = one_of([2, 4, 6])
    head_dim = one_of([8, 12, 16])
    layers = one_of([1, 2, 3, 4])
    hf: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": model_type(kind),
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "vocab_size": one_of([VOCAB_SIZE, 101]),
        "hidden_size": heads * one_of([8, 16]),
        "intermediate_size": one_of([24, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": one_of([size for size in (1, 2, 3, heads) if heads % size == 0]),
        "head_dim": head_dim,
        "max_position_embeddings": one_of([64, 256]),
        "tie_word_embeddings": one_of([False, True]),
        "rms_norm_eps": one_of([1e-6, 1e-5, 1e-2]),
        "attention_dropout": 0.0,
    }
    hf |= OPTIONS.get(kind, _no_options)(choose, hf)
    hf |= _rope(choose, kind)
    if choose.rarely(0.03):
        hf["hidden_act"] = "gelu"
    if choose.rarely(0.5):
        present = [key for key in OPTIONAL if key in hf]
        for key in choose.random.sample(present, min(len(present), one_of([1, 2, 3]))):
            del hf[key]
    if choose.rarely(0.07):
        hf.pop(one_of(RARELY_ABSENT), None)
    if choose.rarely(0.1):
        hf[one_of(["num_key_value_heads", "head_dim", "sliding_window", "layer_types"])] = None
    return hf


def model_type(kind: str) -> str:
    """Return transformers' name of the configuration of a text model."""
    import transformers

    of_text = getattr(transformers, f"{kind}TextConfig", None)
    return str((of_text or getattr(transformers, f"{kind}Config")).model_type)


def _no_options(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return {}


def _mistral(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": choose.one_of([None, 1, 3, 5])}


def _llama(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": choose.rarely(0.1), "mlp_bias": choose.rarely(0.1)}


def _windows(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    one_of, layers = choose.one_of, hf["num_hidden_layers"]
    windows = {
        "use_sliding_window": one_of([False, True]),
        "sliding_window": one_of([1, 3, 5]),
        "max_window_layers": one_of(range(layers + 1)),
    }
    if choose.rarely():
        kinds = ("full_attention", "sliding_attention")
        windows["layer_types"] = [one_of(kinds) for _ in range(layers)]
    return windows


def _qwen3(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return _windows(choose, hf) | {"attention_bias": choose.rarely(0.05)}


def _experts(choose: Chooser, hf: dict[str, Any], count: str = "num_experts") -> dict[str, Any]:
    """A mixture of experts; one expert for each token is rare, and so are all of them."""
    num_experts = choose.one_of([3, 4, 8])
    return {
        count: num_experts,
        "num_experts_per_tok": choose.one_of([1, 2, 2, 3, num_experts]),
        "moe_intermediate_size": choose.one_of([8, 20]),
        "norm_topk_prob": choose.one_of([False, True]),
    }


def _sparse_layers(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    layers = range(hf["num_hidden_layers"])
    dense = [number for number in layers if choose.rarely()]
    return {"decoder_sparse_step": choose.one_of([1, 1, 2]), "mlp_only_layers": dense}


def _qwen3_moe(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return _qwen3(choose, hf) | _experts(choose, hf) | _sparse_layers(choose, hf)


def _shared(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": choose.one_of([16, 24])}


def _qwen2_moe(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    own = {"qkv_bias": choose.one_of([False, True])} | _windows(choose, hf)
    return own | _experts(choose, hf) | _sparse_layers(choose, hf) | _shared(choose, hf)


def _groups(choose: Chooser, num_experts: int) -> dict[str, Any]:
    """Groups of experts, most often one."""
    n_group = choose.one_of([1, 1, *(n for n in (2, 4) if num_experts >= 2 * n)])
    return {"n_group": n_group, "topk_group": choose.one_of(range(1, n_group + 1))}


def _glm_experts(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(choose, hf, "n_routed_experts")
    experts["norm_topk_prob"] = not choose.rarely(0.1)
    groups = _groups(choose, experts["n_routed_experts"])
    if groups["n_group"] > 1:  # the selected groups have as many experts as are selected
        a_group = experts["n_routed_experts"] // groups["n_group"]
        most = a_group * groups["topk_group"]
        experts["num_experts_per_tok"] = choose.one_of([most, 2 * groups["topk_group"]])
    more = {
        "n_shared_experts": choose.one_of([1, 1, 2]),
        "first_k_dense_replace": choose.one_of(range(hf["num_hidden_layers"] + 1)),
        "routed_scaling_factor": choose.one_of([1.0, 1.5, 2.5]),
    }
    return experts | groups | more


def _glm4(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": choose.one_of([False, True])}


def _glm4_moe(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    own = {"use_qk_norm": choose.one_of([False, True])}
    return _glm4(choose, hf) | own | _glm_experts(choose, hf)


def _latent(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    rotated = choose.one_of([4, 8])
    return _glm_experts(choose, hf) | {
        "num_key_value_heads": hf["num_attention_heads"],
        "q_lora_rank": choose.one_of([None, 12, 20]),
        "kv_lora_rank": choose.one_of([16, 24]),
        "qk_nope_head_dim": choose.one_of([8, 12]),
        "qk_rope_head_dim": rotated,
        "v_head_dim": choose.one_of([8, 12]),
        "head_dim": rotated,
        "rope_interleave": not choose.rarely(0.1),
    }


def _latent_lite(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    layers = hf["num_hidden_layers"]
    kinds = [choose.one_of(["dense", "sparse"]) for _ in range(layers)]
    own = _latent(choose, hf) | {"mlp_layer_types": choose.one_of([sorted(kinds), kinds])}
    del own["first_k_dense_replace"]
    return own


def _minimax(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(choose, hf, "num_local_experts")
    for key in ("moe_intermediate_size", "norm_topk_prob"):
        del experts[key]
    return experts


def _gpt_oss(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention", "sliding_attention"]
    return _minimax(choose, hf) | {
        "sliding_window": choose.one_of([1, 3, 5]),
        "layer_types": [choose.one_of(kinds) for _ in range(hf["num_hidden_layers"])],
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }


def _gemma3(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention", "sliding_attention"]
    return {
        "query_pre_attn_scalar": choose.one_of([7, 24]),
        "sliding_window": choose.one_of([1, 3, 5]),
        "layer_types": [choose.one_of(kinds) for _ in range(hf["num_hidden_layers"])],
        "final_logit_softcapping": choose.one_of([None, None, 2.0]),
    }


def _hybrid(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    kinds, keys = ["linear_attention", "full_attention"], choose.one_of([1, 2])
    layers = hf["num_hidden_layers"]
    own = {
        "rms_norm_eps": 1e-3,  # see HYBRID of the families
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * choose.one_of([1, 2, 3]),
        "linear_key_head_dim": choose.one_of([8, 12]),
        "linear_value_head_dim": choose.one_of([8, 12]),
        "linear_conv_kernel_dim": choose.one_of([2, 4]),
        "full_attention_interval": choose.one_of([1, 2, 4]),
    }
    if choose.rarely(0.5):
        own["layer_types"] = [choose.one_of(kinds) for _ in range(layers)]
    return own


def _next(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(choose, hf) | _sparse_layers(choose, hf) | _shared(choose, hf)
    return _hybrid(choose, hf) | experts


def _qwen3_5_moe(choose: Chooser, hf: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(choose, hf) | _shared(choose, hf)
    del experts["norm_topk_prob"]
    return _hybrid(choose, hf) | experts


OPTIONS = {
    "Qwen2": _windows,
    "Qwen3": _qwen3,
    "Qwen3Moe": _qwen3_moe,
    "Qwen2Moe": _qwen2_moe,
    "Llama": _llama,
    "Mistral": _mistral,
    "Gemma3": _gemma3,
    "Glm4": _glm4,
    "MiniMaxM2": _minimax,
    "GptOss": _gpt_oss,
    "Qwen3Next": _next,
    "Qwen3_5": _hybrid,
    "Qwen3_5Moe": _qwen3_5_moe,
    "DeepseekV3": _latent,
    "Glm4MoeLite": _latent_lite,
    "Glm4Moe": _glm4_moe,
}
PARTIAL = ("Glm4", "Glm4Moe", "MiniMaxM2", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Families that may rotate a part of each head."""


def _rope(choose: Chooser, kind: str) -> dict[str, Any]:
    """Return rope options: nested, or at the top level with ``rope_scaling`` as transformers 4."""
    one_of = choose.one_of
    options: dict[str, Any] = {"rope_type": one_of(["default"] * 6 + [*SCALED] * 2)}
    if options["rope_type"] == "dynamic" and not choose.rarely():
        options["rope_type"] = "linear"
    if options["rope_type"] in SCALED:
        options |= SCALED[options["rope_type"]](choose)
    theta: dict[str, Any] = {"rope_theta": one_of([37.0, 1e4, 5e6])}
    part: dict[str, Any] = {}
    if kind in PARTIAL and not choose.rarely():
        part = {"partial_rotary_factor": one_of([0.25, 0.5, 1.0])}
    if kind == "Gemma3" and choose.rarely(0.5):
        local = {"rope_type": "default", "rope_theta": one_of([1e3, 1e4])}
        return {"rope_parameters": {"full_attention": options | theta, "sliding_attention": local}}
    if choose.rarely(0.5):
        return {"rope_parameters": options | theta | part}
    found = theta | part
    if kind == "Gemma3":
        found["rope_local_base_freq"] = one_of([1e3, 1e4])
    if options["rope_type"] != "default":
        name = one_of(["rope_type", "type"])
        scaling = {name: options.pop("rope_type")} | options
        found |= {one_of(["rope_scaling", "rope_scaling", "rope_parameters"]): scaling}
    if choose.rarely(0.1):
        found.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 1e3})
    return found


def _linear(choose: Chooser) -> dict[str, Any]:
    return {"factor": choose.one_of([2.0, 8.0])}


def _llama3(choose: Chooser) -> dict[str, Any]:
    return {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": choose.one_of([16, 64]),
    }


def _yarn(choose: Chooser) -> dict[str, Any]:
    options: dict[str, Any] = {"factor": choose.one_of([4.0, 40.0])}
    if choose.rarely(0.7):
        options["original_max_position_embeddings"] = 16
    if choose.rarely(0.3):
        options |= {"beta_fast": 16.0, "beta_slow": 2.0}
    if choose.rarely(0.3):
        options |= {"mscale": choose.one_of([0.7, 1.0]), "mscale_all_dim": 0.5}
    if choose.rarely(0.2):
        options[choose.one_of(["mscale", "mscale_all_dim"])] = 0.8
    if choose.rarely(0.2):
        options["truncate"] = choose.one_of([False, True])
    if choose.rarely(0.1):
        options["attention_factor"] = 1.2
    return options


def _dynamic(choose: Chooser) -> dict[str, Any]:
    return {"factor": 2.0}


SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic}


def samples_of(hf: dict[str, Any]) -> list[TrainSample]:
    """Return two samples, whose tokens are in any of the vocabularies."""
    source = random.Random(5)
    return [random_sample(source) for _ in range(SEQUENCES)]


def theirs(folder: Path, hf: dict[str, Any], samples: Sequence[TrainSample]) -> torch.Tensor | None:
    """Save transformers' model of a configuration; return its logits, None if it has none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(hf))
    torch.manual_seed(1)
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        set_weights(model, hf["architectures"][0].removesuffix("ForCausalLM"))
        with torch.no_grad():
            rows = [torch.tensor([sample.token_ids]) for sample in samples]
            found = [model(row, use_cache=False).logits[0] for row in rows]
    except Exception:  # whatever a class of transformers or a layer says about values of no model
        return None
    logits = torch.cat(found)
    if not logits.isfinite().all():
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(hf))
    return logits


def ours(actor: Any, folder: Path, samples: Sequence[TrainSample]) -> torch.Tensor:
    """Return the trainer's logits of a folder; ``actor`` has the process groups.

    Raises:
        ConfigError, WeightError: the configuration is refused.
    """
    from rlpost.trainer import step
    from rlpost.trainer.model import build_model, inventory_of
    from rlpost.trainer.model_description import read_description
    from rlpost.trainer.packing import pack
    from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights

    description = read_description(folder)
    chunks = build_model(description, actor.config)
    import_weights(inventory_of(chunks, description), HuggingFaceFolder(folder))
    packed = pack(tuple(samples), actor.row_layout)
    with torch.no_grad():
        (found,) = step.run(
            chunks,
            [packed],
            loss_of=lambda index, micro_batch, output: (output.sum(), output[0]),
            forward_only=True,
            stop_points=actor.stop_points,
        )
    return found[:, : description.hf_config["vocab_size"]]


def check_differences(folder: Path) -> list[str]:
    """Return the differences between trainer and transformers, apart from the run's settings."""
    from transformers import AutoConfig

    from rlpost.cli.resolved_model import differences, engine_model, trainer_model
    from rlpost.trainer.model_description import read_description

    engines = engine_model(AutoConfig.from_pretrained(folder), generation_eos=None, context=None)
    trainer = trainer_model(read_description(folder), context=None, end_tokens=engines.eos_token_id)
    return differences(trainer, engines)


def compare(actor: Any, seeds: Sequence[int], folder: str) -> list[Compared]:
    """Compare the configurations of ``seeds`` on a rank; those that are of no model are left out."""
    made = [compare_one(actor, odd_config(seed), Path(folder) / str(seed)) for seed in seeds]
    return [one for one in made if one is not None]


def compare_uploads(actor: Any, folder: str) -> dict[tuple[str, str], Compared | None]:
    """Compare every form of an upload for every kind; None where transformers has no model."""
    found = {}
    for kind in KINDS:
        base = published_config(kind)
        for form, changed in UPLOADS.items():
            hf = changed(copy.deepcopy(base))
            found[kind, form] = compare_one(actor, hf, Path(folder) / f"{kind}-{form}")
    return found


def published_config(kind: str) -> dict[str, Any]:
    """Return the config.json of the first model of a kind in ``families``."""
    import transformers

    options = next(options for name, options in FAMILIES.values() if name == kind)
    of_text = getattr(transformers, f"{kind}TextConfig", None)
    config = (of_text or getattr(transformers, f"{kind}Config"))(**{**COMMON, **options})
    return {**config.to_dict(), "architectures": [f"{kind}ForCausalLM"], "dtype": "float32"}


def _rope_both(hf: dict[str, Any]) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    if part := hf["rope_parameters"].get("partial_rotary_factor"):
        scaling["partial_rotary_factor"] = part  # transformers ignores MiniMax-M2's rotary_dim
    return hf | {"rope_scaling": scaling, "rope_theta": 5e5}


def _theta_at_top(hf: dict[str, Any]) -> dict[str, Any]:
    nested = hf["rope_parameters"].get("full_attention", hf["rope_parameters"])
    return hf | {"rope_theta": nested.pop("rope_theta")}


def _without_dtype(hf: dict[str, Any]) -> dict[str, Any]:
    del hf["dtype"]
    return hf


UPLOADS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rope in both places": _rope_both,
    "theta at the top level": _theta_at_top,
    "null key-value heads": lambda hf: hf | {"num_key_value_heads": None},
    "no dtype": _without_dtype,
    "tied": lambda hf: hf | {"tie_word_embeddings": True},
    "untied": lambda hf: hf | {"tie_word_embeddings": False},
    "several end tokens": lambda hf: hf | {"eos_token_id": [1, 2]},
}
"""Forms of config.json that uploads have."""


def compare_one(actor: Any, hf: dict[str, Any], path: Path) -> Compared | None:
    """Compare one configuration in a new folder; None if it is of no model."""
    path.mkdir()
    samples = samples_of(hf)
    try:
        expected = theirs(path, hf, samples)
        if expected is None:
            return None
        logits = ours(actor, path, samples)[: len(expected)]
        largest = max(1.0, expected.abs().max().item())
        difference = (logits - expected).abs().max().item() / largest
        return Compared(hf, difference=difference, differences=tuple(check_differences(path)))
    except (ConfigError, WeightError) as error:
        return Compared(hf, refusal=str(error))
    finally:
        shutil.rmtree(path)
