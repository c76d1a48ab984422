"""Cases of the launcher's checks of a kernel and its arguments; part of launcher_cases.py."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import fake_launcher
from launcher_bench import Bench, case, equal, raises

FORMATS = {"P": "<Q", "i": "<i", "I": "<q", "f": "<f", "d": "<d", "0": "<Q"}


def hexadecimal(letters: str, values: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(struct.pack(FORMATS[letter], value or 0).hex() for letter, value in zip(letters, values, strict=True))


@case("hip", "cuda")
def packs_each_kind_at_its_limits(bench: Bench) -> None:
    limits: dict[str, list[Any]] = {
        "P": [0, 1, 2**63, 2**64 - 1, None],
        "i": [0, -1, 1, -(2**31), 2**31 - 1, True],
        "I": [0, -1, 2**31, -(2**63), 2**63 - 1],
        "f": [0.0, -1.0, 3, 0.1, math.inf, -math.inf, 3.4028234663852886e38],
        "d": [0.0, -1.0, 3, 0.1, math.inf, 5e-324],
    }
    for letter, values in limits.items():
        for value in values:
            bench.kernel(letter).launch(0, 0, 1, 1, 1, value)
            (launch,) = bench.fake.take_launches()
            equal(launch.args, hexadecimal(letter, (value,)))
    bench.kernel("fd").launch(0, 0, 1, 1, 1, math.nan, math.nan)
    (launch,) = bench.fake.take_launches()
    assert math.isnan(struct.unpack("<f", bytes.fromhex(launch.args[0]))[0])
    assert math.isnan(struct.unpack("<d", bytes.fromhex(launch.args[1]))[0])


@case("hip", "cuda")
def leaves_no_memory_of_the_host_beside_a_short_argument(bench: Bench) -> None:
    """The driver reads 8 bytes of each argument here, as HIP does if a kernel's metadata says so."""
    bench.kernel("PPPP").launch(0, 0, 1, 1, 1, *[2**64 - 1] * 4)
    bench.launcher.Kernel(b"PPPP", "entry", "ifif", 0, 64, "wide").launch(0, 0, 1, 1, 1, -1, 1.0, 7, -2.0)
    _, launch = bench.fake.take_launches()
    equal(
        launch.args,
        tuple(struct.pack(f"<{kind}4x", value).hex() for kind, value in zip("ifif", (-1, 1.0, 7, -2.0), strict=True)),
    )


@case("hip", "cuda")
def passes_a_structure_by_value(bench: Bench) -> None:
    for letter, size in itertools.product("BK", (1, 216, 4096)):
        content = random.Random(size).randbytes(size)
        bench.kernel(f"{letter}{size}").launch(0, 0, 1, 1, 1, content)
        (launch,) = bench.fake.take_launches()
        equal(launch.args, (content.hex(),))
    kernel = bench.kernel("B8")
    for wrong, kind, fragment in [
        (b"1234567", ValueError, "argument 0 has 7 bytes, wanted 8"),
        (bytearray(8), TypeError, "bytes"),
        (8, TypeError, "bytes"),
    ]:
        with raises(kind, fragment):
            kernel.launch(0, 0, 1, 1, 1, wrong)
    with raises(TypeError, "kernel_B8", "wants 1"):
        kernel.launch(0, 0, 1, 1, 1, b"12345678", 0)
    equal(bench.fake.take_launches(), [])


@case("hip", "cuda")
def packs_any_mix_as_struct_does(bench: Bench) -> None:
    source = random.Random(20)
    make: dict[str, Callable[[], Any]] = {
        "P": lambda: source.choice([None, source.getrandbits(64)]),
        "i": lambda: source.getrandbits(32) - 2**31,
        "I": lambda: source.getrandbits(64) - 2**63,
        "f": lambda: source.uniform(-1e6, 1e6),
        "d": lambda: source.uniform(-1e300, 1e300),
    }
    for length in [*range(129), *range(128, 0, -7)]:
        nulls = source.randrange(min(length, 3) + 1)
        letters = "".join(source.choice("PiIfd") for _ in range(length - nulls))
        values = tuple(make[letter]() for letter in letters)
        bench.kernel(letters + "0" * nulls).launch(0, 0, 1, 1, 1, *values)
        (launch,) = bench.fake.take_launches()
        equal(launch.args, hexadecimal(letters + "0" * nulls, values + (0,) * nulls))


@case("hip", "cuda")
def passes_grid_block_stream_and_shared(bench: Bench) -> None:
    bench.kernel("i", shared=4096, threads=256).launch(0, 2**47 + 8, 2**24 - 1, 65535, 3, 7)
    (launch,) = bench.fake.take_launches()
    equal(launch.grid, (2**24 - 1, 65535, 3))
    equal(launch.block, (256, 1, 1))
    equal((launch.stream, launch.shared, launch.device), (2**47 + 8, 4096, 0))


@case("cuda")
def passes_the_largest_grid(bench: Bench) -> None:
    bench.kernel("i", threads=256).launch(0, 0, 2**31 - 1, 1, 1, 7)
    (launch,) = bench.fake.take_launches()
    equal(launch.grid, (2**31 - 1, 1, 1))


@case("hip")
def refuses_more_threads_than_hip_counts(bench: Bench) -> None:
    for threads, blocks in [(256, 2**24), (1024, 2**31 - 1), (64, 2**26)]:
        with raises(OverflowError, f"{blocks} blocks of {threads} threads", "pass fewer rows"):
            bench.kernel("i", threads=threads).launch(0, 0, blocks, 1, 1, 7)
    equal(bench.fake.take_launches(), [])


@case("hip", "cuda")
def refuses_integers_that_do_not_fit(bench: Bench) -> None:
    for letter, value in [
        ("P", -1),
        ("P", 2**64),
        ("i", 2**31),
        ("i", -(2**31) - 1),
        ("i", 2**200),
        ("I", 2**63),
        ("I", -(2**63) - 1),
        ("f", 1e39),
        ("d", 10**400),
    ]:
        with raises(OverflowError, f"kernel_i{letter}", "argument 1", str(value)):
            bench.kernel("i" + letter).launch(0, 0, 1, 1, 1, 5, value)
    for position, what in enumerate(["device", "stream", "grid_x", "grid_y", "grid_z"]):
        for value in (-1, 2**64):
            arguments = [0, 0, 1, 1, 1]
            arguments[position] = value
            with raises((TypeError if what == "stream" else OverflowError), what, str(value)):
                bench.kernel("").launch(*arguments)
    equal(bench.fake.take_launches(), [])


@case("hip", "cuda")
def refuses_wrong_types(bench: Bench) -> None:
    for letter, value in [
        ("P", "x"),
        ("P", 1.0),
        ("i", None),
        ("i", 1.0),
        ("I", None),
        ("f", None),
        ("d", ""),
    ]:
        with raises(TypeError, f"kernel_P{letter}", "argument 1", type(value).__name__):
            bench.kernel("P" + letter).launch(0, 0, 1, 1, 1, 0, value)
    with raises(TypeError, "stream", "None"):
        bench.kernel("").launch(0, None, 1, 1, 1)
    with raises(TypeError):
        bench.kernel("").launch(0, 0, 1.0, 1, 1)

    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError("of its own")

    with raises(ZeroDivisionError, "of its own"):
        bench.kernel("i").launch(0, 0, 1, 1, 1, Broken())
    equal(bench.fake.take_launches(), [])


@case("hip", "cuda")
def refuses_wrong_counts(bench: Bench) -> None:
    for arguments in [(), (0, 0, 1, 1, 1), (0, 0, 1, 1, 1, 5), (0, 0, 1, 1, 1, 5, 6, 7)]:
        with raises(TypeError, "kernel_ii0", "wants 2", f"got {len(arguments)} in all", "wanted 7"):
            bench.kernel("ii0").launch(*arguments)
    equal(bench.fake.take_launches(), [])


@case("hip", "cuda")
def refuses_impossible_kernels(bench: Bench) -> None:
    good: dict[str, Any] = {
        "image": b"x",
        "symbol": "s",
        "params": "P0",
        "shared": 0,
        "threads": 1024,
        "name": "n",
    }
    bench.launcher.Kernel(**good)
    for field, value, kind, fragment in [
        ("image", b"", ValueError, "image is empty"),
        ("image", bytearray(b"x"), TypeError, "bytes"),
        ("symbol", "", ValueError, "symbol ''"),
        ("symbol", "a\0b", ValueError, "null character"),
        ("name", "", ValueError, "name ''"),
        ("params", "Pq", ValueError, "letter 1"),
        ("params", "P\0", ValueError, "letter 1"),
        ("params", "0P", ValueError, "before letter 1"),
        ("params", "P" * 129, ValueError, "129 params, at most 128"),
        *(("params", text, ValueError, "number of bytes") for text in ("B", "B0", "B-8", "B+8", "B8P", "B4097", "B 8")),
        ("params", "K0", ValueError, "K wants a number of bytes"),
        ("params", b"P", TypeError, "str"),
        ("threads", 0, ValueError, "threads is 0"),
        ("threads", 1025, ValueError, "threads is 1025"),
        ("shared", -1, ValueError, "shared is -1"),
        ("shared", 2**31, OverflowError, ""),
    ]:
        with raises(kind, fragment):
            bench.launcher.Kernel(**{**good, field: value})


@case("hip", "cuda")
def a_kernel_is_immutable_and_tells_what_it_is(bench: Bench) -> None:
    one = bench.launcher.Kernel(b"Pi", symbol="entry", params="Pi", shared=512, threads=128, name="fwd")
    equal((one.name, one.symbol, one.params, one.shared, one.threads), ("fwd", "entry", "Pi", 512, 128))
    equal(repr(one), "Kernel('fwd', params='Pi', shared=512, threads=128)")
    for field in ("name", "shared", "threads", "launch", "other"):
        with raises(AttributeError):
            setattr(one, field, 1)
    with raises(TypeError):
        bench.launcher.Kernel.launch = None
    with raises(TypeError):
        type("Derived", (bench.launcher.Kernel,), {})


class _Fake(fake_launcher.Kernel):
    launched: ClassVar[list[Any]] = []


@case("hip", "cuda")
def is_as_strict_as_the_fake(bench: Bench) -> None:
    """fake_launcher.py replaces the launcher in tests of the package. Both must report the same errors in the same
    words.
    """
    kernels = [
        (b"", "entry", "i", 0, 64, "name"), (b"i", "", "i", 0, 64, "name"), (b"i", "entry", "i", 0, 64, ""),
        (b"i", "entry", "i", 0, 0, "name"), (b"i", "entry", "i", 0, 1025, "name"), (b"i", "entry", "i", -1, 64, "name"),
        *((b"i", "entry", params, 0, 64, "name") for params in ("B", "B0", "K4097", "B8x", "x", "i0i", "i" * 129)),
    ]  # fmt: skip
    for kernel in kernels:
        equal(_refused(bench.launcher.Kernel, *kernel), _refused(_Fake, *kernel))
    launches: list[tuple[str, tuple[Any, ...]]] = [
        ("i", ()), ("i", (1, 2)), ("i", (2**31,)), ("i", (0.5,)), ("i", (None,)), ("I", (2**63,)), ("P", (-1,)),
        ("P", (2**64,)), ("P", ("x",)), ("f", (1e39,)), ("f", ("x",)), ("d", (None,)), ("B2", (b"1",)), ("i0", (1, 0)),
    ]  # fmt: skip
    for params, arguments in launches:
        real, fake = (kind(b"i", "entry", params, 0, 64, "name") for kind in (bench.launcher.Kernel, _Fake))
        equal(_refused(real.launch, 0, 0, 1, 1, 1, *arguments), _refused(fake.launch, 0, 0, 1, 1, 1, *arguments))
    real, fake = (kind(b"i", "entry", "i", 0, 64, "name") for kind in (bench.launcher.Kernel, _Fake))
    fake.platform = bench.platform
    for leading in [(-1, 0, 1, 1, 1), (2**31, 0, 1, 1, 1), (0, 0, -1, 1, 1), (0, 0, 1, 2**32, 1), (0, -1, 1, 1, 1)]:
        equal(_refused(real.launch, *leading, 1), _refused(fake.launch, *leading, 1))
    if bench.platform == "hip":
        equal(_refused(real.launch, 0, 0, 2**26, 1, 1, 1), _refused(fake.launch, 0, 0, 2**26, 1, 1, 1))
    equal(bench.fake.take_launches(), [])
    equal(_Fake.launched, [])


def _refused(function: Callable[..., Any], *given: Any) -> tuple[type[Exception], str]:
    """The exception that a function raises."""
    try:
        function(*given)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError(f"{given} was not refused")
