"""The output before and during the compilation of kernels."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from rocm_wheels.compile import progress, workers
from rocm_wheels.compile.compiler import Unit
from rocm_wheels.matrix.versions import Versions


@pytest.fixture(autouse=True)
def _seconds(data: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds per kernel, independent of the last measurement."""
    seconds = {"ck": 7000, "triton": 2000}
    backends = {
        name: replace(backend, kernel_milliseconds=seconds[name], family_milliseconds={"rdna3": 1000})
        for name, backend in data.backends.items()
    }
    monkeypatch.setattr("rocm_wheels.compile.progress.versions.load", lambda: replace(data, backends=backends))


def unit(name: str, compiler: str, kernels: int, target: str = "gfx942") -> Unit:
    return Unit(
        target=target, name=name, compiler=compiler, kernels=tuple(map(str, range(kernels))), content=(),
        toolchain="pypi", key=f"{target} {name}",
    )  # fmt: skip


def test_the_time_of_a_kernel() -> None:
    """By the family of its target; little if its assembly is compiled in the same run."""
    base, generic = unit("a", "triton", 1, "gfx1100"), unit("a", "triton", 1, "gfx11-generic")
    assert progress.core_seconds([base]) == progress.core_seconds([generic]) == 1
    assert progress.core_seconds([base, generic]) == pytest.approx(1.05)
    assert progress.core_seconds([base, unit("b", "triton", 1, "gfx11-generic")]) == 2
    assert progress.core_seconds([unit("a", "triton", 1, "gfx1201")]) == 2
    assert progress.core_seconds([unit("a", "asm", 3)]) == pytest.approx(0.03)


def test_the_time_is_printed_before(capsys: pytest.CaptureFixture[str]) -> None:
    progress.Progress([unit("a", "ck", 12), unit("b", "ck", 12), unit("c", "triton", 1)], 2)
    assert capsys.readouterr().out == ("  25 to compile with 2 jobs: about 1 min, 99% of it for Composable Kernel\n")
    progress.Progress([unit(str(index), "triton", 1) for index in range(60)], 1)
    assert capsys.readouterr().out == "  60 to compile with 1 jobs: about 2 min\n"
    progress.Progress([unit("a", "triton", 1)], 8)
    assert capsys.readouterr().out == ""


def test_the_time_left_weighs_the_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("rocm_wheels.compile.progress.time.monotonic", lambda: clock[0])
    units = [unit("large", "ck", 2), unit("small", "triton", 1), unit("medium", "triton", 2)]  # 14, 2 and 4 seconds
    counted = progress.Progress(units, 1)
    for each, now in zip(units, (107.0, 108.0, 110.0), strict=True):
        clock[0] = now
        counted.count(each)
    assert capsys.readouterr().out.splitlines() == [
        "  compiled 2/5, 7 s, about 3 s left: gfx942 large",
        "  compiled 3/5, 8 s, about 2 s left: gfx942 small",
        "  compiled 5/5, 10 s, about 0 s left: gfx942 medium",
    ]


def test_the_time_left_is_right_from_the_first_kernel_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three jobs end one after another: the running jobs are halfway on average."""
    clock = [0.0]
    monkeypatch.setattr("rocm_wheels.compile.progress.time.monotonic", lambda: clock[0])
    units = [unit(str(index), "triton", 1) for index in range(30)]
    counted = progress.Progress(units, 3)
    for number, each in enumerate(units, start=1):
        clock[0] = 2.0 * number
        counted.count(each)
    left = [int(line.split("about ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert left[0] <= 60
    assert left == sorted(left, reverse=True)


def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next line cannot erase a wrapped line."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "24")
    units = [unit("a-rather-long-name-of-a-kernel", "triton", 1), unit("b", "triton", 1)]
    counted = progress.Progress(units, 2)
    for each in units:
        counted.count(each)
    lines = capsys.readouterr().out.split("\r\x1b[K")[1:]
    assert [len(line.rstrip("\n")) for line in lines] == [29, 29]


def test_a_log_gets_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    units = [unit(str(index), "triton", 1) for index in range(25)]
    counted = progress.Progress(units, 25)
    for each in units:
        counted.count(each)
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_a_log_gets_a_line_a_minute(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a thousand kernels takes minutes. If no kernel is ready, the line says that compilers run."""
    clock = [0.0]
    monkeypatch.setattr("rocm_wheels.compile.progress.time.monotonic", lambda: clock[0])
    units = [unit(str(index), "triton", 1) for index in range(1000)]
    counted = progress.Progress(units, 4)
    capsys.readouterr()
    for each in units[:90]:
        clock[0] += 2
        counted.count(each)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[:2] for line in lines] == [
        ["  compiled 30/1000", " 60 s"], ["  compiled 60/1000", " 120 s"], ["  compiled 90/1000", " 180 s"]
    ]  # fmt: skip
    clock[0] += 60
    counted.wait()
    assert capsys.readouterr().out == "  compiled 90/1000, 240 s, 4 compilers run\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    counted.wait()
    assert capsys.readouterr().out == ""


def test_a_wait_for_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LOG_SECONDS", 0.01)
    slow: Future[None] = Future()
    told: list[str] = []

    class Told(progress.Progress):
        def wait(self) -> None:
            told.append("waits")
            slow.set_result(None)

    assert list(workers._done({slow}, Told([unit("a", "triton", 1)], 1))) == [slow]
    assert told == ["waits"]
