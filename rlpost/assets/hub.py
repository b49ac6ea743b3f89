"""The Hugging Face hub through its own client: what a repository holds, and the bytes of a file.

A token goes into a header of requests to the hub alone: httpx leaves it out when a download is redirected to another
host. Downloads are plain HTTP (``http_get``), also of repositories in Xet storage: only that continues within a file
that a killed process left. ``hf_hub_download`` names such files by process and never finds them again
(huggingface_hub, pull request 4228).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers

from rlpost.assets.wanted import Asset, HubFile, Listing, chosen
from rlpost.errors import AssetError

TOKEN_REMEDY = "give a token that may read it: HF_TOKEN in the environment, or --token-file FILE (mode 600)"


class Hub:
    """One hub, asked with one token or with none."""

    def __init__(self, token: str | None, endpoint: str | None = None) -> None:
        for name in ("huggingface_hub", "httpx"):  # a line for each request, retries with signed addresses
            logging.getLogger(name).setLevel(logging.ERROR)
        self._api = HfApi(endpoint=endpoint, token=token or False)

    def listing(self, asset: Asset) -> Listing:
        """The files of a repository at the newest commit of its revision. Raises AssetError."""
        with self._errors(asset):
            info = self._api.repo_info(asset.repository, repo_type=asset.kind, revision=asset.revision)
            tree = self._api.list_repo_tree(asset.repository, repo_type=asset.kind, revision=info.sha, recursive=True)
            return Listing(info.sha, chosen([_file(entry) for entry in tree if isinstance(entry, RepoFile)]))

    def download(self, asset: Asset, commit: str, file: HubFile, path: Path, advance: Callable[[int], None]) -> None:
        """Bring ``path`` to the file's size, from where it ends.

        ``advance`` gets the bytes of each chunk before it is written; what it raises ends the download. Raises
        AssetError.
        """
        url = hf_hub_url(
            asset.repository, file.path, repo_type=asset.kind, revision=commit, endpoint=self._api.endpoint
        )
        with self._errors(asset), path.open("ab") as opened:
            held = opened.tell()

            def bar(*, initial: int = 0, **_: Any) -> _Bar:
                advance(initial - held)  # less than 0 when the server cannot continue within a file
                return _Bar(advance)

            headers = build_hf_headers(token=self._api.token)
            sized: dict[str, int] = {"resume_size": held, "expected_size": file.size}
            http_get(url, opened, headers=headers, tqdm_class=bar, **sized)
            opened.flush()
            os.fsync(opened.fileno())

    @contextlib.contextmanager
    def _errors(self, asset: Asset) -> Iterator[None]:
        """Turn errors of the client into an AssetError with a remedy."""
        where = f"{asset.repository} ({asset.kind}) at {self._api.endpoint}"
        try:
            yield
        except OfflineModeIsEnabled:
            raise AssetError(f"{where}: not asked, HF_HUB_OFFLINE is set") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            why = "what has come is kept, call again"
            if status in (401, 403, 404):
                why = "no such repository or revision, or it is private or gated; "
                why += f"check the name, or {TOKEN_REMEDY}"
            raise AssetError(f"{where}: HTTP {status}: {why}") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            # Only the first line and no query: the signed address of a download is as good as a key while it lasts.
            line = str(error).partition("\n")[0].partition("?")[0][:200]
            raise AssetError(f"{where}: {type(error).__name__}: {line}; what has come is kept, call again") from None


class _Bar(contextlib.nullcontext[Any]):
    """As much of tqdm as http_get uses."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__(self)
        self.update = advance


def _file(entry: RepoFile) -> HubFile:
    digest = f"sha256:{entry.lfs.sha256}" if entry.lfs is not None else f"git:{entry.blob_id}"
    return HubFile(entry.path, entry.size, digest)
