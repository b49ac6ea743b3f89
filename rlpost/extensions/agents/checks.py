"""Check the tables [env] and [sandbox] without importing an environment.

Input: settings. Output: one line for each problem: a name that cannot be parsed, a file or class
that is missing, a class without the interface, an adapter that is not installed, settings that
conflict. Files are parsed and never executed.
"""

from __future__ import annotations

import ast
from pathlib import Path

from common.installed import is_package
from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.config.checks.functions import moved_imports, source_of
from rlpost.config.keys import SUFFIX
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled
from rlpost.errors import ConfigError, choice, suggestion
from rlpost.extensions.agents.env_names import EnvName, parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.references import references
from rlpost.extensions.agents.sandbox_table import SandboxConfig

INSTALL = {
    "verifiers": "pip install 'rlpost[verifiers]'",
    "openenv": "pip install 'rlpost[openenv]'",
    "gymnasium": "pip install 'rlpost[gymnasium]'",
    "textarena": "pip install 'rlpost[textarena]'",
    "reasoning_gym": "pip install 'rlpost[reasoning-gym]'",
    "tau2": "pip install 'tau2 @ git+https://github.com/sierra-research/tau2-bench' with Python 3.12 "
    "(the package tau2 of PyPI is another project)",
}
HARNESSES = ("verifiers", "tau2", "nemogym", "gymnasium", "textarena")
"""Adapters whose episodes talk to the gateway."""
BY_TURN = [name for name, row in ESTIMATORS.items() if row.has_turns]
"""Estimators that support rewards of turns."""


def agent_problems(config: Config) -> list[str]:
    """Problems of the table [env]."""
    settings = config.table(EnvConfig)
    if not settings.env:
        return []
    try:
        names = parse_envs(settings.env)
    except ConfigError as error:
        return [str(error)]
    return [
        *_setting_problems(config, names),
        *(line for name in names for line in _of(name, config)),
        *(
            overlong_problem(config, name)
            for name in names
            if config.grpo.overlong_buffer_len is not None and _is_harness(name)
        ),
    ]


def overlong_problem(config: Config, name: EnvName) -> str:
    """The problem of --overlong-buffer-len with an environment that talks to the gateway."""
    return (
        f"{spelled(config, 'overlong_buffer_len')} with --env {name.word}: --rollout-max-response-len limits each "
        "answer to its requests, so no length ends an episode; score lengths in the environment, or use "
        "--truncated-answers punish"
    )


def _is_harness(name: EnvName) -> bool:
    """Whether an environment talks to the gateway; False if a class inherits, or is not found here."""
    if name.kind != "own":
        return name.kind in HARNESSES
    class_def = _classes(name.target).get(name.target.rpartition(":")[2])
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return class_def is not None and any(
        isinstance(item, functions) and item.name == "run" for item in class_def.body
    )


def _classes(target: str) -> dict[str, ast.ClassDef]:
    """Return the classes in the file of an environment by name; empty for one that cannot be read."""
    module = target.rpartition(":")[0]
    source = Path(module).expanduser() if module.endswith(".py") else source_of(module)
    try:
        tree = ast.parse(source.read_bytes()) if source is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return {}  # reported by ``agent_problems``
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def uses_sandboxes(config: Config) -> bool:
    """Return whether an environment of --env needs sandboxes: a class with ``uses_sandboxes = True``.

    Files are parsed and never executed: False for a module that is not found here, and for a class
    that inherits the line from another module.
    """
    try:
        names = parse_envs(config.table(EnvConfig).env)
    except ConfigError:
        return False
    return any(
        name.kind == "harbor" or (name.kind == "own" and _says_uses_sandboxes(name.target))
        for name in names
    )


def _says_uses_sandboxes(target: str) -> bool:
    classes = _classes(target)
    pending, seen = [target.rpartition(":")[2]], set[str]()
    while pending:
        class_def = classes.get(pending.pop())
        if class_def is None or class_def.name in seen:
            continue
        seen.add(class_def.name)
        if any(_sets_uses_sandboxes(statement) for statement in class_def.body):
            return True
        pending += [base.id for base in class_def.bases if isinstance(base, ast.Name)]
    return False


def _sets_uses_sandboxes(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return False
    is_name = any(isinstance(each, ast.Name) and each.id == "uses_sandboxes" for each in targets)
    return is_name and isinstance(value, ast.Constant) and value.value is True


def _setting_problems(config: Config, names: tuple[EnvName, ...]) -> list[str]:
    settings, rollout, grpo = config.table(EnvConfig), config.rollout, config.grpo
    labels = [name.label for name in names]
    unknown = sorted(settings.env_args.keys() - set(labels))
    misnamed = [name for name in references(settings.env_args) if not name.endswith(SUFFIX)]
    by_turn = settings.env_reward == "turn"
    known = grpo.advantage_estimator in BY_TURN and grpo.custom_advantage_function_path is None
    rules = [
        (
            bool(settings.env_weights) and len(settings.env_weights) != len(names),
            f"--env-weights: {len(settings.env_weights)} weights for {len(names)} --env; give one for each, in the "
            "same order, or none",
        ),
        (
            bool(unknown),
            f"--env-args: no environment has the label {listed(unknown)}{suggestion((unknown or [''])[0], labels)}; "
            f"--env has {listed(labels)}",
        ),
        (
            any(not isinstance(value, dict) for value in settings.env_args.values()),
            '--env-args: write an object for each label, {"LABEL": {"NAME": VALUE}}',
        ),
        (
            bool(misnamed),
            f"--env-args names ${{{(misnamed or [''])[0]}}}: an environment gets keys of variables "
            f"whose names end in {SUFFIX} alone; set {(misnamed or [''])[0].upper()}{SUFFIX} and name that",
        ),
        (
            rollout.custom_generate_function_path is not None,
            "--env and --custom-generate-function-path both write the answers; use one of them",
        ),
        (
            rollout.group_rm,
            "--env and --group-rm both give the rewards; use --group-rm false",
        ),
        (
            grpo.is_supervised,
            "--env: with --loss-type sft_loss nothing is generated; leave out --env",
        ),
        (
            by_turn and not known,
            f"--env-reward turn needs --advantage-estimator {listed(BY_TURN, 'or')}, without "
            "--custom-advantage-function-path; or use --env-reward episode",
        ),
        (
            by_turn and grpo.kl_coef > 0,
            f"--env-reward turn does not charge the KL divergence to rewards, as {spelled(config, 'kl_coef')} "
            "asks; use --kl-loss-coef, or --env-reward episode",
        ),
        (
            by_turn and grpo.custom_reward_post_process_path is not None,
            "--env-reward turn trains on the rewards of turns, which "
            f"{spelled(config, 'custom_reward_post_process_path')} does not return; use --env-reward episode",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _of(name: EnvName, config: Config) -> list[str]:
    """Problems of one environment."""
    if name.kind == "harbor":
        if not Path(name.target).expanduser().is_dir():
            return [
                f"--env {name.word}: no such folder; give a folder with tasks in Harbor's format"
            ]
        return _harbor_problems(name, config.table(EnvConfig).env_args.get(name.label, {}))
    if name.kind == "nemogym":  # needs no package
        is_address = name.target.startswith(("http://", "https://"))
        wrong = f"--env {name.word}: not an address; write nemogym:http://HOST:PORT"
        return [] if is_address else [wrong]
    if name.kind != "own":
        elsewhere = config.cluster.container != "none"  # the image may have it
        # the module that an adapter imports has the name of the kind
        if elsewhere or is_package(name.kind):
            return []
        return [
            f"--env {name.word}: the package of {name.kind} is not installed; {INSTALL[name.kind]}"
        ]
    try:
        problems = _own(name)
    except OSError as error:
        problems = [f"{error.strerror or error}; give a file that can be read"]
    except (SyntaxError, ValueError) as error:
        problems = [f"not valid Python: {error}; python -m py_compile shows the place"]
    return [f"--env {name.word}: {each}" for each in problems]


def _harbor_problems(name: EnvName, env_args: object) -> list[str]:
    """Problems of the arguments of tasks in Harbor's format; ``_setting_problems`` reports no object."""
    if not isinstance(env_args, dict):
        return []
    try:  # PyYAML reads compose files; a host that only renders jobs may lack it
        from rlpost.extensions.agents.environments.of_harbor import options_of
    except ImportError:
        return []
    try:
        options_of(name.target, {key: env_args[key] for key in env_args if key != "shown"})
    except ConfigError as error:
        return [str(error)]
    return []


def _own(name: EnvName) -> list[str]:
    """Problems of a class: missing, or without the methods of an environment.

    A module that is not found is left to the nodes, where more may be installed; a class that
    inherits is checked there as well.
    """
    module, _, cls = name.target.rpartition(":")
    is_file = module.endswith(".py")
    source = Path(module).expanduser() if is_file else source_of(module)
    if source is None:
        return []
    if is_file and not source.is_file():
        return ["no such file; give FILE.py:Class, relative to the working directory"]
    tree = ast.parse(source.read_bytes())
    moved = moved_imports(tree)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if cls not in classes:
        imported = any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
        if imported and not is_file:
            return moved  # the module may import it
        return [*moved, f"the file has no class {cls}{choice(cls, sorted(classes))}"]
    return moved if classes[cls].bases else [*moved, *_method_problems(classes[cls])]


def _method_problems(cls: ast.ClassDef) -> list[str]:
    """Problems of the methods of a class that inherits none."""
    methods = {
        node.name: node
        for node in cls.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if "run" in methods:
        argument_names = {"run": "episode"}
    elif {"reset", "step"} <= methods.keys():
        argument_names = {"reset": "prompt", "step": "turn"}
    else:
        return [
            "the class has neither reset and step nor run; it has "
            f"{listed(sorted(methods)) or 'no method'} (docs/agents.md)"
        ]
    return [
        f"{method} takes {_count(methods[method])} arguments; write def {method}(self, {argument})"
        for method, argument in argument_names.items()
        if _count(methods[method]) != 2
    ]


def _count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Positional arguments without a default; 2 if the signature takes any number."""
    arguments = function.args
    needed = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    most = len(arguments.posonlyargs) + len(arguments.args)
    if arguments.vararg is not None or needed <= 2 <= most:
        return 2
    return needed


def sandbox_problems(config: Config) -> list[str]:
    """Problems of the table [sandbox]."""
    sandbox = config.table(SandboxConfig)
    warm, image = spelled(config, "sandbox_warm"), spelled(config, "sandbox_image")
    path = Path(sandbox.sandbox_image) if sandbox.sandbox_image is not None else None
    on_node = sandbox.sandbox_backend == "node"
    partition = spelled(config, "sandbox_partition")
    rules = [
        (
            sandbox.sandbox_warm > sandbox.sandbox_places,
            f"{warm} is more than {spelled(config, 'sandbox_places')}: a node has no place for them",
        ),
        (
            path is not None and not path.exists(),
            f"{image}: no such file or folder",
        ),
        (
            path is not None and path.exists() and on_node and not path.is_dir(),
            f"{image} is not a folder; unpack it, or use --sandbox-backend slurm, which does",
        ),
        (
            on_node and sandbox.sandbox_partition is not None,
            f"{partition} is not used with --sandbox-backend node; use --sandbox-backend slurm",
        ),
        (
            sandbox.sandbox_processes < 4,
            f"{spelled(config, 'sandbox_processes')}: a shell and a program need at least 4",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]
