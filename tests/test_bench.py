"""`outsize bench` on tiny models: real commands, the product's own steps, and weights that are sane."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import command, environment, write_recipe

from outsize.app._bench_batches import RandomBatches, RandomTexts
from outsize.app._bench_cases import case_recipes
from outsize.app._bench_steps import Timing
from outsize.app._bench_weights import RandomWeights, packets_of
from outsize.app.bench import Bench
from outsize.app.meter import MeteredPlacement
from outsize.app.parts import BASE, parts_of
from outsize.app.planning import machine_here, plan_for
from outsize.base.errors import RecipeError
from outsize.devices._rates import FILE_NAME, rates_of
from outsize.devices.protocol import open_device
from outsize.weights.packet import view

TINY = Timing(warmup=1, steps=2)


# runs command lines in one process, for importing takes most of the time; gives what each returned and said
SEVERAL = """
import contextlib, io, json, sys
from outsize.cli.main import main
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["bench", "--device", "cpu", *line])
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
MISTAKES = (
    (["flux9.dev"], 2, "flux9"),
    (["flux2"], 2, "neither a recipe file nor FAMILY.VARIANT"),
    ([], 2, "name a recipe or FAMILY.VARIANT"),
    (["flux2.tiny", "--set", "train.batch"], 2, "says no value"),
    (["flux2.tiny", "--set", "train.bach=2"], 2, "train.bach"),
    (["flux2.tiny", "--vram-limit", "8GiB"], 11, "--vram-limit caps the memory of a card"),
)


@dataclass(frozen=True)
class Said:
    """What one command line returned and said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Ways:
    """Five ways to call the command, in one folder."""

    home: Path
    mistakes: list[Said]
    combined: Said
    lines: Said
    rates: Said
    texts: Said

    @property
    def written(self) -> dict[str, Any]:
        """The file of the combined cases."""
        text = (self.home / "out.json").read_text(encoding="utf-8")
        values: dict[str, Any] = json.loads(text)
        return values


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """Everything that needs the real command, in one child process with a cache folder of its own."""
    home = tmp_path_factory.mktemp("bench")
    recipe = write_recipe(home / "own", "flux1")
    few = ["--steps", "2", "--warmup", "1"]
    combined = [
        "flux2.tiny", *few, "--placement", "resident", "--placement", "stream",
        "--resolution", "64", "--resolution", "96", "--rank", "4", "--slots", "2",
        "--json", home / "out.json",
    ]  # fmt: skip
    lines = [
        recipe, *few, "--set", "placement.kind=stream", "--set", "placement.pinned_bytes=0B",
        "--set", "placement.pageable_bytes=0B", "--json", "-",
    ]  # fmt: skip
    rates = ["--rates", "--cache", home / "disk", "--json", home / "measured.json"]
    texts = [
        "gemma4.tiny", *few, "--window", "32", "--window", "64", "--rank", "4", "--placement", "stream",
        "--set", "train.batch=2", "--set", "placement.vocabulary_on_host=true",
        "--set", "data.pack=true", "--set", "data.pack=false", "--cache", home / "texts", "--json", "-",
    ]  # fmt: skip
    asked = [*(one for one, _, _ in MISTAKES), combined, lines, rates, texts]
    done = subprocess.run(
        [command()[0], "-c", SEVERAL, json.dumps([list(map(str, one)) for one in asked])],
        capture_output=True,
        text=True,
        check=False,
        env=environment() | {"XDG_CACHE_HOME": str(home), "LOCALAPPDATA": str(home)},
    )
    assert done.returncode == 0, done.stderr
    *mistakes, one, two, three, four = [
        Said(*json.loads(line)) for line in done.stdout.splitlines()
    ]
    return Ways(home, mistakes, one, two, three, four)


def test_every_combination_is_one_case_with_its_own_row(ways: Ways) -> None:
    assert ways.combined.code == 0, ways.combined.err
    cases = [(one["placement"]["kind"], one["resolution"]) for one in ways.written["cases"]]
    assert cases == [("resident", 64), ("resident", 96), ("stream", 64), ("stream", 96)]
    rows = ways.combined.out.splitlines()
    assert len(rows) == 5
    assert [row.split(",")[0] for row in rows[1:]] == [
        f"flux2.tiny {side} px r4" for _, side in cases
    ]


def test_a_case_holds_what_was_planned_beside_what_was_measured(ways: Ways) -> None:
    written = ways.written
    assert {"command", "device", "machine", "versions", "cases"} <= written.keys()
    assert written["versions"]["torch"] == torch.__version__
    for case in written["cases"]:
        measured = case["measured"]
        assert case["fault"] is None
        assert len(measured["steps_s"]) == 2
        assert min(measured["steps_s"]) <= round(measured["step_s"], 5) <= max(measured["steps_s"])
        assert measured["first_step_s"] > 0
        assert case["planned"]["step_s"] > 0
        assert case["planned"]["peak_bytes"] > 0
        assert case["compute"]["compiles"] is False


def test_streamed_blocks_are_counted_as_they_are_copied(ways: Ways) -> None:
    """Four blocks and two slots: of eight uses in a step two find their block at the turn and two at the boundary."""
    written = ways.written
    resident, streamed = written["cases"][0], written["cases"][2]
    part = parts_of(case_recipes("flux2.tiny", {}, {})[0])[BASE]
    sizes = [packets_of(part)[block].streamed_bytes for block in range(4)]
    assert resident["measured"]["copied_bytes"] == 0
    assert streamed["measured"]["copied_bytes"] == 2 * sum(sizes) - sum(sizes[:2]) - sum(sizes[2:])


def test_placement_changes_no_number(ways: Ways) -> None:
    """What is timed is the product's own step, so its promise holds here as well."""
    written = ways.written
    first, third = written["cases"][0]["measured"], written["cases"][2]["measured"]
    assert first["losses"] == third["losses"]
    assert len(set(first["losses"])) > 1


def test_text_is_timed_by_the_tokens_of_its_rows(ways: Ways) -> None:
    assert ways.texts.code == 0, ways.texts.err
    cases = [json.loads(line) for line in ways.texts.out.splitlines()]
    assert [(one["shape"], one["window"]) for one in cases] == [
        ("32 tokens", 32), ("64 tokens", 64), ("32 tokens", 32), ("64 tokens", 64),
    ]  # fmt: skip
    for case in cases:
        measured = case["measured"]
        assert measured["tokens_per_s"] == pytest.approx(
            2 * case["window"] / measured["step_s"], rel=1e-3
        )
        # logits of random weights have a deviation of about one
        assert 0.5 * math.log(640) < measured["losses"][0] < 2 * math.log(640)
    packed, alone = (one["measured"]["losses"] for one in cases[::2])
    assert packed != alone


def test_lines_go_to_standard_output_and_rows_elsewhere(ways: Ways) -> None:
    (line,) = ways.lines.out.splitlines()
    case = json.loads(line)
    assert case["base"] == "flux1.tiny"
    assert "flux1.tiny 64 px r4, stream 0/4 kept" in ways.lines.err


def test_blocks_on_disk_are_read_from_a_random_store(ways: Ways) -> None:
    case = json.loads(ways.lines.out)
    assert case["placement"]["tiers"]["disk"] == case["placement"]["num_blocks"] == 4
    assert case["measured"]["losses"][0] > 0
    (store,) = (ways.home / "own" / "cache").glob("random-flux1-tiny-*")
    assert len(list(store.glob("block-*.safetensors"))) == 4


def test_rates_are_printed_and_kept_for_plans(ways: Ways) -> None:
    assert ways.rates.code == 0, ways.rates.err
    rates = json.loads((ways.home / "measured.json").read_text(encoding="utf-8"))["rates"]
    expected = {
        "matmul_flops.bf16", "attention_flops", "decode_bytes_per_s", "device_memory_bytes_per_s",
        "first_touch_bytes_per_s", "staging_bytes_per_s", "hash_bytes_per_s",
        "disk_write_bytes_per_s", "disk_read_bytes_per_s", "import_s",
    }  # fmt: skip
    assert expected == rates.keys()
    assert all(value > 0 for value in rates.values())
    assert [line.split()[0] for line in ways.rates.out.splitlines()] == list(rates)
    (kept,) = ways.home.rglob(FILE_NAME)
    known = rates_of(machine_here(ways.home, device_kind="cpu"), folder=kept.parent)
    assert known.hash_bytes_per_s == rates["hash_bytes_per_s"]
    assert known.matmul_flops["bf16"] == rates["matmul_flops.bf16"]
    assert known.origin("hash_bytes_per_s").startswith("measured")


def test_mistakes_are_told(ways: Ways) -> None:
    for said, (_, code, message) in zip(ways.mistakes, MISTAKES, strict=True):
        assert said.code == code, said.err
        assert message in said.err


@pytest.mark.parametrize(
    "fmt", ["nf4", "int4", "plain", {"name": "nf4", "scales": "double"}], ids=str
)
def test_random_weights_decode_to_sane_matrices(fmt: Any) -> None:
    """Deviation 1 / sqrt(columns), whatever holds them; norms are ones."""
    part = parts_of(case_recipes("flux2.tiny", {"base.format": fmt}, {})[0])[BASE]
    weights = RandomWeights(part, torch.device("cpu"))
    packet = packets_of(part)[0]
    buffer = weights.packet(packet)
    table = part.family.table(part.variant)
    for name in packet.tensors():
        parts = {key: view(entry, buffer) for key, entry in packet.parts(name).items()}
        spec = table[name]
        value = part.packing.formats[name].decode(parts, spec.shape, torch.float32)
        if len(spec.shape) == 2:
            # 4-bit codes move the deviation by a few percent
            assert float(value.std()) == pytest.approx(spec.shape[1] ** -0.5, rel=0.1)
        else:
            assert bool((value == float(not name.endswith("bias"))).all())


def test_packets_of_one_shape_are_made_once() -> None:
    part = parts_of(case_recipes("flux2.tiny", {}, {})[0])[BASE]
    weights, packets = RandomWeights(part, torch.device("cpu")), packets_of(part)
    first, second, third = (weights.packet(packets[block]) for block in (0, 1, 2))
    assert first is second
    assert first is not third


def test_batches_are_a_function_of_step_and_place() -> None:
    (recipe,) = case_recipes("flux2.tiny", {"train.batch": 3, "train.accumulate": 2}, {})
    device = open_device("cpu")
    one, other = RandomBatches(recipe, device), RandomBatches(recipe, device)
    assert torch.equal(one.batch(1, 0).latents_BCHW, other.batch(1, 0).latents_BCHW)
    assert not torch.equal(one.batch(1, 0).latents_BCHW, one.batch(1, 1).latents_BCHW)
    assert one.batch(0, 0).latents_BCHW.shape[0] == 3


@pytest.mark.parametrize("is_packed", [False, True])
def test_random_rows_are_what_a_corpus_gives(*, is_packed: bool) -> None:
    """Positions from 0 in each document, labels of the next token but over no boundary; several documents when packed."""
    fixed = {"data.window": 256, "data.pack": is_packed, "train.batch": 2, "train.accumulate": 2}
    (recipe,) = case_recipes("qwen3_5.tiny", fixed, {})
    one, other = RandomTexts(recipe), RandomTexts(recipe)
    batch = one.batch(1, 0)
    assert torch.equal(batch.input_ids, other.batch(1, 0).input_ids)
    assert not torch.equal(batch.input_ids, one.batch(1, 1).input_ids)
    assert int(batch.segments.max()) > 2 if is_packed else int(batch.segments.max()) == 0
    for row in range(2):
        for number in range(int(batch.segments[row].max()) + 1):
            own = batch.segments[row] == number
            count = int(own.sum())
            assert batch.position_ids[row, own].tolist() == list(range(count))
            expected = [*batch.input_ids[row, own].tolist()[1:], -100]
            assert batch.labels[row, own].tolist() == expected
    trained = [int((one.batch(1, place).labels >= 0).sum()) for place in range(2)]
    assert one.num_trained(1) == sum(trained)


def test_random_layers_have_a_factor_of_one() -> None:
    """Gemma multiplies each layer's output by a number of its own: with 0 all that follows would be 0."""
    part = parts_of(case_recipes("gemma4.tiny", {}, {})[0])[BASE]
    packet = packets_of(part)[0]
    buffer = RandomWeights(part, torch.device("cpu")).packet(packet)
    (name,) = (one for one in packet.tensors() if one.endswith("layer_scalar"))
    (entry,) = packet.parts(name).values()
    assert view(entry, buffer).float().tolist() == [1.0]


def test_a_model_is_used_again_only_where_nothing_but_pictures_differ(tmp_path: Path) -> None:
    machine = machine_here(tmp_path, device_kind="cpu")
    fixed = {"placement.kind": "stream", "adapter.rank": 2, "cache": str(tmp_path)}
    small, large = case_recipes("flux2.tiny", fixed, {"data.resolution": [64, 96]})
    (other,) = case_recipes("flux2.tiny", fixed | {"adapter.rank": 3, "data.resolution": 64}, {})
    with Bench(open_device("cpu"), TINY, tmp_path) as bench:
        results = [bench.run(one, plan_for(one, machine)) for one in (small, large, other)]
    loads = [one.measured.load_s for one in results if one.measured is not None]
    assert len(loads) == 3
    assert loads[0] == loads[1]
    assert loads[2] != loads[0]


def test_running_out_of_memory_is_a_result_and_frees_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases after it must find the memory again."""
    machine = machine_here(tmp_path, device_kind="cpu")
    (recipe,) = case_recipes("flux2.tiny", {"cache": str(tmp_path), "data.resolution": 64}, {})
    plan = plan_for(recipe, machine)
    with Bench(open_device("cpu"), TINY, tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(RandomBatches, "batch", _no_memory)
            failed = bench.run(recipe, plan)
        assert failed.measured is None
        assert failed.to_json()["fault"] == "out of memory: no room"
        assert bench.run(recipe, plan).measured is not None


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


class SlowPlacement:
    """Gives a block after a while."""

    copied_bytes = 7

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def acquire(self, block: int) -> torch.Tensor:
        self._clock[0] += block
        return torch.empty(0)


class ClockDevice:
    """Marks are the clock's time."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def mark(self) -> Any:
        now = self._clock[0]

        class Mark:
            at_s = now

            def seconds_after(self, earlier: Any) -> float:
                return float(self.at_s - earlier.at_s)

        return Mark()


def test_waiting_is_counted_only_while_the_meter_is_on() -> None:
    clock = [0.0]
    meter = MeteredPlacement(SlowPlacement(clock), ClockDevice(clock))  # type: ignore[arg-type]
    meter.acquire(5)
    meter.is_on = True
    meter.acquire(2)
    meter.acquire(3)
    assert meter.take_waited_s() == 5.0
    assert meter.take_waited_s() == 0.0
    assert meter.copied_bytes() == 7


def test_cases_vary_in_the_order_that_lets_a_model_be_used_again() -> None:
    recipes = case_recipes(
        "flux2.tiny",
        {},
        {"adapter.rank": [4, 8], "placement.kind": [], "data.resolution": [64, 96]},
    )
    found = [(one.adapter.rank, one.data.resolution) for one in recipes]
    assert found == [(4, 64), (4, 96), (8, 64), (8, 96)]
    with pytest.raises(RecipeError, match="rank"):
        case_recipes("flux2.tiny", {}, {"adapter.rank": [0]})
