"""Small copies of the images that recorded answers name, for a page that loads no other file.

Input: the run folder, and digests in the order of the page. Output: a picture for each, at most
MAX_IMAGES of them; or the reason why there is none. A file is read within the bounds of all images.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlpost.errors import ImageError
from rlpost.images.limits import open_image
from rlpost.images.store import ImageStore
from rlpost.observe.samples import RecordedAnswer

MAX_IMAGES = 100
"""Of a page; a copy has at most about 10 KB."""
MAX_OF_ANSWER = 8
SIDE = 160  # pixels, the longest
QUALITY = 80  # of JPEG
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image on a page: a data URL of its copy, or the problem with it."""

    url: str = ""
    problem: str = ""


NOT_SHOWN = Picture(problem=f"not shown: a page has up to {MAX_IMAGES} images")


def digests_of(answer: RecordedAnswer) -> list[str]:
    """Return the digests that a record names, which a damaged file may have as anything."""
    named = answer.get("images")
    return [str(one) for one in named] if isinstance(named, list) else []


def pictures(run_folder: Path, answers: Iterable[RecordedAnswer]) -> Mapping[str, Picture]:
    """Return a picture for each image of ``answers``, by its digest. Never raises."""
    store, by_digest = ImageStore(run_folder), dict[str, Picture]()
    storage_failed = ""
    for answer in answers:
        for digest in digests_of(answer)[:MAX_OF_ANSWER]:
            if digest in by_digest:
                continue
            if len(by_digest) >= MAX_IMAGES:
                by_digest[digest] = NOT_SHOWN
            elif storage_failed:  # each attempt takes seconds
                by_digest[digest] = Picture(problem=storage_failed)
            else:
                try:
                    by_digest[digest] = _picture(store, digest)
                except OSError as error:
                    storage_failed = f"cannot be read: {error.strerror or error}"
                    by_digest[digest] = Picture(problem=storage_failed)
    return by_digest


def _picture(store: ImageStore, digest: str) -> Picture:
    """Return the picture of an image. Raises OSError if the storage fails."""
    if not _DIGEST.fullmatch(digest):
        return Picture(problem="not a digest of an image")
    path = store.path(digest)
    try:
        status = path.stat()
    except FileNotFoundError:
        return Picture(problem=f"missing: no file {path}")
    try:
        return Picture(_copy(store.folder.parent, digest, status.st_size, status.st_mtime_ns))
    except ImageError as error:
        return Picture(problem=f"damaged: {error}")


@lru_cache(maxsize=2 * MAX_IMAGES)
def _copy(run_folder: Path, digest: str, num_bytes: int, changed_ns: int) -> str:
    """Return a small copy as a data URL. Raises ImageError, OSError.

    A page is written again at each checkpoint; size and time tell whether the file is the same.
    """
    del num_bytes, changed_ns
    image = open_image(ImageStore(run_folder).read(digest))
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
