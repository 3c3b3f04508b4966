"""Checks: what they measure here is right, wrong kernels are found, and values of other machines are judged as they should."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from doctor_machines import GFX1100_WINDOWS, H200_LINUX, NO_CARD, RTX_4090_WINDOWS
from torch import Tensor

from outsize.app import _doctor_probes
from outsize.app.doctor import _judge_optimizer
from outsize.doctor import checks, probes
from outsize.doctor.checks import PROBES, Probe, is_built_for
from outsize.doctor.children import Outcome
from outsize.doctor.standing import check_commit, check_driver, check_ram, check_versions

GIB = 1 << 30
BY_ID = {probe.id: probe for probe in PROBES}


def here(name: str) -> str:
    probe = BY_ID[name]
    value = getattr(probes, probe.target.partition(":")[2])("cpu")
    return probe.judged(Outcome(name, "done", 0.0, value), NO_CARD).status


@pytest.mark.parametrize("name", ["device", "allocation", "matmul", "attention", "four_bit"])
def test_this_machine_passes(name: str) -> None:
    assert here(name) == "pass"


def wrong_for_the_device(right: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Any:
    """The right function for float64, the reference's type, and a changed one for the device's."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        out = right(*args, **kwargs)
        return out if out.dtype == torch.float64 else change(out)

    return call


@pytest.mark.parametrize(
    "change",
    [lambda out: out * 0, lambda out: out * 1.001, lambda out: out / 0],
    ids=["zero", "a-thousandth-off", "not-finite"],
)
def test_a_wrong_attention_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]
) -> None:
    """Zeros are what one library gives silently, NaN what another does."""
    wrong = wrong_for_the_device(F.scaled_dot_product_attention, change)
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    assert here("attention") == "fail"


def test_a_wrong_product_of_columns_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that was reported hit operands stored by columns alone."""
    right = Tensor.__matmul__

    def product(a: Tensor, b: Tensor) -> Tensor:
        out = right(a, b)
        is_column_major = b.stride(0) == 1 and b.shape[0] > 1
        return out * 0 if is_column_major and b.dtype == torch.float32 else out

    monkeypatch.setattr(Tensor, "__matmul__", product)
    value = probes.matmul("cpu")
    assert value["worst"]["rows"] < 1e-5
    assert value["worst"]["columns"] == pytest.approx(1)
    assert here("matmul") == "fail"


def test_a_wrong_gradient_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            del ctx
            return out.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            del ctx
            return gradient / 2

    wrong = wrong_for_the_device(F.scaled_dot_product_attention, Halved.apply)
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    assert here("attention") == "fail"


def test_a_wrong_decoding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probes.make_format

    def broken(name: str) -> Any:
        fmt = real(name)
        times = iter((2.0, 1.0, 1.0, 1.0))  # of what the device decodes first

        class Broken(type(fmt)):  # type: ignore[misc] # a class made at run time
            def decode(self, *args: Any) -> Tensor:
                return fmt.decode(*args) * next(times)

        return Broken()

    monkeypatch.setattr(probes, "make_format", broken)
    assert here("four_bit") == "fail"


def test_the_8_bit_optimiser_is_held_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    value = _doctor_probes.eight_bit_optimizer("cpu", "adamw8bit")
    assert _judge_optimizer(value, NO_CARD)[0] == "pass"
    assert _judge_optimizer(value | {"state_types": ["float32"]}, NO_CARD)[0] == "fail"
    plain = _doctor_probes.eight_bit_optimizer("cpu", "adamw")
    assert plain["difference"] < 1e-5  # the reference is the same optimiser
    real = _doctor_probes.make_optimizer

    def slow(name: str) -> Any:
        def make(masters: Any, settings: Any) -> Any:
            return real(name)(masters, replace(settings, learning_rate=0.008))

        return make

    monkeypatch.setattr(_doctor_probes, "make_optimizer", slow)
    value = _doctor_probes.eight_bit_optimizer("cpu", "adamw8bit")
    assert _judge_optimizer(value, NO_CARD)[0] == "fail"


ALLOCATED = {
    "wanted_bytes": 16 * GIB, "bytes": 16 * GIB, "refused": "", "wrong_pieces": 0,
    "median_bytes_per_s": 800e9, "slowest_bytes_per_s": 700e9,
}  # fmt: skip
PINNED = {
    "asked_bytes": 4 * GIB, "bytes": 4 * GIB, "refused": "", "pinned_bytes_per_s": 25e9,
    "pageable_bytes_per_s": 9e9,
}  # fmt: skip
WRONG = {"worst": {"rows": 1e-3, "columns": 1.0}, "compute_dtype": "bfloat16", "backend": "Cublas"}


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("allocation", ALLOCATED, "pass"),
        ("allocation", ALLOCATED | {"slowest_bytes_per_s": 20e9}, "fail"),  # lies behind the bus
        ("allocation", ALLOCATED | {"wrong_pieces": 1}, "fail"),
        ("allocation", ALLOCATED | {"bytes": 8 * GIB, "refused": "HIP out of memory"}, "fail"),
        ("matmul", WRONG, "fail"),
        ("matmul", WRONG | {"worst": {"rows": 4e-3}}, "pass"),
        ("pinned", PINNED, "pass"),
        ("pinned", PINNED | {"bytes": GIB // 2, "refused": "error 2"}, "warn"),
        ("pinned", {"asked_bytes": GIB, "bytes": 0, "refused": "error 2"}, "warn"),
        ("pinned", PINNED | {"pinned_bytes_per_s": 3e9}, "warn"),
        ("overlap", {"hidden": 0.95}, "pass"),
        ("overlap", {"hidden": 0.1}, "warn"),
        ("compile", {"worst": {"compiled": float("inf")}, "compile_s": 3, "compute_dtype": "bfloat16"}, "warn"),
    ],
)  # fmt: skip
def test_values_of_other_machines_are_judged(
    name: str, values: dict[str, Any], status: str
) -> None:
    check = BY_ID[name].judged(Outcome(name, "done", 1.0, values), RTX_4090_WINDOWS)
    assert check.status == status
    assert bool(check.remedy) == (status != "pass")
    assert check.measured
    assert check.wanted
    assert check.confidence == "measured; this check has not been tried on nvidia with windows"


@pytest.mark.parametrize("end", ["hung", "died", "raised"])
def test_a_check_that_did_not_end_fails_where_it_is_needed(end: Any) -> None:
    outcome = Outcome("x", end, 1.0, why="SIGSEGV", said="a fault")
    needed = BY_ID["matmul"].judged(outcome, H200_LINUX)
    assert (needed.status, needed.measured) == ("fail", f"{end}: SIGSEGV")
    assert needed.values["said"] == "a fault"
    assert BY_ID["pinned"].judged(outcome, H200_LINUX).status == "warn"
    assert BY_ID["pinned"].skipped("no card").passed is None


def test_the_card_that_is_there_must_be_the_one_that_opens() -> None:
    opened = {"kind": "cpu", "name": "CPU", "compute_dtype": "float32", "is_card": False}
    probe: Probe = BY_ID["device"]
    assert probe.judged(Outcome("device", "done", 0.0, opened), NO_CARD).status == "pass"
    missed = probe.judged(Outcome("device", "done", 0.0, opened), GFX1100_WINDOWS)
    assert missed.status == "fail"
    assert "RX 7900 XTX" in missed.wanted


@pytest.mark.parametrize(
    ("arch", "built_for", "runs"),
    [
        ("sm_90", ["sm_80", "sm_90"], True),
        ("sm_89", ["sm_80", "sm_86"], True),  # an older minor of the same major
        ("sm_86", ["sm_89"], False),
        ("sm_120", ["sm_80", "sm_90"], False),
        ("sm_120", ["sm_90", "compute_90"], True),
        ("sm_120", ["sm_90a"], False),
        ("gfx1100", ["gfx1030", "gfx1100"], True),
        ("gfx1101", ["gfx1100"], False),
    ],
)
def test_for_which_cards_torch_was_built(arch: str, built_for: list[str], *, runs: bool) -> None:
    assert is_built_for(arch, built_for) is runs


def test_the_driver_and_torch_must_be_of_one_maker() -> None:
    assert check_driver(NO_CARD).status == "skipped"
    assert check_driver(H200_LINUX).status == "pass"
    wrong = check_driver(replace(GFX1100_WINDOWS, torch_build="cpu"))
    assert (wrong.status, wrong.is_needed) == ("fail", True)
    assert check_driver(replace(NO_CARD, vendor="intel")).status == "warn"


def test_ram_and_the_commit_limit() -> None:
    assert check_ram(replace(NO_CARD, ram_bytes=8 * GIB)).status == "warn"
    assert check_ram(replace(NO_CARD, ram_bytes=64 * GIB)).status == "pass"
    assert check_commit(replace(NO_CARD, ram_bytes=8 * GIB), None).status == "pass"  # overcommits
    windows = replace(
        RTX_4090_WINDOWS, ram_bytes=64 * GIB, commit_limit_bytes=68 * GIB, vram_bytes=24 * GIB
    )
    short = check_commit(windows, [r"C:\pagefile.sys"])
    assert short.status == "warn"
    assert "20.0 GiB larger" in short.remedy  # 64 + 24 wanted
    assert r"C:\pagefile.sys" in short.measured
    assert check_commit(replace(windows, commit_limit_bytes=88 * GIB), []).status == "pass"
    assert check_commit(RTX_4090_WINDOWS, None).status == "skipped"


def test_versions_are_held_to_what_each_package_requires() -> None:
    have = {**NO_CARD.versions, "safetensors": "0.8.0"}
    told = {
        "peft": ["torch>=1.13", "transformers", "tqdm"],
        "diffusers": ["transformers<5 ; extra == 'old'", "not a requirement!"],
    }
    assert check_versions(have, told.get).status == "pass"
    told["outsize"] = ["diffusers<0.42"]
    conflict = check_versions(have, told.get)
    assert conflict.status == "fail"
    assert "outsize requires diffusers <0.42, and 0.42.1 is there" in conflict.measured
    missing = check_versions({name: one for name, one in have.items() if name != "peft"}, told.get)
    assert "peft is missing" in missing.measured
    assert check_versions({**have, "torch": "2.14.0.dev1"}, told.get).status == "fail"


def test_where_the_checks_were_tried_is_told() -> None:
    assert checks.measured_confidence(NO_CARD) == "measured"
    assert "not been tried" in checks.measured_confidence(GFX1100_WINDOWS)
