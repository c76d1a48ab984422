"""PyTorch's FlexAttention on the kernels of this package, for programs that ask for it.

    from flash_attn.flex import flex_report, use_for_flex

    use_for_flex()                    # from here on; or for a while:
    with use_for_flex():
        ...
    print(flex_report())              # calls that were served, and calls that PyTorch got, with reasons

terms.py        a score_mod or mask_mod as a term, by one run of it
values.py       the values of a term, on the device
scores.py       what a term does to a score
edges.py        a mask as a value: edges of ranges of keys, ids and blocks
bounds.py       reads a mask from a term
distances.py    windows, causal masks and ALiBi: what depends on the distance of query and key
request.py      the traced functions of a call
masks.py        the bounds of a mask at a call
plan.py         the calls that serve it
attention.py    flex_attention in the terms of flash_attn's functions
creation.py     create_block_mask without a compiler
switch.py       use_for_flex, and the counts

Nothing that is read from a tensor outlives the call.
"""

from flash_attn.flex.attention import attention_or_reason
from flash_attn.flex.switch import ActiveFlex, flex_attention, flex_report, use_for_flex

__all__ = ["ActiveFlex", "attention_or_reason", "flex_attention", "flex_report", "use_for_flex"]
