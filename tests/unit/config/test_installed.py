"""What a run is made of and the environment of its driver lacks: told before Ray is up, with exit
code 78.
"""

import io
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest

from common.exit_codes import EXIT_CONFIG
from common.run_folder import create_run_folder
from rlpost import train
from rlpost.cli import check_installed as check
from rlpost.config.load import dump, load
from rlpost.errors import ConfigError


def lacking(monkeypatch, *names):
    """An environment without these."""

    def find_spec(name):
        return None if name in names else PathFinder.find_spec(name)

    monkeypatch.setattr(check, "PathFinder", SimpleNamespace(find_spec=find_spec))
    if "megatron" in names:
        monkeypatch.setattr(check, "option_names", lambda: None)


@pytest.mark.parametrize(
    ("missing", "groups", "said"),
    [
        ("megatron", {}, ["megatron-core is not installed, and the trainer"]),
        ("torch", {}, ["torch is not installed, and the trainer"]),
        ("sglang", {}, ["sglang is not installed, and the engines"]),
        ("ray", {"debug": {"debug_rollout_only": True}}, ["ray is not installed, and the cluster"]),
        ("megatron", {"debug": {"debug_rollout_only": True}}, []),
        ("sglang", {"debug": {"debug_train_only": True}}, []),
        ("sglang", {"grpo": {"loss_type": "sft_loss"}}, []),
    ],
)
def test_a_missing_package_is_named_if_the_run_needs_it(monkeypatch, missing, groups, said):
    lacking(monkeypatch, missing)
    config = load([], groups).config
    if not said:
        return check.check_installed(config)
    with pytest.raises(ConfigError) as caught:
        check.check_installed(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(said) and all(map(str.startswith, lines, said))
    assert "make install" in lines[0]


def test_an_image_without_megatron_ends_the_run_and_is_not_tried_again(
    tmp_path, monkeypatch, capsys
):
    """Exit code 78 is the verdict config, which is not requeued."""
    lacking(monkeypatch, "megatron")
    cluster = {"container": "enroot", "container_image": "/images/a.sqsh"}
    run = create_run_folder(tmp_path / "run", dump(load([], {"cluster": cluster}).config))
    monkeypatch.setattr("sys.stdin", io.StringIO("no cluster is read"))
    assert train.main(["--cluster-from-stdin", "--run-folder", str(run.root)]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert (
        "megatron-core is not installed" in said and "of container_image = /images/a.sqsh" in said
    )
    assert "rlpost doctor --image" in said
