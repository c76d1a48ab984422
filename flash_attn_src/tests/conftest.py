"""Puts the package's source tree and the test helpers on the path, and chooses where Triton kernels run."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

_TESTS = Path(__file__).resolve().parent
_ROOT = _TESTS.parent.parent
for _directory in (_ROOT, _TESTS, _TESTS.parent):
    if str(_directory) not in sys.path:
        sys.path.insert(0, str(_directory))

import pytest  # noqa: E402
import torch  # noqa: E402 - after the path

if TYPE_CHECKING:
    from flash_attn.core.ck_planner import Launch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gfx",
        metavar="TARGET",
        help="where tests run Triton's kernels on a CPU: run what is compiled for this AMD target, on a simulator",
    )
    parser.addoption("--all-kernels", action="store_true", help="all of AMD's assembly kernels instead of a sample")
    parser.addoption("--jit", action="store_true", help="with --gfx: compiled as by a user's Triton at the first call")


# Tests whose many cases repeat a few properties -> every which case runs always. The job of the long tests runs the
# others. With these steps each value of a parameter has cases; of pairs, each member.
STEPS = {
    "test_cross_entropy.py::test_kernels": 7,
    "test_dropout_mask.py::test_every_tiling_draws_the_definition": 3,
    "test_flex.py::test_masks_and_scores": 2,
    "test_flex.py::test_queries_and_keys_of_other_lengths": 5,
    "test_flex.py::test_small_types_with_grouped_heads": 7,
    "test_kvcache_kernels.py::test_pairs_of_options": 4,
    "test_kvcache_kernels.py::test_values_with_a_head_dim_of_their_own": 3,
    "test_layer_norm.py::test_kernels": 5,
    "test_ranges.py::test_equals_dense_attention_with_the_mask": 3,
    "test_sageattention.py::test_calls": 5,
    "test_spas_sage_attn.py::test_calls": 5,
    "test_spas_sage_attn.py::test_the_choice_and_attention_over_it": 4,
    "test_sdpa_switch.py::test_strides_of_the_result_are_pytorchs": 3,
    "test_sparse.py::test_equals_dense_attention_with_the_mask": 2,
    "test_triton_backend.py::test_head_dims_and_dtypes": 2,
    "test_triton_backend.py::test_masks_and_lengths": 2,
}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out the long tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = Counter[str]()
    for item in items:
        name = f"{item.path.name}::{item.name.partition('[')[0]}"
        if seen[name] % STEPS.get(name, 1):
            item.add_marker(pytest.mark.long)
        seen[name] += 1


def pytest_configure(config: pytest.Config) -> None:
    """numpy warns where the interpreter computes what a GPU computes silently: log2(0), exp2 of something large."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    jit = config.getoption("--jit")
    if jit and config.getoption("--gfx") is None:
        raise pytest.UsageError("--jit compiles for the target of --gfx, which is not given: --gfx gfx1031 --jit")
    if not torch.cuda.is_available() and not jit:
        # Triton reads this when a kernel is decorated, so it is set before any test module is imported.
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as within:
        if os.environ.get("TRITON_INTERPRET") == "1":
            import quick_interpreter

            quick_interpreter.patch(within)
        yield


@pytest.fixture(autouse=True, scope="session")
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """The simulated GPU of --gfx."""
    target = request.config.getoption("--gfx")
    if target is None:
        yield
        return
    if torch.cuda.is_available():
        raise pytest.UsageError(
            f"--gfx {target}: the tests run on this machine's GPU; hide it to run them on a simulator"
        )
    from amdgpu_simulator import gpu

    with gpu.pretend(target, jit=request.config.getoption("--jit")):
        yield


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    """Empties the cache of kernels before and after a test that changes how kernels are made."""
    from flash_attn.core import device

    device.clear_kernels()
    yield
    device.clear_kernels()


@pytest.fixture
def fp8_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 numbers that are rounded right: Triton's interpreter (3.7.1) loses the carry into the exponent."""
    if torch.cuda.is_available():
        return
    import numpy as np
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: Any, given: Any, expected: Any, mode: Any) -> Any:
        if expected is not interpreter.tl.float8e4nv:
            return convert(x, given, expected, mode)
        wide = convert(x, given, interpreter.tl.float32, mode).view(np.float32) if given.name != "fp32" else x
        small = torch.from_numpy(np.ascontiguousarray(wide)).to(torch.float8_e4m3fn)
        return small.view(torch.uint8).numpy().reshape(x.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def interpreter_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bf16 as integers and multiplies those (seen in 3.7.1): widen them first."""
    if torch.cuda.is_available():
        return
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest))


def _use_tiles(monkeypatch: pytest.MonkeyPatch, block_k: int) -> None:
    from flash_attn.kernels import tuning

    small = tuning.Config(32, 16, 4, 1, block_k=block_k)
    if not torch.cuda.is_available():
        real = tuning.config

        def config(target: str, variant: Any) -> Any:
            if variant.op == "bwd-ddiagonals":  # its tiles are squares
                return small._replace(block_m=16)
            return small if variant.op.startswith(("fwd", "bwd", "probabilities")) else real(target, variant)

        monkeypatch.setattr(tuning, "config", config)


@pytest.fixture
def _tiles(fresh_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Tiles so small that short sequences span several."""
    _use_tiles(monkeypatch, 0)


@pytest.fixture
def _deep_tiles(fresh_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """The same, with the head dim in pieces, as targets without matrix cores take it."""
    _use_tiles(monkeypatch, 16)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The planner of Composable Kernel, built from these sources."""
    from flash_attn.core import ck_planner

    from rocm_wheels.compile.ck import planner as build
    from rocm_wheels.paths import ROOT

    path = build.build(tmp_path_factory.mktemp("planner"), cache=ROOT / "build" / "test-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ck_planner, "PATH", path)
        ck_planner.library.cache_clear()
        yield
    ck_planner.library.cache_clear()


@pytest.fixture
def done(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """Records the launches of the test's calls and runs each on the CPU:

    in PyTorch, or with --gfx the kernel's code.
    """
    import ck_recorded

    with ck_recorded.running(request) as launches:
        yield launches
