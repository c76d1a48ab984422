"""What the launcher must do once bound; test_launcher.py runs it under each Python, in a process of its own:

    launcher_cases.py PLATFORM MODULE_DIRECTORY LIBRARY [CASE ...]

Standard library only. Every case gets the launcher with the fake driver behind it, reset, with two devices.
"""

from __future__ import annotations

import gc
import importlib
import math
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fake_driver import FakeDriver

FUNCTIONS = {
    "hip": {
        "load": "hipModuleLoadData",
        "find": "hipModuleGetFunction",
        "unload": "hipModuleUnload",
        "launch": "hipModuleLaunchKernel",
        "exchange": "hipThreadExchangeStreamCaptureMode",
        "attribute": "hipFuncGetAttribute",
    },
    "cuda": {
        "load": "cuModuleLoadData",
        "find": "cuModuleGetFunction",
        "unload": "cuModuleUnload",
        "launch": "cuLaunchKernel",
        "exchange": "cuThreadExchangeStreamCaptureMode",
        "attribute": "cuFuncGetAttribute",
    },
}
FORMATS = {"P": "<Q", "i": "<i", "I": "<q", "f": "<f", "d": "<d", "0": "<Q"}


@dataclass(frozen=True)
class Bench:
    """The launcher, bound to a platform, and the driver it is bound to."""

    launcher: Any
    fake: FakeDriver
    platform: str

    @property
    def functions(self) -> dict[str, str]:
        """What the driver calls each of its functions."""
        return FUNCTIONS[self.platform]

    def kernel(self, params: str, *, shared: int = 0, threads: int = 64) -> Any:
        """A kernel whose image is its own list of letters, as fake_driver.c wants it."""
        image = params.encode() or b"\0"
        return self.launcher.Kernel(image, "entry", params, shared, threads, f"kernel_{params}")


Case = Callable[[Bench], None]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {}


def case(*platforms: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, platforms)
        return function

    return register


def equal(got: object, wanted: object) -> None:
    assert got == wanted, f"\n   got {got!r}\nwanted {wanted!r}"


@contextmanager
def raises(kind: type[BaseException], *fragments: str) -> Iterator[list[BaseException]]:
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    if not caught:
        raise AssertionError(f"{kind.__name__} was not raised")
    missing = [fragment for fragment in fragments if fragment not in str(caught[0])]
    if missing:
        raise AssertionError(f"{missing} not in {caught[0]}")


def hexadecimal(letters: str, values: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(struct.pack(FORMATS[letter], value or 0).hex() for letter, value in zip(letters, values, strict=True))


def in_thread(function: Callable[[], None]) -> None:
    """Run in a new thread, which has a device state of its own, and hand on what it raises."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


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
def passes_a_structure_by_value(bench: Bench) -> None:
    for size in (1, 216, 4096):
        content = random.Random(size).randbytes(size)
        bench.kernel(f"B{size}").launch(0, 0, 1, 1, 1, content)
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
    for length in [*range(65), *range(64, 0, -7)]:
        nulls = source.randrange(min(length, 3) + 1)
        letters = "".join(source.choice("PiIfd") for _ in range(length - nulls))
        values = tuple(make[letter]() for letter in letters)
        bench.kernel(letters + "0" * nulls).launch(0, 0, 1, 1, 1, *values)
        (launch,) = bench.fake.take_launches()
        equal(launch.args, hexadecimal(letters + "0" * nulls, values + (0,) * nulls))


@case("hip", "cuda")
def passes_grid_block_stream_and_shared(bench: Bench) -> None:
    bench.kernel("i", shared=4096, threads=256).launch(0, 2**47 + 8, 2**31 - 1, 65535, 3, 7)
    (launch,) = bench.fake.take_launches()
    equal(launch.grid, (2**31 - 1, 65535, 3))
    equal(launch.block, (256, 1, 1))
    equal((launch.stream, launch.shared, launch.device), (2**47 + 8, 4096, 0))


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
        ("params", "P" * 65, ValueError, "65 params, at most 64"),
        *(("params", text, ValueError, "number of bytes") for text in ("B", "B0", "B-8", "B+8", "B8P", "B4097", "B 8")),
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


@case("hip", "cuda")
def a_grid_with_a_zero_does_nothing(bench: Bench) -> None:
    for grid in [(0, 1, 1), (1, 0, 1), (1, 1, 0)]:
        equal(bench.kernel("i").launch(1, 0, *grid, 5), None)
    equal(bench.fake.take_log(), [])
    with raises(OverflowError, "argument 0"):
        bench.kernel("i").launch(0, 0, 0, 1, 1, 2**31)


@case("hip", "cuda")
def loads_once_a_device(bench: Bench) -> None:
    one = bench.kernel("i")
    for device in (0, 1, 0, 1, 1):
        one.launch(device, 0, 1, 1, 1, 5)
    log = bench.fake.take_log()
    loads = [line.split()[1] for line in log if line.startswith(bench.functions["load"])]
    equal(loads, ["device=0", "device=1"])
    equal(sum(line.startswith(bench.functions["launch"]) for line in log), 5)
    one.load(0)
    equal([line for line in bench.fake.take_log() if "Load" in line], [])


@case("hip", "cuda")
def load_alone_launches_nothing(bench: Bench) -> None:
    bench.kernel("i").load(1)
    calls = [line.split()[0] for line in bench.fake.take_log()]
    assert bench.functions["load"] in calls
    assert bench.functions["launch"] not in calls


@case("hip", "cuda")
def eight_threads_load_once(bench: Bench) -> None:
    one = bench.kernel("i")
    bench.fake.library.fake_set_load_milliseconds(30)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        one.launch(number % 2, 0, 1, 1, 1, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = bench.fake.take_log()
    equal(sum(line.startswith(bench.functions["load"]) for line in log), 2)
    equal(sum(line.startswith(bench.functions["launch"]) for line in log), 8)


@case("hip", "cuda")
def launches_meet_in_the_driver(bench: Bench) -> None:
    """Two threads inside the driver at once: neither holds the interpreter lock."""
    one = bench.kernel("")
    one.load(0)
    bench.fake.library.fake_set_meeting(2)
    other = threading.Thread(target=lambda: one.launch(0, 0, 1, 1, 1))
    other.start()
    one.launch(0, 0, 1, 1, 1)
    other.join()
    bench.fake.reset()


@case("hip")
def switches_the_device_and_back(bench: Bench) -> None:
    one = bench.kernel("i")
    one.load(0)
    one.load(1)
    bench.fake.take_log()
    one.launch(0, 0, 1, 1, 1, 5)
    equal([line.split()[0] for line in bench.fake.take_log()], ["hipModuleLaunchKernel"])
    one.launch(1, 0, 1, 1, 1, 5)
    log = bench.fake.take_log()
    equal([log[0], log[2]], ["hipSetDevice 1", "hipSetDevice 0"])
    assert log[1].startswith("hipModuleLaunchKernel device=1 loaded=1")
    equal(bench.launcher.current_device(), 0)


@case("cuda")
def pushes_the_context_and_pops_it(bench: Bench) -> None:
    one = bench.kernel("i")
    one.load(0)
    one.load(1)
    bench.fake.take_log()
    one.launch(0, 0, 1, 1, 1, 5)
    equal([line.split()[0] for line in bench.fake.take_log()], ["cuLaunchKernel"])
    one.launch(1, 0, 1, 1, 1, 5)
    log = bench.fake.take_log()
    equal([log[0], log[2]], ["cuCtxPushCurrent_v2 1", "cuCtxPopCurrent_v2"])
    assert log[1].startswith("cuLaunchKernel device=1 loaded=1")
    equal(bench.launcher.current_device(), 0)


@case("cuda")
def a_thread_without_a_context_gets_one(bench: Bench) -> None:
    def work() -> None:
        equal(bench.launcher.current_device(), 0)
        bench.kernel("i").launch(1, 0, 1, 1, 1, 5)
        equal(bench.launcher.current_device(), 1)

    in_thread(work)
    log = bench.fake.take_log()
    equal([line for line in log if "Ctx" in line and "Retain" not in line], ["cuCtxSetCurrent 1"])


@case("hip", "cuda")
def loading_relaxes_the_capture_mode(bench: Bench) -> None:
    names = bench.functions
    bench.fake.library.fake_set_capture_mode(1)
    bench.kernel("i").launch(0, 0, 1, 1, 1, 5)
    log = [line for line in bench.fake.take_log() if "Ctx" not in line]
    equal(log[0], f"{names['exchange']} 2")
    assert log[1].startswith(f"{names['load']} device=0 mode=2"), log[1]
    equal(log[2:4], [f"{names['find']} entry", f"{names['exchange']} 1"])
    equal(bench.fake.library.fake_capture_mode(), 1)

    bench.fake.fail(names["load"], 209)
    with raises(bench.launcher.DriverError):
        bench.kernel("i").launch(0, 0, 1, 1, 1, 5)
    equal(bench.fake.library.fake_capture_mode(), 1)
    bench.fake.library.fake_set_capture_mode(0)


@case("cuda")
def asks_for_shared_memory_above_48_kib(bench: Bench) -> None:
    bench.kernel("i", shared=48 * 1024).launch(0, 0, 1, 1, 1, 5)
    equal([line for line in bench.fake.take_log() if line.startswith("cuFuncSet")], [])
    bench.kernel("i", shared=100_000).launch(0, 0, 1, 1, 1, 5)
    log = bench.fake.take_log()
    equal([line for line in log if line.startswith("cuFuncSet")], ["cuFuncSetAttribute 8 100000"])
    bench.fake.fail("cuFuncSetAttribute", 1)
    with raises(bench.launcher.DriverError, "cuFuncSetAttribute"):
        bench.kernel("i", shared=100_000).launch(0, 0, 1, 1, 1, 5)


@case("hip", "cuda")
def driver_failures_are_told(bench: Bench) -> None:
    names = bench.functions
    error_name = {"hip": "hipErrorNoBinaryForGpu", "cuda": "CUDA_ERROR_NO_BINARY_FOR_GPU"}[bench.platform]
    for function in (names["load"], names["find"], names["launch"], names["exchange"]):
        one = bench.kernel("i")
        bench.fake.fail(function, 209)
        wanted = ("kernel_i", "device 0", function, error_name, "209", "no kernel image")
        with raises(bench.launcher.DriverError, *wanted) as caught:
            one.launch(0, 0, 1, 1, 1, 5)
        error: Any = caught[0]
        equal((error.function, error.error, error.code), (function, error_name, 209))
        assert isinstance(error, RuntimeError)
        log = bench.fake.take_log()
        equal(f"{names['unload']}" in log, function == names["find"])
        # torch asks for HIP's last error after its own launches, and would find ours there.
        equal("hipGetLastError" in log, bench.platform == "hip")
        one.launch(0, 0, 1, 1, 1, 5)
        equal(len(bench.fake.take_launches()), 1)


@case("cuda")
def an_error_without_a_name_is_told_by_number(bench: Bench) -> None:
    bench.fake.fail("cuLaunchKernel", 12345)
    with raises(bench.launcher.DriverError, "cuLaunchKernel failed: unknown error (12345)"):
        bench.kernel("i").launch(0, 0, 1, 1, 1, 5)


@case("hip")
def a_failing_switch_is_told_and_undone(bench: Bench) -> None:
    one = bench.kernel("i")
    one.load(1)
    bench.fake.fail("hipSetDevice", 46)
    with raises(bench.launcher.DriverError, "hipSetDevice", "46", "device 1"):
        one.launch(1, 0, 1, 1, 1, 5)
    equal(bench.fake.take_launches(), [])
    bench.fake.fail("hipModuleLaunchKernel", 46)
    with raises(bench.launcher.DriverError, "hipModuleLaunchKernel"):
        one.launch(1, 0, 1, 1, 1, 5)
    equal(bench.launcher.current_device(), 0)


@case("hip", "cuda")
def a_device_that_is_not_there_is_named(bench: Bench) -> None:
    equal(bench.launcher.devices(), 2)
    one = bench.kernel("i")
    for device in (2, 2**31 - 1):
        with raises(bench.launcher.DriverError, "kernel_i", f"device {device}", "there are 2"):
            one.launch(device, 0, 1, 1, 1, 5)
        with raises(bench.launcher.DriverError, f"device {device}"):
            one.load(device)
    with raises(OverflowError, "-1"):
        one.load(-1)


@case("hip", "cuda")
def the_image_outlives_the_callers_reference(bench: Bench) -> None:
    launch = bench.launcher.Kernel(bytes(bytearray(b"iP")), "entry", "iP", 0, 64, "n").launch
    launch(0, 0, 1, 1, 1, 5, 6)
    gc.collect()
    churn = [bytes(bytearray(b"zz")) for _ in range(1000)]
    launch(0, 0, 1, 1, 1, 5, 6)
    first, second = bench.fake.take_launches()
    equal(first.args, second.args)
    equal(len(churn), 1000)


@case("hip", "cuda")
def references_are_not_leaked(bench: Bench) -> None:
    if not hasattr(sys, "getrefcount"):
        return
    image, value = bytes(bytearray(b"i")), 123456789
    watched = [image, value, bench.launcher.Kernel]
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(50):
        one = bench.launcher.Kernel(image, "entry", "i", 0, 64, "never_loaded")
        one.launch(0, 0, 0, 1, 1, value)
        with raises(TypeError):
            one.launch(0, 0, 0, 1, 1, "x")
        with raises(ValueError):
            bench.launcher.Kernel(image, "entry", "x", 0, 64, "never_loaded")
    del one
    gc.collect()
    equal([sys.getrefcount(thing) for thing in watched], before)


@case("hip", "cuda")
def attributes_come_from_the_driver(bench: Bench) -> None:
    wanted = {"registers": 64, "local_bytes": 16, "static_shared_bytes": 512, "max_threads": 256}
    one = bench.kernel("i")
    equal(one.attributes(0), wanted)
    equal(one.attributes(1), wanted)
    equal(bench.launcher.current_device(), 0)
    if bench.platform == "hip":
        bench.fake.fail("hipFuncGetAttribute", 1)
        with raises(bench.launcher.DriverError, "hipFuncGetAttribute", "device 1"):
            one.attributes(1)


@case("hip", "cuda")
def binding_again_is_the_same(bench: Bench) -> None:
    equal(bench.launcher.bind(bench.platform), bench.launcher.bind(bench.platform))
    other = {"hip": "cuda", "cuda": "hip"}[bench.platform]
    with raises(bench.launcher.DriverError, f"already bound to {bench.platform}", bench.launcher.bind(bench.platform)):
        bench.launcher.bind(other)
    with raises(ValueError, "'rocm'", "'hip'", "'cuda'"):
        bench.launcher.bind("rocm")
    with raises(TypeError):
        bench.launcher.bind(1)


def main(platform: str, modules: str, library: str, *names: str) -> None:
    sys.path.insert(0, modules)
    launcher = importlib.import_module("_launcher")
    fake = FakeDriver(library)
    launcher.bind(platform)
    bench = Bench(launcher, fake, platform)
    bench.kernel("").load(0)
    for name, (function, platforms) in CASES.items():
        if platform in platforms and (not names or name in names):
            fake.reset()
            function(bench)
            print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
