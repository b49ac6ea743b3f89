"""The Hugging Face hub through its own client: what a repository holds, and a file's bytes. Thin.

In: a repository and, for what is private, a token. Out: a ``Listing``; bytes at the end of a file that may hold the
beginning already. A token goes into a header of the hub's own requests and nowhere else: where the hub sends a download
on to another host, httpx leaves it out.

``huggingface_hub.hf_hub_download`` begins a file anew after a kill (its pull request 4228); ``http_get`` of the same
client takes up where a file ends, within a process and across.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from rlpost.assets.wanted import Asset, HubFile, Listing, chosen
from rlpost.errors import AssetError

T = TypeVar("T")
ASK = "give a token that may read it: HF_TOKEN in the environment, or --token-file FILE (mode 600)"


class Part:
    """A file that grows: what the client writes into. ``wrote`` is told each count of bytes; it may raise to stop."""

    def __init__(self, file: IO[bytes], wrote: Callable[[int], None]) -> None:
        self._file, self._wrote = file, wrote

    def write(self, data: bytes) -> int:
        """Append."""
        self._wrote(len(data))
        return self._file.write(data)

    def tell(self) -> int:
        """Where the next bytes go."""
        return self._file.tell()

    def seek(self, offset: int) -> int:
        """Go back, when the server cannot go on in the middle."""
        return self._file.seek(offset)

    def truncate(self) -> int:
        """Forget what lies behind the place that was sought."""
        here, end = self._file.tell(), self._file.seek(0, os.SEEK_END)
        self._wrote(here - end)
        self._file.seek(here)
        return self._file.truncate()


class Hub:
    """One hub, asked with one token or with none."""

    def __init__(self, token: str | None, endpoint: str | None = None) -> None:
        from huggingface_hub import HfApi

        for name in ("huggingface_hub", "httpx"):  # at INFO a line for each request
            logging.getLogger(name).setLevel(logging.ERROR)
        self._api = HfApi(endpoint=endpoint, token=token or False)

    def listing(self, asset: Asset) -> Listing:
        """The files of a repository at the newest commit of its revision. Raises AssetError."""
        from huggingface_hub.hf_api import RepoFile

        def ask() -> Listing:
            info: Any = self._api.repo_info(asset.repository, repo_type=asset.kind, revision=asset.revision)
            tree = self._api.list_repo_tree(
                asset.repository, repo_type=asset.kind, revision=info.sha, recursive=True, expand=False
            )
            return Listing(info.sha, chosen([_file(entry) for entry in tree if isinstance(entry, RepoFile)]))

        return self._asked(asset, ask)

    def download(self, asset: Asset, commit: str, file: HubFile, part: Path, wrote: Callable[[int], None]) -> None:
        """Bring ``part`` to the file's size, from where it ends. Raises AssetError."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers, disable_progress_bars

        disable_progress_bars()
        url = hf_hub_url(
            asset.repository, file.path, repo_type=asset.kind, revision=commit, endpoint=self._api.endpoint
        )
        headers = build_hf_headers(token=self._api.token)

        def get() -> None:
            with part.open("r+b" if part.exists() else "w+b") as opened:
                held = opened.seek(0, os.SEEK_END)
                sink: Any = Part(opened, wrote)
                http_get(url, sink, resume_size=held, headers=headers, expected_size=file.size)
                opened.flush()
                os.fsync(opened.fileno())

        self._asked(asset, get)

    def _asked(self, asset: Asset, ask: Callable[[], T]) -> T:
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        where = f"{asset.repository} ({asset.kind}) at {self._api.endpoint}"
        try:
            return ask()
        except OfflineModeIsEnabled:
            raise AssetError(f"{where}: not asked, HF_HUB_OFFLINE is set") from None
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403, 404):
                why = "no such repository or revision, or it is private or gated"
                raise AssetError(f"{where}: {why} (HTTP {status}); check the name, or {ASK}") from None
            raise AssetError(f"{where}: HTTP {status}; what has come is kept, call again") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            kind = type(error).__name__
            raise AssetError(f"{where}: {kind}: {_first_line(error)}; what has come is kept, call again") from None


def _file(entry: Any) -> HubFile:
    digest = f"sha256:{entry.lfs.sha256}" if entry.lfs is not None else f"git:{entry.blob_id}"
    return HubFile(entry.path, entry.size, digest)


def _first_line(error: Exception) -> str:
    """Without the signed address of a download, which is as good as a key while it lasts."""
    return (str(error).splitlines() or [""])[0].partition("?")[0][:200]
