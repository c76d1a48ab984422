"""The search for launch configurations: what it tries, keeps, reads back, and that results stay right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention.backends import triton
from flash_attn.attention.backends.triton import autotune
from flash_attn.attention.backends.triton import kernels as triton_kernels
from flash_attn.call.calls import AttentionCall, GradientCall, attention_call, replace
from flash_attn.core import device, jit
from flash_attn.core.platform import windows
from flash_attn.kernels import launches, tuning
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant, table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and jit.triton_problem() is not None, reason="the search needs Triton")


@pytest.fixture
def searching(fresh_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:  # noqa: ARG001
    """A cache directory of the test's own, two candidates, and no memory of earlier searches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = Config(64, 64, 4)
    monkeypatch.setattr(launches, "candidates", lambda _variant, _target: [own, Config(16, 16, 4), Config(32, 32, 4)])
    monkeypatch.setattr(autotune, "_ROUNDS", 1)
    autotune._store.cache_clear()
    return tmp_path


def _call(dropout_p: float = 0.0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    q, k, v, dout = (torch.randn(1, 33, 2, 32, device=DEVICE) for _ in range(4))
    call = attention_call(q, k, v, softmax_scale=32**-0.5, causal=True, dropout_p=dropout_p)
    out, lse, _, rng_state = autotune.forward(call)
    grads = [torch.empty_like(q) for _ in range(3)]
    autotune.backward(GradientCall(replace(call, rng_state=rng_state), dout, out, lse, *grads))
    return q, k, v, dout, out, *grads


def _one_row() -> AttentionCall:
    q = torch.empty(1, device=DEVICE).expand(1, 1, 1, 32)
    return attention_call(q, q, q, softmax_scale=1.0)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # of the reference, in the thread of its backward
def test_search_results_are_saved(searching: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v, dout, out, *grads = _call()
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, _ = reference.attention(*wide, causal=True, dtype=None)
    wanted = (expected, *torch.autograd.grad(expected, wide, dout.double()))
    for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), wanted, strict=True):
        assert_close(name, got, want, tiny=1e-4)

    (store,) = (searching / "flash_attn" / "autotune").glob("*.json")
    kept = json.loads(store.read_text())
    assert set(kept) == {f"{op}-fp32-d32 q64-k64-causal" for op in ("fwd", "bwd-dkdv", "bwd-dq")}
    assert all(entry["milliseconds"] > 0.0 for entry in kept.values())
    assert "tuning fwd-fp32-d32 q64-k64-causal: 1/2" in capsys.readouterr().err


def test_kept_configurations_are_read_and_not_searched(searching: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _call()
    (store,) = (searching / "flash_attn" / "autotune").glob("*.json")
    forced = {name: {"config": Config(16, 32, 4), "milliseconds": 1.0} for name in json.loads(store.read_text())}
    store.write_text(json.dumps(forced))
    device.clear_kernels()
    capsys.readouterr()
    _call()
    assert capsys.readouterr().err == ""
    tuned = [result[-1] for key, result in device.kernels.items() if key[-1] == "q64-k64-causal"]
    assert {(kernel.block_m, kernel.block_n) for kernel in tuned} == {(16, 32)}


def test_compiler_options_are_saved_unchanged() -> None:
    config = Config(16, 32, 4, options=(("waves_per_eu", 2), ("schedule_hint", "attention")))
    assert autotune._config(json.loads(json.dumps(config))) == config


def test_a_damaged_file_is_searched_again(searching: Path) -> None:
    _call()
    (store,) = (searching / "flash_attn" / "autotune").glob("*.json")
    store.write_text("{")
    device.clear_kernels()
    _call()
    assert len(json.loads(store.read_text())) == 3


@pytest.mark.usefixtures("searching")
def test_dropout_draws_once() -> None:
    """The search runs the call many times and must leave torch's generator where one call leaves it."""
    _call(0.25)
    searched = torch.randint(0, 1 << 30, (1,), device=DEVICE)
    _call(0.25)
    assert torch.equal(torch.randint(0, 1 << 30, (1,), device=DEVICE), searched)


def test_autotuning_has_every_backend_function() -> None:
    assert set(triton.__all__) <= set(autotune.__all__)
    assert autotune.kvcache is triton.kvcache


def test_candidates_are_neighbours() -> None:
    for variant in table("gfx942"):
        if variant.op in ("fwd", "bwd-dkdv", "bwd-dq"):
            for target in ("gfx942", "gfx1100", "sm_90"):
                own, *result = launches.candidates(variant, target)
                assert own == tuning.config(target, variant)
                assert len(result) > 10
                assert own not in result
                assert len(set(result)) == len(result)
                assert all(min(one.block_m, one.block_n) >= 16 for one in result)


def test_the_neighbours_of_a_tile() -> None:
    own = Config(64, 32, 4, 2)
    tiles = ((64, 32), (128, 32), (64, 64), (32, 32), (64, 16))
    expected = [Config(*tile, warps, stages) for tile in tiles for warps in (2, 4, 8) for stages in (1, 2, 3)]
    expected.remove(own)
    options = [("waves_per_eu", count) for count in (1, 2, 3, 4)]
    orders = ("attention", "memory-bound-attention", "attention,memory-bound-attention")
    options += [("schedule_hint", order) for order in orders]
    assert tuning.neighbours("gfx942", own) == [*(own._replace(options=(option,)) for option in options), *expected]
    # In addition to its other options.
    own = Config(64, 32, 4, 2, options=(("matrix_instr_nonkdim", 16), ("waves_per_eu", 2)))
    result = [neighbour.options for neighbour in tuning.neighbours("gfx942", own) if neighbour[:5] == own[:5]]
    assert result[0] == (("matrix_instr_nonkdim", 16), ("waves_per_eu", 1))
    assert result[-1] == (*own.options, ("schedule_hint", orders[-1]))
    # Without the order of instructions that it has.
    result = tuning.neighbours("gfx942", Config(64, 32, 4, 2, options=(("schedule_hint", "attention"),)))
    assert Config(64, 32, 4, 2, options=(("schedule_hint", "none"),)) in result
    # Of 16 to 256 rows and keys, with the warps that it has too.
    result = {neighbour[:3] for neighbour in tuning.neighbours("sm_90", Config(16, 256, 1))}
    assert result == {(*tile, warps) for tile in ((16, 256), (32, 256), (16, 128)) for warps in (1, 4, 8)}


def test_blocks_of_keys_in_fp8_stay_within_their_sequence() -> None:
    fp8, half = Variant("fp8-fwd", "fp8e4nv", 128, "plain"), Variant("bwd-dkdv", "bf16", 32, "plain")
    most = [max(candidate.block_n for candidate in launches.candidates(variant, "sm_90")) for variant in (fp8, half)]
    assert most == [128, 256]
    assert launches.specification(half, "sm_90", Config(16, 64, 2)).constants["BLOCK_M"] == 16


@pytest.mark.parametrize(("value", "expected"), [("", False), ("FALSE", False), ("0", False), ("TRUE", True)])
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_AUTOTUNE", value)
    assert autotune.wanted() is expected


def test_switch_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE", "maybe")
    with pytest.raises(RuntimeError, match="maybe is neither TRUE nor FALSE"):
        autotune.wanted()


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_milliseconds", lambda _call, _device: 1.0)


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", '{"ENTRY": 3}', '{"ENTRY": {"config": [1]}}'])
@pytest.mark.usefixtures("searching", "untimed")
def test_an_invalid_file_starts_a_new_search(content: str) -> None:
    store = autotune._store(-1 if DEVICE == "cpu" else 0)
    store.parent.mkdir(parents=True)
    store.write_text(content.replace("ENTRY", "fwd-fp32-d32 q1-k1-full"))
    autotune._choose(("fwd",), _one_row(), tuple)
    assert json.loads(store.read_text())["fwd-fp32-d32 q1-k1-full"]["milliseconds"] == 1.0


@pytest.mark.usefixtures("untimed")
def test_results_that_cannot_be_saved_are_used(searching: Path) -> None:
    (searching / "flash_attn").write_text("a file where a directory should be")
    with pytest.warns(RuntimeWarning, match="cannot be saved .* set XDG_CACHE_HOME"):
        autotune._choose(("fwd",), _one_row(), tuple)
    autotune._choose(("fwd",), _one_row(), tuple)  # and is not searched for again


@pytest.mark.usefixtures("searching", "untimed")
def test_a_file_that_another_process_holds_keeps_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scanner of Windows holds it: the file is not empty, and must not be replaced by the one new entry."""
    store = autotune._store(-1 if DEVICE == "cpu" else 0)
    store.parent.mkdir(parents=True)
    kept = {f"entry {number}": {"config": None, "milliseconds": 1.0} for number in range(40)}
    store.write_text(json.dumps(kept))
    tries, open_file = [], Path.open

    def held(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == store and len(tries) < 5:
            tries.append(1)
            raise PermissionError(13, "the process cannot access the file")
        return open_file(self, *arguments, **options)

    monkeypatch.setattr(autotune, "PLATFORM", windows.Windows())
    monkeypatch.setattr(Path, "open", held)
    autotune._choose(("fwd",), _one_row(), tuple)  # held for a short while
    assert len(json.loads(store.read_text())) == 41
    device.clear_kernels()
    store.write_text(json.dumps(kept))
    monkeypatch.setattr(windows, "_HELD_SECONDS", 0.05)
    monkeypatch.setattr(Path, "open", lambda self, *a, **o: _refuse() if self == store else open_file(self, *a, **o))
    with pytest.warns(RuntimeWarning, match=r"cannot be saved .*13.* close the program that holds the file"):
        autotune._choose(("fwd",), _one_row(), tuple)
    monkeypatch.setattr(Path, "open", open_file)
    assert json.loads(store.read_text()) == kept


def _refuse() -> Any:
    raise PermissionError(13, "the process cannot access the file")


@pytest.mark.usefixtures("searching")
def test_another_shape_class_starts_from_the_wheels_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _one_row()
    key = (("fwd",), call.q.get_device(), call.q.dtype, 32, "plain")
    (own,) = triton_kernels.find(*key)
    triton_kernels.remember(key, ("a winner of other shapes",))
    monkeypatch.setattr(autotune, "_best", lambda place, _variant, standing, *_: standing[place])
    autotune._choose(("fwd",), call, tuple)
    assert device.kernels[key] == (own,)
