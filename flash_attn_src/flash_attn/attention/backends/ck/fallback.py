"""Where a call goes that Composable Kernel has no kernel for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flash_attn.attention.backends.protocol import Backend

# Frames from here to the caller of a public function.
_TO_THE_CALLER = 7


class Fallback:
    """The Triton backend, with one warning that gives the reason; or an error if only CK is requested."""

    def __init__(self, backend: Backend, alone: bool) -> None:
        self.backend = backend
        self.alone = alone
        self._announced: set[str] = set()

    def because(self, what: str, unsupported_reason: str) -> Backend:
        """The backend for a call ("forward") that CK cannot do. Raises NotImplementedError if only CK is requested."""
        if self.alone:
            raise NotImplementedError(
                f"the CK backend cannot do this {what}: {unsupported_reason}. Unset FLASH_ATTENTION_TRITON_AMD_ENABLE "
                "to let the Triton kernels of this wheel do it"
            )
        kind = f"{what} {unsupported_reason.partition(':')[0]}"
        if kind not in self._announced:
            self._announced.add(kind)
            warnings.warn(
                f"the CK backend cannot do this {what}: {unsupported_reason}. The Triton kernels of this wheel do it",
                RuntimeWarning,
                stacklevel=_TO_THE_CALLER,
            )
        return self.backend
