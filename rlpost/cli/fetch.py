"""``rlpost fetch RECIPE``: the model and the data sets of a recipe, from the Hugging Face hub to the folder of assets.

In: a recipe with a table [assets], a cluster profile, flags. Out: what there is and what is to come, with sizes; then
the folders. Where everything is there no network is touched. Exit code 1 when something cannot be had.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rlpost.assets.fetch import Manner, Source, Standing, existing, fetch, room_problem, standing
from rlpost.assets.wanted import Asset, from_elsewhere, wanted
from rlpost.cli import settings as command_line
from rlpost.config.keys import KEYS
from rlpost.config.path_variables import ASSETS
from rlpost.errors import AssetError, ConfigError
from rlpost.units import size_text

EXIT_NOT_HAD = 1
TOKENS = KEYS[:2]


def main(arguments: Sequence[str]) -> int:
    """Entry of the verb. Raises ConfigError."""
    made = command_line.parser("rlpost fetch", "Fetch what a recipe wants from the Hugging Face hub.")
    made.add_argument("--sizes-only", action="store_true", help="say what there is and what is to come, fetch nothing")
    made.add_argument("--compare", action="store_true", help="compare the content of what is there with its digests")
    made.add_argument("--token-file", type=Path, metavar="FILE", help="token for what is private; else HF_TOKEN")
    made.add_argument("--workers", type=int, default=8, help="files at a time (8)")
    made.add_argument("--wait-s", type=float, default=21_600, help="seconds to wait for another fetch (21600)")
    options, loaded = command_line.settings(made, arguments)
    assets = wanted(loaded.config)
    if not assets:
        raise ConfigError(
            "nothing to fetch: the recipe names no repositories; name them with --hub-models or --hub-datasets"
        )
    root = assets_folder(loaded.config.cluster.assets_dir)
    token = None if options.token_file is None else token_of(options.token_file)
    try:
        code = _run(assets, root, token, options)
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_HAD
    for line in from_elsewhere(loaded.config, str(root), assets):
        print(f"not of the hub: {line} (a conversion job makes it: jobs/convert_*.sbatch)")
    return code


def _run(assets: Sequence[Asset], root: Path, token: str | None, options: argparse.Namespace) -> int:
    standings = [standing(asset, root, None) for asset in assets]
    source: Source | None = None
    if is_offline():
        print("HF_HUB_OFFLINE is set: the hub is not asked")
    elif all(one.is_there and one.listing is not None for one in standings) and not options.compare:
        print("everything is there: the hub is not asked")
    else:
        source = _hub(token)
        standings = [standing(asset, root, source) for asset in assets]
    print(table(standings, root))
    if options.sizes_only or (source is None and not options.compare):
        lacking = [one for one in standings if not one.is_there]
        if lacking and source is None:
            raise AssetError(f"{', '.join(str(one.folder) for one in lacking)}: not there, and the hub is not asked")
        return 0
    if problem := room_problem(standings, root):
        raise AssetError(problem)
    total = sum(one.missing_bytes for one in standings)
    with Progress(total) as progress:
        manner = Manner(max(1, options.workers), options.wait_s, tell, progress.add)
        for asset in assets:
            done = fetch(asset, root, source, manner, deep=options.compare)
            tell(f"{done.folder}: {done.remark}")
    return 0


def _hub(token: str | None) -> Source:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"{sys.executable} has no huggingface_hub: pip install huggingface_hub, or fetch where the whole stack is"
        )
    from huggingface_hub import get_token

    from rlpost.assets.hub import Hub

    return Hub(token or get_token(), os.environ.get("HF_ENDPOINT"))  # of HF_TOKEN, or of `hf auth login`


def assets_folder(given: str | None) -> Path:
    """The folder of assets. Raises ConfigError when nobody names it."""
    named = given or os.environ.get(ASSETS)
    if not named:
        raise ConfigError(
            f"where to? give --assets-dir FOLDER (also in the profile of your cluster), or export {ASSETS}=FOLDER"
        )
    return Path(named).absolute()


def token_of(path: Path) -> str:
    """The token in a file, alone or as HF_TOKEN=... among other lines.

    Raises:
        ConfigError: the file cannot be read, holds none, or others can read it as well.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"--token-file {path}: others can read it (mode {stat.S_IMODE(mode):o}): chmod 600 {path}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [value for line in lines for name, _, value in [line.partition("=")] if name in TOKENS]
    bare = lines[:1] if len(lines) == 1 and "=" not in lines[0] else []
    if not (found := named or bare) or not found[0].isprintable() or " " in found[0]:
        raise ConfigError(f"--token-file {path}: holds no token; write it alone, or as HF_TOKEN=... on a line")
    return found[0]


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE says that no network is to be used (huggingface_hub, constants.py)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def table(standings: Sequence[Standing], root: Path) -> str:
    """A line for each repository, and what is free."""
    rows = [("repository", "folder", "files", "size", "to come", "")]
    for one in standings:
        files, size = ("?", "?") if one.listing is None else (str(len(one.listing.files)), size_text(one.listing.size))
        coming = "-" if one.is_there else "?" if one.listing is None else size_text(one.missing_bytes)
        remark = one.remark or ("begun" if one.listing and one.missing_bytes < one.listing.size else "")
        rows.append((one.asset.repository, one.folder.name, files, size, coming, remark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    free = shutil.disk_usage(existing(root)).free
    total = sum(one.missing_bytes for one in standings)
    return "\n".join([*lines, f"{size_text(total)} to come, {size_text(free)} free in {root}"])


def tell(line: str) -> None:
    """A line for the person."""
    print(line, flush=True)


class Progress:
    """How far it is, on standard error: one line that changes on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._is_terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def add(self, count: int) -> None:
        """So many bytes more; fewer when a damaged file begins anew."""
        with self._lock:
            self._done += count

    def line(self) -> str:
        """For instance ``12.3 GB of 45.6 GB, 850.0 MB/s, 40 s left``."""
        rate = self._done / max(1e-3, time.monotonic() - self._started)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 else ""
        return f"{size_text(self._done)} of {size_text(self._total)}, {size_text(rate)}/s{left}"

    def __enter__(self) -> Progress:
        if self._total:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._total:
            self._thread.join()
            print(("\r\033[K" if self._is_terminal else "") + self.line(), file=sys.stderr, flush=True)

    def _show(self) -> None:
        while not self._over.wait(1.0 if self._is_terminal else 10.0):
            begin, end = ("\r\033[K", "") if self._is_terminal else ("", "\n")
            print(begin + self.line(), end=end, file=sys.stderr, flush=True)
