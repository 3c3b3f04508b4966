"""What holds for every test: a quiet CPU, no hub, and the meaning of the marks `gpu` and `slow`.

The environment is set here, above any import of torch, because OpenMP and the hub client read it
once, when they are loaded.
"""

import os
import tempfile

# One thread each: the models are tiny, and the files of tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is no test of ours
# The person's own registry is none of a test's business; nothing is there unless a test makes it.
os.environ["OUTSIZE_REGISTRY"] = f"{tempfile.gettempdir()}/outsize-no-registry-{os.getpid()}"
os.environ.pop("OUTSIZE_REQUESTER", None)

# One holder of the card for all processes of a test run: they start commands, and each other.
os.environ.setdefault("OUTSIZE_CARD_LENT", f"tests-{os.getpid()}")

import functools

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine or this order leaves out."""
    nameless = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if nameless:  # an address differs between the workers of one run, which then run no test at all
        raise pytest.UsageError(f"give these cases ids: {nameless}")
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="gpu: torch sees no CUDA or ROCm device"))


@functools.cache
def _has_gpu() -> bool:
    """Whether torch, which only the gpu tests make us import here, sees a device."""
    import torch

    return torch.cuda.is_available()
