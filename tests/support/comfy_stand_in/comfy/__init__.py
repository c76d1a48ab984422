"""A stand-in of what the node needs of ComfyUI, written from its interface of July to November 2026.

It is no copy: ComfyUI is GPL-3. tests/test_comfyui_node.py runs the same cases on ComfyUI's own code where it is there.
"""
