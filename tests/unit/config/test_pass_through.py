"""Options of SGLang and Megatron-core on the command line and in files: by name, with their types,
typos refused.
"""

import sys

import pytest

from rlpost.cli.check_installed import check_installed
from rlpost.config import flags, megatron_options, pass_through
from rlpost.config.load import dump, load, parse_dump
from rlpost.config.model_arguments import NAMES
from rlpost.errors import ConfigError


@pytest.fixture
def no_megatron(monkeypatch):
    """As on a login node."""
    monkeypatch.setattr(pass_through, "option_names", lambda: None)
    monkeypatch.setattr(flags, "option_names", lambda: None)
    monkeypatch.setattr(megatron_options, "option_names", lambda: None)


def config(line):
    return load([], flags.parse(flags.make_parser("test", ""), line.split())[1]).config


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_fields_of_megatron_are_those_of_its_dataclasses():
    """Read from the source, and compared with the dataclasses themselves."""
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    there = {field.name for kind in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
             for field in fields(kind)}  # fmt: skip
    named = megatron_options.option_names()
    assert named <= there
    assert all("func" in name or "dtype" in name or "method" in name or name in ("timers", "quant_recipe")
               for name in there - named if not name.startswith("_"))  # fmt: skip
    assert megatron_options.OURS.keys() <= there


def test_options_keep_their_types_and_the_last_of_two_counts():
    found = config(
        "--moe-z-loss-coeff 1e-3 --deterministic-mode --bucket-size 7 --bucket-size 9 --nodes 2 "
        "--recompute-modules mlp moe --cp-comm-type=p2p --ddp-bucket-size 11 --fp8-wgrad false"
    )
    assert found.megatron.options == {
        "moe_z_loss_coeff": 1e-3, "deterministic_mode": True, "bucket_size": 11, "recompute_modules": ["mlp", "moe"],
        "cp_comm_type": "p2p", "fp8_wgrad": False,
    }  # fmt: skip
    assert found.cluster.nodes == 2
    assert parse_dump(dump(found)) == found


def test_a_file_gives_the_same(tmp_path):
    (tmp_path / "a.toml").write_text("[megatron]\nmoe_z_loss_coeff = 1e-3\n")
    assert load([tmp_path / "a.toml"], {}).config.megatron.options == {"moe_z_loss_coeff": 1e-3}
    (tmp_path / "a.toml").write_text(
        "[megatron]\nmoe_z_loss_coef = 1e-3\ntensor_model_parallel_size = 2\n"
    )
    text = refusal(load, [tmp_path / "a.toml"], {})
    assert "unknown key 'moe_z_loss_coef' in [megatron]; did you mean 'moe_z_loss_coeff'" in text
    assert "it belongs in [perf]" in text


def test_a_flag_that_is_nobody_s_is_refused_with_the_nearest_of_all():
    assert "did you mean '--moe-z-loss-coeff'" in refusal(config, "--moe-z-loss-coef 1")
    assert "did you mean '--num-rollout'" in refusal(config, "--num-rolout 1")


def test_what_follows_from_our_settings_is_refused_with_them():
    text = refusal(
        check_installed, config("--num-layers-in-first-pipeline-stage 3 --sglang-port 1")
    )
    assert "--decoder-first-pipeline-num-layers" in text and "--sglang-port" in text
    assert "the trainer's loss" in refusal(check_installed, config("--moe-z-loss-coeff 1e-3"))


def test_what_nothing_here_reads_is_refused_and_may_be_switched_off():
    text = refusal(
        check_installed, config("--masked-softmax-fusion --cross-entropy-fusion-impl te")
    )
    softmax, entropy = text.splitlines()
    assert softmax.startswith("--masked-softmax-fusion true: has no effect")
    assert entropy.startswith("--cross-entropy-fusion-impl te: has no effect")
    assert softmax.endswith("leave it out") and entropy.endswith("leave it out")
    check_installed(config("--masked-softmax-fusion false"))
    assert megatron_options.NO_EFFECT.keys() <= megatron_options.option_names()


def test_without_megatron_its_options_wait_for_the_node_and_typos_of_ours_do_not(
    no_megatron, monkeypatch
):
    found = config("--moe-input-jitter-ep 1")
    assert found.megatron.options == {"moe_input_jitter_ep": 1}
    assert "did you mean '--num-rollout'" in refusal(config, "--num-rolout 1")
    monkeypatch.undo()
    assert "did you mean 'moe_input_jitter_eps'" in refusal(check_installed, found)


def test_no_option_of_megatron_is_so_like_a_setting_that_it_counts_as_a_misspelling(monkeypatch):
    ours = [flags.flag(key) for key in [*flags.fields(), *NAMES]]
    names = megatron_options.option_names() - flags.fields().keys() - NAMES
    monkeypatch.setattr(pass_through, "option_names", lambda: None)
    assert [name for name in names if pass_through.owner(name, ours) != "megatron"] == []


def test_settings_are_loaded_without_importing_megatron():
    before = "megatron.core" in sys.modules
    config("--deterministic-mode")
    assert ("megatron.core" in sys.modules) == before
