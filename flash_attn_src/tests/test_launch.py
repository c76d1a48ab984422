"""From the store to a launch: the arguments that the driver receives, and errors for damaged stores."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
import types
import warnings
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_launcher
import pytest
import torch
from flash_attn.attention.backends import recording
from flash_attn.attention.backends.ck.parameters import Parameters
from flash_attn.core import ck_planner, device, driver, jit, layer, store, stored
from flash_attn.core.arguments import Arguments
from flash_attn.core.ck_planner import Launch
from flash_attn.kernels import launches, switches, targets, tuning
from flash_attn.kernels.variants import Variant, table
from triton.backends.amd import compiler
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

IMAGE = bytes(range(256)) * 8
VARIANT = Variant("fwd", "bf16", 64, "plain")


def write(path: Path, manifest: object = None) -> Path:
    """A store of one Triton kernel and one of Composable Kernel."""
    common = {"sha256": hashlib.sha256(IMAGE).hexdigest(), "shared": 64, "threads": 256, "constants": {}}
    kernels = {VARIANT.name: common | {"symbol": "attn_fwd", "params": "PPif0", "signature": 0}}
    kernels[VARIANT.name] |= {"constants": {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_XCDS": 8}}
    kernels["ck-fwd"] = common | {"symbol": "kentry", "params": "B9"}
    for entry in kernels.values():
        entry.update(group="triton-fwd-d64", offset=3, size=len(IMAGE))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        whole = {"format": store.FORMAT, "kernels": kernels, "compiler": {}, "signatures": ["q k group scale"]}
        archive.writestr("manifest.json", json.dumps(whole if manifest is None else manifest))
        archive.writestr("triton-fwd-d64", b"..." + IMAGE + b"...")
    return path


def gpu(index: int = 0, name: str = "gfx942:sramecc+:xnack-") -> driver.Driver:
    """A GPU as torch tells of it."""
    properties = SimpleNamespace(gcnArchName=name, major=9, minor=0, multi_processor_count=228)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        return driver.Driver(index)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """A mock gfx942 with that store, and the list of its launches: (kernel, arguments)."""
    result: list[Any] = []

    class Kernel(fake_launcher.Kernel):
        launched = result

    fake = types.ModuleType("flash_attn._launcher")
    fake.bind = lambda platform: result.append(platform)  # type: ignore[attr-defined]
    fake.Kernel = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn._launcher", fake)
    monkeypatch.setattr(sys.modules["flash_attn"], "_launcher", fake, raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(stored, "_current_stream", lambda index: 7 + index)
    archive = store.Store(write(tmp_path / "gfx942.zip"))
    monkeypatch.setattr(store, "open_store", lambda _target: archive)
    with device.using(gpu(), 0):
        yield result


@pytest.mark.parametrize(
    ("target", "hip", "opened"),
    [
        ("gfx1103", "6.4.43482", "gfx11-generic"),
        ("gfx1100", "7.14.0", "gfx1100"),  # its own before the generic one
        ("gfx1103", "6.3.42131", None),
        ("gfx942", "7.2.0", "gfx942"),
    ],
)
def test_a_gpu_loads_the_store_of_its_target_or_of_its_family(
    target: str, hip: str, opened: str | None, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = store.open_store("gfx942")
    asked: list[str] = []

    def open_store(target: str) -> store.Store | None:
        if target not in ("gfx942", "gfx1100", "gfx11-generic"):
            return None
        asked.append(target)
        return archive

    monkeypatch.setattr(store, "open_store", open_store)
    monkeypatch.setattr(jit, "triton_problem", lambda: "no Triton")
    monkeypatch.setattr(torch.version, "hip", hip)
    if opened is None:
        with pytest.raises(store.KernelError, match=f"this flash_attn has no kernels for {target}"):
            gpu(name=target).kernel(VARIANT)
    else:
        gpu(name=target).kernel(VARIANT)
    assert asked == ([] if opened is None else [opened])
    assert launched == ([] if opened is None else ["hip"])


def test_a_variant_comes_from_the_store(launched: list[Any]) -> None:
    kernel = device.kernel(0, VARIANT)
    tensor = torch.zeros(1)
    kernel.launch((1, 2, 3), (tensor, None), (4, 0.5))
    assert (kernel.block_m, kernel.block_n, kernel.num_xcds) == (128, 64, 8)
    assert device.kernel(0, VARIANT) is kernel
    given = (IMAGE, "attn_fwd", "PPif0", 64, 256, VARIANT.name)
    assert launched == ["hip", (given, (0, 7, 1, 2, 3, tensor.data_ptr(), None, 4, 0.5))]
    device.clear_kernels()
    assert device.kernel(0, VARIANT) is not kernel


def test_a_kernel_for_nvidia_takes_the_driver_of_cuda(launched: list[Any], tmp_path: Path) -> None:
    stored.StoreKernel(store.Store(write(tmp_path / "sm_90.zip")), VARIANT.name, 0)
    assert launched == ["cuda"]


def test_a_launch_holds_its_tensors(launched: list[Any]) -> None:
    """What a kernel reads lives until it is launched: nothing but the launch refers to the tensor."""
    kernel = device.kernel(0, VARIANT)
    gone: list[str] = []

    def launch(*_: Any) -> None:
        launched.append(list(gone))

    kernel._launch = launch  # type: ignore[attr-defined]
    tensor = torch.zeros(8)
    weakref.finalize(tensor, gone.append, "freed")
    tensors = [tensor]
    del tensor
    kernel.launch((1, 1, 1), (tensors.pop(),), ())
    assert launched[-1] == []
    assert gone == ["freed"]


def test_launches_planned_by_composable_kernel_run(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ck_planner, "plan", lambda _call, _packed: [Launch("ck-fwd", (4, 5, 6), b"arguments")] * 2)
    parameters = Parameters()
    tensor = torch.zeros(1)
    assert parameters.address(tensor) == tensor.data_ptr()
    with device.using(device.of(0)):
        parameters.run("forward", b"")
    kernel = device.of(0).stored("ck-fwd")  # type: ignore[attr-defined]
    assert (kernel.block_m, kernel.block_n, kernel.num_xcds) == (0, 0, 1)
    given = (IMAGE, "kentry", "B9", 64, 256, "ck-fwd")
    assert launched[1:3] == [(given, (0, 7, 4, 5, 6, b"arguments"))] * 2


@pytest.mark.usefixtures("launched")
def test_a_wheel_without_its_launcher_says_to_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["flash_attn"], "_launcher")
    monkeypatch.setitem(sys.modules, "flash_attn._launcher", None)
    with pytest.raises(store.KernelError, match=r"the launcher does not load \(.*_launcher.*: reinstall the wheel"):
        device.kernel(0, VARIANT)


@pytest.mark.usefixtures("launched")
def test_a_missing_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(store.KernelError, match=r"no kernel ck-bwd for gfx942 .*PYTORCH_ROCM_ARCH=gfx942 "):
            gpu().run([Launch("ck-bwd", (1, 1, 1), b"")], ())
        monkeypatch.setattr(store, "open_store", lambda _: None)


OTHER = Variant("fwd", "bf16", 128, "plain")


@pytest.mark.parametrize("there", [True, False], ids=["another kernel", "no store"])
def test_triton_compiles_missing_kernels_or_an_error_is_raised(
    there: bool, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack = "this flash_attn has no kernel fwd-bf16-d128 for gfx942"
    if not there:
        monkeypatch.setattr(store, "open_store", lambda _: None)
        monkeypatch.setattr(store, "targets", lambda: ("gfx1100", "gfx90a"))
        lack = "this flash_attn has no kernels for gfx942 (device 3); its targets: gfx1100, gfx90a"
    monkeypatch.setattr(driver, "_warned", set())
    monkeypatch.setattr(jit, "interpreting", lambda: False)
    monkeypatch.setattr(jit, "triton_problem", lambda: "Triton is too old")
    with pytest.raises(store.KernelError) as caught:
        gpu(3).kernel(OTHER)
    if not there:
        monkeypatch.setattr(store, "targets", tuple)
        with pytest.raises(store.KernelError, match="its targets: none, and Triton is too old"):
            gpu(3).kernel(OTHER)
        monkeypatch.setattr(store, "targets", lambda: ("gfx1100", "gfx90a"))
    assert str(caught.value).startswith(f"{lack}, and Triton is too old. Install the Triton that your torch requires")

    monkeypatch.setattr(jit, "triton_problem", lambda: None)
    with pytest.warns(RuntimeWarning, match="Triton compiles kernels at their first call instead") as told:
        kernel = gpu(3).kernel(OTHER)
    assert str(told[0].message).startswith(lack)
    assert isinstance(kernel, jit.JitKernel)
    row = tuning.config("gfx942", OTHER)
    assert (kernel.block_m, kernel.block_n, kernel.num_xcds) == (row.block_m, row.block_n, 8)
    assert kernel.options["num_warps"] == row.num_warps
    assert kernel.index == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu(4).kernel(OTHER)  # the warning comes once per target
    assert launched == []


def test_the_jit_names_no_option_that_the_installed_triton_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton before 3.4 has no `schedule_hint`, and one after 3.7 may have no `kpack`."""
    monkeypatch.setattr(jit, "interpreting", lambda: False)
    whole = jit.JitKernel(VARIANT, "gfx942").options
    assert {"kpack", "schedule_hint"} <= set(whole)
    names = [field.name for field in dataclasses.fields(compiler.HIPOptions)]
    for lacking in ("kpack", "schedule_hint"):
        other = dataclasses.make_dataclass("HIPOptions", [name for name in names if name != lacking])
        monkeypatch.setattr(compiler, "HIPOptions", other)
        switches._names.cache_clear()
        left = {name: value for name, value in whole.items() if name != lacking}
        assert jit.JitKernel(VARIANT, "gfx942").options == left
    switches._names.cache_clear()
    monkeypatch.undo()
    # The pinned Triton has every option of the tables. The JIT leaves out what the compile stage has to look at, and
    # `dk_apart` and `lazy_rescale`, which are constants of the kernel.
    for target in targets.TARGETS:
        for variant in table(target):
            options = launches.specification(variant, target).options
            for name in ("async_copy", "wave_priorities", switches.DK_APART, switches.LAZY_RESCALE):
                options.pop(name, None)
            assert switches.known(options, targets.get(target).vendor) == options
    forms = dict.fromkeys((switches.DK_APART, switches.LAZY_RESCALE), 1)
    asked = {"async_copy": 1, "in_thread_transpose": 1, "wave_priorities": 1, **forms}
    assert switches.known(asked, "amd") == {"in_thread_transpose": 1}
    with switches.switched(asked) as left:
        assert left == {}


def cut(kernel: jit.JitKernel, pointers: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Leaves a kernel these arguments."""
    kernel.take(Arguments(kernel.name, pointers, numbers, (*pointers, *numbers)), [*pointers, *numbers])


def test_the_jit_skips_empty_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Function:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, **options: launched.append((grid, arguments, options))

    monkeypatch.setattr(jit, "interpreting", lambda: True)
    kernel = jit.Interpreter().kernel(VARIANT)
    assert "num_warps" not in kernel.options
    kernel.function, kernel.options = Function(), {"BLOCK_M": 16}
    cut(kernel, ("q",), ("group",))
    q = torch.ones(3)
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 2, 3)):
        kernel.launch(grid, (q,), (5,))
    assert launched == [((1, 2, 3), (q, 5), {"BLOCK_M": 16})]
    cut(kernel, ("q", "lse", "cu_seqlens_q", "rng_state"))
    kernel.launch((1, 1, 1), (q, None, None, None), ())
    _, (_, *absent), _ = launched[-1]
    assert [each.dtype for each in absent] == [torch.float32, torch.int32, torch.int64]
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or nullcontext())
    kernel.index = 0
    cut(kernel, ("q",))
    kernel.launch((4, 5, 6), (q,), ())
    assert entered == [0]
    assert launched[2:] == [((4, 5, 6), (q,), {"BLOCK_M": 16})]
    kernel.index = -1
    cut(kernel)
    for words, kind, told in (
        ("PassManager::run failed", store.KernelError, r"^Triton \S+ cannot compile fwd-\S+ for gfx950 \(PassManager"),
        ("HIP out of memory", RuntimeError, "^HIP out of memory$"),
    ):
        kernel.failure = ""
        kernel.function = {(1, 1, 1): mock.Mock(side_effect=RuntimeError(words))}
        with pytest.raises(kind, match=told):
            kernel.launch((1, 1, 1), (), ())
    append = jit.JitKernel(Variant("append", "bf16", 64, "plain"), "gfx942")
    assert (append.block_m, append.block_n, append.num_xcds) == (16, 0, 1)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfResources(99000, 65536, "shared memory"), "out of resource: shared memory, Required: 99000"),
        (CompilationError("def f(): x", None, "no such dot"), "no such dot"),
    ],
)
def test_an_error_of_tritons_compiler_is_one_of_a_kernel(error: Exception, told: str) -> None:
    """The kernel's next launch says so at once: to compile again would take seconds."""
    kernel = jit.Interpreter().kernel(VARIANT)
    function = mock.Mock(side_effect=error)
    kernel.function, kernel.options = {(1, 1, 1): function}, {}
    cut(kernel, ("q",))
    for _ in range(2):
        with pytest.raises(store.KernelError, match=rf"Triton \S+ cannot compile fwd-\S+ for gfx950 \(.*{told}"):
            kernel.launch((1, 1, 1), (torch.ones(1),), ())
    assert function.call_count == 1


@pytest.mark.parametrize(("target", "repairs"), [("gfx1150", True), ("gfx11-generic", True), ("gfx1201", False)])
def test_the_jit_compiles_for_gfx11_without_its_hazard(
    target: str, repairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = compiler.HIPBackend
    whole = backend.make_amdgcn, backend.hash
    inside = []

    def function(*_: object, **__: object) -> None:
        inside.append((backend.make_amdgcn, backend.hash) == whole)

    monkeypatch.setattr(jit, "interpreting", lambda: False)
    kernel = jit.JitKernel(Variant("fwd", "bf16", 64, "plain"), target)
    kernel.function = {(1, 1, 1): function}
    cut(kernel)
    kernel.launch((1, 1, 1), (), ())
    assert inside == [not repairs]
    kernel.function = {(1, 1, 1): mock.Mock(side_effect=RuntimeError("HIP out of memory"))}
    with pytest.raises(RuntimeError, match="HIP out of memory"):
        kernel.launch((1, 1, 1), (), ())
    assert (backend.make_amdgcn, backend.hash) == whole


def test_a_layer_takes_the_smallest_block_that_holds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kernel", lambda index, variant: (index, *variant))
    half, single = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    for (tensor, op, width, *sizes), (unit, *variant) in {
        (half, "norm-bwd", 1000, 1000, 4096): (8, "norm-bwd", "bf16", 1024, "plain"),
        (half, "norm-bwd", 1024): (8, "norm-bwd", "bf16", 1024, "plain"),
        (half, "norm-bwd", 1025): (8, "norm-bwd", "bf16", 2048, "plain"),
        (half, "norm-bwd", 8, 12): (1, "norm-bwd", "bf16", 1024, "uneven"),
        (half, "norm-bwd", 8192): (8, "norm-bwd", "bf16", 8192, "plain"),
        (half, "norm-bwd", 70000, 16): (8, "norm-bwd", "bf16", 16384, "plain"),
        (half, "norm-bwd", 70000, 16, 12): (1, "norm-bwd", "bf16", 4096, "uneven"),
        (single, "rotary", 64, 12): (4, "rotary", "fp32", 64, "plain"),
        (single, "rotary", 65, 13, 16): (1, "rotary", "fp32", 128, "uneven"),
    }.items():
        assert layer.find(op, tensor, width, *sizes) == ((-1, *variant), unit)
    on_gpu = SimpleNamespace(element_size=lambda: 2, get_device=lambda: 0, dtype=torch.float16)
    assert layer.find("rotary", on_gpu, 64)[0][0] == 0


def test_rows_that_are_not_dense_or_start_off_16_bytes_are_copied() -> None:
    whole = torch.arange(64.0).view(4, 16)
    crossed, half = whole.view(4, 4, 4).transpose(1, 2), whole.half()[:, 1:]
    rows = {whole[1:]: False, whole[:, 4:8]: False, whole[:, 1:]: True, whole[:, ::2]: True, crossed: True, half: True}
    for tensor, copied in rows.items():
        result = layer.dense_rows(tensor)
        assert (result.data_ptr() != tensor.data_ptr()) is copied
        assert torch.equal(result, tensor)
        assert result.dtype is tensor.dtype
        assert result.stride(-1) == 1
        assert result.data_ptr() % 16 == 0


def test_a_device_has_a_target_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert (gpu().target, gpu().compute_units) == ("gfx942", 228)
    assert gpu(name="gfx1100").compute_units == 2 * 228  # HIP counts work group processors
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpu().target == "sm_90"
    interpreter = jit.Interpreter()
    with device.using(interpreter):
        assert device.of(-1) is interpreter
        with recording.record("gfx90a"):
            assert (device.of(-1).target, device.of(-1).compute_units) == ("gfx90a", 304)
        assert device.of(-1) is interpreter


def test_cpu_tensors_have_a_device_only_with_a_mock_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_devices", {})
    monkeypatch.setattr(jit, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="CPU tensors belong to the torch backend"):
        device.of(-1)
    monkeypatch.setattr(jit, "interpreting", lambda: True)
    assert device.of(-1).compute_units == 4


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "Triton cannot be imported (import of triton halted; None in sys.modules)"),
        (
            "3.2.9",
            "Triton 3.2.9 is older than 3.3, whose named tuples the kernels need: install torch 2.7 or newer, "
            "which brings it",
        ),
        ("3.3.0", None),
        ("3.10.0+git7f3a", None),
    ],
)
def test_whether_triton_can_serve(version: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", version and SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    jit.triton_version.cache_clear()
    try:
        assert jit.triton_problem() == problem
    finally:
        jit.triton_version.cache_clear()


@pytest.mark.parametrize("manifest", [{}, [], None, 3, {"format": store.FORMAT}, {"format": 99}], ids=str)
def test_an_invalid_manifest_asks_the_user_to_reinstall(tmp_path: Path, manifest: object) -> None:
    path = write(tmp_path / "gfx942.zip", manifest or [])
    with pytest.raises(store.KernelError, match=r"gfx942\.zip.*reinstall the wheel"):
        store.Store(path)


def test_the_stores_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("gfx942", "gfx90a"):
        write(tmp_path / f"{target}.zip")
    write(tmp_path / "gfx950.zip", {"format": store.FORMAT + 1})
    assert store.targets(tmp_path) == ("gfx90a", "gfx942", "gfx950")
    result = store.open_store("gfx942", tmp_path)
    assert result is not None
    assert result.image(VARIANT.name) == IMAGE
    assert store.open_store("gfx942", tmp_path) is result
    assert store.open_store("gfx1100", tmp_path) is None
    monkeypatch.setattr(store, "DIRECTORY", tmp_path)
    assert store.targets() == ("gfx90a", "gfx942", "gfx950")
    assert store.open_store("gfx90a") is not None
    store.open_store.cache_clear()
    with pytest.raises(store.KernelError, match=f"has format {store.FORMAT + 1}, this flash_attn reads {store.FORMAT}"):
        store.open_store("gfx950", tmp_path)


def test_an_image_of_another_digest_is_corrupt(tmp_path: Path) -> None:
    archive = store.Store(write(tmp_path / "gfx942.zip"))
    result = archive.kernels[VARIANT.name]["sha256"]
    archive.kernels[VARIANT.name]["sha256"] = "0123456789abcdef" * 4
    with pytest.raises(store.KernelError, match=rf"fwd-bf16-d64 in .* is corrupt \(sha256 {result[:16]}\.\.\., the "
                       r"manifest says 0123456789abcdef\.\.\.\): reinstall the wheel"):  # fmt: skip
        archive.image(VARIANT.name)


def test_a_damaged_store_never_gives_a_wrong_image(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.zip").read_bytes()
    draw = random.Random(0)
    path = tmp_path / "gfx942.zip"
    refused = []
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged[: draw.randrange(len(whole))] if draw.random() < 0.3 else damaged)
        try:
            assert store.Store(path).image(VARIANT.name) == IMAGE
        except store.KernelError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all("reinstall the wheel" in message for message in refused)
