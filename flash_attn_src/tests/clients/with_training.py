"""Training by PEFT (LoRA) and by accelerate (FSDP2 on two processes), by flash_attn against eager attention.

    python with_training.py

A small random Llama, its attention by flash_attention_2 and by sdpa under `flash_attn.use_for_sdpa()`: the losses of
some steps and what they changed in the weights. Without a GPU in fp32 on the CPU, over gloo.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import accelerate
import flash_attn
import peft
import torch
import torch.distributed as dist
import transformers
import two_ranks
import with_transformers as client
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

IMPLEMENTATIONS = ("flash_attention_2", "sdpa")
STEPS = 3
BATCH = 4
TINY = 5e-2 if client.GPU else 2e-4

Trained = dict[str, torch.Tensor]


def _batch(rank: int = 0, world: int = 1) -> torch.Tensor:
    """The tokens of every step: a process takes its share."""
    whole = torch.randint(2, 101, (BATCH, 24), generator=torch.Generator().manual_seed(3))
    return whole.chunk(world)[rank].to(client.DEVICE)


def _values(parameters: dict[str, Any]) -> Trained:
    """The values of parameters, whole where FSDP2 shards them."""
    values = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in parameters.items()}
    return {name: x.detach().float().cpu().clone() for name, x in values.items()}


def _train(model: Any, tokens: torch.Tensor, prepare: Any = None, backward: Any = torch.Tensor.backward) -> Trained:
    """The loss of each step, and how the parameters changed."""
    optimizer: Any = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
    if prepare is not None:
        model, optimizer = prepare(model, optimizer)
    learnt = {name: x for name, x in model.named_parameters() if x.requires_grad}
    before = _values(learnt)
    model.train()
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    changed = {name: after - before[name] for name, after in _values(learnt).items()}
    return {"losses": torch.stack(losses)} | changed


def lora(implementation: str) -> Trained:
    """PEFT: low-rank matrices of every projection of attention are trained, nothing else."""
    model = peft.get_peft_model(
        client.build("Llama", implementation, client.DTYPE),
        peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():  # LoRA's own start has B = 0, which hides half of the gradients
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1
    return _train(model, _batch())


def _sharded(implementation: str, rank: int) -> Trained:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=not client.GPU, fsdp_plugin=plugin)
    if not client.GPU:  # accelerate shards on GPUs alone, torch's FSDP2 on CPUs too
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = client.build("Llama", implementation, client.DTYPE)
    result = _train(model, _batch(rank, two_ranks.WORLD), accelerator.prepare, accelerator.backward)
    kinds = {type(x) for x in model.parameters()}
    assert kinds == {DTensor}, f"FSDP2 did not shard: {kinds}"
    dist.all_reduce(result["losses"])
    result["losses"] /= two_ranks.WORLD
    return result


def fsdp2(rank: int) -> list[tuple[int, str, Trained]]:
    """accelerate: each process has half of the batch and of the parameters."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    worlds = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(two_ranks.WORLD))
    os.environ.update(ACCELERATE_USE_FSDP="true", MASTER_ADDR="localhost", MASTER_PORT="0", **ranks, **worlds)
    _start()
    result = [(rank, name, _sharded(name, rank)) for name in ("eager", *IMPLEMENTATIONS)]
    _check_calls()
    return result


def _start() -> None:
    client.serve_sdpa()
    if not client.GPU:
        mock.patch.object(client.dispatch, "is_flash_attn_2_available", return_value=True).start()


def _check_calls() -> None:
    """Each layer called flash_attn in each step, by both ways."""
    assert client.calls["dense"] == client.calls_of("sdpa", "dense") == 2 * STEPS


def whole(implementation: str) -> Trained:
    """The same steps in one process without accelerate."""
    return _train(client.build("Llama", implementation, client.DTYPE), _batch())


def compare(label: str, got: Trained, wanted: Trained) -> None:
    assert got.keys() == wanted.keys()
    worst = 0.0
    for name, value in got.items():
        error = float((value - wanted[name]).abs().max() / wanted[name].abs().max())
        assert error <= TINY, f"{label}: {name}: relative error {error:.2e}, bar {TINY:.0e}"
        worst = max(worst, error)
    losses = ", ".join(f"{loss:.4f}" for loss in got["losses"].tolist())
    assert got["losses"][-1] < got["losses"][0], f"{label}: nothing was learnt: {losses}"
    print(f"{label}: losses {losses}, largest relative error {worst:.1e}")


def main() -> None:
    _start()
    expected = lora("eager")
    for name in IMPLEMENTATIONS:
        compare(f"PEFT {peft.__version__} LoRA, {name}", lora(name), expected)
    _check_calls()
    expected = whole("eager")
    for rank, name, got in two_ranks.run(fsdp2):
        compare(f"accelerate {accelerate.__version__} FSDP2, rank {rank}, {name}", got, expected)
    print(f"transformers {transformers.__version__}, flash_attn {flash_attn.__version__}, {client.DEVICE}")


if __name__ == "__main__":
    main()
