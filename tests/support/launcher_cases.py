"""Cases of a bound launcher. test_launcher.py runs them under each Python, in a process of its own:

launcher_cases.py PLATFORM MODULE_DIRECTORY LIBRARY [CASE ...]

Standard library only. Each case gets the launcher with a reset fake driver and two devices.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from typing import Any

import launcher_argument_cases  # noqa: F401 - its cases come first
from fake_driver import FakeDriver
from launcher_bench import CASES, Bench, case, equal, in_thread, raises

__all__ = ["CASES"]


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
    """Two threads are inside the driver at once: neither holds the interpreter lock."""
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
        expected = ("kernel_i", "device 0", function, error_name, "209", "no kernel image")
        with raises(bench.launcher.DriverError, *expected) as caught:
            one.launch(0, 0, 1, 1, 1, 5)
        error: Any = caught[0]
        equal((error.function, error.error, error.code), (function, error_name, 209))
        assert isinstance(error, RuntimeError)
        log = bench.fake.take_log()
        equal(f"{names['unload']}" in log, function == names["find"])
        # torch asks for HIP's last error after its own launches, and would find an error of ours.
        equal("hipGetLastError" in log, bench.platform == "hip")
        one.launch(0, 0, 1, 1, 1, 5)
        equal(len(bench.fake.take_launches()), 1)


@case("hip", "cuda")
def a_driver_that_gives_no_function_is_told(bench: Bench) -> None:
    """AOTriton launched a null function without a check, so torch's attention left its output unwritten."""
    names = bench.functions
    for act in ("launch", "load", "attributes"):
        one = bench.kernel("i")
        bench.fake.fail(names["find"], -1)
        with raises(bench.launcher.DriverError, "kernel_i", "device 0", names["find"], "gives no function"):
            getattr(one, act)(0, *((0, 1, 1, 1, 5) if act == "launch" else ()))
        log = bench.fake.take_log()
        assert names["unload"] in log, log
        assert not any(line.startswith(names["launch"]) for line in log), log
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
    expected = {"registers": 64, "local_bytes": 16, "static_shared_bytes": 512, "max_threads": 256}
    one = bench.kernel("i")
    equal(one.attributes(0), expected)
    equal(one.attributes(1), expected)
    equal(bench.launcher.current_device(), 0)
    if bench.platform == "hip":
        bench.fake.fail("hipFuncGetAttribute", 1)
        with raises(bench.launcher.DriverError, "hipFuncGetAttribute", "device 1"):
            one.attributes(1)


@case("hip", "cuda")
def launches_pile_up_until_a_submission(bench: Bench) -> None:
    one = bench.kernel("")
    for blocks in (1, 2, 3):
        one.launch(0, 7, blocks, 1, 1)
    equal(bench.launcher.submit(0, 7), True)
    equal(bench.launcher.submit(0, 7), True)
    for _ in range(130):
        one.launch(0, 7, 1, 1, 1)
    one.launch(0, 8, 1, 1, 1)
    equal(bench.launcher.submit(0, 8), True)  # one stream alone
    submissions = bench.fake.take_submissions()
    equal([(stream, len(blocks)) for stream, *blocks in submissions], [(7, 3), (7, 129), (8, 1), (7, 1)])


@case("hip", "cuda")
def a_submission_leaves_captures_alone(bench: Bench) -> None:
    one = bench.kernel("")
    library = bench.fake.library
    equal(bench.launcher.capture(0, 7), 0)
    library.fake_begin_capture(7)
    first = bench.launcher.capture(0, 7)
    one.launch(0, 7, 1, 1, 1)
    equal(bench.launcher.submit(0, 7), False)
    equal([bench.launcher.capture(0, stream) for stream in (8, 0)], [0, 0])
    one.launch(0, 8, 2, 1, 1)
    equal(bench.launcher.submit(0, 8), True)  # another stream, in the global mode
    one.launch(0, 0, 3, 1, 1)
    equal(bench.launcher.submit(0, 0), False)  # the default stream waits for all streams
    equal(library.fake_end_capture(), 1)
    equal(library.fake_capture_mode(), 0)
    equal(bench.fake.take_submissions(), [[8, 2], [0, 3]])
    library.fake_begin_capture(7)
    equal(bench.launcher.capture(0, 7), first + 1)
    library.fake_end_capture()


@case("hip", "cuda")
def a_submission_is_made_on_its_device(bench: Bench) -> None:
    bench.kernel("").load(1)
    bench.fake.take_log()
    equal(bench.launcher.submit(1, 0), True)
    equal(bench.launcher.current_device(), 0)
    log = bench.fake.take_log()
    assert log[0].split()[0] in ("hipSetDevice", "cuCtxPushCurrent_v2"), log
    with raises(bench.launcher.DriverError, "submit() on device 2", "there are 2"):
        bench.launcher.submit(2, 0)
    with raises(bench.launcher.DriverError, "submit() on device -1", "there are 2"):
        bench.launcher.submit(-1, 0)
    with raises(TypeError):
        bench.launcher.submit(0)


@case("hip", "cuda")
def a_failing_submission_is_told(bench: Bench) -> None:
    """An answer that the stream is busy is no failure, and HIP must not keep it as one."""
    prefix = {"hip": "hip", "cuda": "cu"}[bench.platform]
    one = bench.kernel("")
    one.load(0)
    bench.fake.take_log()
    one.launch(0, 7, 1, 1, 1)
    bench.launcher.submit(0, 7)
    equal("hipGetLastError" in bench.fake.take_log(), bench.platform == "hip")
    for function in ("StreamQuery", "StreamGetCaptureInfo", "ThreadExchangeStreamCaptureMode"):
        bench.fake.fail(f"{prefix}{function}", 209)
        with raises(bench.launcher.DriverError, f"submit() on device 0: {prefix}{function} failed", "209"):
            bench.launcher.submit(0, 7)
        equal(bench.fake.library.fake_capture_mode(), 0)
        equal("hipGetLastError" in bench.fake.take_log(), bench.platform == "hip")


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
