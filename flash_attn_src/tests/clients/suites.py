"""A program's own tests, from its checkout, by flash_attn.

    python suites.py PROGRAM DIRECTORY [arguments for pytest]

PROGRAM: diffusers, transformers, xformers, yunchang. DIRECTORY: its checkout. Arguments for pytest come last, so that a
`-k` there takes the place of the choice that is made here. yunchang's tests are scripts, and take none.

The environment has flash_attn, pytest and what the tests import. diffusers' tests call the wheels flash-attn-3 and
sageattention, too, those of transformers and yunchang flash-attn-3.

Without a GPU the CPU counts as one: tensors that a test makes on the device "cuda" are on the CPU, and PyTorch's
operations compute attention, or with TRITON_INTERPRET=1 the Triton kernels in Triton's interpreter, which computes bf16
wrongly. Tests that measure a GPU, its streams or its memory do not run.

Ends with what pytest returns, or with 1 if no test has called flash_attn.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import flash_attn
import pytest
import torch
import torch.distributed as dist
import two_ranks
from flash_attn.attention import backends
from on_cpu import Cpu

GPU = torch.cuda.is_available()


class Counted:
    """A backend that counts its calls."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.backend, name)
        if name not in ("forward", "backward", "with_kvcache"):
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return value(*args, **kwargs)

        return counted


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Every call of attention by one backend, which counts them: the GPU's, the interpreter's or the CPU's."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    counted = Counted(backends.gpu_backend() if GPU or interpreted else backends.select(torch.empty(0)))
    with backends.using(counted):
        yield counted


def register_for_every_device() -> None:
    """Operators that a program registers for GPUs alone are registered for every device, if there is no GPU."""
    if not GPU:
        register = torch.library.custom_op
        torch.library.custom_op = lambda *names, device_types=None, **more: register(*names, **more)  # noqa: ARG005


def run_pytest(words: list[str], plugin: object | None = None) -> int:
    """pytest's exit code for the tests of the current directory. 1 if they pass and none has called flash_attn."""
    sys.path.insert(0, str(Path.cwd()))
    with counting() as counted:
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *words], [] if plugin is None else [plugin]))
    print(f"{counted.calls} calls of flash_attn")
    return code or int(not counted.calls)


def diffusers(words: list[str]) -> int:
    """The tests of attention backends on tiny models of Flux and Qwen-Image, by the backends of these packages."""
    sys.path[:0] = ["src", str(Path.cwd())]
    register_for_every_device()
    tests = importlib.import_module("tests.models.testing_utils.attention")
    utils = importlib.import_module("tests.models.testing_utils.utils")
    names = tests.AttentionBackendName
    ours = [names.FLASH, names.FLASH_VARLEN, names._FLASH_3, names._FLASH_VARLEN_3, names.SAGE, names.SAGE_VARLEN]
    tests._ALL_BACKEND_PARAMS[:] = [pytest.param(name, id=name.value) for name in ours]  # the list of each test
    utils._BF16_REQUIRED_BACKENDS = {*utils._BF16_REQUIRED_BACKENDS, *(ours if GPU else ours[4:])}
    models = [f"tests/models/transformers/test_models_transformer_{name}.py" for name in ("flux", "qwenimage")]
    # Qwen-Image has a mask with a gap. diffusers gives masks to its varlen backends alone, which take the first keys.
    # PyTorch's inductor cannot lower their slices by lengths of a mask.
    left_out = "(Qwen and (not varlen or close_to_native)) or (varlen and test_compile)"
    chosen = f"TransformerAttentionBackend and not ({left_out})"
    return run_pytest([*models, "-k", chosen, *words])


def transformers(words: list[str]) -> int:
    """The tests of FlashAttention-2 and -3 on tiny models of Llama and Mistral."""
    sys.path.insert(0, "src")
    os.environ["RUN_SLOW"] = "1"
    utils = importlib.import_module("transformers.utils.import_utils")
    if not GPU:
        with (  # the answers are kept, so nothing may ask before
            mock.patch.object(utils, "is_torch_cuda_available", return_value=True),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        ):
            assert utils.is_flash_attn_2_available(), "transformers does not see flash_attn"
            assert utils.is_flash_attn_3_available(), "transformers does not see flash_attn_3: install flash-attn-3"
        testing = importlib.import_module("transformers.testing_utils")
        testing.require_torch_gpu = testing.require_torch_accelerator = lambda test: test
    models = [f"tests/models/{name}/test_modeling_{name}.py" for name in ("llama", "mistral")]
    return run_pytest([*models, "-k", "ModelTest and (flash_att or fa2 or fa3)", "-o", "log_cli=false", *words])


class OfOperators:
    """A plug-in of pytest: of the tests with operators of xformers, those with one of `operators`."""

    def __init__(self, base: type, operators: set[type]) -> None:
        self.base = base
        self.operators = operators

    def _among(self, value: object) -> set[type]:
        if isinstance(value, type) and issubclass(value, self.base):
            return {value}
        return set().union(*map(self._among, value)) if isinstance(value, list | tuple) else set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        parameters = [item.callspec.params if hasattr(item, "callspec") else {} for item in items]
        result = [self._among(list(some.values())) for some in parameters]
        dropped = [item for item, some in zip(items, result, strict=True) if some and not some & self.operators]
        items[:] = [item for item in items if item not in set(dropped)]
        config.hook.pytest_deselected(items=dropped)


# These call operators of CUTLASS, or ask for the device of a tensor on a GPU.
OF_A_GPU = "test_attn_bias_to_copy or test_f16_biasf32 or test_f32_biasf16 or test_wrong_alignment or test_cuda_streams"


def xformers(words: list[str]) -> int:
    """0.0.30: tests/test_mem_eff_attention.py for the operators of fmha.flash."""
    sys.modules["flash_attn_interface"] = None  # type: ignore[assignment] # it fails beside the wheel flash-attn-3
    os.environ["XFORMERS_IGNORE_FLASH_VERSION_CHECK"] = "1"  # it takes 2.7.1 to 2.7.4
    sys.path.insert(0, str(Path.cwd()))
    register_for_every_device()
    flash = importlib.import_module("xformers.ops.fmha.flash")
    del sys.modules["flash_attn_interface"]
    assert flash_attn.__version__ == flash.FLASH_VERSION
    if not GPU:
        for operator in (flash.FwOp, flash.BwOp):
            operator.SUPPORTED_DEVICES = {"cpu"}
            operator.CUDA_MINIMUM_COMPUTE_CAPABILITY = (0, 0)
            operator.not_supported_reasons = classmethod(
                functools.partial(_reasons, operator.not_supported_reasons.__func__)
            )
        importlib.import_module("tests.utils").cuda_only = lambda test: test
        words = ["-k", f"not ({OF_A_GPU})", *words]
    base = importlib.import_module("xformers.ops.fmha.common").AttentionOpBase
    with contextlib.nullcontext() if GPU else Cpu():
        return run_pytest(["tests/test_mem_eff_attention.py", *words], OfOperators(base, {flash.FwOp, flash.BwOp}))


def _reasons(function: Callable[..., list[str]], operator: type, inputs: object) -> list[str]:
    """Why an operator does not take the inputs, without the reason that bf16 asks for a newer GPU."""
    return [reason for reason in function(operator, inputs) if not reason.startswith("bf16 is only supported")]


# The scripts of yunchang, and their arguments. gloo cannot send to its own rank, as a backward of a ring of one does.
# test_hybrid_qkvpacked_attn.py does not run: 0.6.4's function for packed tensors lacks the argument attn_processor.
# Its function for FlashAttention-3 has no causal mask.
_HYBRID = ("test_hybrid_attn.py", "--seqlen", "64")
SCRIPTS: tuple[tuple[str, ...], ...] = (
    ("test_ulysses_attn.py",),
    (*_HYBRID, "--causal", "--attn_impl", "fa", "--sp_ulysses_degree", "1", "--use_bwd"),
    (*_HYBRID, "--causal", "--attn_impl", "fa", "--sp_ulysses_degree", "1", "--use_bwd", "--ring_impl_type", "zigzag"),
    (*_HYBRID, "--causal", "--attn_impl", "fa", "--sp_ulysses_degree", "2"),
    (*_HYBRID, "--attn_impl", "fa3", "--sp_ulysses_degree", "1"),
    (*_HYBRID, "--attn_impl", "fa3", "--sp_ulysses_degree", "2"),
    (*_HYBRID, "--causal", "--attn_impl", "sage_auto", "--sp_ulysses_degree", "1"),
    (*_HYBRID, "--causal", "--attn_impl", "sage_auto", "--sp_ulysses_degree", "2"),
)
# The bar of test_hybrid_attn.py, for every difference that a script prints.
MOST_YUNCHANG = 0.1


def _script(name: str, words: tuple[str, ...], rank: int) -> list[str]:  # noqa: ARG001
    """What a script of yunchang prints on a rank."""
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        if not GPU:
            stack.enter_context(Cpu())
            stack.enter_context(mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0))
            stack.enter_context(mock.patch.object(torch.cuda, "reset_peak_memory_stats"))
        # two_ranks makes the group and ends it.
        stack.enter_context(
            mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
        )
        stack.enter_context(mock.patch.object(sys, "argv", [name, *words]))
        stack.enter_context(contextlib.redirect_stdout(said))
        sys.path[:0] = [str(Path.cwd()), "test"]
        runpy.run_path(f"test/{name}", run_name="__main__")
    return [said.getvalue()]


def _differences(*printed: str) -> list[float]:
    """The largest element of every difference that the ranks print. Rank 0 alone prints what each line is."""
    lines = [re.findall(r"(?:^(.*):\n)?^\[(?:Rank#)?\d+\] max ([^,]+)", text, re.MULTILINE) for text in printed]
    names = [name for name, _ in lines[0]]
    assert all(len(some) == len(names) for some in lines)
    return [float(value) for some in lines for name, (_, value) in zip(names, some, strict=True) if "diff" in name]


def yunchang(words: list[str]) -> int:
    """Its scripts in two processes, over gloo without two GPUs. They print the differences to one call of the whole."""
    if words:
        raise SystemExit(f"got {' '.join(words)}, wanted no arguments for pytest: yunchang's tests are scripts")
    failed = 0
    for name, *more in SCRIPTS:
        try:
            result = _differences(*two_ranks.run(functools.partial(_script, name, tuple(more))))
            passed, said = (
                bool(result) and max(result) <= MOST_YUNCHANG,
                f"{len(result)} differences up to {max(result)}",
            )
        except AssertionError as error:
            passed, said = False, str(error)
        failed += not passed
        print(f"{name} {' '.join(more)}: {'passed' if passed else 'FAILED'}, {said}", flush=True)
    print(f"{len(SCRIPTS) - failed} passed, {failed} failed")
    return int(failed > 0)


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "diffusers": diffusers, "transformers": transformers, "xformers": xformers, "yunchang": yunchang,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="A program's own tests, from its checkout, by flash_attn.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("directory", type=Path)
    options, words = parser.parse_known_args()
    os.chdir(options.directory)
    print(f"{options.program} in {options.directory}, flash_attn {flash_attn.__version__}, {'GPU' if GPU else 'CPU'}")
    return PROGRAMS[options.program](words)


if __name__ == "__main__":
    sys.exit(main())
