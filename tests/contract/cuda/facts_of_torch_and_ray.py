"""Facts of torch and Ray that our code relies on with CUDA."""

from __future__ import annotations

import io
import pickle
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch

from rlpost.trainer import varlen
from rlpost.trainer.weights import trainer_side
from tests.contract.cuda.library_source import Fact, Source

CUDA = "torch/cuda/__init__.py"
VARLEN = "torch/nn/attention/varlen.py"
BIAS = "torch/nn/attention/bias.py"
REDUCTIONS = "torch/multiprocessing/reductions.py"
C10D = "torch/distributed/distributed_c10d.py"
OPTIMIZER = "torch/optim/optimizer.py"
SERIALIZATION = "torch/serialization.py"
NVIDIA = "ray/_private/accelerators/nvidia_gpu.py"
RAY_UTILS = "ray/_private/utils.py"
PINNED = "torch/include/ATen/core/CachingHostAllocator.h"
NCCL_GROUP = "torch/include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
PARALLEL = "rlpost/trainer/parallel.py"
KEPT, RANK_MEMORY = "rlpost/trainer/kept_weights.py", "rlpost/extensions/planning/rank_memory.py"


def between(text: str, begin: str, end: str) -> str:
    """Return the text from ``begin`` up to ``end``, without repeated white space."""
    assert begin in text, begin
    return " ".join(text.partition(begin)[2].partition(end)[0].split())


def pinned_memory_is_rounded_up(source: Source) -> None:
    """C++, so its text is compared. The bound is the largest size unless it is set."""
    text = source.text(PINNED)
    rounded = between(text, "const auto roundSize = [&]() -> size_t {", "}();")
    assert rounded == (
        "if (size <= pinned_max_round_threshold() && size <= pinned_max_cached_size()) { "
        "return c10::llvm::PowerOf2Ceil(size); } else { return size; }"
    )


def cached_pinned_blocks_are_of_any_size(source: Source) -> None:
    """A block of the same power of two is returned although it may be smaller than the request."""
    found = between(source.text(PINNED), "virtual B* get_free_block(size_t size,", "return block;")
    assert "B* block = pool.free_list_[index].list_.back();" in found
    assert "size_ >=" not in found and "size_ <" not in found


def nccl_gives_its_buffers_back(source: Source) -> None:
    """Methods of the Python class too; that of a group without a communicator is in C++ alone."""
    found = between(source.text(NCCL_GROUP), "// APIs related to memory offload", "protected:")
    assert found.startswith("(require NCCL 2.29.7+ at runtime)")
    assert "void suspend() override; void resume() override;" in found
    assert "std::unordered_map<std::string, uint64_t> getMemoryStats() override;" in found
    for name in ("suspend", "resume", "memory_stats"):
        assert callable(getattr(torch._C._distributed_c10d.Backend, name))


def parameters(source: Source, path: str, name: str) -> list[str]:
    arguments = source.definition(path, name).args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]


def varlen_takes_our_arguments(source: Source) -> None:
    positional = parameters(source, VARLEN, "varlen_attn")
    assert positional == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    named = {argument.arg for argument in source.definition(VARLEN, "varlen_attn").args.kwonlyargs}
    assert {"scale", "window_size", "enable_gqa"} <= named


def window_means_causal(source: Source) -> None:
    assert "is_causal = window_size == (-1, 0)" in source.lines(VARLEN, "varlen_attn")


def varlen_is_flash_attention(source: Source) -> None:
    """cuDNN's kernel supports neither a window nor fewer query groups than heads."""
    assert source.run(VARLEN, "_should_use_cudnn")(0) is False


def flash_has_our_order(source: Source) -> None:
    """Both operators, as varlen_attn calls them; the denominators of all sequences lie together."""
    arguments = [
        [one.name for one in operator.default._schema.arguments]
        for operator in (
            torch.ops.aten._flash_attention_forward,
            torch.ops.aten._flash_attention_backward,
        )
    ]
    bounds = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    window = {"scale", "window_size_left", "window_size_right"}
    assert arguments[0][:10] == ["query", "key", "value", *bounds, "return_debug_mask"]
    tensors = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert arguments[1][:14] == [*tensors, *bounds, "rng_state", "unused"]
    assert all(window <= set(names) for names in arguments)
    assert "(num_heads, total_q), dtype=torch.float" in source.lines(VARLEN, "_varlen_attn_fake")


def memory_efficient_has_our_order(source: Source) -> None:
    schema = torch.ops.aten._efficient_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    order = [
        "query",
        "key",
        "value",
        "bias",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
    ]
    assert names[:10] == [*order, "dropout_p", "custom_mask_type"]
    assert {"compute_log_sumexp", "scale"} <= set(names[10:])


def causal_mask_has_our_number(source: Source) -> None:
    """The mask is the one aligned to the last query and the last key (bottom right)."""
    variants = source.run(BIAS, "CausalVariant", IntEnum=IntEnum, auto=auto)
    assert varlen.BOTTOM_RIGHT == variants.LOWER_RIGHT
    assert "custom_mask_type=int(attn_mask.variant)" in source.lines(BIAS)


def device_is_argument_six(source: Source) -> None:
    rebuild = parameters(source, REDUCTIONS, "rebuild_cuda_tensor")
    assert rebuild.index("storage_device") == trainer_side._DEVICE
    reduced = source.lines(REDUCTIONS, "reduce_tensor")
    order = "(type(tensor), tensor.size(), tensor.stride(), tensor_offset, type(storage), tensor.dtype, device, handle"
    assert order in reduced


def views_share_their_storage(source: Source) -> None:
    """References are counted per storage and not per tensor, so a view adds another reader."""
    reduced = source.lines(REDUCTIONS, "reduce_tensor")
    assert "storage = tensor._typed_storage()" in reduced and "= storage._share_cuda_()" in reduced


def groups_outside_the_world(source: Source) -> None:
    names = parameters(source, C10D, "_new_process_group_helper")
    assert names[:6] == [
        "group_size",
        "group_rank",
        "global_ranks_in_group",
        "backend",
        "store",
        "group_name",
    ]
    assert {"backend_options", "timeout", "device_id"} <= set(names)
    assert "def pg_group_ranks(self)" in source.lines(C10D, "_World")


def nccl_connects_at_once_only_to_a_given_device(source: Source) -> None:
    helper = source.lines(C10D, "_new_process_group_helper")
    assert helper.count("eager_connect_single_device") == 1
    before = helper.partition("eager_connect_single_device")[0].splitlines()
    assert before[-3].strip() == "if device_id and pg._get_backend(device_id).supports_splitting:"


def broadcast_has_no_error_of_nccl(source: Source) -> None:
    broadcast = source.lines(C10D, "broadcast")
    assert "work.wait()" in broadcast and "if async_op:\n        return work" in broadcast


def groups_can_be_aborted(source: Source) -> None:
    assert "abort" in source.lines(C10D, "_abort_process_group")
    assert "shutdown()" in source.lines(C10D, "destroy_process_group")


def asking_for_cuda_starts_the_driver(source: Source) -> None:
    """The CUDA driver does not survive a fork, unless a variable makes torch ask NVML instead."""
    asks = source.lines(CUDA, "is_available")
    assert asks.rstrip().endswith("else:\n        return torch._C._cuda_getDeviceCount() > 0")
    assert "if not _is_compiled():\n        return False" in asks


def groups_keep_their_defaults(source: Source) -> None:
    """An optimizer's defaults are copied into each of its groups, and so into its state_dict."""
    assert "param_group.setdefault(name, default)" in source.lines(OPTIMIZER, "add_param_group")


def loading_is_weights_only(source: Source) -> None:
    default = source.run(SERIALIZATION, "_default_to_weights_only", torch=torch)
    assert default(None) is True
    assert (
        "if weights_only_not_set:\n        weights_only = _default_to_weights_only(pickle_module)"
        in source.lines(SERIALIZATION, "load")
    )
    held = io.BytesIO()
    torch.save({"cls": torch.optim.AdamW}, held)
    held.seek(0)
    try:
        torch.load(held, map_location="cpu")
    except pickle.UnpicklingError:
        return
    raise AssertionError("torch.load takes any class by default")


def accelerators(environ: dict[str, str], source: Source) -> Any:
    """Ray's package ``accelerators`` with its class for NVIDIA GPUs, reading ``environ``."""
    names: dict[str, Any] = {
        "os": SimpleNamespace(environ=environ),
        "env_bool": lambda name, default: default,
    }
    for name in ("CUDA_VISIBLE_DEVICES_ENV_VAR", "NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR"):
        names[name] = source.value(NVIDIA, name)
    manager = source.run(NVIDIA, "NvidiaGPUAcceleratorManager", AcceleratorManager=object, **names)
    return SimpleNamespace(
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR="RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        get_accelerator_manager_for_resource=lambda resource: manager,
    )


def visible_to_an_actor(source: Source, ids: list[str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a worker with GPUs ``ids``; it inherits 0,1,2,3."""
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ids})
    fake = SimpleNamespace(_private=SimpleNamespace(accelerators=accelerators(environ, source)))
    fake.get_runtime_context = lambda: context
    visible = source.run(
        RAY_UTILS, "set_visible_accelerator_ids", ray=fake, os=SimpleNamespace(environ=environ)
    )
    visible()
    return environ.get("CUDA_VISIBLE_DEVICES")


def no_gpus_keep_the_environment(source: Source) -> None:
    assert visible_to_an_actor(source, []) == "0,1,2,3"


def gpus_are_named_in_the_environment(source: Source) -> None:
    assert visible_to_an_actor(source, ["2"]) == "2"


ATTENTION, SYNC, STORED = (
    "rlpost/trainer/varlen.py",
    "rlpost/trainer/weights/trainer_side.py",
    "rlpost/trainer/megatron_checkpoint.py",
)
FLEET, WORKERS, DEVICE = (
    "rlpost/driver/engines/own_engines.py",
    "rlpost/driver/workers.py",
    "rlpost/trainer/device.py",
)

FACTS = (
    Fact(
        "varlen_attn takes queries, keys, values and bounds in our order",
        (ATTENTION,),
        varlen_takes_our_arguments,
        (
            VARLEN,
            "def varlen_attn(\n    query: torch.Tensor,\n    key: torch.Tensor,",
            "def varlen_attn(\n    key: torch.Tensor,\n    query: torch.Tensor,",
        ),
    ),
    Fact(
        "the window (-1, 0) of varlen_attn is the causal mask",
        (ATTENTION,),
        window_means_causal,
        (
            VARLEN,
            "is_causal = window_size == (-1, 0)\n    out, lse",
            "is_causal = False\n    out, lse",
        ),
    ),
    Fact(
        "torch's FlashAttention takes our arguments, and has one denominator for each head and token",
        (ATTENTION,),
        flash_has_our_order,
        (
            VARLEN,
            """    logsumexp = torch.empty(
        (num_heads, total_q), dtype=torch.float, device=query.device
    )

    rng_state""",
            """    logsumexp = torch.empty(
        (total_q, num_heads), dtype=torch.float, device=query.device
    )

    rng_state""",
        ),
    ),
    Fact(
        "varlen_attn never takes cuDNN's kernel, which has neither windows nor groups",
        (ATTENTION,),
        varlen_is_flash_attention,
        (VARLEN, "    return False\n", "    return True\n"),
    ),
    Fact(
        "the causal mask of torch's memory-efficient attention that is aligned at the end has the number 2",
        (ATTENTION,),
        causal_mask_has_our_number,
        (BIAS, "    LOWER_RIGHT = auto()", "    OTHER = auto()\n    LOWER_RIGHT = auto()"),
    ),
    Fact(
        "a CUDA tensor is rebuilt from its device at argument 6",
        (SYNC,),
        device_is_argument_six,
        (
            REDUCTIONS,
            "    dtype,\n    storage_device,\n    storage_handle,",
            "    storage_device,\n    dtype,\n    storage_handle,",
        ),
    ),
    Fact(
        "tensors of one storage share that storage with their reader, each counted once more",
        (SYNC,),
        views_share_their_storage,
        (REDUCTIONS, ") = storage._share_cuda_()", ") = tensor._share_cuda_()"),
    ),
    Fact(
        "a group with processes outside the world is made by _new_process_group_helper and named in _world",
        (SYNC,),
        groups_outside_the_world,
        (
            C10D,
            "def _new_process_group_helper(\n    group_size,\n    group_rank,",
            "def _new_process_group_helper(\n    group_rank,\n    group_size,",
        ),
    ),
    Fact(
        "NCCL connects when a group is made only with a device_id",
        (SYNC,),
        nccl_connects_at_once_only_to_a_given_device,
        (
            C10D,
            "if device_id and pg._get_backend(device_id)",
            "if True or pg._get_backend(device_id)",
        ),
    ),
    Fact(
        "broadcast waits for its work without async_op, which on NCCL means the stream and not its end",
        (SYNC,),
        broadcast_has_no_error_of_nccl,
        (
            C10D,
            "    work = group.broadcast([tensor], opts)\n    if async_op:\n        return work",
            "    work = group.broadcast([tensor], opts)\n    if True:\n        return work",
        ),
    ),
    Fact(
        "destroy_process_group shuts a group down; _abort_process_group aborts it",
        (SYNC,),
        groups_can_be_aborted,
        (C10D, "def _abort_process_group(", "def _end_process_group("),
    ),
    Fact(
        "torch.cuda.is_available starts CUDA's driver, so a process that asked may not be forked",
        ("tests/contract/actor_ranks.py", "rlpost/engines/server.py"),
        asking_for_cuda_starts_the_driver,
        (
            CUDA,
            "return torch._C._cuda_getDeviceCount() > 0\n\n\ndef is_bf16",
            "return device_count() > 0\n\n\ndef is_bf16",
        ),
    ),
    Fact(
        "an optimizer's defaults are part of its groups",
        (STORED,),
        groups_keep_their_defaults,
        (OPTIMIZER, "param_group.setdefault(name, default)", "pass"),
    ),
    Fact(
        "torch.load refuses classes unless they are listed",
        (STORED,),
        loading_is_weights_only,
        (SERIALIZATION, "return pickle_module is None", "return False"),
    ),
    Fact(
        "pinned memory is rounded up to a power of two",
        (KEPT, RANK_MEMORY),
        pinned_memory_is_rounded_up,
        (PINNED, "return c10::llvm::PowerOf2Ceil(size);", "return size;"),
    ),
    Fact(
        "a group of NCCL has suspend, resume and memory_stats, from NCCL 2.29.7 on",
        (PARALLEL,),
        nccl_gives_its_buffers_back,
        (NCCL_GROUP, "  void suspend() override;\n", ""),
    ),
    Fact(
        "without rounding a cached block of pinned memory may be too small for a request",
        (KEPT,),
        cached_pinned_blocks_are_of_any_size,
        (
            PINNED,
            "B* block = pool.free_list_[index].list_.back();",
            "B* block = pool.free_list_[index].first_of_at_least(size);",
        ),
    ),
    Fact(
        "actors of zero GPUs keep CUDA_VISIBLE_DEVICES as their environment has it",
        (FLEET, WORKERS),
        no_gpus_keep_the_environment,
        (RAY_UTILS, "if not override_on_zero and len(accelerator_ids) == 0:", "if False:"),
    ),
    Fact(
        "actors with GPUs see these alone, by CUDA_VISIBLE_DEVICES",
        (DEVICE, FLEET),
        gpus_are_named_in_the_environment,
        (
            NVIDIA,
            'CUDA_VISIBLE_DEVICES_ENV_VAR = "CUDA_VISIBLE_DEVICES"\nNOSET',
            'CUDA_VISIBLE_DEVICES_ENV_VAR = "NVIDIA_VISIBLE_DEVICES"\nNOSET',
        ),
    ),
)
