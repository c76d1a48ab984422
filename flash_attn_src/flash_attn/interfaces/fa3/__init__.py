"""What FlashAttention-3's module, flash_attn_interface, is made of."""
