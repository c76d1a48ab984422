"""The planner: every supported call maps to kernels of the table, whose argument holds the values of the call.

In the job of the long tests it is built with the checks of -fsanitize=undefined, which abort the process. Its results
are surrounded by guard bytes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck import planner as ck_planner
from rocm_wheels.paths import FLASH_ATTN_SRC, ROOT


def _planner() -> Any:
    """The package's binding as a module of its own, because the package itself imports torch."""
    path = FLASH_ATTN_SRC / "flash_attn" / "core" / "ck_planner.py"
    specification = importlib.util.spec_from_file_location("ck_planner_alone", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


planner = _planner()

# Kept from run to run: its content depends only on its key.
CACHE = ROOT / "build" / "test-cache"
DIMS = (32, 64, 128, 256)
GUARD = b"\xa5" * 64
SIZES = {instance.name for instance in ck_instances.table()}


CHECKS = ("-fsanitize=undefined,bounds", "-fsanitize-trap=undefined,bounds")


@pytest.fixture(
    scope="session", autouse=True,
    params=[pytest.param((), id="as in a wheel"), pytest.param(CHECKS, id="with checks", marks=pytest.mark.long)],
)  # fmt: skip
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The planner of the package. Other tests take the one of a wheel too, from the same cache."""
    path = ck_planner.build(tmp_path_factory.mktemp("planner"), cache=CACHE, flags=request.param)
    patch = pytest.MonkeyPatch()
    patch.setattr(planner, "PATH", path)
    planner.library.cache_clear()
    yield planner.library()
    planner.library.cache_clear()
    patch.undo()


def addresses(start: int = 1) -> Iterator[int]:
    """Device addresses, all different."""
    yield from (0x7F00_0000_0000 + 4096 * number for number in range(start, start + 1000))


@dataclass
class Call:
    """Parameters of one call. tensors: name -> (address, batch, row, head strides)."""

    kind: str
    dtype: int = 1
    batch: int = 3
    nheads: int = 8
    nheads_k: int = 2
    head_dim: int = 64
    seqlen_q: int = 300
    seqlen_k: int = 500
    left: int = -1
    right: int = -1
    scale: float = 0.125
    softcap: float = 0.0
    dropout: float = 0.0
    alibi: bool = False
    group: bool = False
    deterministic: bool = False
    paged: bool = False
    new: int = 0
    rotary: str = ""
    splits: int = 5
    changes: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> tuple[bytes, dict[str, Any]]:
        """The structure of the call, and the values in it that kernels have to receive."""
        place = addresses()
        values: dict[str, Any] = {}

        def pointer(name: str, there: bool = True) -> int:
            values[name] = next(place) if there else 0
            return int(self.changes.get(name, values[name]))

        def tensor(name: str, there: bool = True) -> tuple[int, int, int, int]:
            if not there:
                return (0, 0, 0, 0)
            number = 8 * (1009 + len(values))
            pages = self.kind == "decode" and name in ("k", "v")
            strides = (0 if self.group and not pages else 64 * number, 2 * number, number)
            values[f"{name} strides"] = strides
            return (pointer(name), *self.changes.get(f"{name} strides", strides))

        shape = (
            self.dtype, self.batch, self.nheads, self.nheads_k, self.head_dim, self.seqlen_q, self.seqlen_k,
            self.left, self.right, self.scale, self.softcap, self.dropout,
            0 if self.group else 70_001, 7_001, 11 if self.alibi else 0,
            pointer("alibi_slopes", self.alibi), pointer("cu_seqlens_q", self.group),
            pointer("cu_seqlens_k", self.group), pointer("rng_state", self.dropout > 0),
        )  # fmt: skip
        main = [part for name in ("q", "k", "v", "out") for part in tensor(name)]
        if self.kind == "forward":
            more = (pointer("lse"), pointer("seqused_k", self.changes.get("seqused", False)), 0, 0, 0, 0)
            return planner.FORWARD.pack(*shape, *main, *more), values
        if self.kind == "backward":
            main += [part for name in ("dout", "dq", "dk", "dv") for part in tensor(name)]
            sums = (pointer("lse"), pointer("delta"), pointer("dq_sum"))
            total = self.batch * self.seqlen_q if self.group else 0
            return planner.BACKWARD.pack(*shape, *main, *sums, total, int(self.deterministic), 0), values
        main += [part for name in ("k_new", "v_new") for part in tensor(name, self.new > 0)]
        rotary = self.rotary != ""
        rest = (
            pointer("lse"), pointer("seqlens_before", self.new > 0), pointer("seqlens_k"), 0,
            pointer("block_table", self.paged), 17 if self.paged else 0,
            self.batch * self.seqlen_q if self.group else 0,
            pointer("rotary_cos", rotary), pointer("rotary_sin", rotary), 32 if rotary else 0,
            int(self.rotary == "interleaved"), self.new, self.changes.get("page_size", 128 if self.paged else 0),
            self.splits, 0, pointer("split_out"), pointer("split_lse"),
        )  # fmt: skip
        return planner.DECODE.pack(*shape, *main, *rest), values


def words(argument: bytes, letter: str) -> list[Any]:
    """An argument as a list of aligned pointers (Q), ints (i) or floats (f)."""
    size = struct.calcsize(letter)
    return list(struct.unpack(f"={len(argument) // size}{letter}", argument[: len(argument) // size * size]))


# Operation of a kernel -> the pointers that it receives, if the call has them.
POINTERS = {
    "fwd": "q k v out lse alibi_slopes cu_seqlens_q cu_seqlens_k rng_state seqused_k",
    "dot": "out dout delta cu_seqlens_q",
    "dqdkdv": "q k v lse dout delta dk dv dq_sum alibi_slopes cu_seqlens_q cu_seqlens_k rng_state",
    "convert": "dq_sum dq cu_seqlens_q cu_seqlens_k",
    "appendkv": "q k v k_new v_new seqlens_before block_table rotary_cos rotary_sin",
    "splitkv": "q k v split_lse split_out alibi_slopes seqlens_k block_table cu_seqlens_q cu_seqlens_k",
    "combine": "split_lse split_out lse out cu_seqlens_q",
}
STRIDES = {
    "fwd": "q k v out", "dot": "out dout", "dqdkdv": "q k v dout dk dv", "convert": "dq",
    "appendkv": "q k v k_new v_new", "splitkv": "q k v", "combine": "out",
}  # fmt: skip


def check(call: Call) -> list[str]:
    """Plans the call and checks every launch of the plan. Returns the names of the kernels."""
    parameters, values = call.pack()
    launches = planner.plan(call.kind, parameters)
    for launch in launches:
        operation = launch.kernel.split("-")[0]
        assert launch.kernel in SIZES
        assert all(0 < size < 2**31 for size in launch.grid)
        assert max(launch.grid[1:]) < 65536
        held = words(launch.argument, "Q")
        for name in POINTERS[operation].split():
            if values.get(name):
                assert held.count(values[name]) == 1, f"{launch.kernel}: {name}"
        if values.get("rng_state") and operation in ("fwd", "dqdkdv"):
            assert held.count(values["rng_state"] + 8) == 1  # the offset follows the seed
        foreign = {value for name, value in values.items() if isinstance(value, int) and value} - {
            values[name] for name in POINTERS[operation].split() if name in values
        }
        assert not foreign & set(held), f"{launch.kernel} holds {foreign & set(held)}"
        numbers = words(launch.argument, "i")
        for name in STRIDES[operation].split():
            for stride in values.get(f"{name} strides", ()):
                assert stride == 0 or stride in numbers, f"{launch.kernel}: a stride of {name}"
        assert call.head_dim in numbers
    return [launch.kernel for launch in launches]


shapes = {
    "dtype": st.integers(0, 1),
    "batch": st.integers(1, 70),
    "head_dim": st.sampled_from(DIMS),
    "seqlen_q": st.integers(1, 5000),
    "seqlen_k": st.integers(1, 5000),
    "left": st.one_of(st.just(-1), st.integers(0, 6000)),
    "right": st.one_of(st.just(-1), st.integers(0, 6000)),
    "scale": st.floats(0.015625, 8, width=32),
    "alibi": st.booleans(),
    "group": st.booleans(),
}


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int]:
    nheads_k = draw(st.integers(1, 16))
    return nheads_k * draw(st.integers(1, 8)), nheads_k


@settings(deadline=None, max_examples=400)
@given(heads=heads(), dim=st.integers(1, 32), softcap=st.booleans(), dropout=st.booleans(), **shapes)
def test_forward(heads: tuple[int, int], dim: int, softcap: bool, dropout: bool, **shape: Any) -> None:
    softcap = softcap and not (shape["alibi"] or dropout)
    shape["head_dim"] = 8 * dim
    call = Call("forward", nheads=heads[0], nheads_k=heads[1], softcap=20.0 * softcap, dropout=0.1 * dropout, **shape)
    (kernel,) = check(call)
    bucket = next(dim for dim in (32, 64, 96, 128, 192, 256) if call.head_dim <= dim)
    window = call.left >= 0 or call.right >= 0
    options = {
        "mask": window or softcap or dropout or call.alibi,
        "alibi": call.alibi,
        "dropout": dropout,
        "softcap": softcap,
    }
    expected = ["fwd", ("fp16", "bf16")[call.dtype], f"d{bucket}", "group" if call.group else "batch"]
    assert kernel == "-".join(expected + [name for name, there in options.items() if there])


@settings(deadline=None, max_examples=400)
@given(heads=heads(), dropout=st.booleans(), deterministic=st.booleans(), **shapes)
def test_backward(heads: tuple[int, int], dropout: bool, deterministic: bool, **shape: Any) -> None:
    call = Call(
        "backward", nheads=heads[0], nheads_k=heads[1], dropout=0.1 * dropout, deterministic=deterministic, **shape
    )
    rows = call.batch * call.seqlen_q * call.nheads * call.head_dim
    if (deterministic and rows >= 2**31) or call.seqlen_q * call.nheads * call.head_dim * 4 >= 2**31:
        with pytest.raises(planner.UnsupportedError, match=r"^(dq_sum|deterministic):"):
            check(call)
        return
    kernels = check(call)
    start = f"-{('fp16', 'bf16')[call.dtype]}-d{call.head_dim}-{'group' if call.group else 'batch'}"
    alibi, drop, same = "-alibi" * call.alibi, "-dropout" * dropout, "-deterministic" * deterministic
    assert kernels == [f"dot{start}", f"dqdkdv{start}{alibi}{drop}{same}", f"convert{start}{same}"]
    keys = 64 if call.head_dim == 256 else 128
    parts = -(-call.seqlen_k // keys) if deterministic else 1
    assert planner.backward_workspace(call.pack()[0]) == parts * rows * 4


@settings(deadline=None, max_examples=400)
@given(
    heads=heads(), paged=st.booleans(), softcap=st.booleans(), new=st.integers(0, 40), splits=st.integers(1, 128),
    rotary=st.sampled_from(["", "interleaved", "half"]), **{**shapes, "seqlen_q": st.integers(1, 300)},
)  # fmt: skip
def test_decode(heads: tuple[int, int], softcap: bool, new: int, rotary: str, **shape: Any) -> None:
    softcap = softcap and not shape["alibi"]
    shape["paged"] = shape["paged"] or shape["group"]
    new = 0 if shape["group"] else new
    rotary = rotary if new else ""
    call = Call("decode", nheads=heads[0], nheads_k=heads[1], softcap=20.0 * softcap, new=new, rotary=rotary, **shape)
    if call.splits * call.batch * call.seqlen_q * call.nheads * call.head_dim >= 2**31:
        with pytest.raises(planner.UnsupportedError, match="num_splits: split_out has 2\\^31 elements or more"):
            check(call)
        return
    if 4 * call.head_dim * ((call.splits - 1) * call.batch * call.seqlen_q * call.nheads + call.seqlen_q) >= 2**31:
        with pytest.raises(planner.UnsupportedError, match="num_splits: one sequence of a head spans"):
            check(call)
        return
    kernels = check(call)
    kind = f"-{('fp16', 'bf16')[call.dtype]}-d{call.head_dim}"
    paged, mode = "-paged" * call.paged, "-group" if call.group else "-batch"
    assert kernels == [
        *([f"appendkv{kind}{paged}" + f"-{rotary}" * bool(rotary)] if new else []),
        f"splitkv{kind}{mode}{paged}" + "-alibi" * call.alibi + "-softcap" * softcap,
        f"combine{kind}{mode}-splits{4 if call.splits <= 16 else 7}",
    ]


def test_the_arguments_of_a_forward_field_by_field() -> None:
    call = Call("forward", left=100, right=0)
    parameters, values = call.pack()
    (launch,) = planner.plan("forward", parameters)
    strides = {name: values[f"{name} strides"] for name in ("q", "k", "v", "out")}
    head = struct.unpack_from("<4Q6if8i", launch.argument)
    assert head[:4] == tuple(values[name] for name in ("q", "k", "v", "out"))
    assert head[4:10] == (300, 500, 64, 64, 8, 4)  # lengths, head dims, heads, ratio of query heads to key heads
    assert head[10] == pytest.approx(0.125 * 1.4426950408889634)  # for exp2
    assert head[11:15] == tuple(strides[name][1] for name in strides)
    assert head[15:] == tuple(strides[name][2] for name in strides)
    # window, mask aligned to the last query and key; then the log-sum-exp and the batch strides
    assert struct.unpack_from("<3i", launch.argument, 96) == (100, 0, 2)
    assert struct.unpack_from("<Qii4i", launch.argument, 112) == (
        values["lse"], 7_001, 70_001, *(strides[name][0] for name in strides),
    )  # fmt: skip
    assert launch.grid == (8, 3, 3)  # heads, blocks of 128 queries, batch


@pytest.mark.parametrize(
    ("left", "right", "alibi", "expected"),
    [
        (-1, -1, True, (-1, -1)),
        (499, 299, True, (499, 299)),
        (500, 300, True, (-1, -1)),
        (2**31 - 1, 2**31 - 1, True, (-1, -1)),
        # Causal ALiBi without a left limit would be added as slope * key; a window that excludes no key prevents that.
        (-1, 0, True, (500, 0)),
        (600, 0, True, (500, 0)),
        (-1, 0, False, (-1, 0)),
    ],
)
def test_windows(left: int, right: int, alibi: bool, expected: tuple[int, int]) -> None:
    launch = planner.plan("forward", Call("forward", left=left, right=right, alibi=alibi).pack()[0])[0]
    # after the common part, and the slopes: a pointer and a stride
    assert struct.unpack_from("<3i", launch.argument, 96 + 16 * alibi) == (*expected, 2)


INVALID, UNSUPPORTED = ValueError, NotImplementedError


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (Call("forward", dtype=2), INVALID, "dtype: 2 is neither"),
        (Call("forward", batch=0), INVALID, "batch: 0 is not above 0"),
        (Call("forward", batch=65536), UNSUPPORTED, "batch: 65536 is above 65535"),
        (Call("forward", nheads=7), INVALID, "nheads_k: 2 does not divide nheads = 7"),
        (Call("forward", nheads_k=0), INVALID, "nheads_k: 0 does not divide"),
        (Call("forward", seqlen_q=0), INVALID, "seqlen_q: 0 is not above 0"),
        (Call("forward", seqlen_k=-1), INVALID, "seqlen_k: -1 is not above 0"),
        (Call("forward", head_dim=65), INVALID, "head_dim: 65 is not a multiple of 8"),
        (Call("forward", head_dim=264), INVALID, "head_dim: 264 is not"),
        (Call("backward", head_dim=96), UNSUPPORTED, "head_dim: 96 is none of 32, 64, 128, 256: pad"),
        (Call("forward", left=-2), INVALID, "window_left: -2 is below -1"),
        (Call("forward", scale=0.0), UNSUPPORTED, "scale: 0 is not above 0"),
        (Call("forward", scale=-0.5), UNSUPPORTED, "scale: -0.5 is not above 0"),
        (Call("forward", scale=float("nan")), INVALID, "scale: -?nan is not finite"),
        (Call("forward", softcap=-1.0), INVALID, "softcap: -1 is below 0"),
        (Call("forward", softcap=5.0, alibi=True), UNSUPPORTED, "softcap: not together with alibi_slopes"),
        (Call("forward", softcap=5.0, dropout=0.5), UNSUPPORTED, "softcap: not together with dropout_p"),
        (Call("backward", softcap=5.0), UNSUPPORTED, "softcap: the backward has none"),
        (Call("forward", dropout=1.0), INVALID, "dropout_p: 1 is not from 0 to below 1"),
        (Call("forward", dropout=0.5, changes={"rng_state": 0}), INVALID, "rng_state: is NULL"),
        (Call("forward", alibi=True, seqlen_k=65536), UNSUPPORTED, "alibi_slopes: distances of 65536"),
        (Call("forward", changes={"q": 0}), INVALID, "q: is NULL"),
        (Call("forward", changes={"v": 8}), INVALID, "v: its address is not a multiple of 16 bytes"),
        (Call("forward", changes={"k strides": (0, 12, 8)}), INVALID, "k: its row stride is 12 elements"),
        (Call("forward", changes={"out strides": (2**31, 8, 8)}), UNSUPPORTED, "out: its batch stride of 2147483648"),
        (Call("forward", seqlen_k=10**6, changes={"k strides": (0, 4096, 8)}), UNSUPPORTED, "k: one sequence of"),
        (Call("forward", changes={"lse": 0}), INVALID, "lse: is NULL"),
        (Call("forward", changes={"seqused": True}), INVALID, "seqused_k: is for cu_seqlens only"),
        (Call("forward", group=True, changes={"cu_seqlens_k": 0}), INVALID, "cu_seqlens_k: goes together"),
        (Call("backward", changes={"delta": 0}), INVALID, "delta: is NULL"),
        (Call("decode", splits=0), INVALID, "num_splits: 0 is not from 1 to 128"),
        (Call("decode", splits=129), INVALID, "num_splits: 129 is not from 1 to 128"),
        (Call("decode", dropout=0.5), INVALID, "dropout_p: a cache is read without"),
        (Call("decode", group=True), INVALID, "cu_seqlens_q: is for block_table only"),
        (Call("decode", paged=True, changes={"page_size": 16}), UNSUPPORTED, "page_size: 16 is not a multiple of 128"),
        (Call("decode", new=1, changes={"seqlens_before": 0}), INVALID, "seqlens_before: is NULL"),
        (Call("decode", rotary="half"), INVALID, "rotary_dim: is for k_new only"),
    ],
)  # fmt: skip
def test_wrong_calls_name_the_parameter(call: Call, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        planner.plan(call.kind, call.pack()[0])


@settings(deadline=None, max_examples=300)
@given(kind=st.sampled_from(["forward", "backward", "decode"]), seed=st.integers(0, 2**32))
def test_any_bytes_are_survived(library: ctypes.CDLL, kind: str, seed: int) -> None:
    """Random fields, half of them small numbers: the planner answers each time and writes nothing outside of the
    plan.
    """
    source = random.Random(seed)
    size = {"forward": planner.FORWARD, "backward": planner.BACKWARD, "decode": planner.DECODE}[kind].size
    parts = [
        source.randbytes(4) if source.random() < 0.5 else struct.pack("<i", source.randint(-1, 300))
        for _ in range(size // 4)
    ]
    plan_bytes = planner._PLAN_BYTES
    buffer = ctypes.create_string_buffer(GUARD + bytes(plan_bytes) + GUARD, plan_bytes + 2 * len(GUARD))
    function = getattr(library, f"flash_attn_ck_plan_{kind}")
    status = function(b"".join(parts), ctypes.addressof(buffer) + len(GUARD))
    raw = buffer.raw
    assert status in (planner.OK, planner.INVALID, planner.UNSUPPORTED)
    assert raw[: len(GUARD)] == raw[-len(GUARD) :] == GUARD
    message = raw[len(GUARD) : len(GUARD) + 256]
    assert (message[0] == 0) == (status == planner.OK)


def every_call() -> Iterator[Call]:
    """Calls that reach every kernel of the table."""
    flags = (False, True)
    for dtype, group, alibi, dropout, more in itertools.product((0, 1), flags, flags, flags, flags):
        common: dict[str, Any] = {"dtype": dtype, "group": group, "alibi": alibi, "left": 10 if more else -1}
        for dim in (32, 64, 96, 128, 192, 256):
            yield Call("forward", head_dim=dim, dropout=0.1 * dropout, **common)
            yield Call("forward", head_dim=dim, softcap=20.0 * (not alibi), **common)
        for dim in DIMS:
            yield Call("backward", head_dim=dim, dropout=0.1 * dropout, deterministic=more, **common)
            splits = 40 if dropout else 5
            yield Call("decode", head_dim=dim, softcap=20.0 * (more and not alibi), splits=splits, paged=True, **common)
            if not group:
                for rotary, paged in itertools.product(("", "half", "interleaved"), flags):
                    softcap = 20.0 * (more and not alibi)
                    yield Call("decode", head_dim=dim, softcap=softcap, new=3, rotary=rotary, paged=paged, **common)


_POISON = """
__attribute__((noinline)) static void fill(int byte)
{
    volatile unsigned char stack[65536];
    for (unsigned i = 0; i < sizeof(stack); i++)
        stack[i] = (unsigned char)byte;
}
int plan_after(int byte, int (*plan)(const void *, void *), const void *parameters, void *result)
{
    fill(byte);
    return plan(parameters, result);
}
"""


def test_no_byte_of_the_hosts_memory_is_in_an_argument(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Padding is zero: plans are equal whatever the stack and the memory of the plan held before."""
    (tmp_path / "poison.c").write_text(_POISON)
    command = ["cc", "-shared", "-nostdlib", "-fPIC", "-O0", "poison.c", "-o", "poison.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    plan_after = ctypes.CDLL(str(tmp_path / "poison.so")).plan_after
    plan_after.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    reached: set[str] = set()
    for call in every_call():
        parameters = call.pack()[0]
        reached |= {launch.kernel for launch in planner.plan(call.kind, parameters)}
        function = ctypes.cast(getattr(library, f"flash_attn_ck_plan_{call.kind}"), ctypes.c_void_p)
        plans = []
        for byte in (0x00, 0xFF):
            buffer = ctypes.create_string_buffer(bytes([byte]) * planner._PLAN_BYTES, planner._PLAN_BYTES)
            assert plan_after(byte, function, parameters, buffer) == planner.OK
            plans.append(buffer.raw)
        assert plans[0] == plans[1], call
    assert reached == SIZES


def test_kernels_are_the_table(library: ctypes.CDLL) -> None:
    assert library.flash_attn_ck_version() == 1
    held = planner.kernels()
    assert set(held) == SIZES
    assert all(40 <= size <= 384 for size in held.values())


def test_the_library_needs_an_old_c_library_alone() -> None:
    with planner.PATH.open("rb") as file:
        elf = ELFFile(file)
        (dynamic,) = (section for section in elf.iter_sections() if isinstance(section, DynamicSection))
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}  # type: ignore[attr-defined]
        versions = {
            auxiliary.name
            for section in elf.iter_sections()
            if isinstance(section, GNUVerNeedSection)
            for _, result in section.iter_versions()
            for auxiliary in result
        }
    assert needed <= {"libc.so.6", "libm.so.6"}
    assert {tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in versions} <= {(2, 2, 5), (2, 14)}


def test_the_header_is_c(tmp_path: Path) -> None:
    """A C program has the same sizes as Python's packing."""
    lines = "".join(
        f'_Static_assert(sizeof(flash_attn_ck_{name}) == {size}, "{name}");\n'
        for name, size in [
            ("forward", planner.FORWARD.size),
            ("backward", planner.BACKWARD.size),
            ("decode", planner.DECODE.size),
            ("plan", planner._PLAN_BYTES),
        ]
    )
    (tmp_path / "header.c").write_text(f'#include "flash_attn_ck.h"\n{lines}')
    include = FLASH_ATTN_SRC / "csrc" / "ck" / "include"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-c"]
    done = subprocess.run(
        [*command, f"-I{include}", "header.c"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
