"""The memory estimate against sums done by hand."""

from rlpost.config.load import load
from rlpost.config.memory import Parameters, RankMemory, engine_weights, trainer_memory


def config(nodes=1, optimizer=None, **perf):
    cluster = {"nodes": nodes, "rollout_num_gpus_per_engine": 2}
    return load([], {"cluster": cluster, "perf": {"bf16": False} | perf, "optimizer": optimizer or {}}).config


def test_tensor_and_pipeline_parallel_ranks_share_the_weights_and_data_parallel_ranks_the_optimizer():
    """16 ranks, TP 2, PP 2: a quarter of the weights each, and that quarter's optimizer over the 4 that hold it."""
    found = trainer_memory(config(2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2), Parameters(4000, 0))
    assert found == RankMemory(weights=4000, gradients=4000, optimizer=2000)
    assert found.total == 10000


def test_a_plain_optimizer_is_on_every_rank():
    found = trainer_memory(config(use_distributed_optimizer=False), Parameters(1000, 0))
    assert found == RankMemory(4000, 4000, 8000)


def test_experts_are_cut_by_their_own_sizes():
    """8 ranks, TP 2, EP 4, ETP 1: half of the dense part over DP 4; a quarter of the experts over 2."""
    perf = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    found = trainer_memory(config(**perf), Parameters(dense=800, expert=8000))
    assert found == RankMemory(weights=4 * 2400, gradients=4 * 2400, optimizer=8 * 400 // 4 + 8 * 2000 // 2)


def test_bfloat16_halves_the_weights_and_adds_main_weights_to_the_optimizer():
    plain = {"use_distributed_optimizer": False, "bf16": True}
    assert trainer_memory(config(**plain), Parameters(1000, 0)) == RankMemory(2000, 4000, 12000)
    narrow = config(**plain, accumulate_allreduce_grads_in_fp32=False)
    assert trainer_memory(narrow, Parameters(1000, 0)) == RankMemory(2000, 2000, 12000)


def test_what_lies_in_host_memory_is_not_on_the_gpu():
    away = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    found = trainer_memory(config(use_distributed_optimizer=False, optimizer=away), Parameters(1000, 0))
    assert found == RankMemory(4000, 4000, 2000)
    whole = config(use_distributed_optimizer=False, optimizer={"optimizer_cpu_offload": True})
    assert trainer_memory(whole, Parameters(1000, 0)).optimizer == 0


def test_an_engine_holds_the_weights_in_the_type_of_the_checkpoint():
    parameters = Parameters(1000, 0)
    assert engine_weights(config(), {"dtype": "bfloat16"}, parameters) == 1000
    assert engine_weights(config(), {"torch_dtype": "float32"}, parameters) == 2000
