"""The library as a C program sees it: cffi reads its structs and functions from the header."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import cffi

PACKAGE = Path(__file__).resolve().parents[1]
HEADER = PACKAGE / "include/flash_attn_rocm.h"


def declarations() -> str:
    """The header without what a preprocessor and C++ read."""
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


class Library:
    """The functions of `libflash_attn_rocm.so` at a path."""

    def __init__(self, path: Path) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(declarations())
        self.functions: Any = self.ffi.dlopen(str(path))
        self._options: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # a call -> its options

    def error(self) -> str:
        return self._string(self.functions.flash_attn_rocm_error())

    def version(self) -> str:
        return self._string(self.functions.flash_attn_rocm_version())

    def _string(self, address: Any) -> str:
        content: bytes = self.ffi.string(address)
        return content.decode()

    def open(self, stores: Path | None, device: int = 0) -> Any:
        """A GPU's kernels. Raises RuntimeError with the library's number and message."""
        opened = self.ffi.new("flash_attn_rocm **")
        path = self.ffi.NULL if stores is None else str(stores).encode()
        self.check(self.functions.flash_attn_rocm_open(path, device, opened))
        return opened[0]

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{status}: {self.error()}")

    def call(self, kind: str, fields: dict[str, Any]) -> Any:
        """A `flash_attn_rocm_{kind}_call`. Addresses are numbers in `fields`, options a dict."""
        return self._growing(f"flash_attn_rocm_{kind}_call", fields)

    def _growing(self, name: str, fields: dict[str, Any]) -> Any:
        struct = self.ffi.new(f"{name} *")
        self._fill(struct, fields)
        struct.struct_size = fields.get("struct_size", self.ffi.sizeof(struct[0]))
        return struct

    def _fill(self, struct: Any, fields: dict[str, Any]) -> None:
        types = dict(self.ffi.typeof(struct[0] if self.ffi.typeof(struct).kind == "pointer" else struct).fields)
        for name, value in fields.items():
            if name == "options" and isinstance(value, dict):
                self._options[struct] = self._growing("flash_attn_rocm_options", value)
                struct.options = self._options[struct]
            elif isinstance(value, dict):
                self._fill(getattr(struct, name), value)
            elif types[name].type.kind == "pointer":
                setattr(struct, name, self.ffi.cast(types[name].type, value))
            else:
                setattr(struct, name, value)

    def scratch_bytes(self, opened: Any, kind: str, call: Any) -> int:
        bytes_ = self.ffi.new("size_t *")
        self.check(getattr(self.functions, f"flash_attn_rocm_{kind}_scratch")(opened, call, bytes_))
        return int(bytes_[0])

    def append(self, opened: Any, call: Any) -> None:
        """Launches an append on the default stream. Raises RuntimeError with the library's number and message."""
        self.check(self.functions.flash_attn_rocm_append(opened, call, self.ffi.NULL))

    def scratch_bytes_up_to(self, opened: Any, call: Any) -> int:
        """Of a forward and of those with fewer keys."""
        bytes_ = self.ffi.new("size_t *")
        self.check(self.functions.flash_attn_rocm_forward_scratch_up_to(opened, call, bytes_))
        return int(bytes_[0])

    def plan(self, opened: Any, kind: str, call: Any) -> Any:
        """A plan, freed when it is collected."""
        plan = self.ffi.new("flash_attn_rocm_plan **")
        self.check(getattr(self.functions, f"flash_attn_rocm_{kind}_plan")(opened, call, plan))
        return self.ffi.gc(plan[0], self.functions.flash_attn_rocm_plan_free)

    def launch_plan(self, plan: Any, kind: str, call: Any, scratch: int = 0, size: int = 0) -> None:
        """`launch` by a plan."""
        memory = self.ffi.cast("void *", scratch)
        self.check(getattr(self.functions, f"flash_attn_rocm_plan_{kind}")(plan, call, memory, size, self.ffi.NULL))

    def launch(self, opened: Any, kind: str, call: Any, scratch: int = 0, size: int = 0) -> None:
        """Launches on the default stream. Raises RuntimeError with the library's number and message."""
        memory = self.ffi.cast("void *", scratch)
        function = getattr(self.functions, f"flash_attn_rocm_{kind}")
        self.check(function(opened, call, memory, size, self.ffi.NULL))
