"""A thousand headers that no one should trust: each is one clear error, quickly, without the memory they speak of."""

from __future__ import annotations

import json
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_support import write_recipe
from tiny import write_tiny

from outsize.base.errors import AdapterError, SourceError, StoreBroken
from outsize.base.layout import Layout
from outsize.base.table import ShapeTable, TensorSpec
from outsize.cli.main import main
from outsize.data.cache import ContentCache
from outsize.export.export import read_adapter_files
from outsize.weights.source import Source

NUM_FILES = 1000
SHAPES = {"a.weight": (4, 6), "b.weight": (3, 5), "c.bias": (7,), "d.norm": (2, 2, 2)}
TABLE = ShapeTable(
    tuple(TensorSpec(name, shape, "mlp", 0, is_linear=True) for name, shape in SHAPES.items())
)
LAYOUTS = (Layout("own"),)
CLIMBING = ("../../etc/passwd", "/etc/passwd", "C:\\boot.ini", "..\\..\\x", "a/../../b", "")
UNFIT = (  # what stands where something else should
    None, True, -1, 1.5, 2.0, "4", "", [], {}, [[1]], float("nan"), float("inf"), -0.0, 10**4000,
    2**63, 2**64, 1e308, "\ud800", "\x1b[31m", "x" * 5000,
)  # fmt: skip
UNKNOWN_DTYPES = (
    "",
    "f32",
    "F32 ",
    "Q4_K",
    "I128",
    "F8",
    "OBJECT",
    "x" * 9000,
    "\x1b[2J",
    "\ud800",
)

Header = dict[str, Any]
Fault = Callable[[random.Random, Header, bytes], bytes]


def sound() -> tuple[Header, bytes]:
    """Entries that cover their data, and the data."""
    header, position = {}, 0
    for name, shape in SHAPES.items():
        end = position + 4 * TABLE[name].num_elements
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return header, bytes(i % 251 for i in range(position))


def packed(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


# ---------------------------------------------------------------- one function for each kind of fault


def any_entry(dice: random.Random, header: Header) -> dict[str, Any]:
    found: dict[str, Any] = header[dice.choice(list(SHAPES))]
    return found


def length_is_wrong(dice: random.Random, header: Header, data: bytes) -> bytes:
    true = len(json.dumps(header))
    wrong = dice.choice(
        [0, 1, true - 1, true + 1, true // 2, true + len(data), 2**31, 2**40, 2**63]
    )
    return packed(header, data, dice.choice([wrong, 2**64 - 1, dice.randrange(2**64)]))


def file_is_cut(dice: random.Random, header: Header, data: bytes) -> bytes:
    whole = packed(header, data)
    return whole[: dice.randrange(len(whole))]


def file_goes_on(dice: random.Random, header: Header, data: bytes) -> bytes:
    return packed(header, data) + dice.randbytes(dice.randint(1, 5000))


def extents_overlap(dice: random.Random, header: Header, data: bytes) -> bytes:
    first, second = dice.sample(list(SHAPES), 2)
    start = header[first]["data_offsets"][0] + dice.choice([0, 1, 4])
    old_begin, old_end = header[second]["data_offsets"]
    header[second]["data_offsets"] = [start, start + old_end - old_begin]
    return packed(header, data)


def extents_leave_a_hole(dice: random.Random, header: Header, data: bytes) -> bytes:
    shift = dice.randint(1, 64)
    names = list(SHAPES)
    for name in names[dice.randrange(len(names)) :]:
        header[name]["data_offsets"] = [one + shift for one in header[name]["data_offsets"]]
    return packed(header, data + bytes(shift))


def offsets_are_unfit(dice: random.Random, header: Header, data: bytes) -> bytes:
    entry = any_entry(dice, header)
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = dice.choice(
        [[end, begin], [begin], [begin, end, end], [begin, dice.choice(UNFIT)], dice.choice(UNFIT),
        [dice.choice(UNFIT), end], {"begin": begin, "end": end}, f"{begin}:{end}"]
    )  # fmt: skip
    return packed(header, data)


def shape_is_unfit(dice: random.Random, header: Header, data: bytes) -> bytes:
    entry = any_entry(dice, header)
    entry["shape"] = dice.choice(
        [dice.choice(UNFIT[:12]), [dice.choice(UNFIT), 4], [*entry["shape"], 2], {"0": 4},
        [2**62, 2**62], [*[1] * 3000, 5], [2**63 - 1] * 3000, [10**4000], [0, 10**4000]]
    )  # fmt: skip
    return packed(header, data)


def sizes_are_huge(dice: random.Random, header: Header, data: bytes) -> bytes:
    """Shape and extents agree with each other, and with no file."""
    num = 2 ** dice.randint(30, 62) // 4
    header["d.norm"] = {
        "dtype": "F32", "shape": [num], "data_offsets": [len(data) - 32, len(data) - 32 + 4 * num],
    }  # fmt: skip
    return packed(header, data)


def dtype_is_unfit(dice: random.Random, header: Header, data: bytes) -> bytes:
    entry = any_entry(dice, header)
    entry["dtype"] = dice.choice([*UNKNOWN_DTYPES, *(one for one in UNFIT if one != "F32")])
    return packed(header, data)


def dtype_is_of_another_size(dice: random.Random, header: Header, data: bytes) -> bytes:
    any_entry(dice, header)["dtype"] = dice.choice(["F64", "BF16", "I8", "F4", "F6_E2M3", "C64"])
    return packed(header, data)


def name_climbs(dice: random.Random, header: Header, data: bytes) -> bytes:
    """A tensor's name is no path: it is only a tensor that the table does not have."""
    name = dice.choice(list(SHAPES))
    header[dice.choice(CLIMBING)] = header.pop(name)
    return packed(header, data)


def name_is_no_text(dice: random.Random, header: Header, data: bytes) -> bytes:
    name = dice.choice(list(SHAPES))
    header[dice.choice(["\ud800", "a\udfffb", "\x1b[31mred" + "y" * 9000, "\x00", "\r\n"])] = (
        header.pop(name)
    )
    return packed(header, data)


def key_is_twice(dice: random.Random, header: Header, data: bytes) -> bytes:
    text = json.dumps(header)
    name = dice.choice([*SHAPES, "dtype"])
    if name == "dtype":
        return packed(text.replace('"dtype"', '"dtype": "F32", "dtype"', 1).encode(), data)
    twice = f'{{"{name}": {json.dumps(header[name])}, ' * dice.choice([1, 2000]) + text[1:]
    if dice.random() < 0.5:
        twice = f'{{"{name}": {json.dumps(header[name])}, ' + text[1:]
    return packed(twice.encode(), data)


def keys_are_twice_by_thousands(dice: random.Random, header: Header, data: bytes) -> bytes:
    names = [f"tensor.{number}" for number in range(dice.randint(3000, 5000))]
    listed = ", ".join(f'"{name}": 0' for name in names + names)
    return packed(f"{{{listed}, {json.dumps(header)[1:]}".encode(), data)


def entry_is_of_another_kind(dice: random.Random, header: Header, data: bytes) -> bytes:
    name = dice.choice(list(SHAPES))
    entry = header[name]
    del_key = dict(entry)
    del_key.pop(dice.choice(list(entry)))
    header[name] = dice.choice([*UNFIT, del_key, entry | {"extra": 1}, list(entry.values())])
    return packed(header, data)


def metadata_is_unfit(dice: random.Random, header: Header, data: bytes) -> bytes:
    worse = [one for one in UNFIT if one != {}]
    header["__metadata__"] = dice.choice(
        [dice.choice(worse), {"a": dice.choice([one for one in UNFIT if not isinstance(one, str)])},
        {"a": {"b": "c"}}, {"format": ["pt"]}, {"\ud800": "x"}, {"x": "\udc00"}]
    )  # fmt: skip
    return packed(header, data)


def json_is_broken(dice: random.Random, header: Header, data: bytes) -> bytes:
    text = bytearray(json.dumps(header).encode())
    place = dice.randrange(1, len(text) - 1)
    kind = dice.randrange(4)
    if kind == 0:
        text[place] = 0xFF  # never in UTF-8
    elif kind == 1:
        del text[place:]
    elif kind == 2:
        text[0] = ord(dice.choice("[ \"\x00'"))
    else:
        text += dice.choice([b"}", b"{}", b"\x00", b",", b"[]"])
    return packed(bytes(text), data)


def nesting_is_deep(dice: random.Random, header: Header, data: bytes) -> bytes:
    depth = dice.randint(1500, 60_000)
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    text = json.dumps(header).encode()
    middle = opening * depth + b"1" + closing * (depth if dice.random() < 0.5 else 0)
    return packed(b'{"deep":' + middle + b"," + text[1:], data)


def numbers_are_long(dice: random.Random, header: Header, data: bytes) -> bytes:
    digits = "9" * dice.choice([4299, 4301, 60_000])
    text = json.dumps(header).replace('"data_offsets": [0', f'"data_offsets": [{digits}', 1)
    return packed(text.encode(), data)


def all_is_noise(dice: random.Random, _header: Header, _data: bytes) -> bytes:
    return dice.randbytes(dice.randint(0, 400))


def it_is_another_file(dice: random.Random, _header: Header, data: bytes) -> bytes:
    starts = [b"PK\x03\x04", b"GGUF\x03\x00\x00\x00", b"\x80\x02}q\x00.", b"<!DOCTYPE html><html>"]
    return (
        dice.choice([*starts, b"version https://git-lfs.github.com/spec/v1\noid sha256:0"]) + data
    )


FAULTS: tuple[Fault, ...] = (
    length_is_wrong, file_is_cut, file_goes_on, extents_overlap, extents_leave_a_hole,
    offsets_are_unfit, shape_is_unfit, sizes_are_huge, dtype_is_unfit, dtype_is_of_another_size,
    name_climbs, name_is_no_text, key_is_twice, keys_are_twice_by_thousands,
    entry_is_of_another_kind, metadata_is_unfit, json_is_broken, nesting_is_deep,
    numbers_are_long, all_is_noise, it_is_another_file,
)  # fmt: skip


def file_of(number: int) -> tuple[str, bytes]:
    """The kind of fault and the content of one file; a matter of its number alone."""
    fault = FAULTS[number % len(FAULTS)]
    header, data = sound()
    content = fault(random.Random(number), header, data)
    whole = packed(*sound())
    if content == whole:  # a length that happens to be right, a NaN that JSON does not tell apart
        content = whole[:-1]
    return fault.__name__, content


# ---------------------------------------------------------------- who watches


class Watch:
    """Files opened while it watches; a hook cannot be taken away again, so it listens to a flag."""

    def __init__(self) -> None:
        self.is_on = False
        self.opened: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event == "open":
            self.opened.append(str(arguments[0]))


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    found = Watch()
    yield found
    found.is_on = False


def use(file: Path) -> None:
    """What every reader of a checkpoint does before it reads data."""
    with Source([file]) as source:
        source.locate(LAYOUTS, TABLE)


def require_readable(message: str, kind: str) -> None:
    """A message that fits a screen and cannot steer a terminal."""
    assert len(message) < 8000, kind
    strange = {one for one in message if not one.isprintable() and one != "\n"}
    assert not strange, (kind, strange)
    message.encode()


# ---------------------------------------------------------------- the tests


def test_the_file_that_is_made_unsound_is_sound(tmp_path: Path) -> None:
    """Else the thousand below would all fail for one reason."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(*sound()))
    use(path)


def test_a_thousand_unsound_files_are_one_clear_error_each(tmp_path: Path, watch: Watch) -> None:
    """No traceback, no other file opened, and no more memory than some times what is really there."""
    path = tmp_path / "x.safetensors"
    use_once = packed(*sound())
    path.write_bytes(use_once)
    use(path)  # whatever is imported on the way is imported now
    reasons = set()
    tracemalloc.start()
    try:
        for number in range(NUM_FILES):
            kind, content = file_of(number)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            watch.opened, watch.is_on = [], True
            with pytest.raises(SourceError) as caught:
                use(path)
            watch.is_on = False
            _, peak = tracemalloc.get_traced_memory()
            message = str(caught.value)
            require_readable(message, kind)
            assert "x.safetensors" in message
            assert set(watch.opened) <= {str(path), str(tmp_path / "config.json")}, kind
            # Python's own objects for the JSON take some thirty bytes for each of the file's.
            assert peak - before < 2**20 + 60 * len(content), (kind, peak - before)
            reasons.add(
                (
                    kind,
                    message.split("\n", maxsplit=1)[0][:40],
                    message.rsplit("\n", maxsplit=1)[-1][-30:],
                )
            )
    finally:
        watch.is_on = False
        tracemalloc.stop()
    assert {kind for kind, _, _ in reasons} == {one.__name__ for one in FAULTS}
    assert len(reasons) > 200, "the files differ in what is wrong with them"


def test_adapters_and_cache_entries_of_such_files_are_one_error_as_well(tmp_path: Path) -> None:
    """Both are read by other readers: an adapter by the library, an entry by its own digest."""
    cache = ContentCache(tmp_path / "cache")
    key = "ab" * 32
    entry = cache.path(key)
    entry.parent.mkdir(parents=True)
    adapter = tmp_path / "x.safetensors"
    for number in range(NUM_FILES // 2):
        kind, content = file_of(number)
        adapter.write_bytes(content)
        entry.write_bytes(content)
        with pytest.raises(StoreBroken) as caught:
            cache.get(key)
        require_readable(str(caught.value), kind)
        assert list(cache.broken([key])) == [key], kind
        if kind == "name_climbs":
            continue  # a sound file of tensors of other names: which, the dialects say
        with pytest.raises(AdapterError) as of_adapter:
            read_adapter_files([adapter])
        require_readable(str(of_adapter.value), kind)


INDICES: dict[str, bytes] = {
    "deep": b'{"weight_map":' + b"[" * 50_000,
    "deep and closed": b'{"weight_map":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "no mapping": b'{"weight_map": ["a.safetensors"]}',
    "kinds": b'{"weight_map": {"a": 1, "b": "x.safetensors"}}',
    "lists": b'{"weight_map": {"a": ["x.safetensors"]}}',
    "nothing": b'{"weight_map": {}}',
    "long number": b'{"weight_map": {"a": ' + b"9" * 5000 + b"}}",
    "zero byte": b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
    "half a letter": b'{"weight_map": {"a": "\\ud800.safetensors"}}',
    "climbs": b'{"weight_map": {"a": "../x.safetensors"}}',
    "escape": b'{"weight_map": {"a": "\\u001b[2Jx.safetensors"}}',
    "not UTF-8": b'{"weight_map": {"\xff": "x.safetensors"}}',
    "many": json.dumps(
        {"weight_map": {str(i): f"{i}.safetensors" for i in range(20_000)}}
    ).encode(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("fuzz"))


def test_the_command_says_one_error_of_every_kind_of_file_and_index(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, model=model)
    folder = model / "transformer"
    (weights,) = folder.glob("*.safetensors")
    index = weights.with_name("model.safetensors.index.json")
    good = weights.read_bytes()
    cases = [(weights, *file_of(number)) for number in range(2 * len(FAULTS))]
    cases += [(index, kind, content) for kind, content in INDICES.items()]
    for file, kind, content in cases:
        if file == index:
            weights.unlink(missing_ok=True)
        file.write_bytes(content)
        code = main(["prepare", str(recipe)])
        said = capsys.readouterr().err
        file.unlink()
        last = said[said.rindex("SourceError: ") :] if "SourceError: " in said else said
        assert code == SourceError.exit_code, (kind, said)
        assert "Traceback" not in said, kind
        require_readable(last, kind)
    weights.write_bytes(good)
