"""Fake commands of a cluster: its container tools, and a Slurm that accepts or rejects jobs."""

from __future__ import annotations

import os
from pathlib import Path

PYXIS = 'case $* in *--help*) echo "  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH" ;; esac'
NO_PYXIS = 'case $* in *--help*) echo "  --chdir=PATH" ;; esac'


def commands(folder: Path, **texts: str) -> str:
    """A PATH with these commands before the system's, which has neither enroot nor pyxis."""
    folder.mkdir(exist_ok=True)
    for name, text in {"srun": NO_PYXIS, **texts}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}/usr/bin:/bin"


def fleet_commands(folder: Path, asked: Path, queue: Path, sbatch: str) -> str:
    """As ``commands``: squeue shows the file ``queue``, and scancel writes to ``asked``."""
    scancel = f'echo "scancel $*" >>{asked}'
    answers = {"scontrol": "exit 0", "squeue": f"cat {queue}"}
    return commands(folder, sbatch=sbatch, scancel=scancel, **answers)
