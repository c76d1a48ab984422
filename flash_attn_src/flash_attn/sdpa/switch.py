"""The switch that serves PyTorch's scaled_dot_product_attention by these kernels, and ends it again."""

from __future__ import annotations

from torch.compiler import is_compiling

from flash_attn.sdpa.override import end, serve, serve_in_graph


class Active:
    """SDPA on these kernels, from its creation on until `off()` or the end of a `with` block.

    A `with` block of an object that is off turns it on again. Several objects are independent: SDPA is served while any
    is on.
    """

    def __init__(self) -> None:
        self._is_on = False
        self.on()

    def on(self) -> None:
        """Serves SDPA. Does nothing if the object is on."""
        if not self._is_on:
            self._is_on = True
            if is_compiling():
                serve_in_graph(True)
            else:
                serve(self)

    def off(self) -> None:
        """Ends it. SDPA goes to PyTorch if no other object is on. A second call does nothing."""
        if self._is_on:
            self._is_on = False
            if is_compiling():
                serve_in_graph(False)
            else:
                end(self)

    def __enter__(self) -> Active:
        self.on()
        return self

    def __exit__(self, *_: object) -> None:
        self.off()


def use_for_sdpa() -> Active:
    """Serves PyTorch's scaled_dot_product_attention by the kernels of this package, forward and backward.

    Served: tensors on a GPU in fp16, bf16 and fp32, 3 or 4 dimensions, head dims to 512, boolean and additive masks,
    is_causal, scale, dropout_p without a mask, enable_gqa, autocast, torch.compile. PyTorch computes every other call;
    `sdpa_report()` tells which and why. PyTorch's dispatcher leads calls here, so it does not matter which name or
    language a program calls SDPA by. Every thread is served.

    The result turns it off again: by its method `off()`, or as a context manager.
    """
    return Active()
