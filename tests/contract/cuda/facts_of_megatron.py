"""Facts of Megatron-core that our code relies on with CUDA or TransformerEngine."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import torch

from rlpost.trainer.model_state import METADATA
from rlpost.trainer.torch_dist import optimizer_state
from tests.contract.cuda.library_source import Fact, Source

CORE = "megatron/core"
BUFFER = f"{CORE}/distributed/param_and_grad_buffer.py"
HYBRID = f"{CORE}/optimizer/cpu_offloading/hybrid_optimizer.py"
DISTRIBUTED = f"{CORE}/optimizer/distrib_optimizer.py"
OPTIMIZERS = f"{CORE}/optimizer/__init__.py"
CONFIG = f"{CORE}/optimizer/optimizer_config.py"
UTILS = f"{CORE}/utils.py"
COMMON_STATE = f"{CORE}/dist_checkpointing/strategies/common.py"
SAFE = f"{CORE}/safe_globals.py"
ROUTER = f"{CORE}/transformer/moe/router.py"
MOE_UTILS = f"{CORE}/transformer/moe/moe_utils.py"
SPECS = f"{CORE}/models/gpt/gpt_layer_specs.py"
LAYERS = f"{CORE}/tensor_parallel/layers.py"
TRANSFORMER_CONFIG = f"{CORE}/transformer/transformer_config.py"
EXPERTS = f"{CORE}/transformer/moe/experts.py"


def buffers_leave_by_resizing(source: Source) -> None:
    """After a reload, views of the buffer are valid, weights are kept and gradients are zero."""
    data, grads = torch.arange(8.0), torch.ones(8)
    view = data[2:4]
    buffer = SimpleNamespace(param_data=data, grad_data=grads, param_data_cpu=data.clone())
    names = {"move_params": True, "move_grads": True}
    source.run(BUFFER, "_ParamAndGradBuffer.offload_to_cpu")(buffer, **names)
    assert data.untyped_storage().nbytes() == grads.untyped_storage().nbytes() == 0
    source.run(BUFFER, "_ParamAndGradBuffer.reload_from_cpu")(buffer, **names)
    assert view.tolist() == [2.0, 3.0] and not grads.any()


def parameters_move_into_the_buffer_only_when_optimizer_is_distributed(source: Source) -> None:
    made = source.lines(BUFFER, "_ParamAndGradBuffer.__init__")
    assert "if self.ddp_config.use_distributed_optimizer" in made
    assert (
        "param.data = new_param_data" in made
        and "param.data.detach().copy_(old_param_data)" in made
    )


def precision_aware_needs_a_version(source: Source) -> None:
    is_min = source.run(
        UTILS,
        "is_te_min_version",
        HAVE_PACKAGING=True,
        get_te_version=lambda: None,
        PkgVersion=lambda text: 2.1,
    )
    try:
        is_min("2.1.0")
    except TypeError:
        lines = source.lines(CONFIG)
        aware = lines[lines.index("if self.use_precision_aware_optimizer:") :]
        assert aware.index("is_te_min_version('2.1.0')") < aware.index(
            "if self.optimizer_cpu_offload:"
        )
        return
    raise AssertionError(
        "without TransformerEngine is_te_min_version answers instead of raising TypeError"
    )


def precision_aware_needs_the_distributed_optimizer(source: Source) -> None:
    aware = source.lines(CONFIG).partition("if self.use_precision_aware_optimizer:")[2]
    assert "assert self.use_distributed_optimizer" in aware.partition("try:")[0]


def hybrid_keeps_classes(source: Source) -> None:
    made = source.definition(HYBRID, "HybridDeviceOptimizer.__init__")
    (call,) = [
        node
        for node in ast.walk(made)
        if isinstance(node, ast.Call) and "__init__" in ast.unparse(node.func)
    ]
    (defaults,) = [keyword.value for keyword in call.keywords if keyword.arg == "defaults"]
    names = {
        key.value: ast.unparse(value)
        for key, value in zip(defaults.keys, defaults.values, strict=True)
        if key
    }
    assert (
        names["cpu_optimizer_cls"] == "cpu_optimizer_cls"
        and names["gpu_optimizer_cls"] == "gpu_optimizer_cls"
    )


def hybrid_pins_a_gradient_for_each_parameter(source: Source) -> None:
    made = source.lines(HYBRID, "HybridDeviceOptimizer")
    assert (
        "self.cpu_copy_map_grad[param] = torch.empty(param.shape, dtype=param.dtype, "
        "pin_memory=self.pin_cpu_grads, device='cpu')" in made
    )


def hybrid_loses_pinned_weights(source: Source) -> None:
    """A conversion of pinned memory to float32 is pageable."""
    made = source.lines(HYBRID, "HybridDeviceOptimizer._get_sub_optimizer_param_groups")
    pinned = made.index("param = param.detach().clone().cpu().pin_memory()")
    assert pinned < made.index("param = param.detach().clone().float()")
    assert "cpu_copys_map_gpu_param[param] = orig_param" in made


def hybrid_is_chosen_by_cpu_offload(source: Source) -> None:
    made = source.lines(OPTIMIZERS, "_get_megatron_optimizer_based_on_param_groups")
    offload, adam = (
        made.index("if config.optimizer_cpu_offload:"),
        made.index("elif config.optimizer == 'adam':"),
    )
    part = made[offload:adam]
    assert (
        "HybridDeviceOptimizer(param_groups, offload_fraction=config.optimizer_offload_fraction"
        in part
    )
    assert "param_update_in_fp32=True" in part and "cpu_optimizer_cls = CPUAdam" in part
    assert "from torch.optim import AdamW as CPUAdam" in source.lines(OPTIMIZERS)


def hybrid_has_master_params(source: Source) -> None:
    """The main weights are ``master_param`` in a hybrid optimizer and ``param`` in a checkpoint."""
    hybrid = type("HybridDeviceOptimizer", (), {})()
    shard, main = object(), object()
    hybrid.param_groups = [{"params": [shard]}]
    hybrid.state = {shard: {"exp_avg": 1, "exp_avg_sq": 2, "master_param": main}}
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)
    one = SimpleNamespace(
        config=config, optimizer=hybrid, model_param_group_index_map={"weight": (0, 0)}
    )
    states = source.run(
        DISTRIBUTED, "_get_main_param_and_optimizer_states", HybridDeviceOptimizer=type(hybrid)
    )
    found = states(one, "weight")
    assert set(optimizer_state.KEYS) == set(found) and found["param"] is main


def hybrid_takes_new_weights(source: Source) -> None:
    """Main weights in host memory follow weights that were imported into the model."""
    hybrid = type("HybridDeviceOptimizer", (), {})()
    weight, main = torch.tensor([1.5, 2.5], dtype=torch.bfloat16), torch.zeros(2)
    hybrid.param_to_fp32_param = {weight: main}
    update = source.run(HYBRID, "HybridDeviceOptimizer.update_fp32_param_by_new_param")
    hybrid.update_fp32_param_by_new_param = lambda: update(hybrid)
    copy = source.run(
        DISTRIBUTED, "_copy_model_params_to_main_params", HybridDeviceOptimizer=type(hybrid)
    )
    copy(SimpleNamespace(optimizer=hybrid))
    assert main.tolist() == [1.5, 2.5]


def fully_reshardable_by_name(source: Source) -> None:
    named = f"elif sharding_type == {METADATA['distrib_optim_sharding_type']!r}:"
    assert named in source.lines(DISTRIBUTED, "load_state_dict")
    assert named in source.lines(DISTRIBUTED, "sharded_state_dict")
    made = source.lines(DISTRIBUTED, "sharded_param_state_fully_reshardable")
    assert "metadata.get('distrib_optim_fully_reshardable_mem_efficient', False)" in made
    assert (
        "prefix = 'optimizer.state'" in made
        and "key=f'{prefix}.{state_key}.{sharded_metadata.key}'" in made
    )


def common_state_takes_listed_classes_only(source: Source) -> None:
    assert "torch.load(load_path, map_location='cpu')" in source.lines(COMMON_STATE, "load_common")
    (listed,) = [
        node.value
        for node in ast.parse(source.text(SAFE)).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SAFE_GLOBALS"
    ]
    names = {ast.unparse(element) for element in listed.elts}
    assert {"Namespace", "OptimizerConfig", "BytesIO"} <= names
    assert not {name for name in names if name.endswith(("Adam", "AdamW", "SGD"))}, (
        "optimizers may be loaded now"
    )


def router_weight_is_made_without_a_device(source: Source) -> None:
    made = source.definition(ROUTER, "Router.__init__")
    (weight,) = [
        node.value
        for node in ast.walk(made)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.weight"
    ]
    assert "torch.empty(" in ast.unparse(weight) and "device=" not in ast.unparse(weight)


def moe_reads_a_name_of_the_engine(source: Source) -> None:
    lines = source.lines(MOE_UTILS)
    assert "te_general_gemm" in lines.partition("except ImportError:")[0]
    assert "te_general_gemm = None" not in lines
    assert lines.count("if te_general_gemm is not None and") == 2


def specs_say_whether_the_engine_is_there(source: Source) -> None:
    lines = source.lines(SPECS)
    assert "HAVE_TE = True" in lines and "HAVE_TE = False" in lines
    arguments = source.definition(SPECS, "get_gpt_decoder_block_spec").args
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    assert {"config", "use_transformer_engine", "normalization", "vp_stage"} <= set(names)


def only_local_specs_rename_the_norm_before_experts(source: Source) -> None:
    old = "'pre_mlp_layernorm.': 'mlp.linear_fc1.layer_norm_'"
    assert old in source.lines(SPECS, "get_gpt_layer_local_spec")
    assert old not in source.lines(SPECS, "get_gpt_layer_with_transformer_engine_spec")


def quick_gelu_is_that_of_fusions(source: Source) -> None:
    """Megatron compares functions by identity, and has two of this name."""
    for path in (TRANSFORMER_CONFIG, EXPERTS):
        (where,) = [
            node.module
            for node in ast.walk(ast.parse(source.text(path)))
            if isinstance(node, ast.ImportFrom)
            and "quick_gelu" in {name.name for name in node.names}
        ]
        assert where is not None and where.endswith("fusions.fused_bias_geglu")


def weight_gradients_fuse_only_with_apex(source: Source) -> None:
    assert (
        "if config.gradient_accumulation_fusion and (not _grad_accum_fusion_available):"
        in source.lines(LAYERS)
    )
    assert "import fused_weight_gradient_mlp_cuda" in source.lines(LAYERS)


def overlap_relies_on_one_connection(source: Source) -> None:
    assert (
        source.text(LAYERS).count(
            "Here we rely on CUDA_DEVICE_MAX_CONNECTIONS=1 to ensure that the"
        )
        == 3
    )
    assert "environ" not in source.lines(LAYERS, "LinearWithGradAccumulationAndAsyncCommunication")


def buffers_lie_on_the_current_device(source: Source) -> None:
    made = source.lines(BUFFER, "_ParamAndGradBuffer.__init__")
    for name, dtype in (
        ("self.grad_data", "self.grad_dtype"),
        ("self.param_data", "self.param_dtype"),
    ):
        arguments = (
            f"self.numel, dtype={dtype}, device=torch.cuda.current_device(), requires_grad=False"
        )
        assert f"{name} = torch.zeros({arguments})" in made


OPTIMIZER, MEMORY, MODEL = (
    "rlpost/trainer/optimizer.py",
    "rlpost/trainer/memory.py",
    "rlpost/trainer/model.py",
)
CHECKPOINT, COPIES = (
    "rlpost/trainer/megatron_checkpoint.py",
    "rlpost/trainer/torch_dist/optimizer_state.py",
)
LAYER_SPECS, STARTUP = "rlpost/trainer/layer_specs.py", "rlpost/driver/startup.py"

FACTS = (
    Fact(
        "buffers of DDP leave the device and come back by resizing their storage, under tensors that stay",
        (MEMORY,),
        buffers_leave_by_resizing,
        (BUFFER, "self.param_data.storage().resize_(0)", "self.param_data = None"),
    ),
    Fact(
        "parameters become views of a buffer only with the distributed optimizer",
        (MEMORY, MODEL),
        parameters_move_into_the_buffer_only_when_optimizer_is_distributed,
        (BUFFER, "param.data.detach().copy_(old_param_data)", "pass"),
    ),
    Fact(
        "buffers of DDP lie on the current CUDA device",
        (MEMORY, MODEL),
        buffers_lie_on_the_current_device,
        (BUFFER, "self.grad_data = torch.zeros(", "self.grad_data = on_the_host("),
    ),
    Fact(
        "use_precision_aware_optimizer raises TypeError without TransformerEngine, with CPU offload too",
        (OPTIMIZER,),
        precision_aware_needs_a_version,
        (
            UTILS,
            "return get_te_version() >= PkgVersion(version)",
            "return get_te_version() == PkgVersion(version)",
        ),
    ),
    Fact(
        "use_precision_aware_optimizer needs the distributed optimizer",
        (OPTIMIZER,),
        precision_aware_needs_the_distributed_optimizer,
        (
            CONFIG,
            "self.use_distributed_optimizer\n            ), '--use-precision-aware-optimizer",
            "True\n            ), '--use-precision-aware-optimizer",
        ),
    ),
    Fact(
        "optimizer_cpu_offload makes a HybridDeviceOptimizer with torch's AdamW on the host and float32 main weights",
        (OPTIMIZER, CHECKPOINT),
        hybrid_is_chosen_by_cpu_offload,
        (OPTIMIZERS, "param_update_in_fp32=True", "param_update_in_fp32=False"),
    ),
    Fact(
        "HybridDeviceOptimizer keeps the classes of its optimizers among the defaults of its groups",
        (CHECKPOINT,),
        hybrid_keeps_classes,
        (
            HYBRID,
            '"cpu_optimizer_cls": cpu_optimizer_cls,',
            '"cpu_optimizer_cls": str(cpu_optimizer_cls),',
        ),
    ),
    Fact(
        "HybridDeviceOptimizer pins weights before it converts them, so that each step copies pageable ones",
        (OPTIMIZER,),
        hybrid_loses_pinned_weights,
        (HYBRID, "param.detach().clone().float()", "param.float().pin_memory()"),
    ),
    Fact(
        "HybridDeviceOptimizer allocates a pinned gradient for each parameter",
        ("rlpost/extensions/planning/rank_memory.py",),
        hybrid_pins_a_gradient_for_each_parameter,
        (HYBRID, "pin_memory=self.pin_cpu_grads, device=", "pin_memory=False, device="),
    ),
    Fact(
        "the state of a HybridDeviceOptimizer is that of the format: param, exp_avg and exp_avg_sq",
        (COPIES,),
        hybrid_has_master_params,
        (
            DISTRIBUTED,
            'tensors["param"] = tensors.pop("master_param")',
            'tensors["main"] = tensors.pop("master_param")',
        ),
    ),
    Fact(
        "main weights of a HybridDeviceOptimizer follow imported weights when its parameters are reloaded",
        ("rlpost/trainer/actor.py", OPTIMIZER),
        hybrid_takes_new_weights,
        (
            HYBRID,
            "            fp32_param.data.copy_(param)\n\n    def _register_load",
            "            pass\n\n    def _register_load",
        ),
    ),
    Fact(
        "the optimizer's format is called fully_reshardable and gathers with gloo when it is told to",
        (COPIES, CHECKPOINT),
        fully_reshardable_by_name,
        (
            DISTRIBUTED,
            "elif sharding_type == 'fully_reshardable':\n                self.load",
            "elif sharding_type == 'reshardable':\n                self.load",
        ),
    ),
    Fact(
        "common.pt is loaded with weights_only, and no optimizer class is among the classes that may be in it",
        (CHECKPOINT,),
        common_state_takes_listed_classes_only,
        (SAFE, "SAFE_GLOBALS = [", "SAFE_GLOBALS = [\n    AdamW,"),
    ),
    Fact(
        "the weight of an MoE's router is made on the CPU, whatever the device",
        (MODEL, "rlpost/trainer/weights/exporter.py"),
        router_weight_is_made_without_a_device,
        (
            ROUTER,
            "(self.config.num_moe_experts, self.config.hidden_size), dtype=torch.float32",
            "(self.config.num_moe_experts, self.config.hidden_size), dtype=torch.float32, device='cuda'",
        ),
    ),
    Fact(
        "moe_utils reads te_general_gemm, which it defines only with TransformerEngine",
        (MODEL,),
        moe_reads_a_name_of_the_engine,
        (
            MOE_UTILS,
            "if te_general_gemm is not None and router_dtype != torch.float64",
            "if HAVE_TE and router_dtype != torch.float64",
        ),
    ),
    Fact(
        "gpt_layer_specs has HAVE_TE, and specifies a block with or without TransformerEngine",
        (LAYER_SPECS,),
        specs_say_whether_the_engine_is_there,
        (SPECS, "def get_gpt_decoder_block_spec(", "def get_gpt_block_spec("),
    ),
    Fact(
        "only the local specification renames the norm before an MLP in checkpoints",
        (LAYER_SPECS, CHECKPOINT),
        only_local_specs_rename_the_norm_before_experts,
        (SPECS, '"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",', ""),
    ),
    Fact(
        "the quick_gelu that TransformerConfig and experts compare with is that of fused_bias_geglu",
        (MODEL,),
        quick_gelu_is_that_of_fusions,
        (
            TRANSFORMER_CONFIG,
            "from ..fusions.fused_bias_geglu import quick_gelu",
            "from ..activations import quick_gelu",
        ),
    ),
    Fact(
        "gradient_accumulation_fusion needs the extension of Apex",
        (MODEL,),
        weight_gradients_fuse_only_with_apex,
        (LAYERS, "import fused_weight_gradient_mlp_cuda", "import fused_weight_gradient"),
    ),
    Fact(
        "overlapped tensor-parallel collectives rely on CUDA_DEVICE_MAX_CONNECTIONS=1, which nothing sets",
        (STARTUP,),
        overlap_relies_on_one_connection,
        (
            LAYERS,
            "Here we rely on CUDA_DEVICE_MAX_CONNECTIONS=1 to ensure that the\n                # gather",
            "Here the stream ensures that the\n                # gather",
        ),
    ),
)
