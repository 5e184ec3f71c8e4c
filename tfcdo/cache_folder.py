"""Finds the user's folder for files, and writes files."""

from __future__ import annotations

import os
import pathlib
import tempfile

import platformdirs

VARIABLE = "TFCDO_CACHE_DIR"


def cache_folder() -> pathlib.Path:
    """Returns the folder, which may not exist; a `RuntimeError` without a home."""
    given = os.environ.get(VARIABLE)
    try:
        folder = pathlib.Path(given) if given else platformdirs.user_cache_path("tfcdo")
        if not given and not folder.is_absolute():
            # XDG_CACHE_HOME is a relative path, which its specification has ignored.
            folder = pathlib.Path("~/.cache/tfcdo")
        return folder.expanduser()
    except RuntimeError as error:
        raise RuntimeError("there is no home directory") from error


def write_whole(file: pathlib.Path, content: bytes) -> None:
    """Writes a file that others may be reading or writing: it appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as unfinished:
        new = pathlib.Path(unfinished) / file.name
        new.write_bytes(content)
        new.replace(file)
