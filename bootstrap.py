"""Start Outsize from a plain checkout: nothing to install first but Python 3.11.

    python bootstrap.py demo                 a whole fine-tuning on teaching data, on any machine
    python bootstrap.py train recipe.yaml    any word but the next two is handed to `outsize`
    python bootstrap.py install              install again, looking at the hardware anew
    python bootstrap.py test [--quick] ...   lint, types and tests; other arguments go to pytest

Why this file exists: the one dependency no package index can choose is torch, whose right build
hangs on the graphics card and its driver. So this file looks at the machine, says which build it
takes and why, and installs that and Outsize into `.venv` beside itself. A stamp, written last,
makes every later start instant and offline; without it, an interrupted install just continues.

Only the standard library, because this runs before anything else is there. Set OUTSIZE_TORCH to
`cpu`, `cu126`, `cu130`, `rocm7.2` or `default` (your ordinary index) to overrule the choice.
"""

import sys

MINIMUM_PYTHON = (3, 11)
if sys.version_info < MINIMUM_PYTHON:  # said before an import that an older Python cannot do
    sys.exit("Outsize needs Python 3.11 or newer; this is " + sys.version.split()[0] + ".")

import collections
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "outsize-stamp.json"
LOG = VENV / "outsize-install.log"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

TORCH = "2.13.0"  # the release the tests run on; pyproject.toml states the range that may work
VENDOR_INDEX = "https://download.pytorch.org/whl/"
# One process for each core, whole files to each: fixtures are shared within a file.
SIDE_BY_SIDE = ("-n", "auto", "--dist", "loadfile")
PROBE_S = 4.0  # a reachable index answers in well under one second
CPU_BYTES, GPU_BYTES = 3 << 30, 12 << 30  # disk taken by the environment: 2.2 and 9 GiB, and room


class SetupError(Exception):
    """Something only the user can put right; its text says what and how."""


@dataclass(frozen=True)
class Build:
    """One build of torch, and the sentence that says why it is the one."""

    tag: str  # the vendor index's folder: cpu, cu130, ...; "default" is the ordinary index
    why: str
    version: str = TORCH

    @property
    def requirement(self) -> str:
        """The exact pin. The local part makes pip replace another build of the same release."""
        return f"torch=={self.version}" + ("" if self.tag == "default" else f"+{self.tag}")


# Best first. Source: "PyTorch CUDA Support Matrix" in pytorch/pytorch's RELEASE.md, and NVIDIA's
# table of minimum drivers (any CUDA 12 runs on driver 525, CUDA 13 needs 580). torch 2.13 has no
# build for a Blackwell card whose driver is older than 580, so there 2.11 is the newest that runs.
CUDA_BUILDS = (  # folder, release, oldest driver, oldest and newest compute capability
    ("cu130", TORCH, 580, (7, 5), (99, 0)),
    ("cu126", TORCH, 525, (5, 0), (9, 0)),
    ("cu128", "2.11.0", 570, (7, 5), (12, 1)),
)
ROCM_TAG = "rocm7.2"
# The cards that build has kernels for; on Linux only the kernel's own amdgpu driver is needed.
ROCM_CARDS = frozenset(
    """gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102
    gfx1150 gfx1151 gfx1200 gfx1201""".split()  # noqa: SIM905 - a list of names, not of quotes
)


def main(arguments: Sequence[str]) -> int:
    """Install what is missing, then do what was asked; the exit code is that of the work."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__)
        return 0
    word, *rest = arguments
    try:
        ensure_installed(extras={"dev"} if word == "test" else set(), again=word == "install")
    except SetupError as problem:
        print(f"\nbootstrap: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the same command continues the install.", file=sys.stderr)
        return 130
    if word == "install":
        return 0
    return run_tests(rest) if word == "test" else run([PYTHON, "-m", "outsize", word, *rest])


# --- what this machine is ------------------------------------------------------------------------


def choose_build(system: str, *, nvidia: str | None, gfx: Sequence[str]) -> Build:
    """Choose the torch build that fits, from what `see_nvidia` and `see_amd` reported."""
    if system == "Darwin":
        return Build("default", "macOS has one build, for processor and Apple GPU alike")
    if nvidia is not None:
        return _choose_cuda(nvidia)
    usable = [name for name in gfx if name in ROCM_CARDS]
    if usable:
        return Build(ROCM_TAG, f"AMD {', '.join(usable)} seen by the amdgpu driver")
    if gfx:
        return Build("cpu", f"PyTorch's {ROCM_TAG} build has no kernels for {', '.join(gfx)}")
    amd = "no AMD compute device" if system == "Linux" else "AMD cards are looked for on Linux only"
    return Build("cpu", f"no NVIDIA driver found; {amd}")


def _choose_cuda(report: str) -> Build:
    cards = re.findall(r"^(.+), (\d+)\.(\d+), (\d+)\.[\d.]+\s*$", report, re.MULTILINE)
    module = re.search(r"Kernel Module.*?\s(\d+)\.\d", report)
    if cards:  # with several cards, fit the newest: it is the one to train on
        name, major, minor, driver = max(cards, key=lambda card: (int(card[1]), int(card[2])))
        capability = (int(major), int(minor))
    elif module:  # a container without nvidia-smi tells the driver but not the card
        name, capability, driver = "an NVIDIA card of unknown age", (8, 0), module[1]
    else:
        first_line = (report.strip().splitlines() or ["nothing"])[0]
        return Build("cpu", f"nvidia-smi names no card it can use; it said: {first_line}")
    seen = f"{name} (compute {capability[0]}.{capability[1]}), driver {driver}"
    for tag, version, oldest_driver, oldest, newest in CUDA_BUILDS:
        if int(driver) >= oldest_driver and oldest <= capability <= newest:
            return Build(tag, seen, version)
    return Build(
        "cpu", f"{seen}: no CUDA build runs on that pair; update the driver to 580 or newer"
    )


def see_nvidia() -> str | None:
    """Return what the NVIDIA driver says of itself, or None where there is none."""
    program = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if program:
        query = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
            return answer.stdout or answer.stderr
    kernel = Path("/proc/driver/nvidia/version")
    return kernel.read_text() if kernel.exists() else None


def see_amd(topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[str]:
    """Name the AMD compute devices as the Linux kernel lists them, such as gfx1100."""
    names = []
    for path in sorted(topology.glob("*/properties")):
        with contextlib.suppress(OSError):  # a container may list a device that it may not use
            match = re.search(r"^gfx_target_version (\d+)$", path.read_text(), re.MULTILINE)
            names += [gfx_name(int(match[1]))] if match and int(match[1]) else []
    return names


def gfx_name(target_version: int) -> str:
    """Turn the kernel's decimal 110001 into gfx1101: major, minor, and stepping in hexadecimal."""
    major, rest = divmod(target_version, 10_000)
    return f"gfx{major}{rest // 100:x}{rest % 100:x}"


def settle_build(build: Build) -> Build:
    """Give way to the ordinary index where the vendor's does not answer, and say what that means."""
    if build.tag == "default" or _answers(f"{VENDOR_INDEX}{build.tag}/torch/"):
        return build
    means = {"Linux": "publicly the CUDA build", "Windows": "publicly a CPU-only build"}
    return Build(
        "default",
        f"{build.why}. The {build.tag} build would fit, but {VENDOR_INDEX} does not answer, so the"
        f" plain release comes from your ordinary index"
        f" ({means.get(platform.system(), 'the only build there is')})",
    )


def _answers(url: str) -> bool:
    import urllib.request  # here, as it takes longer to load than a later start takes in all

    request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - a constant https address
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S):  # noqa: S310
            return True
    except OSError:  # URLError, HTTPError and time-outs are all OSErrors
        return False


# --- installing ----------------------------------------------------------------------------------


def ensure_installed(*, extras: set[str], again: bool = False) -> None:
    """Install unless the stamp says that all of it is already here. Without work: no pip, no net."""
    wanted = stamp_key(
        (ROOT / "pyproject.toml").read_text("utf-8"),
        python=platform.python_version(),
        sight=(
            os.environ.get("OUTSIZE_TORCH", ""),
            str(bool(shutil.which("nvidia-smi"))),  # a look at presence is free, a question is not
            str(Path("/dev/kfd").exists()),
        ),
    )
    key, have = read_stamp()
    if not again and PYTHON.exists() and key == wanted and extras <= have:
        return
    STAMP.unlink(missing_ok=True)
    _install(extras=extras | have)
    STAMP.write_text(json.dumps({"key": wanted, "extras": sorted(extras | have)}))


def stamp_key(pyproject: str, *, python: str, sight: tuple[str, ...]) -> str:
    """Hash all that decides what gets installed; the tools' settings in pyproject.toml do not."""
    tables = tomllib.loads(pyproject)
    parts = [tables["project"], tables["build-system"], python, sight, TORCH]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_stamp() -> tuple[str, set[str]]:
    """Read the key and extras of the last finished install; a torn stamp counts as none."""
    try:
        stamp = json.loads(STAMP.read_text())
        return stamp["key"], set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", set()


def _install(*, extras: set[str]) -> None:
    override = os.environ.get("OUTSIZE_TORCH")
    build = (
        Build(override, "OUTSIZE_TORCH says so")
        if override
        else choose_build(platform.system(), nvidia=see_nvidia(), gfx=see_amd())
    )
    build = settle_build(build)
    print(f"torch: {build.requirement}\n  why: {build.why}", flush=True)
    _make_venv(needed_bytes=CPU_BYTES if build.tag == "cpu" else GPU_BYTES)
    vendor = [] if build.tag == "default" else ["--index-url", VENDOR_INDEX + build.tag]
    pip("torch", [build.requirement, *vendor])
    project = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    # torch is named again, so that no dependency can draw in another build of it.
    pip("outsize", ["--editable", project, build.requirement])


def _make_venv(*, needed_bytes: int) -> None:
    if PYTHON.exists() and _runs_pip():
        return
    missing = [name for name in ("venv", "ensurepip") if not importlib.util.find_spec(name)]
    if missing:
        package = "python{}.{}-venv".format(*sys.version_info)
        raise SetupError(f"this Python lacks {missing}. On Debian or Ubuntu: apt install {package}")
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < needed_bytes:
        need, free = needed_bytes / 2**30, free_bytes / 2**30
        raise SetupError(
            f"installing needs {need:.0f} GiB of disk; {ROOT} has {free:.1f} GiB free."
        )
    print(f"environment: {VENV}", flush=True)
    import venv

    try:
        venv.create(VENV, clear=True, with_pip=True, symlinks=os.name != "nt")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"cannot make {VENV}: {error}") from error


def _runs_pip() -> bool:
    """Whether the environment is whole and of this Python's version (else it is made anew)."""
    check = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    return subprocess.run([PYTHON, "-c", check], capture_output=True, check=False).returncode == 0


def pip(title: str, arguments: Sequence[str]) -> None:
    """Run pip install, all its words in the log, the latest on one line of the terminal."""
    started, tail = time.monotonic(), collections.deque[str](maxlen=15)
    live = sys.stdout.isatty()
    command = [str(PYTHON), "-m", "pip", "install", "--progress-bar=off", "--no-input", *arguments]
    print(f"installing {title} ...", end="" if live else "\n", flush=True)
    work = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=child_environment(),
    )
    with LOG.open("a", encoding="utf-8") as log, work:
        for line in work.stdout or ():
            log.write(line)
            tail.append(line.rstrip())
            if live:
                print(f"\r{f'installing {title}: {line.strip()}'[:78]:<78}", end="", flush=True)
    if work.returncode:
        lines = "\n  ".join(tail)
        raise SetupError(f"pip could not install {title}. Its last words:\n  {lines}\nAll: {LOG}")
    done = f"installed {title} in {time.monotonic() - started:.0f} s"
    print(f"\r{done:<78}" if live else done, flush=True)


# --- running -------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """Return our environment without PYTHONHOME, which names another Python's library."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}


def run(command: Sequence[str | Path]) -> int:
    """Run a child to its end; Ctrl-C and termination are its to answer: a trainer saves first."""
    child = subprocess.Popen([str(part) for part in command], env=child_environment())

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    while child.returncode is None:
        with contextlib.suppress(KeyboardInterrupt):  # the terminal has told the child as well
            child.wait()
    signal.signal(signal.SIGTERM, before)
    code = child.returncode
    return code if code >= 0 else 128 - code  # died of a signal: say it as a shell does


def run_tests(arguments: Sequence[str]) -> int:
    """Run every check, the cheap first, show each outcome, and fail if any failed."""
    python: list[str | Path] = [PYTHON, "-m"]
    checks = {
        "ruff check": [*python, "ruff", "check", ROOT],
        "ruff format": [*python, "ruff", "format", "--check", ROOT],
        "mypy": [*python, "mypy", "--config-file", ROOT / "pyproject.toml"],
        "codespell": [*python, "codespell_lib", "--toml", ROOT / "pyproject.toml", ROOT],
    }
    os.chdir(ROOT)
    failed = []
    for name, command in {} if "--quick" in arguments else checks.items():
        print(f"== {name}", flush=True)
        failed += [name] if run(command) else []
    tests = [argument for argument in arguments if argument != "--quick"]
    print("== pytest", flush=True)
    failed += ["pytest"] if run([*python, "pytest", *SIDE_BY_SIDE, *tests]) else []
    if failed:  # on success pytest's closing line stays the last one
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
