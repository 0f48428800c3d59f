"""Regional compilation: graphs and bytes of a model whose blocks are compiled, plain and under plans.

    python -m benchmarks.compiled
    python -m benchmarks.compiled transformers      # a GPT-2, with the cache that its config asks for and without it

On the simulated device, whose allocator counts what is really held, with the backend that runs graphs as they were
traced (AOTAutograd's forward and backward, operator by operator). Bytes are measured. Times are none of its business.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations, Plan, Reason, StreamParameters

WIDTH, NUM_BLOCKS, ROWS, NUM_STEPS = 256, 8, 1024, 3
DEVICE = torch.device("simgpu", 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting:
    """AOTAutograd without a code generator; counts graphs and the runs of them."""

    def __init__(self) -> None:
        self.num_graphs = self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        self.num_graphs += 1
        compiled = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return compiled(*args)

        return run


def treatments() -> dict[str, tuple[Action, ...]]:
    names = [f"blocks.{index}" for index in range(NUM_BLOCKS)]
    return {
        "nothing": (),
        "checkpointed": tuple(Checkpoint(name) for name in names),
        "activations offloaded": tuple(OffloadActivations(name) for name in names),
        "streamed": tuple(StreamParameters(name) for name in names),
    }


def run(actions: Sequence[Action], *, compiled: bool) -> tuple[list[torch.Tensor], int, Counting]:
    """Losses, the peak of the allocator, and what was compiled."""
    torch.compiler.reset()
    model, backend = Model(), Counting()
    if compiled:
        for block in model.blocks:
            block.compile(backend=backend)
    executor = execute(model, plan_of(actions), ExecutionSettings(device=DEVICE))
    torch.accelerator.reset_peak_memory_stats()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(NUM_STEPS):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        del loss, batch
    peak_bytes = torch.accelerator.max_memory_allocated()
    executor.detach()
    return losses, peak_bytes, backend


def plan_of(actions: Sequence[Action], device_type: str = DEVICE.type) -> Plan:
    return Plan(
        actions=tuple(actions),
        baseline_peak_bytes=0,
        predicted_peak_bytes=0,
        predicted_slowdown=1.0,
        budget_bytes=0,
        fits=True,
        decision_source="user_config",
        mode="balanced",
        device_type=device_type,
        device_name=device_type,
        optimizer_name="sgd",
        profile_source="static",
        model_class="Model",
        inputs=(),
        summary=Reason("made by hand"),
        rows=(),
    )


def run_gpt2(*, num_blocks: int, use_cache: bool, is_wrapped: bool) -> tuple[list[torch.Tensor], Counting]:
    """Losses of a tiny GPT-2 on the CPU, and what was compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.compiler.reset()
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    model, backend = GPT2LMHeadModel(GPT2Config(**sizes, n_layer=num_blocks, use_cache=use_cache)), Counting()
    for block in model.transformer.h:
        block.compile(backend=backend)
    actions = tuple(Checkpoint(f"transformer.h.{index}") for index in range(num_blocks if is_wrapped else 0))
    executor = execute(model, plan_of(actions, "cpu"), ExecutionSettings())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(NUM_STEPS):
        tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    executor.detach()
    return losses, backend


def compare_caches() -> None:
    print(
        f"{'GPT-2':<10} {'use_cache':>9} {'graphs':>7} {'wrapped':>8} {'runs a step':>12} {'wrapped':>8}  same losses"
    )
    for num_blocks in (6, 12):
        for use_cache in (True, False):
            plain, before = run_gpt2(num_blocks=num_blocks, use_cache=use_cache, is_wrapped=False)
            ours, after = run_gpt2(num_blocks=num_blocks, use_cache=use_cache, is_wrapped=True)
            print(
                f"{num_blocks:>3} blocks {use_cache!s:>9} {before.num_graphs:>7} {after.num_graphs:>8} "
                f"{before.num_runs / NUM_STEPS:>12.1f} {after.num_runs / NUM_STEPS:>8.1f}  "
                f"{'yes' if all(map(torch.equal, ours, plain)) else 'NO'}"
            )


def main() -> None:
    torch.set_num_threads(1)
    # The compiler looks at `.grad` of what a block is given.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    if "transformers" in sys.argv[1:]:
        compare_caches()
        return
    reference, _, _ = run((), compiled=True)
    print(f"{'blocks':<22} {'peak MB':>8} {'compiled':>9} {'graphs':>7} {'runs a step':>12}  same losses")
    for name, actions in treatments().items():
        _, eager_bytes, _ = run(actions, compiled=False)
        losses, peak_bytes, backend = run(actions, compiled=True)
        is_same = all(torch.equal(a, b) for a, b in zip(losses, reference, strict=True))
        print(
            f"{name:<22} {eager_bytes / 1e6:>8.1f} {peak_bytes / 1e6:>9.1f} {backend.num_graphs:>7} "
            f"{backend.num_runs / NUM_STEPS:>12.1f}  {'yes' if is_same else 'NO'}"
        )


if __name__ == "__main__":
    main()
