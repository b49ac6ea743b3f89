"""Source and loaded function give the same interface; any other signature is refused."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlpost.algorithm.plugin import load_function
from rlpost.algorithm.signatures import FORMS, Kind, interface, problem, signature_of
from rlpost.config.checks.functions import function_problems, whole_rollout_problems
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.extensions.slime import modules
from rlpost.extensions.slime import names as provided_names

ROOT = Path(__file__).parents[3]
CASES: list[tuple[Kind, str, str | None]] = [
    ("filter", "(group)", "rlpost"),
    ("filter", "(group, threshold=0.5)", "rlpost"),
    ("filter", "(args, samples, **kwargs)", "slime"),
    ("filter", "(args, samples: list[Sample])", "slime"),
    ("filter", "(args, samples, step)", None),
    ("filter", "(waiting, num_groups)", None),
    ("filter", "(_, samples)", "slime"),
    ("filter", "()", None),
    ("buffer filter", "(waiting, num_groups)", "rlpost"),
    ("buffer filter", "(args, rollout_id, buffer: list[list[Sample]], num_samples: int)", "slime"),
    ("buffer filter", "(args, buffer, num_samples)", None),
    ("reward", "(prompt, sample)", "rlpost"),
    ("reward", "(p, s, /)", "rlpost"),
    ("reward", "(args, sample, **kwargs)", "slime"),
    ("reward", "(_args, sample)", "slime"),
    ("reward", "(flags: argparse.Namespace, sample)", "slime"),
    ("reward", "(sample)", None),
    ("group reward", "(args, samples, **kwargs)", "slime"),
    ("generate", "(builder, prompt, sampling)", "rlpost"),
    ("generate", "(args, sample, sampling_params)", "slime"),
    ("generate", "(args, sample, sampling_params, evaluation=False)", "slime"),
    ("generate", "(args, sample, sampling_params, *, evaluation)", "slime"),
    ("generate", "(args, sample)", None),
    ("generate", "(_, sample, sampling_params)", "slime"),
    ("generate", "(d, p, s)", "rlpost"),
    ("generate", "(builder, prompt)", None),
    ("loss", "(tokens, settings)", "rlpost"),
    ("loss", "(args, batch, logits, sum_of_sample_mean)", None),
    ("loss", "(args, batch)", None),
    ("advantage", "(groups, penalties)", "rlpost"),
    ("advantage", "(groups)", None),
]


@pytest.mark.parametrize(("kind", "signature", "found"), CASES)
def test_an_interface_is_recognised_by_its_signature(
    kind: Kind, signature: str, found: str | None
) -> None:
    source = f"from __future__ import annotations\ndef function{signature}: ..."
    node = ast.parse(source).body[1]
    assert isinstance(node, ast.FunctionDef)
    namespace: dict[str, object] = {}
    exec(compile(source, "mine", "exec", dont_inherit=True), namespace)
    loaded = inspect.signature(namespace["function"])  # type: ignore[arg-type]
    assert interface(kind, signature_of(node)) == interface(kind, loaded) == found
    why = problem(kind, "function", loaded)
    assert (why is None) == (found is not None)
    if why is not None:
        slimes = FORMS[kind].slimes
        assert f"use ({', '.join(FORMS[kind].ours)})" in why
        assert (slimes is None) or f", or slime's ({', '.join(slimes)}" in why


def config(container: str = "none", **rollout: object) -> Config:
    return Config.model_validate({"rollout": rollout, "cluster": {"container": container}})


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        (
            "dynamic_sampling_filter_path",
            "def f(samples, args, step): ...",
            "f(samples, args, step) cannot be called; use",
        ),
        (
            "buffer_filter_path",
            "def f(buffer): ...",
            "use (waiting, num_groups), or slime's (args, rollout_id, buf",
        ),
        (
            "custom_rm_path",
            "async def f(sample): ...",
            "f(sample) cannot be called; use (prompt, sample), or",
        ),
        (
            "custom_rm_path",
            "def f(args, samples, **kwargs): ...",
            "takes the answers to a prompt at once; add --group-rm",
        ),
        (
            "custom_generate_function_path",
            "async def f(args, sample): ...",
            "(args, sample, sampling_params, evaluation=F",
        ),
        (
            "custom_rm_path",
            "from slime.agent.sandbox import E2BSandbox\ndef f(args, sample): ...",
            "line 1: rlpost has no slime.agent.sandbox; copy what the plug-in needs of it",
        ),
        (
            "custom_rm_path",
            "from slime.utils.types import Samples\ndef f(args, sample): ...",
            "line 1: rlpost's slime.utils.types has no Samples; did you mean 'Sample'? It has Sample",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_on_the_login_node(
    tmp_path: Path, key: str, code: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    (line,) = function_problems(config(**{key: f"{tmp_path}/mine.py:f"}))
    assert line.startswith(f"{flag(key)} {tmp_path}/mine.py:f: ")
    assert said in line


def test_a_module_on_the_path_is_parsed_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generate_with_tool.py").write_text("raise SystemExit\ndef generate(args): ...\n")
    monkeypatch.chdir(tmp_path)
    (line,) = function_problems(config(custom_generate_function_path="generate_with_tool.generate"))
    assert "generate(args) cannot be called" in line


@pytest.mark.parametrize(
    "code",
    [
        "def f(prompt, sample): ...",
        "def f(args, sample, **kwargs): ...",
        "from functools import wraps\n@wraps\ndef f(): ...",
        "f = lambda: 1",
        "try:\n    from slime.agent import sandbox\nexcept ImportError:\n    sandbox = None\ndef f(args, sample): ...",
        "import slime.utils.types\nfrom slime.rollout import sglang_rollout\ndef f(args, sample): ...",
    ],
)
def test_functions_that_can_be_called_or_not_analysed_are_accepted(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    assert function_problems(config(custom_rm_path=f"{tmp_path}/mine.py:f")) == []


def test_an_image_may_provide_a_module_that_is_missing_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from slime.agent import sandbox\ndef f(args, sample): ...")
    assert function_problems(config("pyxis", custom_rm_path=f"{tmp_path}/mine.py:f")) == []


def test_a_misspelt_filter_of_slime_is_refused() -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert function_problems(config(dynamic_sampling_filter_path=path)) == []
    (line,) = function_problems(config(dynamic_sampling_filter_path=path + "s"))
    assert "has no check_reward_nonzero_stds; did you mean 'check_reward_nonzero_std'?" in line


def test_rollout_functions_of_slime_are_settings_here_and_others_are_refused() -> None:
    whole = "slime.rollout.{}".format
    assert (
        whole_rollout_problems(
            config(rollout_function_path=whole("sglang_rollout.generate_rollout"))
        )
        == []
    )
    sft = config(rollout_function_path=whole("sft_rollout.generate_rollout"))
    assert (
        "corresponds to --loss-type sft_loss, but --loss-type policy_loss; use --loss-type sft_loss"
        in whole_rollout_problems(sft)[0]
    )
    given = {"rollout_function_path": whole("fully_async_rollout.generate_rollout_fully_async")}
    assert whole_rollout_problems(config(**given, rollout_mode="fully_async")) == []
    (line,) = whole_rollout_problems(config(rollout_function_path="mine.generate_rollout"))
    assert (
        "--rollout-function-path mine.generate_rollout: replacing the whole rollout is not supported"
        in line
    )
    assert "use --custom-generate-function-path" in line


def test_every_name_that_plugins_may_import_exists() -> None:
    """They are imported in a separate interpreter, as in the driver, without slime installed."""
    wanted = [(module, name) for module, known in provided_names.PROVIDED.items() for name in known]
    code = (
        "from importlib import import_module\nfrom rlpost.extensions.slime import modules\nmodules.install()\n"
        f"for module, name in {wanted!r}:\n    assert callable(getattr(import_module(module), name)), (module, name)\n"
        "from slime.rollout import sglang_rollout, rm_hub\nassert sglang_rollout.GenerateState and rm_hub.async_rm\n"
        "try:\n    from slime.agent import sandbox\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "rlpost has no slime.agent" in done.stdout


def test_the_documentation_lists_the_provided_names() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    rows = [
        f"| `{module}` | {', '.join(f'`{name}`' for name in known)} |"
        for module, known in provided_names.PROVIDED.items()
    ]
    assert "\n".join(rows) in page


def test_a_plugin_may_import_modules_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_a_plugin.py").write_text("SCORE = 3.0\n")
    (tmp_path / "mine.py").write_text(
        "from beside_a_plugin import SCORE\ndef f(args, sample): return SCORE\n"
    )
    assert load_function(f"{tmp_path}/mine.py:f", key="key")(None, None) == 3.0


def test_a_clone_in_the_working_directory_is_not_an_installed_slime(tmp_path: Path) -> None:
    (tmp_path / "slime/docs").mkdir(parents=True)
    code = "from rlpost.extensions.slime import modules; "
    code += "print(modules.sample_class().__module__, modules.is_installed())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["rlpost.extensions.slime.sample", "False"], done.stderr


def test_an_installed_slime_is_used_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "slime/utils"
    package.mkdir(parents=True)
    (tmp_path / "slime/__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "types.py").write_text("class Sample: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    assert modules.is_installed()
    found = modules.sample_class()
    assert (
        found.__module__ == "slime.utils.types" and Path(inspect.getfile(found)).parent == package
    )
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'slime\.rollout'"):
        __import__("slime.rollout.sglang_rollout")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        assert isinstance(sys.modules.pop(name), ModuleType)
