"""``rlpost evaluate``: evaluate a Hugging Face folder, or a step of a run, without a trainer.

Input: a recipe and flags, or a run and a step. Output: a run of engines alone, which evaluates once;
a table with pass@k and intervals, and every answer as JSON Lines.

The weights of a step are those that --save-hf exported, else its checkpoint is converted here first.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from common.files import sync, write_atomic
from common.ledger import Entry
from common.process_end import ProcessId, has_ended, this_process
from common.run_folder import RunFolder
from common.run_identity import read_identity
from rlpost.cli.runs import RUNS_DIR, RUNS_DIR_VARIABLE, find_run
from rlpost.cli.submit import submit_main
from rlpost.cli.terminal import aligned
from rlpost.config.arguments import Parser, add_switch
from rlpost.config.checks.export_folder import (
    Marker,
    folder_of,
    is_complete,
    mark,
    names_a_step,
    read_marker,
)
from rlpost.config.flags import flag, groups
from rlpost.config.groups.distillation import DistillationConfig
from rlpost.config.keys import without_keys
from rlpost.config.load import Loaded, read_dump
from rlpost.config.show import resolved
from rlpost.config.tree import Config
from rlpost.config.wording import near_path, with_values
from rlpost.durable.commit import COMMITTED, PREFIX, checkpoint_name, step_of, was_committed
from rlpost.errors import ConfigError
from rlpost.extensions.evaluating.set_results import Estimate, SetResult, read_results
from rlpost.observe.evaluation_answers import EVALUATION

ONCE = (
    *("--debug-rollout-only", "true", "--debug-eval-only", "true", "--eval-interval", "1"),
    *("--sglang-load-format", "auto"),  # no trainer sends weights to engines that have none
)
BEFORE = ("--skip-eval-before-train", "false")
NOT_OF_THE_RUN = {
    **dict.fromkeys(("save", "load", "save_hf", "save_debug_rollout_data"), "none"),
    **{"use_wandb": "false", "engines": "0", "min_engines": "0"},
}
"""Settings of a run that write to its folders, or start jobs that an evaluation does not need.

Some are of other extensions, which may be missing.
"""
MAKER = ".made-by"
"""A file in the folder of a conversion: its host and process."""
WHOLE_BYTES = 32 << 20
"""Files up to this size enter a digest with their content."""
FOLDER = "evaluations"  # of a run, one folder for each evaluation


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost evaluate``; the exit code is that of the run of its engines."""
    parser = Parser(
        prog="rlpost evaluate",
        usage="rlpost evaluate [RECIPE] [--run-folder RUN] [--step N] [SETTINGS]",
        description="Evaluate a Hugging Face folder, or a step of a run, on engines alone. Any setting of a "
        "recipe is a flag; --local and --dry-run are those of rlpost submit.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", metavar="RECIPE", help="file or name; also the first word")
    parser.add_argument(
        "--run-folder", metavar="RUN", help="run whose settings and weights are used; with --step"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="step of the run; default: the newest"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the evaluation")
    add_switch(parser, "--json", "print the results for programs")
    options, rest = parser.parse_known_args(arguments)
    if options.step is not None and options.run_folder is None:
        raise ConfigError(f"--step {options.step} needs the run: add --run-folder RUN")
    words = list(rest)
    runs_dir = Path(os.environ.get(RUNS_DIR_VARIABLE) or RUNS_DIR)
    if options.run_folder is not None:
        run = find_run(options.run_folder, runs_dir)
        out, evaluated = _evaluation_of(run, options.step, options.out)
        words = [*evaluated, *words]
    else:
        recipe = options.recipe or (words.pop(0) if words and words[0][:1] != "-" else None)
        if recipe is None:
            raise ConfigError(
                "which recipe? rlpost evaluate RECIPE --hf-checkpoint FOLDER, or --run-folder RUN --step N"
            )
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        out = options.out or runs_dir / f"evaluate-{Path(recipe).stem}-{stamp}"
        words = [recipe, *words]
    if "--dry-run" not in words:
        words += ["--wait"]
    code = submit_main([*words, *ONCE, *BEFORE, "--run-folder", str(out)])
    if code or "--dry-run" in words:
        return code
    answers = RunFolder(out).report / EVALUATION
    results = read_results(answers)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print("\n".join(table(results)))
        for weights in dict.fromkeys(result.weights for result in results):
            print(f"weights: {weights}")
        print(f"answers: {near_path(str(answers))}/*.jsonl")
    return 0


def _evaluation_of(run: RunFolder, step: int | None, out: Path | None) -> tuple[Path, list[str]]:
    """Return the folder of an evaluation of a run, and the words of its submission.

    Raises ConfigError when no weights of the step exist.
    """
    try:
        config, gone = read_dump(run.run_json.read_text())
    except OSError as error:
        raise ConfigError(f"{run.run_json}: {error.strerror}; was this run submitted?") from error
    except ValueError as error:
        raise ConfigError(f"{run.run_json}: cannot be read: {error}") from None
    for line in gone:
        print(f"note: {line}", file=sys.stderr)
    step, weights = weights_of(run, config, step)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    out = out or run.root / FOLDER / f"step_{step:07d}-{stamp}"
    recipe = out.with_suffix(".toml")
    recipe.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # the job for which the run waited is over
    others = [word for word in config.cluster.sbatch if not word.startswith("--dep")]
    config = with_values(config, sbatch=tuple(others))
    # no teacher; one in the trainer, which 0.2 had, would be refused
    config = config.model_copy(update={"distillation": DistillationConfig()})
    write_atomic(recipe, resolved(Loaded(config, {}), is_private=True))
    if not (weights / "config.json").is_file():
        weights = conversion_of(run, step, weights, config.checkpoint.hf_checkpoint, out.parent)
    return out, [str(recipe), "--hf-checkpoint", str(weights), *_not_of_the_run()]


def _not_of_the_run() -> list[str]:
    known = {key for group in groups().values() for key in group.model_fields}
    pairs = [(flag(key), value) for key, value in NOT_OF_THE_RUN.items() if key in known]
    return [word for pair in pairs for word in pair]


def weights_of(run: RunFolder, config: Config, step: int | None) -> tuple[int, Path]:
    """Return a step and its weights: the folder of --save-hf, else the checkpoint.

    ``step``: None for the newest checkpoint. Raises ConfigError and names the steps that there are.
    """
    saved = Path(config.checkpoint.save) if config.checkpoint.save else run.checkpoints
    folders = [path for path in saved.glob(f"{PREFIX}*") if was_committed(path)]
    steps = sorted(step_of(path) for path in folders)
    if step is None and steps:
        step = steps[-1]
    template, others = config.checkpoint.save_hf, ""
    # A folder that each export replaces may change while it is evaluated.
    if step is not None and template is not None and names_a_step(template):
        exported = folder_of(template, step)
        others = _why_not(exported, run, step)
        if not others:
            return step, exported
    if step is None or step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"--step {step if step is not None else '(newest)'}: {saved} has no checkpoint of it, and --save-hf no "
            f"folder{others and f' ({others})'}; checkpoints of the steps: {known}"
        )
    if config.lora.lora_rank is not None:
        raise ConfigError(
            f"--step {step}: the checkpoint has adapters, which are not converted; evaluate a folder that "
            "--save-hf exported with --lora-export merged"
        )
    return step, saved / checkpoint_name(step)


def _why_not(exported: Path, run: RunFolder, step: int) -> str:
    """Return why a folder does not have the run's weights of a step; empty if it has them."""
    if not (exported / "config.json").is_file():
        return f"{exported} has no config.json"
    marker, identity = read_marker(exported), read_identity(run.root)
    if marker is None or identity is None or marker.id != identity.id:
        return f"{exported} is of another run"
    if marker.step != step:
        return f"{exported} is of step {marker.step}"
    if was_saved_again(run.ledger.read(), step, marker.attempt):
        return f"{exported} is of attempt {marker.attempt}, and a later one trained the step again"
    return ""


def was_saved_again(entries: Sequence[Entry], step: int, attempt: str | None) -> bool:
    """Return whether a later attempt than ``attempt`` saved a checkpoint of a step."""
    current, is_later = "", False
    for entry in entries:
        if entry["event"] == "started":
            is_later = is_later or current == attempt
            current = str(entry.get("attempt"))
        saves = entry["event"] == "committed" and entry.get("step") == step
        if saves and is_later and current != attempt:
            return True
    return False


def conversion_of(run: RunFolder, step: int, checkpoint: Path, model: str, parent: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint in ``parent``; convert it unless it is there.

    Its name has a digest of all that it is made from, so another run, the step trained again, or
    another model give another folder. Raises ConfigError.
    """
    identity = read_identity(run.root)
    try:  # COMMITTED is a digest of the manifest, which has the digests of all files
        source = {"checkpoint": (checkpoint / COMMITTED).read_text().strip()}
        source["model"] = digest(model)
    except OSError as error:
        raise ConfigError(f"--step {step}: {error.filename}: {error.strerror}") from error
    marker = Marker(
        identity.id if identity else "",
        identity.label if identity else run.root.name,
        step,
        source=source,
    )
    unique = hashlib.sha256(json.dumps(asdict(marker)).encode()).hexdigest()[:12]
    return convert(checkpoint, model, parent / f"hf_{step:07d}-{unique}", marker)


def digest(model: str) -> str:
    """Return a digest of a model's folder: contents of small files, size and time of weights.

    Raises OSError.
    """
    parts: list[object] = []
    for path in sorted(Path(model).rglob("*")):
        if not path.is_file():
            continue
        name, status = str(path.relative_to(model)), path.stat()
        if status.st_size > WHOLE_BYTES:
            parts.append([name, status.st_size, status.st_mtime_ns])
        else:
            parts.append([name, hashlib.sha256(path.read_bytes()).hexdigest()])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def convert(checkpoint: Path, model: str, target: Path, marker: Marker) -> Path:
    """Convert a checkpoint to a Hugging Face folder; an earlier one with ``marker`` is used again.

    It is written in a hidden folder beside the target, synced and renamed. The hidden folder of an
    evaluation that was killed is removed by the next one on the same host.

    Raises ConfigError when the conversion fails, or the name is taken.
    """
    if os.path.lexists(target):
        return _own_conversion(target, marker)
    remove_leftovers(target)
    work = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    converted = work / "hf"
    command = [sys.executable, "-m", "rlpost", "convert", "to-hf", "--input-dir", str(checkpoint)]
    command += ["--output-dir", str(converted), "--origin-hf-dir", model]
    work.mkdir(mode=0o700)
    try:
        maker = {"host": socket.gethostname(), **asdict(this_process())}
        write_atomic(work / MAKER, json.dumps(maker))
        done = subprocess.run(command, env=without_keys(os.environ))
        if done.returncode:
            raise ConfigError(
                f"{checkpoint} was not converted to a Hugging Face folder (exit code "
                f"{done.returncode}); its error is above"
            )
        mark(converted, marker)
        for path in (*converted.rglob("*"), converted):
            sync(path)
        try:
            os.rename(converted, target)
        except OSError:
            if not os.path.lexists(target):  # else another evaluation was faster
                raise
            return _own_conversion(target, marker)
        sync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _own_conversion(target: Path, marker: Marker) -> Path:
    """Return ``target`` if this user converted it from the same; raise ConfigError otherwise."""
    status, problem = target.lstat(), ""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        problem = f"is not a folder of this user (its owner is user {status.st_uid})"
    else:
        existing = read_marker(target)
        if existing is None or replace(existing, files=()) != marker:
            problem = "was not converted from this checkpoint"
        elif not is_complete(target):
            problem = "lacks some of its files"
    if problem:
        raise ConfigError(f"{target}: {problem}; remove it, or name another --out")
    return target


def remove_leftovers(target: Path) -> None:
    """Remove what ended processes of this host left of conversions to ``target``; nothing else."""
    for work in target.parent.glob(f".{glob.escape(target.name)}.*"):
        try:
            maker = json.loads((work / MAKER).read_text())
            is_here = maker["host"] == socket.gethostname()
            process = ProcessId(int(maker["pid"]), int(maker["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not made here
        if is_here and not work.is_symlink() and has_ended(process):
            shutil.rmtree(work, ignore_errors=True)


def table(results: Sequence[SetResult]) -> list[str]:
    """Return the results as a table: means with 95 % intervals."""
    ks = sorted({k for result in results for k in result.pass_at})
    rows = [
        ["set", "prompts", "answers", "reward", *(f"pass@{k}" for k in ks), "tokens", "truncated"]
    ]
    for result in results:
        rows.append(
            [
                result.name,
                str(result.prompts),
                str(result.answers),
                _text(result.reward),
                *(_text(result.pass_at[k]) if k in result.pass_at else "-" for k in ks),
                f"{result.tokens:.1f}",
                f"{100 * result.truncated:.1f} %",
            ]
        )
    return aligned(rows, None)


def _text(value: Estimate) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
