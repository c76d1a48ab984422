"""Makes the custom ops raise if torch.func or torch.vmap transforms them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

# torch.func looks for a kernel with this dispatch key before it transforms an operator.
_KEY = "FuncTorchDynamicLayerFrontMode"
_library = torch.library.Library("flash_attn", "IMPL")


def refuse_to_be_transformed(*names: str) -> None:
    """Makes these ops raise NotImplementedError under a transform.

    Otherwise torch.func would silently lose a tangent.
    """
    for name in names:

        def refuse(*_: Any, op: str = name, **__: Any) -> NoReturn:
            raise NotImplementedError(
                f"flash_attn::{op}: torch.func and torch.vmap do not transform it, wanted flash_attn.flash_attn_func "
                "outside of torch.compile, of dense tensors without dropout"
            )

        _library.impl(name, refuse, _KEY)
