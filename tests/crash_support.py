"""What a disk may hold after a crash: file operations recorded as they are made, and every state they may leave behind.

The model is harsher than any file system in use. A file holds what was last fsynced and any prefix of what was written
since, or zeros where the length came before the bytes. A folder knows the names it knew at its own last fsync and any
prefix of the links, renames and removals since; each folder and each file for itself. A kill without a power cut is the
case in which everything written is there.

Names with TEMPORARY in them are read by nobody, so of their contents the least is kept and the others are not tried.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Self

import pytest
import safetensors.torch

from outsize.base.files import TEMPORARY

Snapshot = tuple[tuple[str, bytes | None], ...]  # paths below the root; None is a folder
# Windows journals names and cannot fsync a folder: what was renamed stays renamed.
NAMES_ARE_JOURNALLED = os.name == "nt"


@dataclass(frozen=True)
class Operation:
    """kind; the path or the number of an open file; what else it needs."""

    kind: str
    on: Any
    more: Any = None


# ---------------------------------------------------------------- recording


class _Recorded:
    """An open file whose writes are noted; everything else is the file's own."""

    def __init__(self, file: Any, number: int, recorder: Recorder, *, appends: bool) -> None:
        self._file, self._number, self._recorder = file, number, recorder
        assert not appends, "none of the writers appends"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, content: Any) -> int:
        raw = content.encode() if isinstance(content, str) else bytes(content)
        place = self._file.tell()
        self._recorder.note("write", self._number, (place, raw))
        count: int = self._file.write(content)
        assert count == len(content), "a short write"
        return count

    def truncate(self, size: int) -> int:
        self._recorder.note("truncate", self._number, size)
        return int(self._file.truncate(size))

    def close(self) -> None:
        if not self._file.closed:
            self._recorder.numbers.pop(self._file.fileno(), None)
        self._file.close()


class Recorder:
    """Notes what is done below a folder, in order, while `recording` lasts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.numbers: dict[int, Any] = {}  # open descriptors: number of a file, or path of a folder
        self._num_files = 0
        self._lock = threading.RLock()

    def note(self, kind: str, on: Any, more: Any = None) -> None:
        with self._lock:
            self.operations.append(Operation(kind, on, more))

    def run(self, act: Callable[[], object]) -> list[Operation]:
        """What `act` does."""
        self.operations = []
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            act()
        return self.operations

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path below the root, relative to it; None for anything else."""
        if isinstance(path, int):
            return None
        whole = Path(path)
        if dir_fd is not None:
            if dir_fd not in self.numbers:
                return None
            whole = self.root / self.numbers[dir_fd] / whole
        return whole.relative_to(self.root).as_posix() if whole.is_relative_to(self.root) else None

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        real_open, real_os_open, real_fsync, real_close = io.open, os.open, os.fsync, os.close

        def open_(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            path = self._path(file)
            if path is None or not set(mode) & set("wax+"):
                return real_open(file, mode, *rest, **options)
            opened = real_open(file, mode, *rest, **options)
            with self._lock:
                self._num_files += 1
                number = (self._num_files, id(self))
                self.note("open", number, (path, "w" in mode))
                self.numbers[opened.fileno()] = number
            return _Recorded(opened, number, self, appends="a" in mode)  # type: ignore[arg-type]

        def os_open(path: Any, *rest: Any, dir_fd: int | None = None, **options: Any) -> int:
            handle = real_os_open(path, *rest, dir_fd=dir_fd, **options)
            found = self._path(path, dir_fd)
            if found is not None and (self.root / found).is_dir():
                self.numbers[handle] = found
            return handle

        def close(handle: int) -> None:
            self.numbers.pop(handle, None)
            real_close(handle)

        def fsync(handle: int) -> None:
            if (found := self.numbers.get(handle)) is not None:
                self.note("fsync folder" if isinstance(found, str) else "fsync", found)
            real_fsync(handle)

        patch.setattr(io, "open", open_)
        patch.setattr(builtins, "open", open_)
        patch.setattr(os, "open", os_open)
        patch.setattr(os, "close", close)
        patch.setattr(os, "fsync", fsync)
        for name in ("mkdir", "unlink", "remove", "rmdir"):
            kind = "unlink" if name == "remove" else name
            patch.setattr(os, name, self._naming(kind, getattr(os, name)))
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._moving(getattr(os, name)))
        patch.setattr(safetensors.torch, "save_file", self._save_file)

    def _naming(self, kind: str, real: Callable[..., None]) -> Callable[..., None]:
        def act(path: Any, *rest: Any, dir_fd: int | None = None, **options: Any) -> None:
            real(path, *rest, dir_fd=dir_fd, **options)  # first: what fails has changed nothing
            if (found := self._path(path, dir_fd)) is not None:
                self.note(kind, found)

        return act

    def _moving(self, real: Callable[..., None]) -> Callable[..., None]:
        def act(source: Any, target: Any, **options: Any) -> None:
            real(source, target, **options)
            if (found := self._path(source)) is not None:
                self.note("rename", found, self._path(target))

        return act

    @staticmethod
    def _save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        """The library writes with calls of its own, which nobody here sees, and fsyncs nothing."""
        content = safetensors.torch.save(tensors, metadata)
        with open(filename, "wb") as file:  # noqa: PTH123 - the recorded one
            file.write(content[: len(content) // 2])
            file.write(content[len(content) // 2 :])


# ---------------------------------------------------------------- the disk


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    pending: list[Operation] = field(default_factory=list)

    def now(self, num_pending: int | None = None) -> bytes:
        content = bytearray(self.durable)
        for one in self.pending[:num_pending]:
            _apply(content, one)
        return bytes(content)

    def contents(self) -> list[bytes]:
        """All that may be found: prefixes, the last write cut in the middle, and zeros in place of bytes."""
        found = [self.now(number) for number in range(len(self.pending) + 1)]
        for number, one in enumerate(self.pending):
            if one.kind == "write" and len(one.more[1]) > 1:
                cut = bytearray(self.now(number))
                _apply(cut, Operation("write", None, (one.more[0], one.more[1][:-1])))
                found.append(bytes(cut))
                half = bytearray(self.now(number))
                _apply(
                    half,
                    Operation("write", None, (one.more[0], one.more[1][: len(one.more[1]) // 2])),
                )
                found.append(bytes(half))
        if self.pending:
            found.append(self.durable + bytes(max(0, len(self.now()) - len(self.durable))))
        return list(dict.fromkeys(found))

    def sync(self) -> None:
        self.durable, self.pending = self.now(), []


def _apply(content: bytearray, one: Operation) -> None:
    if one.kind == "truncate":
        del content[one.more :]
        content.extend(bytes(one.more - len(content)))
        return
    place, raw = one.more
    content.extend(bytes(max(0, place - len(content))))
    content[place : place + len(raw)] = raw


@dataclass(eq=False)
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)

    def now(self, num_pending: int | None = None) -> dict[str, _File | _Folder]:
        names = dict(self.durable)
        for kind, name, what in self.pending[:num_pending]:
            if kind == "link":
                names[name] = what
            elif kind == "drop":
                del names[name]
            else:
                names[what] = names.pop(name)
        return names

    def change(self, kind: str, name: str, what: Any = None) -> None:
        self.pending.append((kind, name, what))
        if NAMES_ARE_JOURNALLED:
            self.sync()

    def sync(self) -> None:
        self.durable, self.pending = self.now(), []


class Disk:
    """A tree that remembers what is safe and what is not yet."""

    def __init__(self, start: Snapshot = ()) -> None:
        self.root = _Folder()
        self._open: dict[Any, _File] = {}
        for path, content in start:
            folder, name = self._place(path)
            folder.durable[name] = _Folder() if content is None else _File(content)

    def _place(self, path: str) -> tuple[_Folder, str]:
        *parents, name = path.split("/")
        folder = self.root
        for one in parents:
            found = folder.now()[one]
            assert isinstance(found, _Folder)
            folder = found
        return folder, name

    def do(self, one: Operation) -> None:
        if one.kind in {"write", "truncate"}:
            self._open[one.on].pending.append(one)
        elif one.kind == "fsync":
            self._open[one.on].sync()
        elif one.kind == "open":
            path, truncates = one.more
            folder, name = self._place(path)
            there = folder.now().get(name)
            if there is None:
                there = _File()
                folder.change("link", name, there)
            elif truncates:
                there.pending.append(Operation("truncate", None, 0))  # type: ignore[arg-type,union-attr]
            assert isinstance(there, _File)
            self._open[one.on] = there
        elif one.kind == "fsync folder":
            folder, name = self._place(one.on) if one.on != "." else (self.root, "")
            found = folder.now()[name] if name else folder
            found.sync()
        elif one.kind == "mkdir":
            folder, name = self._place(one.on)
            folder.change("link", name, _Folder())
        elif one.kind == "rename":
            folder, name = self._place(one.on)
            target, new_name = self._place(one.more)
            assert target is folder, "no writer moves a name to another folder"
            folder.change("move", name, new_name)
        else:
            folder, name = self._place(one.on)
            if name in folder.now():  # else a lock, which is not recorded
                folder.change("drop", name)

    def now(self) -> Snapshot:
        """What is there without a power cut."""
        return tuple(_walk(self.root, "", lambda folder: folder.now(), lambda file: file.now()))

    def states(self) -> Iterator[Snapshot]:
        """Everything that may be there after one."""
        yield from _states(self.root, "")


def _walk(
    folder: _Folder,
    prefix: str,
    names_of: Callable[[_Folder], Mapping[str, _File | _Folder]],
    content_of: Callable[[_File], bytes],
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in sorted(names_of(folder).items()):
        if isinstance(node, _File):
            yield prefix + name, content_of(node)
        else:
            yield prefix + name, None
            yield from _walk(node, f"{prefix}{name}/", names_of, content_of)


def _states(folder: _Folder, prefix: str) -> Iterator[Snapshot]:
    seen = set()
    for number in range(len(folder.pending) + 1):
        names = folder.now(number)
        options = [list(_options(node, prefix + name)) for name, node in sorted(names.items())]
        for chosen in product(*options):
            state = tuple(row for rows in chosen for row in rows)
            if state not in seen:
                seen.add(state)
                yield state


def _options(node: _File | _Folder, path: str) -> Iterator[Snapshot]:
    if isinstance(node, _File):
        contents = node.contents()
        for content in contents[:1] if TEMPORARY in path else contents:
            yield ((path, content),)
        return
    for state in _states(node, f"{path}/"):
        yield ((path, None), *state)
        if TEMPORARY in path:
            return


# ---------------------------------------------------------------- putting it together


def put(root: Path, state: Snapshot) -> None:
    """Make a folder hold exactly this."""
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    for path, content in state:
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def taken(root: Path) -> Snapshot:
    """What a folder holds, as `put` takes it; locks left out."""
    found = sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts)
    return tuple(
        (path.relative_to(root).as_posix(), path.read_bytes() if path.is_file() else None)
        for path in found
        if path.name != ".lock" and path.suffix != ".lock"
    )


def crashes(
    root: Path, writer: Callable[[], object], before: Sequence[Operation] = (), start: Snapshot = ()
) -> tuple[list[Snapshot], list[Snapshot]]:
    """States after a crash at any of the writer's operations, each once, and those after its return.

    root: what `start` and the operations `before` have led to. The writer works in it.
    """
    operations = Recorder(root).run(writer)
    disk = Disk(start)
    for one in before:
        disk.do(one)
    found = dict.fromkeys(disk.states())
    for one in operations:
        disk.do(one)
        found |= dict.fromkeys(disk.states())
    assert disk.now() == taken(root), "operations that were not recorded"
    return list(found), list(dict.fromkeys(disk.states()))
