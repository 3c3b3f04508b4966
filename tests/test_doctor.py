"""`outsize doctor` as a person meets it: the whole of it on this machine's processor, once."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import GFX1201_LINUX, H200_LINUX, NO_CARD

import outsize.app.doctor as app
from outsize.app.planning import machine_here
from outsize.base.errors import EXIT_COMPLETED, MachineFault, RecipeError
from outsize.cli.main import main
from outsize.devices._rates import rates_of
from outsize.doctor.checks import Check, Probe
from outsize.doctor.facts import Facts

BAD = Check("matmul", "fail", "error 1.0", "1e-5", "another driver", "measured", is_needed=True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(app, "rates_folder", lambda: folder)
    return folder


@pytest.mark.slow
def test_the_whole_of_it_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    before = dict(os.environ)
    code = main(["doctor", "--device", "cpu", "--cache", str(tmp_path / "stores"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == EXIT_COMPLETED
    assert dict(os.environ) == before  # no variable is set behind anybody's back
    status = {one["id"]: one["status"] for one in told["checks"]}
    assert list(status) == [
        "driver", "versions", "ram", "commit", "device", "allocation", "matmul", "attention",
        "four_bit", "pinned", "overlap", "compile", "optimizer", "rates", "disk",
    ]  # fmt: skip
    measured = ("versions", "device", "allocation", "matmul", "attention", "four_bit", "optimizer")
    assert {status[one] for one in measured} == {"pass"}
    assert {status[one] for one in ("driver", "pinned", "overlap", "compile")} == {"skipped"}
    for one in told["checks"]:
        assert one["measured"]
        assert one["confidence"]
        assert one["wanted"] or one["status"] == "skipped"
    kept = Path(told["kept"])
    assert json.loads(kept.read_text(encoding="utf-8")) == told
    known = rates_of(machine_here(tmp_path, device_kind="cpu"), folder=kept.parent)
    rates = next(one["values"] for one in told["checks"] if one["id"] == "rates")
    assert known.hash_bytes_per_s == rates["hash_bytes_per_s"]
    assert known.origin("disk_read_bytes_per_s").startswith("measured")


def examined(
    monkeypatch: pytest.MonkeyPatch, facts: Facts, measured: list[Check]
) -> Callable[..., Any]:
    """Doctor on a machine that is not here."""
    monkeypatch.setattr(app, "gather_facts", lambda: facts)
    monkeypatch.setattr("outsize.doctor.gather.gather_facts", lambda: facts)
    monkeypatch.setattr(app, "standing_checks", lambda _, **__: [])
    monkeypatch.setattr(app, "_measured", lambda *_: iter(measured))
    return lambda *arguments: main(["doctor", *arguments])


def test_what_is_needed_and_failed_is_the_exit_code(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Check("pinned", "warn", "0 B", "1 GiB", "stream", "measured", is_needed=False)
    assert examined(monkeypatch, H200_LINUX, [slow])() == EXIT_COMPLETED
    assert examined(monkeypatch, H200_LINUX, [slow, BAD])() == MachineFault.exit_code
    out, err = capsys.readouterr()
    assert (
        "MachineFault: 1 of 2 checks failed that training needs: matmul: error 1.0. another driver"
        in err
    )
    assert "pinned: stream" in out
    assert (own_cache / app.REPORT_NAME).exists()


def test_json_stays_json_when_a_check_fails(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that is no number is what a broken kernel gives; JSON has no word for it."""
    broken = replace(BAD, values={"worst": {"rows": float("inf")}})
    code = examined(monkeypatch, GFX1201_LINUX, [broken])("--json")
    told = json.loads(capsys.readouterr().out)
    assert code == MachineFault.exit_code
    assert told["checks"][0]["values"] == {"worst": {"rows": "inf"}}
    status = {one["id"]: one["status"] for one in told["findings"]}
    assert status["gfx1201-silent-zeros"] == "confirmed"
    assert own_cache.exists()


def test_env_says_what_why_and_what_nothing_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = replace(
        GFX1201_LINUX,
        environment={"TORCH_USE_HIPBLASLT": "0", "DISABLE_ADDMM_HIP_LT": "1", "HF_TOKEN": "secret"},
    )
    before = dict(os.environ)
    run = examined(monkeypatch, facts, [])
    assert run("--env") == EXIT_COMPLETED
    out = capsys.readouterr().out
    assert "TORCH_USE_HIPBLASLT is set, and nothing reads it" in out
    assert "unset TORCH_USE_HIPBLASLT" in out
    assert "DISABLE_ADDMM_HIP_LT=1  (is so)" in out
    assert "TORCH_BLAS_PREFER_HIPBLASLT=0\n" in out
    assert "check `attention` decides" in out
    assert run("--env", "--json") == EXIT_COMPLETED
    text = capsys.readouterr().out
    assert "secret" not in text
    values = {one["name"]: one["value"] for one in json.loads(text)["environment"]}
    assert values["TORCH_USE_HIPBLASLT"] is None
    assert dict(os.environ) == before
    assert examined(monkeypatch, NO_CARD, [])("--env") == EXIT_COMPLETED
    assert "No variable is recommended." in capsys.readouterr().out


def test_a_kernel_that_dies_takes_neither_doctor_nor_the_other_checks(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = {one.id: one for one in app.PROBES}
    dying = Probe("matmul", "os:abort", probes["matmul"].judge, "another driver")
    hanging = Probe("attention", "time:sleep", probes["attention"].judge, "x", timeout_s=0.5)
    plain = [
        Probe(name, "json:loads", lambda *_: ("pass", "1", "1"), "", is_needed=False)
        for name in ("optimizer", "rates")
    ]
    monkeypatch.setattr(app, "gather_facts", lambda: NO_CARD)
    monkeypatch.setattr(app, "PROBES", (dying, hanging))
    monkeypatch.setattr(app, "_OPTIMIZER_PROBE", plain[0])
    monkeypatch.setattr(app, "_rates_probe", lambda _: replace(plain[1], target="os:abort"))
    # `call` gives each of them the device's kind, which these take as well or not at all
    monkeypatch.setattr(Probe, "call", lambda self, *_: app_call(self))
    found = app.examine(device_kind="cpu", cache=own_cache, told=lambda _: None)
    status = {one.id: (one.status, one.measured.split(":")[0]) for one in found.checks[4:]}
    assert status["matmul"] == ("fail", "died")
    assert status["attention"] == ("fail", "hung")
    assert status["optimizer"] == ("pass", "1")
    assert status["rates"] == ("warn", "died")
    assert [one.id for one in found.failed] == ["matmul", "attention"]


def app_call(probe: Probe) -> Any:
    from outsize.doctor.children import Call

    arguments = {"json:loads": ["{}"], "time:sleep": [600]}.get(probe.target, [])
    return Call(probe.id, probe.target, arguments, probe.timeout_s)


def test_a_device_that_does_not_open_is_told_once_and_not_by_every_check(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seven equal errors with seven remedies, six of which do not help, would hide the one that does."""
    monkeypatch.setattr(app, "gather_facts", lambda: NO_CARD)
    monkeypatch.setattr(app, "standing_checks", lambda _, **__: [])
    assert main(["doctor", "--device", "cuda"]) == MachineFault.exit_code
    out, err = capsys.readouterr()
    assert err.count("no cuda device can be used") == 1
    assert "1 of 10 checks failed" in err
    skipped = [line for line in out.splitlines() if "see check `device`" in line]
    assert len(skipped) == 9
    assert "close other programs" not in out
    assert own_cache.exists()


def test_a_device_of_no_such_name_is_refused_before_anything_is_measured(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--device", "cdua"]) == RecipeError.exit_code
    out, err = capsys.readouterr()
    assert "no device is called 'cdua'; did you mean 'cuda'?" in err
    assert out == ""
    assert not own_cache.exists()


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--cache", str(tmp_path / "file" / "stores")]) == MachineFault.exit_code
    out, err = capsys.readouterr()
    assert "stores cannot be written" in err
    assert "name another with --cache" in err
    assert out == ""
