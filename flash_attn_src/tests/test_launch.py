"""From the store to a launch: what is handed to the driver, and what a damaged store says."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn.backends import ck_calls
from flash_attn.runtime import ck_planner, launch, store
from flash_attn.runtime.ck_planner import Launch
from flash_attn.runtime.variants import Variant

IMAGE = bytes(range(256)) * 8
VARIANT = Variant("fwd", "bf16", 64, "plain")


def write(path: Path, manifest: object = None) -> Path:
    """A store of one Triton kernel and one of Composable Kernel."""
    common = {"sha256": hashlib.sha256(IMAGE).hexdigest(), "shared": 64, "threads": 256, "constants": {"BLOCK_M": 128}}
    kernels = {VARIANT.name: common | {"symbol": "attn_fwd", "params": "PPi"}}
    kernels["ck-fwd"] = common | {"symbol": "kentry", "params": "B", "image": VARIANT.name, "constants": {}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        whole = {"format": store.FORMAT, "kernels": kernels, "compiler": {}}
        archive.writestr("manifest.json", json.dumps(whole if manifest is None else manifest))
        archive.writestr(f"{VARIANT.name}.co", IMAGE)
    return path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A gfx942 with that store; the list fills with (kernel, what it was launched with)."""
    launched: list[Any] = []

    class Kernel:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def launch(self, *arguments: Any) -> None:
            launched.append((self.given, arguments))

    fake = types.ModuleType("flash_attn._launcher")
    fake.bind = lambda platform: launched.append(platform)  # type: ignore[attr-defined]
    fake.Kernel = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn._launcher", fake)
    monkeypatch.setattr(sys.modules["flash_attn"], "_launcher", fake, raising=False)
    monkeypatch.setattr(launch, "device_target", lambda _device: "gfx942")
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_stored", {})
    archive = store.Store(write(tmp_path / "gfx942.zip"))
    monkeypatch.setattr(store, "open_store", lambda _target: archive)
    return launched


def test_a_variant_comes_from_the_store(driver: list[Any]) -> None:
    kernel = launch.kernel(0, VARIANT)
    kernel.launch(0, 7, 1, 2, 3, "q")
    assert kernel.block_m == 128
    assert driver == ["hip", ((IMAGE, "attn_fwd", "PPi", 64, 256, VARIANT.name), (0, 7, 1, 2, 3, "q"))]


def test_what_composable_kernel_planned_is_launched(driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ck_planner, "plan", lambda _call, _parameters: [Launch("ck-fwd", (4, 5, 6), b"arguments")] * 2)
    monkeypatch.setattr(ck_calls, "_current_stream", lambda _device: 7)
    ck_calls.run(torch.zeros(1), "forward", b"")
    given = (IMAGE, "kentry", "B", 64, 256, "ck-fwd")
    assert driver == ["hip", *[(given, (-1, 7, 4, 5, 6, b"arguments"))] * 2]


@pytest.mark.usefixtures("driver")
def test_a_wheel_without_its_launcher_says_to_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["flash_attn"], "_launcher")
    monkeypatch.setitem(sys.modules, "flash_attn._launcher", None)
    with pytest.raises(store.KernelError, match=r"the launcher does not load \(.*_launcher.*: reinstall the wheel"):
        launch.kernel(0, VARIANT)


@pytest.mark.usefixtures("driver")
def test_a_kernel_that_is_not_there_is_named() -> None:
    with pytest.raises(store.KernelError, match="no kernel ck-bwd for gfx942"):
        launch.stored(0, "ck-bwd")


@pytest.mark.parametrize("manifest", [{}, [], None, 3, {"format": store.FORMAT}, {"format": 99}], ids=str)
def test_a_manifest_of_another_form_says_to_reinstall(tmp_path: Path, manifest: object) -> None:
    path = write(tmp_path / "gfx942.zip", manifest or [])
    with pytest.raises(store.KernelError, match=r"gfx942\.zip.*reinstall the wheel"):
        store.Store(path)


def test_the_stores_of_an_installation(tmp_path: Path) -> None:
    for target in ("gfx942", "gfx90a"):
        write(tmp_path / f"{target}.zip")
    write(tmp_path / "gfx950.zip", {"format": store.FORMAT + 1})
    assert store.targets(tmp_path) == ("gfx90a", "gfx942", "gfx950")
    found = store.open_store("gfx942", tmp_path)
    assert found is not None
    assert found.image(VARIANT.name) == IMAGE
    assert store.open_store("gfx1100", tmp_path) is None
    with pytest.raises(store.KernelError, match=f"has format {store.FORMAT + 1}, this flash_attn reads {store.FORMAT}"):
        store.open_store("gfx950", tmp_path)


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


@pytest.mark.parametrize(("version", "follows"), [((3, 2), False), ((3, 3), True)])
def test_which_triton_reads_numbers_within_loops(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], follows: bool
) -> None:
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "_triton_version", lambda: version)
    assert launch.follows_pages(object.__new__(launch.JitKernel)) is follows
    assert launch.follows_pages(object.__new__(launch.StoreKernel))
