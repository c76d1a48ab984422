"""The package by which clients ask whether FlashAttention-3 is installed; its functions are in flash_attn_interface."""
