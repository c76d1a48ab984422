"""The custom ops flash_attn::*, as which torch.compile and torch.export record attention."""

from flash_attn.attention.operators.attention import (
    _flash_attn_forward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_forward,
)
from flash_attn.attention.operators.backward import (
    _flash_attn_backward,
    _flash_attn_varlen_backward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_varlen_backward,
)
from flash_attn.attention.operators.transforms import refuse_to_be_transformed

refuse_to_be_transformed(
    "_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward",
    "_extended_forward", "_flash_attn_with_kvcache", "_extended_backward",
)  # fmt: skip

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]
