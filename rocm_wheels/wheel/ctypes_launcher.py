"""flash_attn._launcher of AMD GPUs in Python, for a file that can bring no library: see flash_attn/_launcher.pyi.

`one_file` packs it as flash_attn/_launcher.py. A launch costs the host more than the compiled launcher's. Standard
library only.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_RELAXED, _NOT_READY, _IMPLICIT = 2, 600, 906  # capture mode, hipErrorNotReady, hipErrorStreamCaptureImplicit
_BUFFER, _SIZE, _END = 1, 2, 3  # HIP_LAUNCH_PARAM_BUFFER_POINTER and the like
_FORMS = {"P": "Q", "0": "Q", "i": "i", "I": "q", "f": "f", "d": "d"}
_hip: Any = None
_lock = threading.Lock()


class DriverError(RuntimeError):
    """What HIP answered: its function, the error's name and number."""

    function: str | None = None
    error: str | None = None
    code: int | None = None


def _loaded() -> list[str]:
    """The HIP runtimes of this process that may be torch's. On Windows, the name has the major version of HIP."""
    if sys.platform == "win32":
        handle = ctypes.windll.kernel32.GetModuleHandleW
        handle.restype = ctypes.c_void_p
        hip = str(sys.modules["torch"].version.hip).partition(".")[0]
        return [name for name in (f"amdhip64_{hip}.dll", "amdhip64.dll") if handle(name)][:1]
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({str(Path("/", line.partition("/")[2]).resolve()) for line in lines if "/libamdhip64" in line})


def bind(platform: str, /) -> str:
    """Takes the functions of torch's HIP runtime. Returns its path."""
    global _hip
    if platform != "hip":
        raise DriverError(f"this launcher is for AMD GPUs, not for {platform}: install the wheel")
    if _hip is None:
        paths = _loaded()
        if len(paths) != 1:
            raise DriverError(f"torch for ROCm brings one HIP runtime, this process has {', '.join(paths) or 'none'}")
        _hip = ctypes.CDLL(paths[0])
        _hip.hipGetErrorName.restype = _hip.hipGetErrorString.restype = ctypes.c_char_p
    return str(_hip._name)


def _call(what: str, name: str, *arguments: Any, accepted: tuple[int, ...] = ()) -> int:
    """Calls a function of HIP. Raises DriverError for a result other than 0 and those accepted."""
    code = int(getattr(_hip, name)(*arguments))
    if code:
        _hip.hipGetLastError()  # else torch's next check would report it as its own
    if code and code not in accepted:
        error = _hip.hipGetErrorName(code).decode()
        problem = DriverError(f"{what}: {name} failed: {error} ({code}): {_hip.hipGetErrorString(code).decode()}")
        problem.function, problem.error, problem.code = name, error, code
        raise problem
    return code


@contextmanager
def _on(what: str, device: int, *, relaxed: bool = False) -> Iterator[None]:
    """Makes a device the thread's current one for a block. relaxed: a stream capture does not forbid what it does."""
    before, mode = ctypes.c_int(), ctypes.c_int(_RELAXED)
    _call(what, "hipGetDevice", ctypes.byref(before))
    if before.value != device:
        _call(what, "hipSetDevice", device)
    if relaxed:
        _call(what, "hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        if relaxed:
            _call(what, "hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if before.value != device:
            _call(what, "hipSetDevice", before.value)


def _asked(device: int, stream: int, *, query: bool) -> tuple[int, bool]:
    """The number of the graph into which a stream is captured, 0 for none; whether its launches were submitted."""
    status, graph, what, on = (
        ctypes.c_int(),
        ctypes.c_ulonglong(),
        f"stream of device {device}",
        ctypes.c_void_p(stream),
    )
    with _on(what, device, relaxed=True):
        about = (ctypes.byref(status), ctypes.byref(graph))
        implicit = _call(what, "hipStreamGetCaptureInfo", on, *about, accepted=(_IMPLICIT,))
        query = query and not implicit and not status.value
        if query:
            _call(what, "hipStreamQuery", on, accepted=(_NOT_READY,))
    return graph.value if status.value else 0, query


def submit(device: int, stream: int, /) -> bool:
    """Makes HIP submit what was launched on a stream; False while the stream is captured."""
    return _asked(device, stream, query=True)[1]


def capture(device: int, stream: int, /) -> int:
    """The number of the graph into which a stream is captured, 0 for none."""
    return _asked(device, stream, query=False)[0]


class Kernel:
    """A kernel of a code object; params as in csrc/launcher/kernel.c. All arguments go to HIP as one buffer."""

    def __init__(self, image: bytes, symbol: str, params: str, shared: int, threads: int, name: str) -> None:
        self._image, self._symbol, self._name = image, symbol.encode(), name
        self._block, self._shared = (threads, 1, 1), shared
        self._structure = int(params[1:]) if params[0] in "BK" else 0
        self._form = struct.Struct("@" + "".join(_FORMS[letter] for letter in params[: 0 if self._structure else None]))
        self._zeros = (0,) * params.count("0")
        self._functions: dict[int, ctypes.c_void_p] = {}

    def launch(self, device: int, stream: int, grid_x: int, grid_y: int, grid_z: int, /, *args: Any) -> None:
        """Launches on a stream; the memory behind the addresses must live until it has run."""
        content = self._packed(args)
        if grid_x * self._block[0] >= 1 << 32:  # some releases of HIP launch a part of it in silence
            raise OverflowError(f"kernel {self._name}: {grid_x} blocks are too many: pass fewer rows")
        if not grid_x * grid_y * grid_z:
            return
        function, what = self._function(device), f"kernel {self._name} on device {device}"
        buffer, size = ctypes.create_string_buffer(content, len(content)), ctypes.c_size_t(len(content))
        extra = (ctypes.c_void_p * 5)(_BUFFER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(size), _END)
        how = (*self._block, self._shared, ctypes.c_void_p(stream), None, extra)
        with _on(what, device):
            _call(what, "hipModuleLaunchKernel", function, grid_x, grid_y, grid_z, *how)

    def _packed(self, args: tuple[Any, ...]) -> bytes:
        if self._structure:
            (content,) = args
            if len(content) != self._structure:
                raise ValueError(f"kernel {self._name}: argument 0 has {len(content)} bytes, wanted {self._structure}")
            return bytes(content)
        try:
            return self._form.pack(*(0 if value is None else value for value in args), *self._zeros)
        except struct.error as error:
            raise OverflowError(f"kernel {self._name}: {error}") from None

    def _function(self, device: int) -> ctypes.c_void_p:
        """The kernel on a device, loaded there once."""
        with _lock:
            if device not in self._functions:
                module, function = ctypes.c_void_p(), ctypes.c_void_p()
                what = f"kernel {self._name} on device {device}"
                with _on(what, device, relaxed=True):
                    _call(what, "hipModuleLoadData", ctypes.byref(module), self._image)
                    _call(what, "hipModuleGetFunction", ctypes.byref(function), module, self._symbol)
                self._functions[device] = function
            return self._functions[device]
