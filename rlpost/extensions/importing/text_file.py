"""Read a script or a YAML file that was written elsewhere.

Input: a path. Output: its text, or ConfigError with the reason and the remedy.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.config.wording import near_path
from rlpost.errors import ConfigError

MOST_BYTES = 1_000_000


def read_text(path: Path) -> str:
    """Return the text of a file of at most ``MOST_BYTES``, with ``\\n`` at the end of lines.

    Raises:
        ConfigError: it cannot be read, is larger, or is no text in UTF-8.
    """
    shown = near_path(str(path))
    try:
        if not path.is_file():
            raise ConfigError(f"{shown}: no such file")
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{shown}: larger than {MOST_BYTES:,} bytes; give a shell script or a YAML file"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown}: no text in UTF-8 (byte {error.start}); give a shell script or a YAML file"
        ) from None
    if "\0" in text:
        raise ConfigError(f"{shown}: holds bytes 0; give a shell script or a YAML file")
    # Letters of this block mark unknown values (``shell``).
    return text.replace("\r\n", "\n").replace("\ue000", "\ufffd").replace("\ue001", "\ufffd")
