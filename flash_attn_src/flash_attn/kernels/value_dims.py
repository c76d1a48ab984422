"""Values with a head dim of their own: which kernels serve a pair of head dims, the one of q and k and the one of v.

The rule: the first pair of `VALUE_DIMS` that holds both head dims, and whose value dim is smaller than the head dim of
q and k, serves a call. v is padded to exactly that value dim. Where there is none, q, k and v are padded to the larger
of their two head dims. Zeros in q and k add nothing to a score. Zeros in v make columns of out that are cut off.

The kernels of a KV cache take every pair without padding, because they wait for memory and load no masked column.
Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

# The largest head dim of q and k of a kernel -> the head dim of its v. 192 and 128: training and prefill of multi-head
# latent attention (DeepSeek V2 and V3).
VALUE_DIMS = {128: 64, 192: 128}

# The kernels of multi-head latent attention take keys of up to so many columns, and values of up to 512.
LATENT_DIM, LATENT_VALUE_DIM = 64, 512


def served_pair(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dims to which q and k, and v, are padded before a kernel takes them."""
    if head_dim == head_dim_v:
        return head_dim, head_dim_v
    for size, value_dim in VALUE_DIMS.items():
        if head_dim <= size and head_dim_v <= value_dim < head_dim:
            return head_dim, value_dim
    larger = max(head_dim, head_dim_v)
    return larger, larger
