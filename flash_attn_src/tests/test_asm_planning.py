"""Plans of AMD's assembly kernels: which kernel serves a call, its grid and the bytes of its argument."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from flash_attn.attention.backends.asm import planning
from flash_attn.attention.backends.asm.arguments import LAYOUTS
from flash_attn.attention.backends.asm.planning import Call, Operand
from flash_attn.core.ck_planner import Launch
from flash_attn.kernels import assembly

CALL = Call(
    target="gfx942", units=304, dtype="bf16", batch=3, heads=16, heads_k=4, head_dim=128, seqlen_q=1000, seqlen_k=900,
    left=-1, right=-1, scale=0.125,
)  # fmt: skip
PACKED = CALL._replace(packed=True, starts_q=0x7100, starts_k=0x7200, total_q=2500, total_k=2300)
Q = Operand(0x1000, 1000 * 2048, 2048, 128)
K = Operand(0x2000, 900 * 512, 512, 128)
V = Operand(0x3000, 900 * 1024, 1024, 256)
OUT = Operand(0x4000, 1000 * 2048, 2048, 128)
GRADIENTS = {
    "q": Q, "k": K, "v": V, "dout": OUT._replace(address=0x5000),
    "dk": Operand(0x6000, 900 * 2048, 2048, 128), "dv": Operand(0x7000, 900 * 2048, 2048, 128),
}  # fmt: skip


def replace(call: Call, **changes: Any) -> Call:
    return call._replace(**changes)


def word(argument: bytes, offset: int, form: str = "I") -> float:
    return float(struct.unpack_from(f"<{form}", argument, offset)[0])


def forward(call: Call) -> Launch:
    return planning.forward(call, Q, K, V, OUT, 0x8000, 1000)


def backward(call: Call) -> Launch:
    return planning.backward(call, GRADIENTS, 0x8000, 0x9000, 0xA000, 1000)


def test_the_argument_of_a_forward() -> None:
    """At the offsets that the code objects read them from: `s_load` of their disassembly."""
    launch = forward(CALL)
    assert launch.kernel == "asm-fwd-bf16-d128-plain"
    assert len(launch.argument) == 512
    addresses = [word(launch.argument, offset, "Q") for offset in (0x0, 0x10, 0x20, 0x30, 0x40)]
    assert addresses == [0x4000, 0x1000, 0x2000, 0x3000, 0x8000]
    assert word(launch.argument, 0x50, "f") == 0.125
    expected = {
        0x60: 1000, 0x70: 4096, 0x80: 256 * 4096, 0x90: 256, 0xA0: 1000 * 4096, 0xB0: 4, 0xC0: 1024, 0xD0: 256,
        0xE0: 900 * 1024, 0xF0: 5, 0x100: 1, 0x110: 900, 0x120: 128, 0x130: 128, 0x140: 16, 0x150: 2048, 0x160: 512,
        0x170: 900 * 2048, 0x180: 4096, 0x190: 256, 0x1A0: 1000 * 4096, 0x1B0: 0, 0x1C0: 0, 0x1D0: 4000,
    }  # fmt: skip
    assert {offset: word(launch.argument, offset) for offset in expected} == expected


def test_values_with_a_head_dim_of_their_own() -> None:
    """These kernels have tiles of 128 queries."""
    call = replace(CALL, target="gfx950", head_dim=192, value_dim=128, right=0)
    assert planning.unsupported_reason(call, "fwd", {"q": Q, "k": K, "v": V}) is None
    launch = forward(call)
    assert (launch.kernel, launch.grid) == ("asm-fwd-bf16-d192-v128-causal", (4, 16, 3))
    expected = {0x80: 128 * 4096, 0x120: 192, 0x130: 128}
    assert {offset: word(launch.argument, offset) for offset in expected} == expected
    for op, change, said in (
        ("bwd", {}, "head_dim 192 with values of 128"),
        ("fwd", {"value_dim": 0}, "head_dim 192, causal"),
        ("fwd", {"value_dim": 96}, "head_dim 192 with values of 96"),
    ):
        assert said in str(planning.unsupported_reason(replace(call, **change), op, {"q": Q}))


def test_the_grids_of_a_forward() -> None:
    """A causal program serves two tiles of 256 queries. Packed sequences have the tiles last."""
    causal = replace(CALL, right=0)
    assert forward(CALL).grid == (4, 16, 3)
    assert forward(causal).grid == (2, 16, 3)
    assert forward(replace(causal, seqlen_q=1025)).grid == (3, 16, 3)
    assert forward(PACKED).grid == (16, 3, 4)
    packed = forward(replace(PACKED, right=0))
    assert packed.grid == (16, 3, 2)
    assert [word(packed.argument, offset, "Q") for offset in (0x1B0, 0x1C0, 0x1E0, 0x1F0)] == [
        0x7100, 0x7200, 0x7100, 0x7200,
    ]  # fmt: skip


def test_the_order_of_a_causal_forward() -> None:
    """The order is by heads if all dies get equally many heads and sequences are short."""
    causal = replace(CALL, right=0)
    assert word(forward(causal).argument, 0xF0) == 5
    assert word(forward(replace(causal, heads=12)).argument, 0xF0) == 3
    assert word(forward(replace(causal, seqlen_q=16385)).argument, 0xF0) == 3


def test_the_argument_of_a_backward() -> None:
    launch = backward(CALL)
    assert launch.kernel == "asm-bwd-bf16-d128-plain"
    assert (launch.grid, len(launch.argument)) == ((5, 16, 3), 272)
    addresses = [word(launch.argument, 8 * index, "Q") for index in range(9)]
    assert addresses == [0xA000, 0x6000, 0x7000, 0x1000, 0x2000, 0x3000, 0x5000, 0x8000, 0x9000]
    assert [word(launch.argument, offset, "f") for offset in (72, 80)] == [0.125, pytest.approx(1.4426950)]
    expected = [
        4, 1000, 900, 128, 16,  # group, lengths, head dim, heads
        256, 1000 * 4096, 4096, 256, 900 * 1024, 1024, 512, 900 * 2048, 2048,  # q, k, v
        256, 1000 * 4096, 4096, 256, 900 * 4096, 4096, 256, 900 * 4096, 4096,  # dout, dk, dv
    ]  # fmt: skip
    assert [word(launch.argument, 88 + 8 * index) for index in range(len(expected))] == expected


def test_the_argument_of_a_packed_backward() -> None:
    launch = backward(replace(PACKED, right=0, dtype="fp16", head_dim=64))
    assert launch.kernel == "asm-bwd-fp16-d64-causal-varlen"
    assert (launch.grid, len(launch.argument)) == ((3, 16, 3), 248)
    starts = [word(launch.argument, 72 + 8 * index, "Q") for index in range(4)]
    assert starts == [0x7100, 0x7200, 0x7100, 0x7200]
    expected = [4, 4000, 2300, 256, 4096, 256, 1024, 512, 2048, 256, 4096, 256, 4096, 256, 4096, 64]
    assert [word(launch.argument, 120 + 8 * index) for index in range(len(expected))] == expected


def test_the_argument_of_a_window() -> None:
    """mask_x: keys that the first query sees; mask_y: queries that see the first key."""
    launch = backward(replace(CALL, left=700, right=200))
    assert launch.kernel == "asm-bwd-bf16-d128-window"
    assert (launch.grid, len(launch.argument)) == ((5, 16, 3), 288)
    assert [word(launch.argument, offset, "i") for offset in (272, 280)] == [200 - 100 + 1, 700 + 100 + 1]
    far = backward(replace(CALL, left=-1, right=200))
    assert word(far.argument, 280, "i") == 900 + 100


def test_the_argument_of_gfx950() -> None:
    launch = backward(replace(CALL, target="gfx950"))
    assert (launch.grid, len(launch.argument)) == ((4, 16, 3), 704)
    expected = {
        0xB0: 1000, 0xC0: 256 * 1024, 0xD0: 256, 0xE0: 1000 * 4096, 0xF0: 4096, 0x100: 4, 0x130: 1024, 0x140: 4096,
        0x150: 900, 0x160: 128, 0x180: 16, 0x1B0: 2048, 0x1E0: 4096, 0x230: 4096, 0x240: 4000, 0x290: 1000,
    }  # fmt: skip
    assert {offset: word(launch.argument, offset) for offset in expected} == expected


@pytest.mark.parametrize(
    ("left", "right", "mask"),
    [
        (-1, -1, assembly.PLAIN), (-1, 0, assembly.CAUSAL), (899, 0, assembly.CAUSAL), (898, 0, assembly.WINDOW),
        (900, 1000, assembly.PLAIN), (899, 999, assembly.PLAIN), (-1, 998, assembly.WINDOW), (5, -1, assembly.WINDOW),
    ],
)  # fmt: skip
def test_the_kind_of_a_window(left: int, right: int, mask: str) -> None:
    assert replace(CALL, left=left, right=right).mask == mask


def test_one_query_needs_no_causal_mask() -> None:
    assert replace(CALL, seqlen_q=1, right=0).mask == assembly.PLAIN


@pytest.mark.parametrize(
    ("change", "op", "reason"),
    [
        ({"dtype": "fp16"}, "fwd", "kernel: gfx942 has none for fwd, fp16, head_dim 128, plain"),
        ({"head_dim": 64}, "fwd", "kernel: gfx942 has none"),
        ({"left": 5}, "fwd", "kernel: gfx942 has none for fwd, bf16, head_dim 128, window"),
        ({"target": "gfx90a"}, "bwd", "kernel: gfx90a has none"),
        ({"head_dim": 32}, "bwd", "head_dim 32"),
        ({"head_dim": 256}, "bwd", "head_dim 256"),
        ({"head_dim": 76}, "bwd", "head_dim 76"),
        ({"left": 5, "packed": True, "total_q": 9, "total_k": 9}, "bwd", "window, packed sequences"),
        ({"seqlen_q": 1 << 20, "heads": 64}, "bwd", "size: the sums of dq"),
        ({"batch": 3000}, "fwd", "size: q reaches"),
        ({"scale": -0.1}, "fwd", "softmax_scale: -0.1"),
        ({"scale": -0.1}, "bwd", "softmax_scale: -0.1"),
        ({"scale": math.nan}, "fwd", "softmax_scale: nan"),
    ],
)
def test_unsupported_calls_have_a_reason(change: dict[str, int], op: str, reason: str) -> None:
    result = planning.unsupported_reason(replace(CALL, **change), op, {"q": Q, "k": K})
    assert result is not None
    assert reason in result


def test_a_row_stride_of_more_than_24_bits() -> None:
    reason = planning.unsupported_reason(CALL, "fwd", {"q": Q._replace(row=1 << 22, batch=0)})
    assert reason is not None
    assert "size: q" in reason


def test_how_far_a_tensor_reaches() -> None:
    """The last of three sequences begins two strides from the first one, and 4 GiB are 2**31 elements from it."""
    inside = Operand(0x1000, (1 << 30) - 1 - 1000 * 1024, 2048, 128)
    for batch, is_served in ((inside.batch, True), (1 << 30, False)):
        reason = planning.unsupported_reason(CALL, "fwd", {"q": inside._replace(batch=batch)})
        assert (reason is None) is is_served, reason


def test_a_plan_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="unsupported_reason"):
        forward(replace(CALL, dtype="fp16"))


def test_compute_units_choose_the_kernel() -> None:
    """An MI308X has separate kernels; every other gfx942 uses the kernels for MI300X."""
    for units, suffix in ((304, ""), (228, ""), (38, ""), (80, "-mi308"), (64, "-mi308")):
        assert forward(replace(CALL, units=units)).kernel == f"asm-fwd-bf16-d128-plain{suffix}"


def test_every_kernel_serves_its_calls() -> None:
    assert len({(row.target, row.name) for row in assembly.KERNELS}) == len(assembly.KERNELS)
    for row in assembly.KERNELS:
        units = 80 if row.name.endswith("-mi308") else 304
        for head_dim in (row.least_dim, row.head_dim):
            kind = (row.target, row.op, row.dtype, head_dim, row.mask, row.packed, units, row.value_dim)
            assert assembly.find(*kind) is row
        assert row.layout in LAYOUTS
