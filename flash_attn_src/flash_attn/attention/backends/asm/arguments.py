"""The arguments of AMD's assembly kernels, as bytes: the fields of each layout in their order.

A field is an address, a float or a 32-bit number, in a slot of its own. Strides are in bytes: `q_row` from one row of q
to the next, `q_head` and `q_batch` likewise. `starts_q` is the address of cu_seqlens_q; `room_starts_q` the address of
the same numbers where sequences have room after them, which here they never have. `columns_k` is the bytes of a tile
of keys.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_ADDRESSES = (
    "q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv",
    "starts_q", "starts_k", "room_starts_q", "room_starts_k",
)  # fmt: skip
_FORMATS = {"scale": "f", "log2e": "f", "mask_x": "i", "mask_y": "i"}


class Layout:
    """The fields of a structure of arguments. An address takes address_slot bytes, any other field slot bytes."""

    def __init__(self, fields: str, *, address_slot: int, slot: int) -> None:
        self.fields = tuple(fields.split())
        self.offsets: dict[str, int] = {}
        form, end = "<", 0
        for name in self.fields:
            self.offsets[name] = end
            if name in _ADDRESSES:
                form += f"Q{address_slot - 8}x"
                end += address_slot
            else:
                form += f"{_FORMATS.get(name, 'I')}{slot - 4}x"
                end += slot
        self.size = end
        self._struct = struct.Struct(form)

    def pack(self, values: Mapping[str, float]) -> bytes:
        """The structure's bytes. Raises struct.error for a number that does not fit, KeyError for a missing one."""
        return self._struct.pack(*[values[name] for name in self.fields])


_GRADIENT_ADDRESSES = "dq dk dv q k v dout lse delta"
_BATCH_STRIDES = (
    "q_head q_batch q_row k_head k_batch k_row v_head v_batch v_row dout_head dout_batch dout_row "
    "dk_head dk_batch dk_row dv_head dv_batch dv_row"
)
_BATCH = f"{_GRADIENT_ADDRESSES} scale log2e group seqlen_q seqlen_k head_dim heads {_BATCH_STRIDES}"

LAYOUTS = {
    "forward": Layout(
        "out q k v lse scale seqlen_q q_row rows_q q_head q_batch group k_row k_head k_batch options stores_lse "
        "seqlen_k head_dim head_dim_v heads v_row v_head v_batch out_row out_head out_batch starts_q starts_k lse_head "
        "room_starts_q room_starts_k",
        address_slot=16,
        slot=16,
    ),
    "backward": Layout(_BATCH, address_slot=8, slot=8),
    "window": Layout(f"{_BATCH} mask_x mask_y", address_slot=8, slot=8),
    "packed": Layout(
        f"{_GRADIENT_ADDRESSES} starts_q starts_k room_starts_q room_starts_k scale log2e group lse_head total_k "
        "q_head q_row k_head k_row v_head v_row dout_head dout_row dk_head dk_row dv_head dv_row head_dim",
        address_slot=8,
        slot=8,
    ),
    "backward950": Layout(
        f"{_GRADIENT_ADDRESSES} scale log2e seqlen_q columns_k q_head q_batch q_row group k_head k_batch k_row dk_row "
        "seqlen_k head_dim head_dim_v heads v_head v_batch v_row dout_head dout_batch dout_row dk_head dk_batch "
        "dv_head dv_batch dv_row lse_head starts_q starts_k room_starts_q room_starts_k longest_q mask_x mask_y",
        address_slot=16,
        slot=16,
    ),
}
