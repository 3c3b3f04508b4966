"""The starter: which build of torch it takes, when it may skip the install, and what it imports.

Nothing here installs, starts a process of another program or needs a network.
"""

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

# As printed by `nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader`.
ADA = "NVIDIA GeForce RTX 4090, 8.9, 570.133.07\n"
ADA_NEW_DRIVER = "NVIDIA GeForce RTX 4090, 8.9, 580.95.05\n"
BLACKWELL = "NVIDIA GeForce RTX 5090, 12.0, 581.57\n"
BLACKWELL_OLD_DRIVER = "NVIDIA GeForce RTX 5090, 12.0, 572.16\n"
PASCAL_NEW_DRIVER = "NVIDIA GeForce GTX 1080 Ti, 6.1, 580.95.05\n"
TWO_CARDS = "NVIDIA GeForce GTX 1080 Ti, 6.1, 580.95.05\nNVIDIA GeForce RTX 3090, 8.6, 580.95.05\n"
OPEN_KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
)
OLD_DRIVER = "Tesla T4, 7.5, 470.223.02\n"
BROKEN = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that"
    " the latest NVIDIA driver is installed and running.\n"
)
KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load bootstrap.py afresh, with its environment moved to an empty folder."""
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", ROOT / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    folder = tmp_path / "venv"
    folder.mkdir()
    monkeypatch.setattr(module, "VENV", folder)
    monkeypatch.setattr(module, "STAMP", folder / "stamp.json")
    monkeypatch.setattr(module, "LOG", folder / "log")
    monkeypatch.setattr(module, "PYTHON", folder / "python")
    module.PYTHON.touch()
    return module


# --- which build ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "requirement"),
    [
        (ADA, "torch==2.13.0+cu126"),
        (ADA_NEW_DRIVER, "torch==2.13.0+cu130"),
        (BLACKWELL, "torch==2.13.0+cu130"),
        (BLACKWELL_OLD_DRIVER, "torch==2.11.0+cu128"),
        (PASCAL_NEW_DRIVER, "torch==2.13.0+cu126"),
        (TWO_CARDS, "torch==2.13.0+cu130"),
        (KERNEL_MODULE, "torch==2.13.0+cu126"),
        (OPEN_KERNEL_MODULE, "torch==2.13.0+cu130"),
        (OLD_DRIVER, "torch==2.13.0+cpu"),
        (BROKEN, "torch==2.13.0+cpu"),
    ],
    ids=[
        "ada-driver-570",
        "ada-driver-580",
        "blackwell-driver-581",
        "blackwell-driver-572",
        "pascal-driver-580",
        "two-cards-fit-the-newer",
        "container-without-nvidia-smi",
        "container-with-the-open-module",
        "driver-too-old",
        "driver-not-running",
    ],
)
def test_the_cuda_build_fits_both_the_driver_and_the_card(
    bootstrap: ModuleType, report: str, requirement: str
) -> None:
    """A build for a newer driver does not start; one without the card's kernels fails in a step."""
    build = bootstrap.choose_build("Linux", nvidia=report, gfx=[])
    assert build.requirement == requirement


def test_a_driver_that_is_not_running_is_quoted(bootstrap: ModuleType) -> None:
    """The user has a card, so "no card" would be a riddle; the driver's own words are not."""
    build = bootstrap.choose_build("Windows", nvidia=BROKEN, gfx=[])
    assert "couldn't communicate with the NVIDIA driver" in build.why


@pytest.mark.parametrize(
    ("gfx", "tag"),
    [
        (["gfx1100"], "rocm7.2"),
        (["gfx1036", "gfx1201"], "rocm7.2"),  # a processor's own graphics beside a real card
        (["gfx1036"], "cpu"),
        ([], "cpu"),
    ],
)
def test_the_rocm_build_needs_a_card_it_has_kernels_for(
    bootstrap: ModuleType, gfx: list[str], tag: str
) -> None:
    """The small graphics inside a Ryzen shows as a compute device and then fails at first use."""
    assert bootstrap.choose_build("Linux", nvidia=None, gfx=gfx).tag == tag


def test_macos_takes_the_only_build_there_is(bootstrap: ModuleType) -> None:
    """The vendor's index has nothing else for it, so it must not be asked."""
    build = bootstrap.choose_build("Darwin", nvidia=None, gfx=[])
    assert (build.tag, build.requirement) == ("default", "torch==2.13.0")


def test_amd_devices_are_named_from_the_kernels_topology(
    bootstrap: ModuleType, tmp_path: Path
) -> None:
    """The kernel lists the processor too, as version 0, and writes the stepping in decimal."""
    nodes = {"0": 0, "1": 110001, "2": 90010, "3": 90402}
    for name, version in nodes.items():
        (tmp_path / name).mkdir()
        text = f"cpu_cores_count 0\nsimd_count 96\ngfx_target_version {version}\nvendor_id 4098\n"
        (tmp_path / name / "properties").write_text(text)
    assert bootstrap.see_amd(tmp_path) == ["gfx1101", "gfx90a", "gfx942"]


def test_without_the_vendors_index_the_plain_pin_is_taken_and_said(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed network must still get the tested release, and the user must know what was lost."""
    monkeypatch.setattr(bootstrap, "_answers", lambda _url: False)
    build = bootstrap.settle_build(bootstrap.Build("cu130", "a card"))
    assert build.requirement == "torch==2.13.0"
    assert "cu130" in build.why
    assert "does not answer" in build.why


def test_a_reachable_vendors_index_is_taken(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(bootstrap, "_answers", lambda url: asked.append(url) or True)
    build = bootstrap.Build("cpu", "no card")
    assert bootstrap.settle_build(build) is build
    assert asked == ["https://download.pytorch.org/whl/cpu/torch/"]


# --- when to install -----------------------------------------------------------------------------


def key_of(bootstrap: ModuleType, text: str, **changes: object) -> str:
    arguments = {"python": "3.11.7", "sight": ("", "False", "False"), **changes}
    return str(bootstrap.stamp_key(text, **arguments))


def test_only_what_decides_the_install_changes_the_stamp(bootstrap: ModuleType) -> None:
    """A changed dependency must be installed; a changed lint rule must not ask for a network."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = key_of(bootstrap, text)
    assert key_of(bootstrap, text.replace("line-length = 100", "line-length = 90")) == base
    assert key_of(bootstrap, text.replace('"typer"', '"typer>=0.1"')) != base
    assert key_of(bootstrap, text, python="3.13.1") != base
    assert key_of(bootstrap, text, sight=("", "True", "False")) != base


@pytest.fixture
def installs(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Record the extras of each install instead of installing."""
    done: list[set[str]] = []
    monkeypatch.setattr(bootstrap, "_install", lambda *, extras: done.append(extras))
    return done


def test_a_second_start_installs_nothing(bootstrap: ModuleType, installs: list[set[str]]) -> None:
    """That is what makes it instant and lets it work without a network."""
    bootstrap.ensure_installed(extras=set())
    bootstrap.ensure_installed(extras=set())
    assert installs == [set()]


def test_extras_once_installed_stay(bootstrap: ModuleType, installs: list[set[str]]) -> None:
    """`demo` after `test` is instant, and `install` does not take the tools away."""
    bootstrap.ensure_installed(extras=set())
    bootstrap.ensure_installed(extras={"dev"})
    bootstrap.ensure_installed(extras=set())
    bootstrap.ensure_installed(extras=set(), again=True)
    assert installs == [set(), {"dev"}, {"dev"}]


def test_an_interrupted_install_leaves_no_stamp(
    bootstrap: ModuleType, installs: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where an older, finished install had left one: that one is no longer true."""
    bootstrap.ensure_installed(extras=set())

    def interrupted(**_extras: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.ensure_installed(extras={"dev"})
    assert bootstrap.read_stamp() == ("", set())
    assert len(installs) == 1


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"key": "x"}', '{"key": "x", "extras": 3}'])
def test_a_torn_stamp_counts_as_none(bootstrap: ModuleType, torn: str) -> None:
    bootstrap.STAMP.write_text(torn)
    assert bootstrap.read_stamp() == ("", set())


# --- what goes wrong -----------------------------------------------------------------------------


def test_too_little_disk_is_said_before_anything_is_written(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up half way through leaves the user with less than before."""
    bootstrap.PYTHON.unlink()
    monkeypatch.setattr(
        bootstrap.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1 << 30})
    )
    with pytest.raises(bootstrap.SetupError, match=r"needs 3 GiB of disk.*1\.0 GiB free"):
        bootstrap._make_venv(needed_bytes=3 << 30)


def test_a_missing_venv_module_names_the_package(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian ships Python without it, and Python's own message does not say what to install."""
    bootstrap.PYTHON.unlink()
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: name != "ensurepip")
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    with pytest.raises(bootstrap.SetupError, match=f"apt install {package}"):
        bootstrap._make_venv(needed_bytes=0)


def fake_pip(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the environment's Python be this one, and `-m pip install ...` be the given program."""
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen

    def start(_command: list[str], **options: object) -> subprocess.Popen[str]:
        return popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(bootstrap.subprocess, "Popen", start)


def test_pips_failure_shows_its_last_words_and_where_the_rest_is(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print('many lines'); print('ERROR: no matching distribution'); raise SystemExit(1)"
    fake_pip(bootstrap, monkeypatch, program)
    with pytest.raises(bootstrap.SetupError, match="no matching distribution") as caught:
        bootstrap.pip("torch", ["torch==0"])
    assert str(bootstrap.LOG) in str(caught.value)
    assert "many lines" in bootstrap.LOG.read_text()


# --- running -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3])
def test_the_childs_exit_code_is_handed_back(bootstrap: ModuleType, code: int) -> None:
    """Scripts tell a stopped run from a failed one by it."""
    assert bootstrap.run([sys.executable, "-c", f"raise SystemExit({code})"]) == code


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to die of")
def test_a_child_killed_by_a_signal_is_reported_as_a_shell_does(bootstrap: ModuleType) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert bootstrap.run([sys.executable, "-c", program]) == 128 + 9


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to a process group")
def test_ctrl_c_leaves_the_child_the_time_to_save() -> None:
    """Python's own subprocess.run kills a child a quarter of a second after Ctrl-C."""
    saver = (
        "import time\ntry:\n    print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.6); raise SystemExit(7)"
    )
    program = f"import bootstrap, sys; sys.exit(bootstrap.run([sys.executable, '-c', {saver!r}]))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells every process of the group
        assert process.wait(timeout=30) == 7


def test_bootstrap_imports_only_the_standard_library() -> None:
    """It runs on a bare Python, before anything is installed, the package itself included."""
    tree = ast.parse((ROOT / "bootstrap.py").read_text(encoding="utf-8"))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names <= sys.stdlib_module_names, names - sys.stdlib_module_names


def test_an_old_python_can_read_the_file_far_enough_to_be_told_so() -> None:
    """A syntax error on line 200 is no answer to "which Python do I need?"."""
    text = (ROOT / "bootstrap.py").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 7))
