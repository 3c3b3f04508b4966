"""What the planner settles of how a step computes, and the rates it knows of a machine."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from outsize.arithmetic.protocol import ARITHMETICS
from outsize.base.errors import RecipeError
from outsize.devices._profile import MachineProfile, limited, parse_nvidia_smi, stated
from outsize.devices._rates import (
    cards,
    find_card,
    rates_of,
    require_card,
    save_rates,
    stated_rates,
    vendor_of,
)
from outsize.families.protocol import FAMILIES
from outsize.plan import planner
from outsize.plan.compute import arithmetic_fault, choose_arithmetic, may_compile, proven_for
from outsize.plan.planner import make_plan
from outsize.recipes.recipe import Recipe

GIB = 2**30
HERE = MachineProfile(
    device="CPU, 4 cores",
    vram_bytes=None,
    vram_free_bytes=None,
    ram_bytes=64 * GIB,
    ram_available_bytes=60 * GIB,
    disk_free_bytes=None,
    num_cores=4,
    os="Linux",
)


def machine(gpu: str, vram_gib: float = 24) -> MachineProfile:
    return stated(vram_bytes=int(vram_gib * GIB), ram_bytes=None, gpu=gpu, base=HERE)


def recipe(**train: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "cat",
            "base": {"family": "flux2", "variant": "klein-4b", "source": "nowhere/nothing"},
            "data": {"resolution": 512, "sets": [{"folder": "none"}]},
            "train": train,
        }
    )


@pytest.mark.parametrize(
    ("said", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("rtx 4090", "RTX 4090"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("Radeon RX 7900 XT", "RX 7900 XT"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_cards_are_known_by_the_names_their_tools_give(said: str, card: str) -> None:
    """nvidia-smi, rocm-smi and people write them differently."""
    found = find_card(said)
    assert found is not None
    assert found.name == card


def test_a_laptops_card_is_not_taken_for_the_desktops() -> None:
    """It has the name and half of the speed."""
    assert find_card("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert vendor_of("NVIDIA GeForce RTX 4090 Laptop GPU") == "nvidia"


def test_every_card_of_the_table_finds_itself_and_has_plausible_figures() -> None:
    """A slip of the keyboard by a factor of a thousand would go into every plan."""
    for card in cards():
        assert find_card(card.name) == card
        rates = rates_of(machine(card.name, card.vram_bytes / GIB))
        assert 10e12 < rates.matmul_flops["bf16"] < 1e15
        assert 1e11 < rates.device_memory_bytes_per_s < 1e13
        assert 5e9 < rates.bus_bytes_per_s < 60e9
        assert rates.origin("matmul_flops") == "table"
        assert rates.origin("disk_read_bytes_per_s") == "guess"


def test_an_unknown_card_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(RecipeError, match=r"'RTX 409'; did you mean 'RTX 4090'\?"):
        require_card("RTX 409")


def test_what_was_measured_replaces_the_table_and_says_when(tmp_path: Path) -> None:
    """For this card, system and torch alone; an arithmetic that was not measured keeps the table's figure."""
    here = replace(machine("H200", 141), os=_system())
    values = {"bus_bytes_per_s": 5e9, "matmul_flops": {"bf16": 7e14}}
    save_rates(tmp_path, "H200", values)
    rates = rates_of(here, folder=tmp_path)
    assert rates.bus_bytes_per_s == 5e9
    assert rates.origin("bus_bytes_per_s").startswith("measured 2")
    assert rates.matmul_flops["bf16"] == 7e14
    assert rates.matmul_flops["fp8"] == rates_of(here).matmul_flops["fp8"]
    assert rates.origin("disk_read_bytes_per_s") == "guess"
    other = replace(here, device="H100")
    assert rates_of(other, folder=tmp_path) == rates_of(other)
    save_rates(tmp_path, "H200", {"disk_read_bytes_per_s": 1e9})
    assert rates_of(here, folder=tmp_path).bus_bytes_per_s == 5e9


def test_a_damaged_file_of_rates_is_as_none(tmp_path: Path) -> None:
    """It is a memory, not a source of truth."""
    (tmp_path / "rates.json").write_text("{torn")
    assert rates_of(machine("H200"), folder=tmp_path) == rates_of(machine("H200"))


def test_a_stated_rate_is_said_to_be_stated() -> None:
    rates = stated_rates(rates_of(machine("RTX 4090")), disk_read_bytes_per_s=5e8)
    assert rates.disk_read_bytes_per_s == 5e8
    assert rates.origin("disk_read_bytes_per_s") == "stated"


def test_the_arithmetic_left_open_is_the_fastest_that_is_proven_and_there() -> None:
    """Never a faster one without evidence, nor one that the card lacks."""

    def chosen(gpu: str, *proven: str) -> str:
        where = machine(gpu)
        return choose_arithmetic(recipe(), where, rates_of(where), proven)[0]

    assert chosen("RTX 4090", "bf16") == "bf16"
    assert chosen("RTX 4090", "bf16", "fp8") == "fp8"
    assert chosen("RTX 3090", "bf16", "fp8") == "bf16"
    assert chosen("RX 9070 XT", "bf16", "fp8") == "bf16"  # not verified on hardware


def test_evidence_names_families_and_arithmetics_that_are_there_and_a_decision() -> None:
    text = (Path(planner.__file__).parent / "_evidence.toml").read_text(encoding="utf-8")
    for family, row in tomllib.loads(text).items():
        assert family in FAMILIES.names()
        assert set(row["arithmetics"]) <= set(ARITHMETICS.names())
        decisions = Path(__file__).parent.parent / "docs" / "decisions"
        assert list(decisions.glob(f"{row['decision']}-*.md"))
        assert proven_for(family) == tuple(row["arithmetics"])
    assert proven_for("no such family") == ()


def test_an_arithmetic_that_the_card_lacks_is_refused_with_the_reason_and_the_remedy() -> None:
    plan = make_plan(recipe(arithmetic="fp8"), machine("RTX 3090"))
    assert plan.refusal is not None
    assert plan.refusal.startswith("RTX 3090 has no products in fp8 (NVIDIA cards have it from")
    assert "`train: {arithmetic: auto}`" in plan.refusal
    assert make_plan(recipe(arithmetic="fp8"), machine("RTX 4090")).fits


def test_a_card_that_nobody_knows_may_turn_out_to_have_it() -> None:
    """The device tells, once it is open; a capability read from the driver tells at once."""
    where = machine("NVIDIA Something")
    assert arithmetic_fault("fp8", where, rates_of(where)) is None
    old = replace(where, compute_capability=8.6)
    assert arithmetic_fault("fp8", old, rates_of(old)) is not None
    new = replace(where, compute_capability=12.0)
    assert arithmetic_fault("fp8", new, rates_of(new)) is None
    assert rates_of(new).matmul_flops["fp8"] == 2 * rates_of(new).matmul_flops["bf16"]


def test_blocks_are_compiled_where_that_was_verified_or_asked_for() -> None:
    here = machine("RTX 4090")
    assert may_compile(here, has_triton=True, asked=None)[0]
    assert not may_compile(here, has_triton=False, asked=None)[0]
    assert not may_compile(replace(here, os="Windows"), has_triton=True, asked=None)[0]
    assert not may_compile(machine("RX 7900 XTX"), has_triton=True, asked=None)[0]
    assert may_compile(machine("RX 7900 XTX"), has_triton=True, asked=True)[0]
    assert not may_compile(HERE, has_triton=True, asked=None)[0]


def test_what_decides_bits_is_told_apart() -> None:
    """A run is resumed only with the same."""
    said = make_plan(recipe(exact=False, compile=False), machine("RTX 4090")).compute.describe()
    assert said == {"arithmetic": "fp8", "compiles": False, "is_exact": False}


def test_the_capability_is_read_where_the_driver_tells_it() -> None:
    """Older drivers know no such column."""
    line = "0, GPU-a, NVIDIA GeForce RTX 4090, 24564, 23971"
    assert parse_nvidia_smi(line)[0].compute_capability is None
    assert parse_nvidia_smi(f"{line}, 8.9")[0].compute_capability == 8.9
    assert parse_nvidia_smi(f"{line}, [N/A]")[0].compute_capability is None


def test_a_limit_cuts_the_card_and_stated_ram_is_what_there_is() -> None:
    """A limit above what is free changes nothing."""
    whole = replace(machine("H200", 141), vram_free_bytes=100 * GIB)
    cut = limited(whole, vram_bytes=8 * GIB)
    assert (cut.vram_bytes, cut.vram_free_bytes) == (8 * GIB, 8 * GIB)
    assert limited(whole, vram_bytes=120 * GIB).vram_free_bytes == 100 * GIB
    grown = limited(whole, ram_bytes=255 * GIB)
    assert (grown.ram_bytes, grown.ram_available_bytes) == (255 * GIB, 253 * GIB)


def _system() -> str:
    import platform

    return platform.system()
