"""Builds, repairs, tests and publishes ROCm wheels of flash_attn."""
