"""Puts the package's source tree and the test helpers on the path, and chooses where Triton kernels run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
_ROOT = _TESTS.parent.parent
for _directory in (_ROOT, _ROOT / "tests", _TESTS, _TESTS.parent):
    if str(_directory) not in sys.path:
        sys.path.insert(0, str(_directory))

import pytest  # noqa: E402
import torch  # noqa: E402 - after the path

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it is set before any test module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gfx",
        metavar="TARGET",
        help="where tests run Triton's kernels on a CPU: run what is compiled for this AMD target, on a simulator",
    )


@pytest.fixture(autouse=True, scope="session")
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """The pretended GPU of --gfx."""
    target = request.config.getoption("--gfx")
    if target is None:
        yield
        return
    if torch.cuda.is_available():
        raise pytest.UsageError(
            f"--gfx {target}: the tests run on this machine's GPU; hide it to run them on a simulator"
        )
    import simulated_gpu

    with simulated_gpu.pretend(target):
        yield


def _use_tiles(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    from flash_attn.backends import triton_kernels
    from flash_attn.kernels import tuning
    from flash_attn.runtime import launch

    small = tuning.Config(32, 16, 4, 1, depth=depth)
    if not torch.cuda.is_available():
        monkeypatch.setattr(tuning, "config", lambda target, variant: small)  # noqa: ARG005
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(triton_kernels, "_kernels", {})


@pytest.fixture
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that short sequences span several."""
    _use_tiles(monkeypatch, 0)


@pytest.fixture
def _deep_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with the head dim in pieces, as targets without matrix cores take it."""
    _use_tiles(monkeypatch, 16)
