"""List repositories of the Hugging Face hub and download their files, with the hub's own client.

A token is sent only to the hub: httpx removes the header when a download is redirected to another
host.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile

from common.terminal import raw_stream
from rlpost.errors import AssetError
from rlpost.extensions.fetching.assets.wanted import Asset, HubFile, Listing, chosen

TOKEN_REMEDY = (
    "set a token with access: HF_TOKEN in the environment, or --token-file FILE (mode 600)"
)
RETRY_REMEDY = "complete files are kept; run the command again"


class UnreachableError(AssetError):
    """The hub did not answer."""


class Hub:
    """A client of one hub, with or without a token."""

    def __init__(self, token: str | None, endpoint: str | None = None) -> None:
        # These loggers record each request, and the signed URLs of retries.
        for name in ("huggingface_hub", "httpx"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._api = HfApi(endpoint=endpoint, token=token or False)

    def listing(self, asset: Asset) -> Listing:
        """Return the files at the newest commit of an asset's revision. Raises AssetError."""
        with self._errors(asset):
            info = self._api.repo_info(
                asset.repository, repo_type=asset.kind, revision=asset.revision
            )
            tree = self._api.list_repo_tree(
                asset.repository, repo_type=asset.kind, revision=info.sha, recursive=True
            )
            files = [_file(entry) for entry in tree if isinstance(entry, RepoFile)]
            return Listing(info.sha, chosen(files))

    def download(
        self, asset: Asset, commit: str, paths: Iterable[str], folder: Path, *, workers: int
    ) -> None:
        """Download files of a commit into ``folder``, but for those that it has. Raises AssetError."""
        # its progress bar draws on the terminal itself
        with self._errors(asset), contextlib.redirect_stderr(raw_stream(sys.stderr)):
            snapshot_download(
                asset.repository,
                repo_type=asset.kind,
                revision=commit,
                local_dir=folder,
                allow_patterns=[glob.escape(path) for path in paths],
                max_workers=workers,
                token=self._api.token,
                endpoint=self._api.endpoint,
            )

    @contextlib.contextmanager
    def _errors(self, asset: Asset) -> Iterator[None]:
        """Turn errors of the client into an AssetError with a remedy."""
        where = f"{asset.repository} ({asset.kind}) at {self._api.endpoint}"
        try:
            yield
        except OfflineModeIsEnabled:
            raise AssetError(f"{where}: HF_HUB_OFFLINE is set; unset it to reach the hub") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            reason = RETRY_REMEDY
            if status in (401, 403, 404):
                reason = "no such repository or revision, or it is private or gated; "
                reason += f"check the name, or {TOKEN_REMEDY}"
            raise AssetError(f"{where}: HTTP {status}: {reason}") from None
        except httpx.TransportError as error:
            raise UnreachableError(f"{where}: {_first_line(error)}; {RETRY_REMEDY}") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise AssetError(f"{where}: {_first_line(error)}; {RETRY_REMEDY}") from None


def _first_line(error: Exception) -> str:
    """The first line, without the query: a signed URL grants access until it expires."""
    line = str(error).partition("\n")[0].partition("?")[0][:200]
    return f"{type(error).__name__}: {line}"


def _file(entry: RepoFile) -> HubFile:
    digest = f"sha256:{entry.lfs.sha256}" if entry.lfs is not None else f"git:{entry.blob_id}"
    return HubFile(entry.path, entry.size, digest)
