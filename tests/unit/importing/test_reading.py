"""``rlpost import``: scripts are read as bash would run them, and nothing in them is executed."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tomllib
from pathlib import Path

import pytest

from rlpost.cli.main import main
from rlpost.config.load import load
from rlpost.config.wording import near_path
from rlpost.errors import ConfigError
from rlpost.extensions.importing.arithmetic import calculate
from rlpost.extensions.importing.imported import imported
from rlpost.extensions.importing.peers.row import Unresolved
from rlpost.extensions.importing.script import read_script
from rlpost.extensions.importing.source import read
from rlpost.extensions.importing.yaml_file import read_yaml, scalar

SCRIPT = r"""
#!/bin/bash
set -euo pipefail   # the usual
batch=${BATCH:-64}
mini=$((batch / 4))
name='a b'
ROOT=${ROOT:-"${HOME}/data"}
DATA=(
    data.train_files="['$ROOT/a.parquet', '$ROOT/b.parquet']"  # don't stop here
    data.train_batch_size=${batch}
)
DATA+=( data.max_prompt_length=$((256*2)) )
COMMON="trainer.nnodes=2 trainer.n_gpus_per_node=8"
if [ "$batch" -ge 32 ]; then lr=2e-6; else lr=1e-6; fi
for ((i=0; i<3; i++)); do last=$i; done
cat > notes <<'EOF'
python3 -m verl.trainer.main_ppo trainer.nnodes=99 it's
EOF
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo "${DATA[@]}" $COMMON \
    actor_rollout_ref.actor.optim.lr=$lr \
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \
    +trainer.experiment_name="$name/$last" \
    "$@" 2>&1 | tee log.txt
"""


def written(folder: Path, text: str, name: str = "run.sh") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def words_of_bash(path: Path, variables: dict[str, str]) -> list[str]:
    """The words that bash gives to python3."""
    stand_in = 'python3() { printf "%s\\0" "$@" >&3; }; '
    command = f"{stand_in} cd {path.parent}; source {path}"
    run = subprocess.run(
        ["bash", "-c", f"exec 3>words; {command}"],
        cwd=path.parent,
        env={"PATH": "/usr/bin:/bin", "HOME": "$HOME", **variables},
        capture_output=True,
        check=True,
    )
    assert run.returncode == 0
    return (path.parent / "words").read_text().split("\0")[:-1]


FRAGMENTS = [
    "X=${A:-one}",
    "X=${B:-$A}",
    'X="$A two"',
    "X='$A'",
    "L=(1 '2 3' \"$X\")",
    'L+=("${X}" $X)',
    "N=$((N + 2))",
    "N=$(( (N * 3) % 7 ))",
    "X=${X%.*}.sh",
    "X=${X##*/}",
    "X=${X/one/1}",
    'if [ "$N" -gt 3 ]; then X=big; elif [ -z "$A" ]; then X=none; else X=small; fi',
    '[ "$X" = big ] && X=bigger || X=other',
    "for w in a b; do L+=($w); done",
    "for ((i=0; i<N; i++)); do L+=($i); done",
    "case $X in big*) N=9;; *) N=1;; esac",
    'X=$(echo "$X" end)',
    "f() { X=$1; L+=(f$2); }\nf p q",
    'printf -v X "%s-%s" "$X" $N',
    "export X=exported Y=2",
    "X=$(basename /a/b/c.txt .txt)",
    "# a comment with ' and \" and $(\n",
    "X=a\\ b\\$c",
    'X="q\\"u\\\\o"',
    "X=${L[0]}${#L[@]}",
    "( X=lost; : ) > /dev/null 2>&1",
    '[[ "$N" == 1 || -z "$A" ]] && X=y',
    '[[ "$N" == 1 && "$A" == x* ]] || { X=z; N=4; } > /dev/null',
    "eval \"X='$A e'; N=2\"",
    "for w in 1 2; do :; done < /dev/null",
    'L+=({x,y}$N "{p,q}" {1..3} a{b,{c,d}}e {} {one} $X{.a,.b} {3..-2..2})',
    'set -- p "q r"; L+=("$@" $1); shift; L+=("$@")',
    "for w in {a,b}{1..2}; do L+=($w); done",
]


def test_words_are_those_that_bash_expands(tmp_path):
    """Scripts of random fragments: the same words as bash, one by one."""
    source = random.Random(3)
    for _ in range(25):
        lines = ["A=x.y/one", "N=1", "L=()", "X=start", *source.sample(FRAGMENTS, 7)]
        call = 'python3 -m verl.trainer.main_ppo a.b=$X "c.d=$X" "${L[@]}" e.f=$N g.h="${A}" \\\n  last'
        path = written(tmp_path, "\n".join([*lines, call]) + "\n")
        shell = read_script(path, {})
        (words,) = [words for words in shell.commands if words[0].text == "python3"]
        assert [word.text for word in words[1:]] == words_of_bash(path, {}), lines


def test_a_script_is_read_with_its_variables(tmp_path, capsys):
    path = written(tmp_path, SCRIPT)
    assert main(["import", str(path)]) == 0
    printed = capsys.readouterr()
    recipe = tomllib.loads(printed.out)
    assert recipe["rollout"]["rollout_batch_size"] == 64
    assert recipe["rollout"]["prompt_data"] == ["$HOME/data/a.parquet", "$HOME/data/b.parquet"]
    assert recipe["cluster"]["actor_num_nodes"] == 2 and recipe["cluster"]["job_name"] == "a_b_2"
    assert recipe["optimizer"]["lr"] == pytest.approx(2e-6)
    assert "run.sh, line 19: verl, 9 keys" in printed.err
    assert main(["import", str(path), "BATCH=16", "actor_rollout_ref.rollout.n=4"]) == 0
    recipe = tomllib.loads(capsys.readouterr().out)
    assert recipe["rollout"]["global_batch_size"] == 16 // 4 * 4
    assert recipe["optimizer"]["lr"] == pytest.approx(1e-6)


def test_what_only_the_machine_of_a_run_knows_is_named_with_its_line(tmp_path):
    text = """A=$(nvidia-smi -L | wc -l)
if [ "$A" -gt 4 ]; then B=1; else B=2; fi
python3 -m verl.trainer.main_ppo trainer.nnodes=$A trainer.n_gpus_per_node=$B \\
  trainer.save_freq=$C ${MORE} data.shuffle=True
"""
    source = read(written(tmp_path, text), [])
    reasons = {one.key: one.why for one in source.given}
    assert "line 1: what `nvidia-smi -L | wc -l` prints" in reasons["trainer.nnodes"]
    assert "condition of line 2" in reasons["trainer.n_gpus_per_node"]
    assert "line 4: C is not set in the script" in reasons["trainer.save_freq"]
    assert "MORE is not set" in reasons["?"] and len(source.given) == 5


def test_files_that_a_script_sources_are_read(tmp_path):
    (tmp_path / "models").mkdir()
    written(tmp_path / "models", "MODEL_ARGS=(--num-layers 4 --swiglu)\n", "m.sh")
    text = """DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${DIR}/models/m.sh"
source "${DIR}/models/other.sh"
ray job submit --address="http://127.0.0.1:8265" -- python3 train_async.py --lr 1e-5 ${MODEL_ARGS[@]}
"""
    source = read(written(tmp_path, text), [])
    lines = {one.key: one.line for one in source.given}
    assert source.stack == "slime"
    assert lines == {"train_async.py": 4, "lr": 4, "num-layers": 1, "swiglu": 1}
    assert "other.sh" in source.problems[0] and "line 3" in source.problems[0]


def test_a_program_that_is_only_named_is_not_started(tmp_path):
    text = """echo "Launching" train.py --lr 1
cp train.py --lr backup
cat train.py
$LAUNCH -u "$ROOT/train.py" --lr 3e-6
"""
    (answer,) = read(written(tmp_path, text), []).given
    assert (answer.value, answer.line) == ("3e-6", 4)


def test_a_shift_in_arithmetic_is_no_here_document(tmp_path):
    text = "N=$((1<<20)); M=$(( N * 2 ))\npython3 -m verl.trainer.main_ppo data.seed=$N trainer.nnodes=2\n"
    seed, nodes = read(written(tmp_path, text), []).given
    assert seed.settings or "1<<20" in seed.why
    assert nodes.settings == {"actor_num_nodes": 2}


def test_elements_by_key_and_words_of_a_branch_are_not_read_in_silence(tmp_path):
    text = """declare -A M=([q]=7 [l]=8)
N[0]=3
if [ "$OTHER" ]; then set -- trainer.nnodes=2; fi
python3 -m verl.trainer.main_ppo data.seed=${M[l]} data.train_batch_size=${N[0]} "$@"
"""
    answers = read(written(tmp_path, text), []).given
    assert not any(one.settings for one in answers)
    reasons = {one.key: one.why for one in answers}
    assert "line 1: M has elements by key" in reasons["data.seed"]
    assert "line 2: N has elements by key" in reasons["data.train_batch_size"]
    assert "$@ depends on a condition of line 3" in reasons["?"]


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("train.py --lr 1e-5", "sync"),
        ("/root/slime/train_async.py --lr 1e-5", "one_step_off"),
        (
            "train_async.py --rollout-function-path slime.rollout.fully_async_rollout.f",
            "fully_async",
        ),
        ("train.py --wandb-group fully_async", "sync"),
    ],
)
def test_the_program_of_slime_says_when_batches_are_generated(words, mode, tmp_path):
    source = read(written(tmp_path, f"python3 {words}\n"), [])
    config = load([], imported(source.given, source.absent).settings).config
    assert config.rollout.rollout_mode == mode


def test_the_last_of_a_repeated_flag_or_key_counts(tmp_path):
    """As argparse, which parses slime's flags, and Hydra have it."""
    text = """A=(--lr 1e-6
--rollout-batch-size 8)
python3 train.py "${A[@]}" --use-kl-loss --rollout-batch-size=16 \\
  --lr 5e-6 --wandb-key FIRST --wandb-key LAST
"""
    source = read(written(tmp_path, text), [])
    result = imported(source.given, ())
    theirs = argparse.ArgumentParser()
    theirs.add_argument("--lr", type=float)
    theirs.add_argument("--rollout-batch-size", type=int)
    lines = text.replace("\\\n", " ").splitlines()
    words = [*lines[0][3:].split(), *lines[1][:-1].split(), *lines[2].split()]
    expected, _ = theirs.parse_known_args(words)
    assert result.settings["optimizer"]["lr"] == expected.lr == 5e-6
    assert result.settings["rollout"]["rollout_batch_size"] == expected.rollout_batch_size == 16
    said = {(one.key, one.line): one.why for one in result.taken}
    assert said["lr", 1] == "given again on line 4, and the last one counts"
    assert "FIRST" not in str(result)
    command = "python3 -m verl.trainer.main_ppo trainer.nnodes=2 trainer.nnodes=3\n"
    source = read(written(tmp_path, command), [])
    result = imported(source.given, ())
    assert result.settings["cluster"]["actor_num_nodes"] == 3
    assert [one.value for one in result.taken if one.why] == [2]


def test_each_flag_of_a_script_of_slime_is_in_one_list(tmp_path, capsys):
    text = "python3 train.py --lr 1e-5 --use-tis --eps-clip lots --frobnicate 3 --tp 2 \\\n"
    text += "  --wandb-key SECRET --log-interval 1 stray --sglang-nonsense 1 --use-kl-loss --kl-loss-type k2\n"
    assert main(["import", str(written(tmp_path, text))]) == 0
    printed = capsys.readouterr()
    assert "SECRET" not in printed.out + printed.err
    grpo = tomllib.loads(printed.out)["grpo"]
    assert grpo["use_tis"] is True and grpo["kl_loss_type"] == "k2"
    left = printed.err.partition("not here: ")[2]
    for name in ("eps-clip", "frobnicate", "tp", "wandb-key", "sglang-nonsense"):
        assert f"line {2 if name in ('wandb-key', 'sglang-nonsense') else 1}: {name} " in left, name
    assert 'log-interval = "1 stray": no setting' in printed.err
    assert 'lr-decay-style = "linear" -> --lr-decay-style linear' in printed.err


NEMO = """
defaults: base.yaml
grpo:
  num_prompts_per_step: 8
  seed: ${.num_prompts_per_step}
policy:
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}
  optimizer: null
  max_grad_norm: ${oc.env:NORM}
"""


def test_yaml_has_its_defaults_and_references(tmp_path):
    written(
        tmp_path,
        "grpo: {num_generations_per_prompt: 4, seed: 1}\npolicy:\n  optimizer:\n    kwargs: {lr: 5e-6}\n",
        "base.yaml",
    )
    values = read_yaml(written(tmp_path, NEMO, "run.yaml")).entries
    assert values["grpo.seed"].value == 8 and values["policy.train_global_batch_size"].value == 32
    assert "policy.optimizer.kwargs.lr" not in values and values["policy.optimizer"].value is None
    assert isinstance(values["policy.max_grad_norm"].value, Unresolved)
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(ConfigError, match=r"base\.yaml: no such file"):
        read_yaml(tmp_path / "run.yaml")


def test_a_recipe_of_nemo_rl_without_the_file_it_begins_with_has_that_files_values(tmp_path):
    """``examples/configs/grpo_math_1B.yaml`` of 7ea279a: its numbers, and its references.

    The same by a script that overrides a key, where no ``--config`` means that file.
    """
    recipe = "defaults: ../../grpo_math_1B.yaml\npolicy:\n  max_total_sequence_length: 16384\n"
    command = "uv run examples/run_grpo.py {}policy.max_total_sequence_length=16384\n"
    sources = [
        read(written(tmp_path, recipe, "run.yaml"), []),
        read(
            written(tmp_path, recipe.partition("policy")[0], "base.yaml"),
            [command.split()[-1].removeprefix("{}")],
        ),
        read(written(tmp_path, command.format("")), []),
        read(written(tmp_path, command.format("--config=configs/grpo_math_1B.yaml ")), []),
    ]
    for source in (sources[0], sources[-1]):
        assert "grpo_math_1B.yaml: no such file" in source.problems[0]
    for source in sources:
        assert source.given[0].key == "policy.max_total_sequence_length"
        assert all(one.is_needless for one in source.given[1:])
        config = load([], imported(source.given, source.absent).settings).config
        assert config.rollout.rollout_max_response_len == 16384
        assert config.rollout.rollout_max_prompt_len == 16384
        assert config.perf.max_tokens_per_gpu == 16384 * 4
        assert config.optimizer.lr == 5e-6 and config.optimizer.lr_warmup_iters == 50
        assert config.optimizer.lr_warmup_init == pytest.approx(5e-7)
        assert config.sglang.model_extra == {"sglang_mem_fraction_static": 0.6}


def test_a_configuration_of_verl_that_is_not_read_is_named_first(tmp_path):
    command = "python3 -m verl.trainer.main_ppo --config-name={} trainer.nnodes=2\n"
    assert not read(written(tmp_path, command.format("ppo_trainer.yaml")), []).problems
    assert "--config-name mine" in read(written(tmp_path, command.format("mine")), []).problems[0]


def test_the_file_that_a_command_of_nemo_rl_names_is_read_or_the_script_is_refused(tmp_path):
    command = "uv run examples/run_grpo.py --config configs/a.yaml grpo.num_prompts_per_step=8\n"
    path = written(tmp_path, command)
    with pytest.raises(ConfigError, match=r"--config configs/a\.yaml"):
        read(path, [])
    (tmp_path / "configs").mkdir()
    written(tmp_path / "configs", "grpo: {num_prompts_per_step: 4, seed: 3}\n", "a.yaml")
    values = {one.key: one.value for one in read(path, []).given}
    assert values["grpo.num_prompts_per_step"] == 8 and values["grpo.seed"] == 3


def test_what_an_import_says_of_its_recipe_is_what_check_says(tmp_path, monkeypatch, capsys):
    """Epochs are counted, and the folder of runs is that of the environment, as by any verb."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 100)
    monkeypatch.setenv("RLPOST_RUNS_DIR", str(tmp_path / "runs"))
    for batch in (10, 128):
        command = f"python3 train.py --prompt-data {tmp_path}/rows.jsonl --input-key prompt"
        command += f" --rollout-batch-size {batch} --num-epoch 1\n"
        path, target = written(tmp_path, command), tmp_path / f"recipe{batch}.toml"
        assert main(["import", str(path), "--output", str(target)]) == 0
        own = capsys.readouterr().err.partition("of this recipe\n")[2].partition("\n\n")[0]
        assert main(["check", str(target)]) == 2
        check = capsys.readouterr().err.replace(f" ({near_path(str(target))})", "")
        said = [line.removeprefix("error: ") for line in check.splitlines()]
        assert own.splitlines() == [f"  {line.replace(' (the default)', '')}" for line in said]
        assert ("fewer than --rollout-batch-size 128" in own) == (batch == 128)


def test_a_recipe_is_written_once(tmp_path, capsys):
    path, target = written(tmp_path, SCRIPT), tmp_path / "recipe.toml"
    assert main(["import", str(path), "--output", str(target)]) == 0
    load([target], {})
    before = target.read_bytes()
    assert main(["import", str(path), "--output", str(target)]) == 2
    assert "the file exists" in capsys.readouterr().err and target.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} == {"run.sh", "recipe.toml"}


def lol(levels: int, empty: str, item: str) -> str:
    """A document whose aliases expand to 9 ** levels parts."""
    lines = [f"a0: &a0 {item}"]
    for level in range(1, levels):
        inner = ", ".join(
            f"{key}*a{level - 1}" for key in (empty.replace("#", str(n)) for n in range(9))
        )
        lines.append(f"a{level}: &a{level} {item[0]}{inner}{item[-1]}")
    return "\n".join([*lines, "grpo: {seed: 1}"])


HOSTILE = {
    "a value that doubles.sh": "A=xxxxxxxxxx\n" + "A=$A$A$A$A\n" * 40,
    "a function that calls itself.sh": "f() { f; }\nf\n",
    "braces without end.sh": "echo " + "{a,b}" * 40 + "\n",
    "open braces.sh": "echo " + "{" * 100_000 + "\n",
    "many digits.yaml": "grpo: {seed: " + "9" * 5000 + "}\n",
    "an endless loop.sh": "for ((;;)); do :; done\n",
    "a file that sources itself.sh": "source './a file that sources itself.sh'\n",
    "nested substitutions.sh": "A=" + "$(" * 500 + ")" * 500,
    "nested blocks.sh": "if true; then " * 3000,
    "large.sh": "a" * 1_500_000,
    "binary.sh": "\0\0\0",
    "an open quote.sh": "A='never\n",
    "lists.yaml": lol(9, "", "[1, 1]"),
    "tables.yaml": lol(9, "k#: ", "{a: 1, b: 2}"),
    "itself.yaml": "grpo: &a\n  b: *a\n",
    "its own list.yaml": "grpo: {b: &a [*a]}\n",
    "a tag.yaml": "grpo: !!python/object/apply:os.system ['touch pwned']\n",
    "another tag.yaml": "grpo: !mine {a: 1}\n",
    "defaults of itself.yaml": "defaults: defaults of itself.yaml\ngrpo: {seed: 1}\n",
    "deep.yaml": "grpo: " + "[" * 50_000,
    "no table.yaml": "- 1\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, HOSTILE[name], name)
    assert main(["import", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_nothing_of_a_script_is_executed_and_nothing_controls_the_terminal(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text = "touch one; A=$(touch two; echo hi); eval touch three; `touch four`; touch five | cat\n"
    text += "python3 -m verl.trainer.main_ppo trainer.project_name=$A data.train_files='\x1b[2Jx\ny' z.z=\x1b[1m\n"
    assert main(["import", str(written(tmp_path, text))]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert tomllib.loads(printed.out)["rollout"]["prompt_data"] == ["\x1b[2Jx\ny"]
    assert [one.name for one in tmp_path.iterdir()] == ["run.sh"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "echo hi\n", "no command starts"),
        ("a.toml", "", "a recipe already"),
        ("a.yaml", "model: {a: 1}\n", "neither NeMo-RL's tables"),
    ],
)
def test_files_of_no_stack_are_refused(name, text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        read(written(tmp_path, text, name), [])


def test_scalars_are_those_of_hydra():
    assert scalar("['a','b']") == ["a", "b"] and scalar("null") is None and scalar('"5"') == "5"
    assert scalar("1e-6") == 1e-6 and scalar("False") is False and scalar("a b") == "a b"
    assert json.dumps(scalar("[1, x, 2.5]")) == '[1, "x", 2.5]'


def test_arithmetic_is_that_of_bash():
    source = random.Random(1)
    for _ in range(60):
        numbers = [source.randint(-9, 9) or 1 for _ in range(4)]
        signs = [source.choice(["+", "-", "*", "/", "%", "<", "==", "&&", "||"]) for _ in range(3)]
        text = f"({numbers[0]} {signs[0]} {numbers[1]}) {signs[1]} ({numbers[2]} {signs[2]} {numbers[3]})"
        run = subprocess.run(["bash", "-c", f"echo $(({text}))"], capture_output=True, text=True)
        result = calculate(text, lambda _: 0)
        assert (None if run.returncode else int(run.stdout)) == result, text
