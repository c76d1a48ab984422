"""A ComfyUI custom node: the attention of a model by flash_attn's kernels for AMD GPUs.

counts.py       what became of a model's attention calls
attention.py    ComfyUI's call in the terms of SDPA
node.py         the node
install.py      installs the wheel into ComfyUI's Python

Copy this folder into ComfyUI's custom_nodes. docs/comfyui.md of the project has each step.
"""

from .node import FlashAttentionROCm

NODE_CLASS_MAPPINGS = {"FlashAttentionROCm": FlashAttentionROCm}
NODE_DISPLAY_NAME_MAPPINGS = {"FlashAttentionROCm": "Flash Attention (ROCm)"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
