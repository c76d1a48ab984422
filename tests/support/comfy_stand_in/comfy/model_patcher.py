"""What holds a model of the stand-in: options that clones do not share, and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModelPatcher:
    """A model with options of its own."""

    def __init__(self, model: torch.nn.Module, load_device: torch.device, offload_device: torch.device) -> None:
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.callbacks: dict[str, dict[str, list[Callable[..., None]]]] = {}

    def clone(self) -> ModelPatcher:
        other = ModelPatcher(self.model, self.load_device, self.offload_device)
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        other.callbacks = {
            kind: {key: list(c) for key, c in callbacks.items()} for kind, callbacks in self.callbacks.items()
        }
        return other

    def set_model_optimized_attention(self, optimized_attention: Callable[..., torch.Tensor]) -> None:
        """What the node "Model Attention Backend" calls."""

        def override(_: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return optimized_attention(*args, **kwargs)

        if hasattr(optimized_attention, "container_function"):
            override.container_function = optimized_attention.container_function  # type: ignore[attr-defined]
        self.model_options["transformer_options"]["optimized_attention_override"] = override

    def add_callback_with_key(self, call_type: str, key: str, callback: Callable[..., None]) -> None:
        self.callbacks.setdefault(call_type, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, call_type: str, key: str) -> None:
        self.callbacks.get(call_type, {}).pop(key, None)

    def cleanup(self) -> None:
        """What ComfyUI does at the end of a sampling."""
        for callbacks in list(self.callbacks.get("on_cleanup", {}).values()):
            for callback in callbacks:
                callback(self)
