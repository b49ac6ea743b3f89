"""Settings of SGLang's own: typed as its command line types them, refused on the login node when it
would refuse.
"""

import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.cli.check_settings import check
from rlpost.config import flags, server_arg_values
from rlpost.config.load import dump, load, parse_dump
from rlpost.config.server_arg_values import LIMITS, OPAQUE, typed_args, typed_value
from rlpost.engines.server_args import OURS, check_server_args
from rlpost.errors import ConfigError
from rlpost.extensions.planning import plan_verb as plan
from tests.unit.cli.projects import make_project
from tools.server_arg_source import source_args

SGLANG = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
TABLE = server_arg_values.server_arg_table()


def config(*words):
    return load([], flags.parse(flags.make_parser("test", ""), words)[1]).config


def refusal(*words, gpus=8):
    with pytest.raises(ConfigError) as caught:
        check_server_args(config(*words).sglang.given_server_args, gpus_per_engine=gpus)
    return str(caught.value)


def typed(*words):
    given = config(*words).sglang
    check_server_args(given.given_server_args, gpus_per_engine=8)
    return given.server_args


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--sglang-mem-fraction-static 0.7", {"mem_fraction_static": 0.7}),
        ("--sglang-schedule-conservativeness 1", {"schedule_conservativeness": 1.0}),
        ("--sglang-max-running-requests 64", {"max_running_requests": 64}),
        ("--sglang-max-total-tokens 16k", {"max_total_tokens": 16_000}),
        ("--sglang-context-length 1.5Ki", None),
        ("--sglang-context-length 2Ki", {"context_length": 2048}),
        ("--sglang-enable-metrics", {"enable_metrics": True}),
        ("--sglang-enable-metrics false", {"enable_metrics": False}),
        ("--sglang-attention-backend fa3", {"attention_backend": "fa3"}),
        ("--sglang-revision 007", {"revision": "007"}),
        ("--sglang-served-model-name true", {"served_model_name": "true"}),
        ("--sglang-cuda-graph-bs 1 2 4", {"cuda_graph_bs_decode": [1, 2, 4]}),
        ("--sglang-cuda-graph-bs 8", {"cuda_graph_bs_decode": [8]}),
        ("--sglang-bucket-e2e-request-latency 1 2.5", {"bucket_e2e_request_latency": [1.0, 2.5]}),
        ("--sglang-log-requests-level 3", {"log_requests_level": 3}),
        (
            "--sglang-data-parallel-size 4 --sglang-enable-dp-attention",
            {"dp_size": 4, "enable_dp_attention": True},
        ),
        ("--sglang-model-checksum", {"model_checksum": ""}),
        ("--sglang-custom-weight-loader", {"custom_weight_loader": []}),
        ("--sglang-page-size none", {}),
        ("--sglang-hicache-host-memory-fraction none", {"hicache_host_memory_fraction": None}),
        ("--sglang-grammar-backend none", {"grammar_backend": "none"}),
        (
            '--sglang-cuda-graph-config {"decode":{"max_bs":8}}',
            {"cuda_graph_config": {"decode": {"max_bs": 8}}},
        ),
    ],
)
def test_a_value_has_the_type_that_sglang_gives_it(words, meant):
    if meant is None:
        assert "a whole number" in refusal(*words.split())
    else:
        assert typed(*words.split()) == meant


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sglang-mem-fraction-static 70",
         "--sglang-mem-fraction-static 70: a fraction above 0 and below 1; use 0.7"),
        ("--sglang-mem-fraction-static abc",
         "--sglang-mem-fraction-static abc: a fraction above 0 and below 1; for instance 0.7"),
        ("--sglang-mem-fraction-static nan",
         "--sglang-mem-fraction-static nan: a fraction above 0 and below 1; for instance 0.7"),
        ("--sglang-mem-fraction-static 1", "a fraction above 0 and below 1; for instance 0.7"),
        ("--sglang-mem-fraction-static", "--sglang-mem-fraction-static: needs a value, a fraction above 0 and below 1"),
        ("--sglang-mem-fraction-static 0.5 0.6", "--sglang-mem-fraction-static 0.5 0.6: a fraction"),
        ("--sglang-max-running-requests 8.5", "8.5: a whole number, 1 or more; leave it out for SGLang's own choice"),
        ("--sglang-max-running-requests true", "a whole number"),
        ("--sglang-page-size 0", "--sglang-page-size 0: 1 or more"),
        ("--sglang-cuda-graph-bs 1 2 x", "--sglang-cuda-graph-bs 1 2 x: a whole number, 1 or more"),
        ("--sglang-enable-metrics maybe", "--sglang-enable-metrics maybe: true or false"),
        ("--sglang-attention-backend fa33", "did you mean 'fa3'?"),
        ("--sglang-grpc-port 70000", "--sglang-grpc-port 70000: a port, 1 to 65535"),
        ("--sglang-log-level none", "none: cannot be unset; leave it out for SGLang's default, info"),
        ("--sglang-mm-process-config {x", "--sglang-mm-process-config {x: JSON, a table or a list"),
        ("--sglang-stat-loggers x", "a Python object, which text cannot express"),
        ("--sglang-tensor-parallel-size 2", "this follows from --rollout-num-gpus-per-engine"),
        ("--sglang-nccl-port 2000", "this follows from the ports of the job"),
        ("--sglang-dp-size 2", "add --sglang-enable-dp-attention, or use more engines"),
        ("--sglang-dp-size 3 --sglang-enable-dp-attention", "not divide the 8 GPUs of an engine; use 1, 2, 4 or 8"),
        ("--sglang-pp-size 2", "--sglang-pp-size 2: tensor parallelism takes all of the 8 GPUs of an engine"),
        ("--sglang-moe-dense-tp-size 2", "use 1 or leave it out"),
    ],
)  # fmt: skip
def test_a_value_that_sglang_does_not_take_is_refused(words, message):
    assert message in refusal(*words.split())


def test_every_problem_is_named_at_once():
    lines = refusal(
        "--sglang-page-size", "0", "--sglang-mem-fraction-static", "2", "--sglang-nonsens", "1"
    ).splitlines()
    assert len(lines) == 3


def test_a_file_takes_the_same_path(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text(
        '[sglang]\nsglang_mem_fraction_static = "70"\nsglang_page_size = 1.5\nsglang_log_level = "none"\n'
        'sglang_max_total_tokens = "16k"\nsglang_mm_process_config = { image = { max_pixels = 4 } }\n'
    )
    given = load([recipe], {}).config.sglang
    with pytest.raises(ConfigError) as caught:
        check_server_args(given.given_server_args)
    fraction, page, level = str(caught.value).splitlines()
    assert (
        fraction.endswith("use 0.7")
        and "--sglang-page-size 1.5" in page
        and "cannot be unset" in level
    )
    assert given.server_args["max_total_tokens"] == 16_000
    assert given.server_args["mm_process_config"] == {"image": {"max_pixels": 4}}


def test_a_flag_unsets_what_a_recipe_says(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text("[sglang]\nsglang_mem_fraction_static = 0.8\n")
    values = flags.parse(flags.make_parser("test", ""), ["--sglang-mem-fraction-static", "none"])[1]
    found = load([recipe], values).config
    assert "mem_fraction_static" not in found.sglang.server_args
    assert parse_dump(dump(found)) == found


@pytest.mark.parametrize("value", ["none", "abc"])
def test_a_plan_shows_no_traceback(value, capsys):
    words = ["qwen3_4b", "--sglang-mem-fraction-static", value]
    if value == "none":
        assert plan.main(words) == 0
    else:
        with pytest.raises(ConfigError, match="--sglang-mem-fraction-static abc: a fraction"):
            plan.main(words)


def test_every_default_of_sglang_passes():
    wrong = {}
    for name, arg in TABLE.args.items():
        if arg.kind == OPAQUE or (arg.default is None and not arg.may_be_none):
            continue
        try:
            value = typed_value(name, arg, arg.default)
            assert value == arg.default
        except (ValueError, AssertionError) as error:
            wrong[name] = (arg.default, error)
    assert not wrong
    assert LIMITS.keys() <= TABLE.args.keys()
    assert OURS.keys() <= TABLE.args.keys()


def test_the_table_knows_more_than_names():
    """What the checks rest on, spelled out for a few fields of each kind."""
    args = TABLE.args
    assert (args["mem_fraction_static"].kind, args["mem_fraction_static"].may_be_none) == (
        "float",
        True,
    )
    assert args["max_total_tokens"].suffixes
    assert (
        args["cuda_graph_bs_decode"].is_list
        and args["lora_target_modules"].is_list
        and args["lora_paths"].is_list
    )
    assert "hermes" in args["tool_call_parser"].choices, "a registry that SGLang computes"
    assert args["elastic_ep_backend"].may_be_none
    assert args["custom_sigquit_handler"].kind == args["stat_loggers"].kind == OPAQUE
    assert TABLE.name_of("tensor_parallel_size") == "tp_size"
    assert TABLE.name_of("cuda_graph_bs") == "cuda_graph_bs_decode"


def test_the_source_says_what_the_copy_says():
    """So a later version is read as well as this one, but for what SGLang computes."""
    read = source_args(SGLANG)
    assert read.keys() == TABLE.args.keys()
    for name, arg in TABLE.args.items():
        for fact in (
            "kind",
            "is_list",
            "may_be_none",
            "may_be_empty",
            "suffixes",
            "const",
            "aliases",
        ):
            assert getattr(read[name], fact) == getattr(arg, fact), (name, fact)
        assert read[name].default in (None, arg.default), name


def test_a_login_node_without_sglang_has_the_copy(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(server_arg_values.importlib.metadata, "version", absent)
    found = server_arg_values.server_arg_table.__wrapped__()
    assert found.source.startswith("the pinned SGLang ")
    assert found.args == TABLE.args


def table_of(monkeypatch, version):
    monkeypatch.setattr(server_arg_values.importlib.metadata, "version", lambda name: version)
    return server_arg_values.server_arg_table.__wrapped__()


def test_a_later_version_has_the_settings_in_which_it_differs(monkeypatch):
    found = table_of(monkeypatch, "0.5.23.post1")
    assert found.source == "the installed SGLang 0.5.23.post1" and found.is_complete
    assert "cuda_graph_tc_compiler" in TABLE.args and "cuda_graph_tc_compiler" not in found.args
    assert found.name_of("enable_hicache") == "enable_hierarchical_cache"
    assert "triton_v2" in found.args["lora_backend"].choices
    assert found.args["mem_fraction_static"] == TABLE.args["mem_fraction_static"]


def test_a_version_without_a_table_may_have_further_settings(monkeypatch):
    found = table_of(monkeypatch, "0.9.1")
    assert not found.is_complete and "attn_dp_size" in found.args
    monkeypatch.setattr("rlpost.engines.server_args.server_arg_table", lambda: found)
    check_server_args({"of_tomorrow": 1})
    with pytest.raises(ConfigError, match="mem-fraction-static 70"):
        check_server_args({"mem_fraction_static": 70})


def test_checking_imports_nothing_of_sglang():
    program = (
        "import sys; from rlpost.engines.server_args import check_server_args; "
        "check_server_args({'mem_fraction_static': 0.5}); assert not {'sglang', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_engine_gets_typed_values():
    assert typed_args({"max_total_tokens": "16k", "tp_size": 2, "watchdog_timeout": "7"}) == {
        "max_total_tokens": 16_000, "tp_size": 2, "watchdog_timeout": 7.0,
    }  # fmt: skip
    assert math.isclose(typed_args({"mem_fraction_static": "0.3"})["mem_fraction_static"], 0.3)


def test_the_copy_is_of_the_pinned_version():
    copy = json.loads(server_arg_values.COPY.read_text())
    pinned = (Path(__file__).parents[3] / "setup.cfg").read_text()
    assert f"sglang=={copy['sglang']}\n" in pinned


def test_a_check_of_a_recipe_refuses_values_too(tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path))
    values = flags.parse(
        flags.make_parser("test", ""),
        ["--sglang-mem-fraction-static", "70", "--sglang-dp-size", "2"],
    )[1]
    with pytest.raises(ConfigError, match=r"--sglang-mem-fraction-static 70: .*; use 0.7"):
        check(load([Path("recipe.toml")], values).config)
    check(load([Path("recipe.toml")], {}).config)
