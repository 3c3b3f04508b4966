"""Known faults of machines: each machine gets the rules that name it, and no others.

The machines are written down by hand (doctor_machines.py), and so is what the sources say of each, independently of how
rules.toml words its conditions.
"""

import datetime as dt
from dataclasses import replace

import pytest
from doctor_machines import (
    GFX1100_WINDOWS,
    GFX1201_LINUX,
    H200_LINUX,
    NO_CARD,
    RTX_4090_WINDOWS,
    RTX_4090_WSL,
)

from outsize.doctor.facts import Facts, overridden_arch, version_matches
from outsize.doctor.rules import Judgement, Rule, judge, known_rules, recommended, rules_from

TODAY = dt.date(2026, 12, 1)
EXPECTED: list[tuple[Facts, set[str]]] = [
    (H200_LINUX, set()),
    (NO_CARD, set()),
    (
        RTX_4090_WINDOWS,
        {
            "nvidia-windows-spill",
            "windows-pinned-half",
            "windows-mapped-weights",
            "paged-optimizers",
        },
    ),
    (RTX_4090_WSL, {"nvidia-wsl-spill", "wsl-pinned-cap", "paged-optimizers"}),
    (
        GFX1100_WINDOWS,
        {
            "windows-pinned-half",
            "windows-mapped-weights",
            "amd-windows-free-memory",
            "amd-exhausted-hangs",
            "rdna-hipblaslt",
            "gfx110x-blas-flips",
            "rdna-sdpa-gated",
            "gfx1100-aotriton-nan",
            "gfx11-wide-heads",
            "bnb-rocm-library",
            "rdna3-windows-slows",
            "gfx110x-windows-hipsparse",
        },
    ),
    (
        GFX1201_LINUX,
        {
            "amd-exhausted-hangs",
            "amd-linux-pinned-eviction",
            "rdna-hipblaslt",
            "gfx1201-silent-zeros",
            "gfx120x-tensile-fault",
            "gfx120x-tensile-fault-workaround",
            "gfx120x-grouped-mm",
            "rdna-sdpa-gated",
            "triton36-stages",
            "bnb-rocm-library",
        },
    ),
]


def found(facts: Facts, **options: object) -> Judgement:
    return judge(known_rules(), facts, **{"today": TODAY, **options})  # type: ignore[arg-type]


def ids(facts: Facts) -> set[str]:
    return {one.rule.id for one in found(facts).findings}


def environment(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment=variables)


def versions(facts: Facts, **changed: str | None) -> Facts:
    return replace(facts, versions={**facts.versions, **changed})


@pytest.mark.parametrize(
    ("facts", "expected"), EXPECTED, ids=lambda one: getattr(one, "device", "") or ""
)
def test_each_machine_gets_the_rules_that_name_it_and_no_others(
    facts: Facts, expected: set[str]
) -> None:
    assert ids(facts) == expected
    assert found(facts).undecided == ()


EXPANDABLE = "expandable_segments:True"
SPLIT = f"{EXPANDABLE},max_split_size_mb:128"


@pytest.mark.parametrize(
    ("facts", "more"),
    [
        (versions(H200_LINUX, **{"hf-xet": "1.8.0"}), {"hf-xet-stalls"}),
        (versions(H200_LINUX, **{"flash-linear-attention": "0.4"}), {"fla-hopper-hang"}),
        (environment(H200_LINUX, PYTORCH_ALLOC_CONF=EXPANDABLE), set()),  # works there
        (
            environment(H200_LINUX, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync"),
            {"cuda-malloc-async"},
        ),
        (
            environment(RTX_4090_WINDOWS, PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE),
            {"nvidia-expandable-unsupported"},
        ),
        (
            environment(RTX_4090_WSL, PYTORCH_ALLOC_CONF=EXPANDABLE),
            {"nvidia-expandable-unsupported"},
        ),
        (environment(RTX_4090_WINDOWS, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"), set()),
        (replace(RTX_4090_WSL, arch="sm_120"), {"wsl-blackwell-overhead"}),
        (environment(GFX1201_LINUX, HSA_OVERRIDE_GFX_VERSION="11.0.0"), {"hsa-override-other"}),
        (environment(GFX1201_LINUX, HSA_OVERRIDE_GFX_VERSION="12.0.1"), {"hsa-override-needless"}),
        (environment(GFX1201_LINUX, HSA_OVERRIDE_GFX_VERSION=""), {"hsa-override-empty"}),
        (environment(GFX1201_LINUX, TORCH_USE_HIPBLASLT="0"), {"unread-hipblaslt"}),
        (environment(H200_LINUX, TRITON_DISABLE_AUTOTUNING="1"), {"unread-triton-autotuning"}),
        (
            environment(versions(GFX1201_LINUX, torch="2.11.0"), PYTORCH_HIP_ALLOC_CONF=EXPANDABLE),
            {"amd-expandable-ignored"},
        ),
        (
            environment(GFX1201_LINUX, PYTORCH_HIP_ALLOC_CONF=SPLIT),
            {"amd-expandable-works", "amd-expandable-split-zeros"},
        ),
        (
            environment(versions(H200_LINUX, torch="2.9.1"), PYTORCH_ALLOC_CONF="x:1"),
            {"unread-alloc-conf"},
        ),
        (versions(GFX1201_LINUX, rocm="7.0.1"), {"gfx1201-old-rocm"}),
        (replace(GFX1201_LINUX, is_virtual=True), {"gfx1201-passthrough"}),
        (replace(GFX1201_LINUX, tools=frozenset()), {"bnb-rocminfo-missing"}),
        (replace(GFX1201_LINUX, has_aotriton_images=False), {"aotriton-images-missing"}),
        (versions(GFX1201_LINUX, torchao="0.15"), {"torchao-int4-cdna"}),
        (versions(GFX1100_WINDOWS, bitsandbytes="0.49.2"), {"bnb-rdna-nan"}),
    ],
)
def test_a_change_of_the_machine_brings_the_rules_about_it(facts: Facts, more: set[str]) -> None:
    plain = next(
        expected for one, expected in EXPECTED
        if (one.vendor, one.os_class) == (facts.vendor, facts.os_class)
    )  # fmt: skip
    assert ids(facts) - plain == more


def test_versions_bound_rules() -> None:
    """Each of these went away with a release that is installed now."""
    newer = versions(GFX1201_LINUX, rocm="7.13.0", hip="7.13.1", triton="3.7.0")
    gone = {
        "gfx120x-tensile-fault",
        "gfx120x-tensile-fault-workaround",
        "gfx120x-grouped-mm",
        "triton36-stages",
    }
    assert ids(GFX1201_LINUX) - ids(newer) == gone
    assert "torchao-int4-cdna" not in ids(
        versions(replace(GFX1201_LINUX, arch="gfx90a"), torchao="1")
    )


def test_what_nobody_knows_stays_undecided() -> None:
    judged = found(versions(GFX1201_LINUX, hip=None))
    assert judged.undecided == ("gfx120x-grouped-mm",)
    assert "gfx120x-grouped-mm" not in {one.rule.id for one in judged.findings}


def test_past_its_expiry_a_rule_says_unknown() -> None:
    """What was true of last year's driver must not be told as true, nor be told as gone."""
    rule = next(rule for rule in known_rules() if rule.id == "nvidia-windows-spill")
    for day, status in ((rule.expires, "applies"), (rule.expires + dt.timedelta(1), "unknown")):
        (finding,) = judge([rule], RTX_4090_WINDOWS, today=day).findings
        assert finding.status == status
    late = found(GFX1201_LINUX, today=dt.date(2029, 1, 1))
    assert {one.status for one in late.findings} == {"unknown"}
    assert recommended(late.findings, GFX1201_LINUX) == []


def test_a_measurement_outweighs_a_rule() -> None:
    def status(**measured: bool) -> str:
        judged = found(GFX1201_LINUX, measured=measured)
        return next(one.status for one in judged.findings if one.rule.id == "gfx1201-silent-zeros")

    assert status(matmul=True) == "not seen"
    assert status(matmul=False) == "confirmed"
    assert status(attention=False) == "applies"


def test_the_recommended_environment_of_an_amd_card() -> None:
    said = recommended(found(GFX1201_LINUX).findings, GFX1201_LINUX)
    assert {one.name: one.value for one in said} == {
        "DISABLE_ADDMM_HIP_LT": "1",
        "TORCH_BLAS_PREFER_HIPBLASLT": "0",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1",
    }
    measured = found(GFX1201_LINUX, measured={"attention": True})
    names = {one.name for one in recommended(measured.findings, GFX1201_LINUX)}
    assert "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL" not in names


def test_a_variable_is_unset_only_where_it_is_set() -> None:
    facts = environment(GFX1201_LINUX, HSA_OVERRIDE_GFX_VERSION="11.0.0", DISABLE_ADDMM_HIP_LT="1")
    said = {one.name: one for one in recommended(found(facts).findings, facts)}
    assert said["HSA_OVERRIDE_GFX_VERSION"].value == ""
    assert said["DISABLE_ADDMM_HIP_LT"].is_so
    assert not said["TORCH_BLAS_PREFER_HIPBLASLT"].is_so
    assert not recommended(found(H200_LINUX).findings, H200_LINUX)


def test_the_table_is_sound() -> None:
    """Every rule can be judged, and no two rules of one machine contradict each other in what they recommend."""
    assert len(known_rules()) >= 70
    for facts, _ in EXPECTED:
        values: dict[str, set[str]] = {}
        for one in found(facts).findings:
            for name, value in one.rule.recommend.items():
                values.setdefault(name, set()).add(value)
        assert all(len(many) == 1 for many in values.values()), values


ROW = {
    "id": "one", "when": {"vendor": "amd"}, "symptom": "s", "action": "a", "grade": "A",
    "sources": ["x#1"], "seen": dt.date(2026, 1, 1), "expires": dt.date(2027, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"grade": "D"}, "grade"),
        ({"sets": {"A": "1"}}, "sets"),
        ({"when": {}}, "when"),
        ({"sources": []}, "sources"),
        ({"when": {"torch": "2.10 and newer"}}, "2.10 and newer"),
        ({"when": {"tocrh": "<2"}}, "tocrh"),
        ({"when": {"env": {"A": "is:1"}}}, "is:1"),
        ({"expires": dt.date(2025, 1, 1)}, "expires"),
    ],
)
def test_a_rule_that_cannot_be_judged_is_refused(change: dict[str, object], told: str) -> None:
    assert isinstance(rules_from({"rule": [ROW]})[0], Rule)
    with pytest.raises(ValueError, match=told):
        rules_from({"rule": [ROW | change]})
    with pytest.raises(ValueError, match="twice"):
        rules_from({"rule": [ROW, ROW]})


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("7.14.60850", ">=7.2", True),  # as numbers; as text it would be older
        ("7.14", "<7.2", False),
        ("7.2.53211-e1a6bc5663", "==7.2.*", True),
        ("7.20", "==7.2.*", False),
        ("2.12.0.dev20260401+rocm7.2", ">=2.12,<2.14", True),
        ("2.10", "==2.10.0", True),
        ("6.8.0-45-generic", "<5.6", False),
        ("nightly", "<3", None),
        ("nightly", "*", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, wanted: str, *, holds: bool | None) -> None:
    assert version_matches(version, wanted) is holds


def test_the_card_an_override_names() -> None:
    named = {"11.0.0": "gfx1100", "12.0.1": "gfx1201", "9.0.10": "gfx90a", "10.3.0": "gfx1030"}
    assert {value: overridden_arch(value) for value in named} == named
    assert overridden_arch("gfx1100") is None
