"""A tiny random Gemma 3 that sees images, prompts with images for it, and transformers' log probabilities.

Tokens of an image attend to later tokens of that image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from PIL import Image

SIDE, TOKENS = 56, 16  # an image's pixels and tokens, fewer than the window
BEGIN, END, TOKEN = 4, 5, 6
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
NEWLINES = ["\n" * count for count in (1, 2, 3, 4)]
SPECIAL = dict(zip(("image_token", "boi_token", "eoi_token"), (WORDS[TOKEN], WORDS[BEGIN], WORDS[END]), strict=True))


def _write_processor(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

    words = [*WORDS, *NEWLINES]
    words += [chr(0x100 + i) for i in range(tiny_models.VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n+|."), "isolated")
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=SPECIAL, **named)
    images = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    Gemma3Processor(images, fast, image_seq_length=TOKENS).save_pretrained(folder)


def written(folder: Path) -> list[Any]:
    """Writes the model and its processor into a folder, and returns it in fp32 and bf16, by eager attention."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText, Gemma3Config

    text = {name: value for name, value in tiny_models.COMMON.items() if name != "dtype"}
    config = Gemma3Config(
        text_config={**text, **tiny_models.MODELS["gemma3_text"]},
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": SIDE, "patch_size": 7,
        },
        mm_tokens_per_image=TOKENS, boi_token_index=BEGIN, eoi_token_index=END, image_token_index=TOKEN,
        dtype="bfloat16", bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForImageTextToText.from_config(config).bfloat16()
    for weights in made.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    made.save_pretrained(folder)
    result = [
        AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    _write_processor(folder)
    file = folder / "model.safetensors"  # transformers 5 writes other names than Gemma's own files have
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weights
        for name, weights in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    return result


def prompts() -> list[tuple[list[int], list[Any]]]:
    """Tokens with BEGIN where an image goes, and the images: none, one, and three of which two touch."""
    draw = np.random.default_rng(0)
    one, two, three = (Image.fromarray(draw.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(3))

    def text(length: int) -> list[int]:
        return [int(x) for x in draw.integers(len(WORDS) + len(NEWLINES), tiny_models.VOCABULARY, length)]

    start = [1, *text(20), BEGIN]
    return [
        ([1, *text(7)], []),
        ([*start, *text(30)], [one]),
        ([1, BEGIN, *text(5), BEGIN, BEGIN, *text(9)], [one, two, three]),
        ([1, *text(90)], []),
        ([*start, *text(2)], [one]),
        ([1, *text(60), BEGIN, *text(3)], [three]),  # longer than a step
    ]


def log_probabilities(model: Any, prompt: Sequence[int], answer: Sequence[int], images: list[Any]) -> torch.Tensor:
    """fp32 (tokens of the answer, VOCABULARY). prompt: with the tokens of its images."""
    from transformers import Gemma3ImageProcessor

    tokens = torch.tensor([[*prompt, *answer]])
    processor = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    pixels = processor(images, return_tensors="pt")["pixel_values"].to(model.dtype) if images else None
    with torch.no_grad():
        logits = model(input_ids=tokens, pixel_values=pixels, token_type_ids=(tokens == TOKEN).long()).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)
