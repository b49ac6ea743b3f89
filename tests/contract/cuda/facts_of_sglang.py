"""Facts of SGLang that our code relies on with CUDA."""

from __future__ import annotations

import ast
import contextlib
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch

from rlpost.driver.offload import CACHE
from rlpost.trainer.weights import trainer_side
from tests.contract.cuda.library_source import Fact, Source

ENGINE = "sglang/srt/entrypoints/engine.py"
ENVIRON = "sglang/srt/environ.py"
COMMON = "sglang/srt/utils/common.py"
PATCH_TORCH = "sglang/srt/utils/patch_torch.py"
TP_WORKER = "sglang/srt/managers/tp_worker.py"
SCHEDULER = "sglang/srt/managers/scheduler.py"
SCHEDULER_UPDATER = "sglang/srt/managers/scheduler_components/weight_updater.py"
RUNNER_UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
BUCKET = "sglang/srt/weight_sync/tensor_bucket.py"
BACKENDS = "sglang/srt/model_executor/runner_backend"
GRAPH_CONFIG = "sglang/srt/model_executor/cuda_graph_config.py"
GRAPH_FIELDS = "sglang/srt/arg_groups/fields/exec_.py"
DP_CONTROLLER = "sglang/srt/managers/data_parallel_controller.py"
KV_CACHE = "sglang/srt/mem_cache/kv_cache_configurator.py"
BOOTSTRAP = "sglang/srt/distributed/bootstrap.py"
UUID = "GPU-of-the-trainer"


def own_environment(
    source: Source,
    methods: list[Any] | None = None,
    *,
    nnodes: int = 1,
    has_fabric: bool = False,
    is_symmetric: bool = False,
    **given: str,
) -> dict[str, str]:
    """Return the environment that SGLang's server makes of ``given``.

    Args:
        methods: the start method of its processes is appended to it.
        nnodes: nodes of the engine.
        has_fabric: whether GPUs of several nodes are joined by NVLink (MNNVL).
        is_symmetric: the setting ``enable_symm_mem``. NVLS is off.
    """
    seen = [] if methods is None else methods
    environ = dict(given)
    arguments = SimpleNamespace(
        nnodes=nnodes,
        enable_symm_mem=is_symmetric,
        enable_nccl_nvls=False,
        dcp_size=1,
        enable_metrics=False,
    )
    arguments.custom_sigquit_handler, arguments.gc_threshold = None, None
    launch = source.run(
        ENGINE,
        "_set_envs_and_config",
        os=SimpleNamespace(environ=environ),
        resolving_view=lambda one: one,
        is_mnnvl_fabric_device=lambda: has_fabric,
        get_bool_env_var=lambda name: name == "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK",
        set_ulimit=lambda: None,
        time=SimpleNamespace(time=lambda: 0.0),
        random=SimpleNamespace(randint=lambda low, high: low),
        threading=SimpleNamespace(current_thread=lambda: 1, main_thread=lambda: 2),
        logger=SimpleNamespace(warning=lambda text: None, info=lambda text: None),
        mp=SimpleNamespace(set_start_method=lambda method, **_: seen.append(method)),
        envs=SimpleNamespace(),
    )
    launch(arguments)
    return environ


def takes_cumem_away(source: Source) -> None:
    assert own_environment(source)["NCCL_CUMEM_ENABLE"] == "0"
    assert own_environment(source, NCCL_CUMEM_ENABLE="1")["NCCL_CUMEM_ENABLE"] == "1", (
        "a person's own value wins"
    )


def sets_only_these_of_nccl(source: Source) -> None:
    written = {name for name in own_environment(source) if name.startswith("NCCL_")}
    assert written == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}, written


def overrides_max_connections(source: Source) -> None:
    assert (
        own_environment(source, CUDA_DEVICE_MAX_CONNECTIONS="1")["CUDA_DEVICE_MAX_CONNECTIONS"]
        == "8"
    )


def lets_nccl_register_graphs(source: Source) -> None:
    assert "NCCL_GRAPH_REGISTER" not in own_environment(source)
    assert "NCCL_GRAPH_REGISTER" not in source.text(f"{BACKENDS}/full_cuda_graph_backend.py")


def answers_a_release_of_the_cache_without_a_barrier(source: Source) -> None:
    release = source.definition(
        SCHEDULER_UPDATER, "SchedulerWeightUpdaterManager.release_memory_occupation"
    )
    (of_weights,) = [
        one
        for one in release.body
        if isinstance(one, ast.If) and "GPU_MEMORY_TYPE_WEIGHTS in" in ast.unparse(one.test)
    ]
    outside = [ast.unparse(one) for one in release.body if one is not of_weights]
    assert "barrier" not in " ".join(outside)
    lines = ast.unparse(of_weights)
    assert lines.index("barrier") < lines.index("pause(GPU_MEMORY_TYPE_WEIGHTS)")


def spawns_its_processes(source: Source) -> None:
    methods: list[Any] = []
    own_environment(source, methods)
    assert methods == ["spawn"]


def keeps_graphs_out_of_the_saver(source: Source) -> None:
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH = EnvBool(False)" in source.lines(ENVIRON)


def asks_the_variable_for_graphs(source: Source) -> None:
    wanted = "enable=enable_memory_saver and get_bool_env_var('SGLANG_MEMORY_SAVER_CUDA_GRAPH')"
    assert wanted in source.lines(
        f"{BACKENDS}/full_cuda_graph_backend.py", "FullCudaGraphBackend.__init__"
    )


def keeps_a_copy_of_paused_graphs(source: Source) -> None:
    capture = source.text(f"{BACKENDS}/full_cuda_graph_backend.py")
    assert "tag=GPU_MEMORY_TYPE_CUDA_GRAPH" in capture and "enable_cpu_backup=True" in capture


class Anything:
    """An object with every attribute."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return Anything()


def breakable_graphs_refuse_the_saver(source: Source) -> None:
    made = source.run(
        f"{BACKENDS}/breakable_cuda_graph_backend.py",
        "BreakableCudaGraphBackend.__init__",
        GraphPoolPrecarve=Anything(),
        TorchMemorySaverAdapter=SimpleNamespace(
            create=lambda *, enable: SimpleNamespace(enabled=enable)
        ),
        get_bool_env_var=lambda name: name == "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
        Optional=Any,
    )
    try:
        made(Anything(), Anything(), enable_memory_saver=True)
    except NotImplementedError:
        return
    raise AssertionError("breakable CUDA graphs take the memory saver")


def prefill_is_breakable_unless_disabled(source: Source) -> None:
    default = source.lines(GRAPH_CONFIG, "default_prefill_backend")
    assert "return Backend.BREAKABLE if is_cuda() else" in default
    field = "cuda_graph_backend_prefill: A[Optional[Literal['full', 'breakable', 'tc_piecewise', 'disabled']]"
    assert field in source.lines(GRAPH_FIELDS)


class CudaTensor(torch.Tensor):
    """A CPU tensor that claims to be on CUDA."""

    is_cuda = True  # type: ignore[assignment]


class CudaStorage:
    """The part of a CUDA storage that torch uses to share it, with the values of device 0."""

    _untyped_storage = SimpleNamespace(device=torch.device("cuda", 0))

    def _share_cuda_(self) -> tuple[Any, ...]:
        return (0, b"memory handle", 4096, 512, b"counter", 0, b"event", True)


def reduced(source: Source) -> Any:
    """Return torch's own ``reduce_tensor``, changed to accept ``CudaTensor``."""
    from torch.multiprocessing import reductions

    names = dict(vars(reductions))
    seen_as = {CudaTensor: torch.Tensor, CudaStorage: torch.storage.TypedStorage}
    names |= {
        "type": lambda one: seen_as.get(type(one), type(one)),
        "StorageWeakRef": id,
        "shared_cache": {},
    }
    names["rebuild_cuda_tensor"] = reductions.rebuild_cuda_tensor
    CudaTensor._typed_storage = lambda tensor: CudaStorage()  # type: ignore[method-assign]
    return source.run("torch/multiprocessing/reductions.py", "reduce_tensor", **names)


def pickled_handle(source: Source) -> bytes:
    """Pickle a CUDA tensor as the trainer does, with device and memory faked below torch."""
    memory = torch.zeros(64, dtype=torch.uint8).as_subclass(CudaTensor)
    reduce_tensor, properties = trainer_side.reduce_tensor, torch.cuda.get_device_properties
    buffer = io.BytesIO()
    try:
        trainer_side.reduce_tensor = reduced(source)
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=UUID)
        trainer_side._HandlePickler(buffer).dump([("name", memory)])
    finally:
        trainer_side.reduce_tensor, torch.cuda.get_device_properties = reduce_tensor, properties
    return buffer.getvalue()


def unpickler(source: Source) -> Any:
    """SGLang's SafeUnpickler, which returns the arguments of a rebuild and opens no memory."""
    safe = source.run(COMMON, "SafeUnpickler", pickle=pickle, _safe_load_torch_storage=None)

    class Recording(safe):  # type: ignore[misc,valid-type]
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            is_rebuild = name == "rebuild_cuda_tensor"
            return (lambda *arguments: arguments) if is_rebuild else found

    return Recording


def handle_passes_the_unpickler(source: Source) -> None:
    ((name, arguments),) = unpickler(source)(io.BytesIO(pickled_handle(source))).load()
    assert name == "name"
    assert arguments[:2] == (torch.Tensor, torch.Size([64])) and arguments[5] == torch.uint8


def unpickler_refuses_the_rest(source: Source) -> None:
    try:
        unpickler(source)(io.BytesIO(pickle.dumps(print))).load()
    except RuntimeError:
        return
    raise AssertionError(
        "SafeUnpickler lets builtins.print through: it is no list of what is allowed any more"
    )


def uuid_names_the_gpu(source: Source) -> None:
    """The engine sees the trainer's GPU as number 1; a plain index would be used unchanged."""
    ((_, arguments),) = unpickler(source)(io.BytesIO(pickled_handle(source))).load()
    uuids = {0: "GPU-of-somebody-else", 1: UUID}
    cuda = SimpleNamespace(
        device_count=lambda: len(uuids),
        get_device_properties=lambda device: SimpleNamespace(uuid=uuids[device]),
    )
    names: dict[str, Any] = {"_REDUCE_TENSOR_ARG_DEVICE_INDEX": source.value(PATCH_TORCH, INDEX)}
    names["_modify_tuple"] = source.run(PATCH_TORCH, "_modify_tuple")
    names["_device_from_maybe_uuid"] = source.run(
        PATCH_TORCH, "_device_from_maybe_uuid", torch=SimpleNamespace(cuda=cuda)
    )
    names["reductions"] = SimpleNamespace(_rebuild_cuda_tensor_original=lambda *rebuilt: rebuilt)
    rebuilt = source.run(PATCH_TORCH, "_rebuild_cuda_tensor_modified", **names)(*arguments)
    assert arguments[trainer_side._DEVICE] == UUID
    assert [
        at for at, pair in enumerate(zip(arguments, rebuilt, strict=True)) if pair[0] != pair[1]
    ] == [trainer_side._DEVICE]
    assert rebuilt[trainer_side._DEVICE] == 1


INDEX = "_REDUCE_TENSOR_ARG_DEVICE_INDEX"


def unpickling_uses_the_patched_rebuild(source: Source) -> None:
    patch = source.lines(PATCH_TORCH, "monkey_patch_torch_reductions")
    assert "reductions.rebuild_cuda_tensor = _rebuild_cuda_tensor_modified" in patch
    own = source.lines(TP_WORKER, "deserialize_own_rank")
    assert own.index("monkey_patch_torch_reductions()") < own.index(
        "MultiprocessingSerializer.deserialize"
    )


def bucket_description_passes_the_unpickler(source: Source) -> None:
    safe = source.run(COMMON, "SafeUnpickler", pickle=pickle, _safe_load_torch_storage=None)
    assert (
        "sglang.srt.weight_sync.tensor_bucket",
        "FlattenedTensorMetadata",
    ) in safe.ALLOWED_GLOBALS
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
    described = {"shape": torch.Size([2, 3]), "dtypes": dtypes, "numel": 6}
    assert safe(io.BytesIO(pickle.dumps(described))).load() == described


def each_rank_reads_its_own_handle(source: Source) -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(tp_rank=3))
    own = source.run(
        TP_WORKER,
        "deserialize_own_rank",
        monkey_patch_torch_reductions=lambda: None,
        MultiprocessingSerializer=SimpleNamespace(deserialize=lambda data: data),
    )
    assert own(worker, list("abcdefgh")) == "d"


def flattened_bucket_of_handles(source: Source) -> None:
    """It is a dictionary of ``flattened_tensor`` and ``metadata``; offsets are in bytes."""
    names: dict[str, Any] = {"torch": torch, "dataclass": None}
    bucket = source.run(BUCKET, "FlattenedTensorBucket", **names, List=list, Tuple=tuple)
    described = SimpleNamespace(
        name="b", shape=torch.Size([1, 2]), dtype=torch.float32, start_idx=4, end_idx=12
    )
    described.numel = 8
    loaded: list[Any] = []
    updater = SimpleNamespace(get_model=lambda: SimpleNamespace(load_weights=loaded.extend))
    update = source.run(
        RUNNER_UPDATER,
        "_update_weights_from_flattened_bucket",
        FlattenedTensorBucket=bucket,
        FlattenedTensorMetadata=SimpleNamespace,
    )
    memory = torch.arange(3.0).view(torch.uint8)
    assert update(updater, {"flattened_tensor": memory, "metadata": [described]})[0]
    ((name, tensor),) = loaded
    assert name == "b" and tensor.tolist() == [[1.0, 2.0]]
    assert 'if load_format == "flattened_bucket":' in source.text(RUNNER_UPDATER)


class Calls:
    """Records method calls as (name, arguments)."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **_: self.made.append((name, *arguments))


def memory_names(source: Source) -> dict[str, Any]:
    constants = ("KV_CACHE", "WEIGHTS", "CUDA_GRAPH")
    names: dict[str, Any] = {
        f"GPU_MEMORY_TYPE_{one}": source.value("sglang/srt/constants.py", f"GPU_MEMORY_TYPE_{one}")
        for one in constants
    }
    names |= {f"{kind}MemoryOccupationReqOutput": Anything() for kind in ("Release", "Resume")}
    names |= {
        "_export_static_state": lambda model: "buffers",
        "_import_static_state": lambda model, state: None,
    }
    return names | {"torch": Anything()}


def manager(*, is_idle: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler=None,
        is_fully_idle=lambda **_: is_idle,
        offload_tags=set(),
        memory_saver_adapter=Calls(),
        flush_cache=lambda: None,
        _assert_weight_cache_inactive=lambda operation: None,
        tp_worker=Anything(),
        tp_cpu_group=None,
    )


def tags_are_ours(source: Source) -> None:
    constants = [
        memory_names(source)[f"GPU_MEMORY_TYPE_{one}"]
        for one in ("KV_CACHE", "CUDA_GRAPH", "WEIGHTS")
    ]
    assert constants == [*CACHE, "weights"]


def releases_only_what_it_is_told(source: Source) -> None:
    release = source.run(SCHEDULER_UPDATER, "release_memory_occupation", **memory_names(source))
    found = manager()
    release(found, SimpleNamespace(tags=[*CACHE]))
    assert found.memory_saver_adapter.made == [("pause", "kv_cache"), ("pause", "cuda_graph")]


def a_busy_engine_does_not_release(source: Source) -> None:
    release = source.run(SCHEDULER_UPDATER, "release_memory_occupation", **memory_names(source))
    try:
        release(manager(is_idle=False), SimpleNamespace(tags=["kv_cache"]))
    except AssertionError:
        return
    raise LookupError("a busy engine releases its memory")


def restores_only_what_was_released(source: Source) -> None:
    resume = source.run(SCHEDULER_UPDATER, "resume_memory_occupation", **memory_names(source))
    try:
        resume(manager(), SimpleNamespace(tags=["kv_cache"]))
    except KeyError:
        return
    raise AssertionError("memory that was never released can be restored")


def a_paused_engine_counts_as_idle(source: Source) -> None:
    release = source.lines(SCHEDULER_UPDATER, "release_memory_occupation")
    assert "ignore_waiting=scheduler is not None and scheduler._engine_paused" in release


def a_request_reaches_the_rank_that_it_names(source: Source) -> None:
    """The controller of data-parallel ranks sends it there, and chooses one for other requests."""
    sent: list[tuple[str, object]] = []
    route = source.run(
        DP_CONTROLLER,
        "maybe_external_dp_rank_routing",
        sock_send=lambda worker, request: sent.append((worker, request)),
        logger=Anything(),
    )
    controller = SimpleNamespace(workers=["first", "second"], _active_workers={0, 1})
    named, other = SimpleNamespace(routed_dp_rank=1), SimpleNamespace(routed_dp_rank=None)
    assert route(controller, named) is True and sent == [("second", named)]
    assert route(controller, other) is False and len(sent) == 1


def memory_counts_from_what_is_free(source: Source) -> None:
    """With 60 GB free at startup and a fraction of 0.8, weights and cache get 48 GB."""
    profile = source.run(
        KV_CACHE,
        "_profile_available_bytes",
        gc=Anything(),
        get_available_gpu_memory=lambda *_, **__: 55.0,  # weights of 5 GB are loaded
        get_parallel=lambda: SimpleNamespace(launch_world_size=1, world_group=Anything()),
        get_schedule=lambda: SimpleNamespace(mem_fraction_static=0.8),
        get_mm=Anything(),
        mm_runtime_reservation_gb=lambda **_: 0.0,
        math=None,
    )
    owner = SimpleNamespace(device="cuda", gpu_id=0, mambaish_config=None, model_config=Anything())
    assert abs(profile(owner, 60.0) / 2**30 - 43.0) < 1e-6
    measured = source.lines(BOOTSTRAP, "measure_pre_model_load_memory")
    assert "pre_model_load_memory = get_available_gpu_memory(" in measured


def joined_group(source: Source) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """Join a group as tensor-parallel rank 1 of an engine.

    Return the worker's arguments for the group, and the positional and keyword arguments of the
    call to torch.
    """
    asked: dict[str, Any] = {}
    join = source.run(
        RUNNER_UPDATER,
        "init_weights_update_group",
        torch=SimpleNamespace(distributed=SimpleNamespace(is_initialized=lambda: True)),
        logger=Calls(),
        NetworkAddress=lambda host, port: SimpleNamespace(to_tcp=lambda: f"tcp://{host}:{port}"),
        init_custom_process_group=lambda **how: asked.update(how),
    )
    updater = SimpleNamespace(tp_rank=1, _model_update_group={})
    assert join(updater, "10.0.0.1", 29500, 5, 9, "rlpost-1-0", "nccl")[0]
    made: list[Any] = []

    def rendezvous(address: str, rank: int, size: int, timeout: Any) -> Any:
        yield SimpleNamespace(set_timeout=lambda limit: None), rank, size

    from torch.distributed import distributed_c10d

    kept = {
        name: getattr(distributed_c10d, name) for name in ("rendezvous", "PrefixStore", "_world")
    }
    kept["_new_process_group_helper"] = distributed_c10d._new_process_group_helper
    try:
        distributed_c10d.rendezvous = rendezvous
        distributed_c10d.PrefixStore = lambda prefix, store: ("store of", prefix)
        distributed_c10d._world = SimpleNamespace(pg_group_ranks={})

        def helper(*arguments: Any, **how: Any) -> Any:
            made.extend((arguments, how))
            return "group", None

        distributed_c10d._new_process_group_helper = helper
        source.run(COMMON, "init_custom_process_group", torch_release=(2, 13))(**asked)
    finally:
        for name, original in kept.items():
            setattr(distributed_c10d, name, original)
    return asked, made[0], made[1]


def ranks_follow_the_offset(source: Source) -> None:
    asked, arguments, _ = joined_group(source)
    assert (asked["rank"], asked["world_size"], asked["init_method"]) == (
        6,
        9,
        "tcp://10.0.0.1:29500",
    )
    assert arguments[:3] == (9, 6, [])


def keys_stand_under_the_groups_name(source: Source) -> None:
    _, arguments, how = joined_group(source)
    assert arguments[4] == ("store of", "rlpost-1-0") and how["group_name"] == "rlpost-1-0"


def nccl_connects_lazily(source: Source) -> None:
    """With a device, torch would connect each group when it is made; both sides could deadlock."""
    _, _, how = joined_group(source)
    assert how["device_id"] is None


def a_bucket_arrives_as_one_tensor_of_bytes(source: Source) -> None:
    sent: list[Any] = []
    bucket = source.run(BUCKET, "FlattenedTensorBucket", torch=torch, List=list, Tuple=tuple)
    bucket.__init__.__globals__["FlattenedTensorMetadata"] = SimpleNamespace
    fake_torch = SimpleNamespace(
        dtype=torch.dtype, empty=torch.empty, float32=torch.float32, bfloat16=torch.bfloat16
    )
    fake_torch.distributed = SimpleNamespace(
        broadcast=lambda tensor, **how: sent.append((tensor, how))
    )
    receive = source.run(
        RUNNER_UPDATER,
        "_receive_bucketed_weights_from_distributed",
        torch=fake_torch,
        FlattenedTensorBucket=bucket,
    )
    updater = SimpleNamespace(device="cpu", _model_update_group={"g": "group"})
    shapes, dtypes = [[2, 3], [5]], ["float32", "bfloat16"]
    tensors = dict(receive(updater, names=["a", "b"], dtypes=dtypes, shapes=shapes, group_name="g"))
    ((flat, how),) = sent
    assert how == {"src": 0, "group": "group"} and flat.dtype == torch.uint8
    assert len(flat) == sum(tensor.nbytes for tensor in tensors.values()), (
        "no padding between tensors"
    )


def the_version_is_recorded_after_success(source: Source) -> None:
    for kind in ("distributed", "tensor", "disk"):
        lines = source.lines(SCHEDULER_UPDATER, f"update_weights_from_{kind}")
        success = lines.index("if success:")
        assert success < lines.index(
            "self.record_weight_version_after_update(recv_req.weight_version)"
        ), kind
    changed = source.lines(SCHEDULER, "record_weight_version_change")
    assert (
        "if new_version is None or new_version == get_serving().weight_version:\n        return"
        in changed
    )


def updates_need_a_session(source: Source) -> None:
    for kind in ("distributed", "tensor"):
        update = source.run(
            SCHEDULER_UPDATER,
            f"update_weights_from_{kind}",
            **{f"UpdateWeightsFrom{kind.title()}ReqOutput": SimpleNamespace},
        )
        assert update(SimpleNamespace(_session=None), None).success is False


class LoaderFailed(Exception):
    """What a custom loader raises."""


def a_loaders_exception_comes_before_the_barrier(source: Source) -> None:
    barriers: list[Any] = []
    update = source.run(
        SCHEDULER_UPDATER,
        "SchedulerWeightUpdaterManager.update_weights_from_tensor",
        torch=SimpleNamespace(
            distributed=SimpleNamespace(barrier=lambda group: barriers.append(group))
        ),
        msgspec=SimpleNamespace(structs=SimpleNamespace(replace=lambda session, **_: session)),
        UpdateWeightsFromTensorReqOutput=SimpleNamespace,
    )
    outcomes = iter([LoaderFailed(), (True, "")])

    def load(**_: object) -> tuple[bool, str]:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    runner = SimpleNamespace(weight_updater=SimpleNamespace(update_weights_from_tensor=load))
    manager = SimpleNamespace(
        _session=object(),
        tp_cpu_group="group",
        tp_worker=SimpleNamespace(deserialize_own_rank=lambda one: one),
        _observe_weight_load=lambda _: contextlib.nullcontext(),
        _select_runners=lambda _: [("target", runner)],
        flush_cache_after_weight_update=lambda _: None,
        record_weight_version_after_update=lambda _: None,
    )
    request = SimpleNamespace(
        serialized_named_tensors=[], selector="all", load_format="loader", weight_version=None
    )
    try:
        update(manager, request)
    except LoaderFailed:
        assert barriers == []
    else:
        raise AssertionError("SGLang handles what a custom loader raises")
    assert update(manager, request).success and barriers == ["group"]
    assert "self.weight_updater.update_weights_from_tensor" in source.text(SCHEDULER)


ENGINE_SIDE, TRAINER_SIDE = (
    "rlpost/engines/engine_side_weights.py",
    "rlpost/trainer/weights/trainer_side.py",
)
STAGES, STARTUP, PROCESS = (
    "rlpost/driver/stages.py",
    "rlpost/driver/startup.py",
    "rlpost/engines/process.py",
)
TURNS, FLEET = "rlpost/driver/offload.py", "rlpost/driver/engines/own_engines.py"
CLIENT = "rlpost/engines/engine_client.py"

FACTS = (
    Fact(
        "a server sets NCCL_CUMEM_ENABLE=0 for itself unless it is set",
        (STARTUP, TRAINER_SIDE),
        takes_cumem_away,
        (ENGINE, 'if "NCCL_CUMEM_ENABLE" not in os.environ or', "if"),
    ),
    Fact(
        "a server sets no variables of NCCL but NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE",
        (STARTUP,),
        sets_only_these_of_nccl,
        (ENGINE, 'os.environ["CUTE_DSL_LOG_LEVEL"] = "30"', 'os.environ["NCCL_P2P_LEVEL"] = "NVL"'),
    ),
    Fact(
        "a server sets CUDA_DEVICE_MAX_CONNECTIONS=8 over whatever it inherits",
        (STARTUP,),
        overrides_max_connections,
        (
            ENGINE,
            'os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"',
            'os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")',
        ),
    ),
    Fact(
        "a server lets NCCL register the buffers of CUDA graphs that it releases "
        "(fzyzcjy/torch_memory_saver#88, sgl-project/sglang#40648)",
        ("rlpost/engines/cuda_graphs.py",),
        lets_nccl_register_graphs,
        (
            ENGINE,
            'os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"',
            'os.environ["NCCL_GRAPH_REGISTER"] = "0"',
        ),
    ),
    Fact(
        "a release of the cache is answered when one rank has released (THUDM/slime#579)",
        (TURNS,),
        answers_a_release_of_the_cache_without_a_barrier,
        (
            SCHEDULER_UPDATER,
            "        return ReleaseMemoryOccupationReqOutput()",
            "        torch.distributed.barrier(self.tp_cpu_group)\n"
            "        return ReleaseMemoryOccupationReqOutput()",
        ),
    ),
    Fact(
        "a server spawns its processes, for it was asked whether there is CUDA before",
        ("rlpost/engines/server.py",),
        spawns_its_processes,
        (
            ENGINE,
            'mp.set_start_method("spawn", force=True)',
            'mp.set_start_method("fork", force=True)',
        ),
    ),
    Fact(
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH is off unless it is set",
        (PROCESS, TURNS),
        keeps_graphs_out_of_the_saver,
        (
            ENVIRON,
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH = EnvBool(False)",
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH = EnvBool(True)",
        ),
    ),
    Fact(
        "full CUDA graphs lie in the memory saver only with SGLANG_MEMORY_SAVER_CUDA_GRAPH",
        (PROCESS, TURNS),
        asks_the_variable_for_graphs,
        (
            f"{BACKENDS}/full_cuda_graph_backend.py",
            'enable=enable_memory_saver\n            and get_bool_env_var("SGLANG_MEMORY_SAVER_CUDA_GRAPH")',
            "enable=enable_memory_saver",
        ),
    ),
    Fact(
        "full CUDA graphs have a copy in host memory while they are paused",
        ("rlpost/extensions/planning/estimate.py",),
        keeps_a_copy_of_paused_graphs,
        (
            f"{BACKENDS}/full_cuda_graph_backend.py",
            "enable_cpu_backup=True",
            "enable_cpu_backup=False",
        ),
    ),
    Fact(
        "breakable CUDA graphs raise with the memory saver and SGLANG_MEMORY_SAVER_CUDA_GRAPH",
        (PROCESS, FLEET),
        breakable_graphs_refuse_the_saver,
        (f"{BACKENDS}/breakable_cuda_graph_backend.py", "raise NotImplementedError(", "print("),
    ),
    Fact(
        "prefill graphs are breakable on CUDA by default and can be disabled by cuda_graph_backend_prefill",
        (PROCESS, FLEET),
        prefill_is_breakable_unless_disabled,
        (GRAPH_CONFIG, "return Backend.BREAKABLE if is_cuda()", "return Backend.FULL if is_cuda()"),
    ),
    Fact(
        "SafeUnpickler lets all names in a handle to CUDA memory through",
        (TRAINER_SIDE,),
        handle_passes_the_unpickler,
        (COMMON, '("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),', ""),
    ),
    Fact(
        "SafeUnpickler refuses names that are not in its list",
        (TRAINER_SIDE,),
        unpickler_refuses_the_rest,
        (COMMON, "if (module, name) in self.ALLOWED_GLOBALS:", "if True:"),
    ),
    Fact(
        "the device of a handle stands at argument 6 and may be a UUID",
        (TRAINER_SIDE,),
        uuid_names_the_gpu,
        (PATCH_TORCH, f"{INDEX} = 6", f"{INDEX} = 7"),
    ),
    Fact(
        "a worker patches torch's rebuild function before it reads a handle",
        (TRAINER_SIDE,),
        unpickling_uses_the_patched_rebuild,
        (PATCH_TORCH, "reductions.rebuild_cuda_tensor = _rebuild_cuda_tensor_modified", "pass"),
    ),
    Fact(
        "SafeUnpickler lets the description of a flattened bucket through",
        (TRAINER_SIDE,),
        bucket_description_passes_the_unpickler,
        (COMMON, '("torch", "float8_e4m3fn"),', ""),
    ),
    Fact(
        "a worker reads the handle at its tensor-parallel rank, counted over all nodes",
        (ENGINE_SIDE, "rlpost/driver/placement.py"),
        each_rank_reads_its_own_handle,
        (
            TP_WORKER,
            "serialized_named_tensors[self.model_runner.tp_rank]",
            "serialized_named_tensors[0]",
        ),
    ),
    Fact(
        "a flattened bucket is a dictionary of flattened_tensor and metadata, placed by byte",
        (TRAINER_SIDE, CLIENT),
        flattened_bucket_of_handles,
        (
            RUNNER_UPDATER,
            'metadata = flattened_tensor_bucket_dict["metadata"]',
            'metadata = flattened_tensor_bucket_dict["meta"]',
        ),
    ),
    Fact(
        "parts of an engine's memory are called kv_cache, cuda_graph and weights",
        (TURNS, CLIENT),
        tags_are_ours,
        (
            "sglang/srt/constants.py",
            'GPU_MEMORY_TYPE_CUDA_GRAPH = "cuda_graph"',
            'GPU_MEMORY_TYPE_CUDA_GRAPH = "graphs"',
        ),
    ),
    Fact(
        "an engine releases the parts that it is told and keeps the others",
        (TURNS, FLEET),
        releases_only_what_it_is_told,
        (
            SCHEDULER_UPDATER,
            "self.memory_saver_adapter.pause(GPU_MEMORY_TYPE_KV_CACHE)",
            "self.memory_saver_adapter.pause(None)",
        ),
    ),
    Fact(
        "a busy engine fails when it is told to release its memory",
        (CLIENT,),
        a_busy_engine_does_not_release,
        (SCHEDULER_UPDATER, "assert self.is_fully_idle(", "print("),
    ),
    Fact(
        "requests that wait in a paused engine do not make it busy",
        (CLIENT, FLEET),
        a_paused_engine_counts_as_idle,
        (
            SCHEDULER_UPDATER,
            "ignore_waiting=scheduler is not None and scheduler._engine_paused",
            "ignore_waiting=False",
        ),
    ),
    Fact(
        "an engine fails over memory that was never released",
        (FLEET,),
        restores_only_what_was_released,
        (SCHEDULER_UPDATER, "self.offload_tags.remove(tag)", "self.offload_tags.discard(tag)"),
    ),
    Fact(
        "mem_fraction_static counts from the memory that is free when the engine starts",
        (STAGES, "rlpost/extensions/planning/engine_memory.py"),
        memory_counts_from_what_is_free,
        (KV_CACHE, "slack_gb = pre_model_load_memory * (1 -", "slack_gb = 100.0 * (1 -"),
    ),
    Fact(
        "a request reaches the data-parallel rank that it names (routed_dp_rank)",
        ("rlpost/engines/connection.py",),
        a_request_reaches_the_rank_that_it_names,
        (DP_CONTROLLER, "            rank = req.routed_dp_rank\n", "            rank = 0\n"),
    ),
    Fact(
        "an engine's rank in the group of a weight update is the offset plus its tensor-parallel rank",
        (ENGINE_SIDE, TRAINER_SIDE),
        ranks_follow_the_offset,
        (RUNNER_UPDATER, "rank = rank_offset + self.tp_rank", "rank = rank_offset"),
    ),
    Fact(
        "keys of a weight-update group stand under the group's name",
        (TRAINER_SIDE,),
        keys_stand_under_the_groups_name,
        (COMMON, "store = PrefixStore(group_name, store)", 'store = PrefixStore("default", store)'),
    ),
    Fact(
        "an engine gives torch no device for a weight-update group, so NCCL connects at the first broadcast",
        (TRAINER_SIDE,),
        nccl_connects_lazily,
        (COMMON, "pg_options=None,\n    device_id=None,", "pg_options=None,\n    device_id=0,"),
    ),
    Fact(
        "a bucket is received as one tensor of bytes without padding, from rank 0 of its group",
        (TRAINER_SIDE, ENGINE_SIDE),
        a_bucket_arrives_as_one_tensor_of_bytes,
        (
            BUCKET,
            "self.flattened_tensor = torch.cat(flattened_tensors, dim=0)",
            "self.flattened_tensor = torch.zeros(1024, dtype=torch.uint8)",
        ),
    ),
    Fact(
        "a weight version is recorded after a successful update, and only when one is given",
        (ENGINE_SIDE, CLIENT),
        the_version_is_recorded_after_success,
        (
            SCHEDULER,
            "if new_version is None or new_version == get_serving().weight_version:",
            "if new_version == get_serving().weight_version:",
        ),
    ),
    Fact(
        "weights are refused outside a session of updates",
        (ENGINE_SIDE, CLIENT),
        updates_need_a_session,
        (
            SCHEDULER_UPDATER,
            "return UpdateWeightsFromTensorReqOutput(\n                success=False",
            "return UpdateWeightsFromTensorReqOutput(\n                success=True",
        ),
    ),
    Fact(
        "an exception of a custom loader leaves update_weights_from_tensor before its only barrier",
        ("rlpost/engines/shards/failures.py",),
        a_loaders_exception_comes_before_the_barrier,
        (
            SCHEDULER_UPDATER,
            "def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput):",
            "def update_weights_from_tensor(self, recv_req, timeout):",
        ),
    ),
)
