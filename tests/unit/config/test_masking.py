"""No secret of the settings is in what leaves the run's private files; a resume gets them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.cli.submit import resume_command
from rlpost.config.load import Loaded, dump, load
from rlpost.config.masking import (
    MASK,
    masked,
    masked_words,
    masking_problems,
    restored,
    without_secrets,
)
from rlpost.config.show import resolved
from rlpost.config.tree import Config
from rlpost.extensions.agents.references import resolve_references
from rlpost.extensions.watching.report.write import write_report
from tests.unit.watching.report.runs import make_run

SECRET = "sk-proj-S3cr3t"
URL = f"http://user:{SECRET}@judge.site.org/v1"
TABLES = {
    "cluster": {
        "environment": {"SITE_PASSWORD": SECRET, "PLAIN": SECRET, "NCCL_DEBUG": "INFO"},
        "setup_commands": ["module load gcc", f"export HF_TOKEN={SECRET}"],
        "sbatch": [f"--export=ALL,WANDB_API_KEY={SECRET}"],
    },
    "env": {
        "env_args": {
            "swe": {
                "env": {"OPENAI_API_KEY": SECRET},
                "keys": [SECRET],
                "max_turns": 8,
                "on": True,
            },
            "named": {"env": {"OPENAI_API_KEY": "${A_ENGINES_KEY}"}},
        }
    },
    "rollout": {"rm_url": URL, "judge_url": f"http://host/x?v=1&token={SECRET}"},
    "engines": {"judge": {"url": [URL], "path": "m"}},
    "sglang": {"sglang_api_key": SECRET},
}


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """Settings with a secret in every place that can hold one."""
    tables = {name: TABLES[name] for name in ("cluster", "env", "rollout")}
    return load([], tables)


def test_masked_settings_hold_no_secret_and_all_that_decides_results() -> None:
    hidden = masked(TABLES)
    assert SECRET not in json.dumps(hidden)
    assert hidden["cluster"]["environment"] == {
        "SITE_PASSWORD": MASK,
        "PLAIN": MASK,
        "NCCL_DEBUG": "INFO",
    }
    assert hidden["env"]["env_args"]["swe"] == {
        "env": {"OPENAI_API_KEY": MASK},
        "keys": [MASK],
        "max_turns": 8,
        "on": True,
    }
    assert hidden["rollout"]["rm_url"] == f"http://{MASK}@judge.site.org/v1"
    assert hidden["cluster"]["setup_commands"] == ["module load gcc", f"export HF_TOKEN={MASK}"]
    whole = Config().model_dump(mode="json")
    assert masked(whole) == whole, "no default is masked"


def test_printed_settings_and_commands_hold_no_secret(loaded: Loaded) -> None:
    assert SECRET not in resolved(loaded) and f'"PLAIN" = "{MASK}"' in resolved(loaded)
    words = ["tiny", "--env-args", json.dumps(TABLES["env"]["env_args"]), "--rm-url", URL]
    words += ["--environment", f"A={SECRET}", f"B={SECRET}", "NCCL_DEBUG=INFO", "--lr", "1e-6"]
    words += [f"--env-args={json.dumps({'swe': SECRET})}", f"--environment=C={SECRET}"]
    words += [f"--sglang-api-key={SECRET}"]
    words += ["--sbatch", f"--export=ALL,WANDB_API_KEY={SECRET}"]
    words += ["--setup-commands", f"export HF_TOKEN={SECRET}"]
    command = resume_command(words, Path("/runs/a"))
    assert SECRET not in command and "--lr 1e-6" in command and "NCCL_DEBUG=INFO" in command
    plain = ["tiny", "--lr", "1e-6", "--prompt-data", "s3://bucket/x", "--input-key", "prompt"]
    assert masked_words(plain) == plain


def test_a_report_and_its_recipe_hold_no_secret(loaded: Loaded, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", num_steps=3, preempted_at=())
    run.run_json.write_text(dump(loaded.config))
    write_report(run)
    for path in run.report.glob("re*"):
        assert SECRET not in path.read_text(), path
    recipe = load([run.report / "recipe.toml"], {}).config
    problems = masking_problems(recipe)
    assert {line.split(":")[0] for line in problems} == {
        *("--environment", "--setup-commands", "--sbatch", "--rm-url", "--judge-url", "--env-args")
    }
    whole = restored(recipe, json.loads(run.run_json.read_text()))
    assert whole == loaded.config and not masking_problems(whole)


def test_a_resume_keeps_what_is_given_again(loaded: Loaded) -> None:
    earlier = loaded.config.model_dump(mode="json")
    other = {"rollout": {"rm_url": "http://other/x"}, "cluster": {"environment": {"PLAIN": MASK}}}
    config = restored(load([], other).config, earlier)
    assert config.rollout.rm_url == "http://other/x"
    assert config.cluster.environment == {"PLAIN": SECRET}
    assert restored(Config(), {}) == Config()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host:1/x?y=z@w", "https://***@host:1/x?y=z@w"),
        ("ssh://token@host", "ssh://***@host"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://user:p@ss@host/x", "http://***@host/x"),
        ("http://host/x?api_key=s&n=1#a", "http://host/x?api_key=***&n=1#a"),
        ("A_TOKEN='a b' ./x --password=p --n=1", "A_TOKEN=*** ./x --password=*** --n=1"),
        ("eos_token_id=3", "eos_token_id=3"),
        ("name@host", "name@host"),
    ],
)
def test_users_of_urls_and_assigned_secrets_are_masked(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_a_key_that_is_named_instead_of_written_is_shown_and_resolved_where_it_is_set() -> None:
    arguments = TABLES["env"]["env_args"]["named"]
    assert masked(TABLES)["env"]["env_args"]["named"] == arguments
    environ = {"A_ENGINES_KEY": SECRET, "HF_TOKEN": SECRET}
    assert resolve_references(arguments, environ) == {"env": {"OPENAI_API_KEY": SECRET}}
    assert resolve_references(["x ${A_ENGINES_KEY}", 1], environ) == ["x ${A_ENGINES_KEY}", 1]
    for name in ("HF_TOKEN", "WANDB_API_KEY", "B_ENGINES_KEY", "PATH"):
        with pytest.raises(KeyError, match=name):
            resolve_references({"a": [f"${{{name}}}"]}, environ)
