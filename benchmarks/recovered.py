"""Which ordinary models survive running out of memory, and what is said where one does not?

    python -m benchmarks.recovered [--models NAME ...] [--setting default|plain|True] [--every 10] [--blocks N]
        [--json FILE]

Each model is trained on the simulated device in a process of its own, so that whatever its libraries fill in when they
are first used is empty: two batches a step whose gradients are added up, clipping, AdamW, a schedule. In each step one
allocation fails: at first one of the very first forward and one of the second step, then the first of a step, the
eleventh and so on (`--every`), until a step is over before. A step that is refused is done again by the loop, from the
same weights, as loops do. A plain twin trains afterwards; losses, weights, buffers, the optimizer's state with its
counters, and the random states must be the same bits at the end, whatever happened. `--blocks 1` leaves one block in
each list of blocks, so that a step has fewer allocations.

Shown are how many steps failed, how many of them were recovered, and with which sentence the others were refused, or
that the loop's own computing failed (`loop`). Exits with 1 where training was not the same, or an error came that does
not say why the step was not run again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import multiprocessing
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import memscale
from benchmarks.models import Case, case

DEVICE = "simgpu:0"
EARLY = (40, 150)
"""Which allocations fail in the first two steps: one of the first forward, one of the second step's backward."""
PARTS = 2
"""Batches of a step."""
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"recover_from_oom": "plain"},
    "True": {"recover_from_oom": True},
}


# ---- models


class _Attention(nn.Module):
    """Written as image models of other libraries are: one projection, heads by a view, a switch for the kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused = heads, (width // heads) ** -0.5, True
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if self.fused:
            dropout = self.attn_drop.p if self.training else 0.0
            x = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        else:
            x = self.attn_drop((query * self.scale @ key.transpose(-2, -1)).softmax(dim=-1)) @ value
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(batch, length, width)))


class _DropPath(nn.Module):
    """Leaves whole samples out at random."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.share)
        return x * kept.div_(1 - self.share)


class _ImageBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.drop_path = _Attention(width, heads), _DropPath(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ImageTransformer(nn.Module):
    """A vision transformer of plain PyTorch."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.Sequential(*(_ImageBlock(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.forward_features(x)[:, 0])


def _checkpointed() -> nn.Module:
    model: Any = case("llama").build()
    model.gradient_checkpointing_enable()
    return model


def _lora_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = case("gpt2").build()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _noisy(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    sample, when = torch.randn(2, 3, 16, 16, generator=generator), torch.randint(1000, (2,), generator=generator)
    return {"sample": sample, "timestep": when}


def _images(step: int) -> dict[str, Any]:
    return {"x": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step))}


def _square(output: Any) -> torch.Tensor:
    loss: torch.Tensor = getattr(output, "sample", output).square().mean()
    return loss


def shortened(model: nn.Module, blocks: int | None) -> nn.Module:
    """The model with so many blocks in each list of more, which are all alike."""
    for part in [*model.modules()] if blocks is not None else []:
        for name, child in [*part.named_children()]:
            if type(child) is nn.ModuleList and len({type(each) for each in child}) == 1:
                setattr(part, name, child[:blocks])
    return model


def cases() -> dict[str, Case]:
    """The models by name."""
    text = case("llama")
    ours = (
        Case("llama, its own checkpointing", _checkpointed, text.batch, text.loss),
        Case("gpt2 with LoRA by PEFT", _lora_gpt2, text.batch, text.loss),
        Case("vision transformer of plain PyTorch", ImageTransformer, _images, _square),
        Case("UNet2DModel of diffusers", _unet, _noisy, _square),
    )
    names = ("mlp", "gpt2", "bert", "llama", "t5", "vit", "transformer encoder", "resnet", "lora llama")
    found = {each.name: each for each in (*map(case, names), *ours)}
    return {**found, **{name: found[each] for name, (each, _) in LOOPS.items()}}


# ---- one training


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one training saw."""

    digest: str
    """Of losses, weights, buffers, the optimizer's state and the random states."""
    num_failed: int
    num_recovered: int
    refusals: dict[str, int]
    """Sentences, and how often."""
    strange: list[str]
    """Errors that do not say why the step was not run again."""


class FailingAllocation:
    """Fails once in a step."""

    def __init__(self, nth: int | None) -> None:
        import simgpu  # not by the parent: a device that it uses cannot be used by a fork of it

        self._context = None if nth is None else simgpu.fail_allocation(nth)
        self._fault = None if self._context is None else self._context.__enter__()

    def disarm(self) -> bool:
        """Whether it failed."""
        if self._context is None or self._fault is None:
            return False
        self._context.__exit__(None, None, None)
        self._context = None
        return self._fault.fired


class Loop:
    """The user's loop."""

    def __init__(self, entry: Case, wishes: dict[str, Any] | None, blocks: int | None = None) -> None:
        self.entry = entry
        torch.manual_seed(1)
        random.seed(1)
        self.model = shortened(entry.build(), blocks).to(DEVICE).train()
        if wishes is not None:
            config = memscale.Config(enable_logging=False, mode=memscale.OptimizationMode.CONSERVATIVE, **wishes)
            memscale.wrap(self.model, config, self.batch(0))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.1 * step))
        self.losses: list[torch.Tensor] = []
        self.is_in_model = False
        self.refusals: collections.Counter[str] = collections.Counter()
        self.strange: list[str] = []
        self.num_failed = self.num_refused = 0

    def batch(self, number: int) -> dict[str, Any]:
        return tree_map(
            lambda leaf: leaf.to(DEVICE) if isinstance(leaf, torch.Tensor) else leaf, self.entry.batch(number)
        )

    def step(self, number: int, nth: int | None = None) -> None:
        batches = {part: self.batch(part) for part in range(PARTS * number, PARTS * (number + 1))}
        failing = FailingAllocation(nth)
        for part, batch in batches.items():
            self._again_where_refused(functools.partial(self._pass, batch, part), failing)
        self.apply(failing)
        self.schedule.step()
        self.optimizer.zero_grad()
        self.num_failed += failing.disarm()

    def apply(self, failing: FailingAllocation) -> None:
        """The gradients are clipped, and the optimizer steps."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._plainly(lambda: nn.utils.clip_grad_norm_(trained, 1.0), failing)
        self._again_where_refused(self.optimizer.step, failing)

    def _pass(self, batch: dict[str, Any], part: int) -> None:
        torch.manual_seed(part)
        with self._in_model():
            output = self.model(**batch)
        loss = self.scaled(self.entry.loss(output) / PARTS)
        del output
        first = torch.ones_like(loss)  # PyTorch would make it before its engine is asked: that is the loop's own
        with self._in_model():
            loss.backward(first)
        self.losses.append(loss.detach().cpu())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that is sent back."""
        return loss

    @contextlib.contextmanager
    def _in_model(self) -> Iterator[None]:
        self.is_in_model = True
        yield
        self.is_in_model = False

    def _again_where_refused(self, run: Callable[[], Any], failing: FailingAllocation) -> None:
        gradients = [(p, None if p.grad is None else p.grad.cpu()) for p in self.model.parameters()]
        buffers = [(value, value.cpu()) for value in self.model.buffers()]
        self.is_in_model = False
        try:
            run()
        except torch.OutOfMemoryError as error:
            said = str(error)
        else:
            return
        self._note(said, failing)
        for parameter, gradient in gradients:
            parameter.grad = None if gradient is None else gradient.to(DEVICE)
        for value, before in buffers:
            value.copy_(before)
        run()

    def _plainly(self, run: Callable[[], Any], failing: FailingAllocation) -> None:
        """What is the loop's own fails as it does without MemScale."""
        try:
            run()
        except torch.OutOfMemoryError:
            failing.disarm()
            run()

    def _note(self, said: str, failing: FailingAllocation) -> None:
        self.num_failed += failing.disarm()
        self.num_refused += 1
        reason = said.partition("is not run again after this failure in ")[2].partition(";")[0]
        if reason or not self.is_in_model:
            self.refusals[reason or "loop"] += 1
        else:
            self.strange.append(said)

    def outcome(self) -> Outcome:
        counters = [value for entry in self.optimizer.state.values() for value in entry.values()]
        found = [*self.losses, *(value.detach().cpu() for value in (*self.model.state_dict().values(), *counters))]
        found += [torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state(torch.device(DEVICE)).cpu()]
        found.append(torch.tensor([random.random(), len(self.optimizer.state)]))
        digest = hashlib.sha256(
            b"".join(each.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for each in found)
        )
        recovered = self.num_failed - self.num_refused
        return Outcome(digest.hexdigest(), self.num_failed, recovered, dict(self.refusals), self.strange)


class ScaledLoop(Loop):
    """With a `GradScaler`, whose scale grows; the loss is read for a log in every step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._scaler = torch.amp.GradScaler("simgpu", init_scale=256.0, growth_interval=2)
        self._scaler.scale(torch.ones((), device=DEVICE))  # makes its own tensors
        self._latest = 0.0
        self._logged: list[float] = []

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        self._latest = loss.item()
        return self._scaler.scale(loss)

    def _pass(self, batch: dict[str, Any], part: int) -> None:
        super()._pass(batch, part)
        self._logged.append(self._latest)  # once, also for a pass that was done again

    def apply(self, failing: FailingAllocation) -> None:
        self.num_failed += failing.disarm()  # what follows looks for infinities, and is the scaler's
        self._scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def outcome(self) -> Outcome:
        self.losses.append(torch.tensor([*self._logged, self._scaler.get_scale()]))
        return super().outcome()


class LoggingLoop(Loop):
    """Prints `loss.item()` and the norm of its gradients to a list in every step."""

    def _pass(self, batch: dict[str, Any], part: int) -> None:
        super()._pass(batch, part)
        self.losses.append(torch.tensor(self.losses[-1].item() * 2))


LOOPS: dict[str, tuple[str, type[Loop]]] = {
    "mlp, GradScaler": ("mlp", ScaledLoop),
    "mlp, losses logged": ("mlp", LoggingLoop),
}
"""Other loops: the model, and how it is trained."""


# ---- all of them


def train(name: str, setting: str, every: int, blocks: int | None) -> dict[str, Any]:
    """One row: a training with failures, and then a plain twin."""
    import simgpu  # noqa: F401

    logging.getLogger("memscale").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # whoever looks for living optimizers need not look through all that was imported, in every step
    kind = LOOPS[name][1] if name in LOOPS else Loop
    loop = kind(cases()[name], SETTINGS[setting], blocks)
    for number, nth in enumerate(EARLY):
        loop.step(number, nth)
    num_steps, nth, has_failed = len(EARLY), 1, True
    while has_failed:
        before = loop.num_failed
        loop.step(num_steps, nth)
        has_failed = loop.num_failed > before
        num_steps, nth = num_steps + 1, nth + every
    found = loop.outcome()
    memscale.detach(loop.model)
    plain = kind(cases()[name], None, blocks)
    for number in range(num_steps):
        plain.step(number)
    return {
        "model": name,
        "setting": setting,
        "is_same": found.digest == plain.outcome().digest,
        **dataclasses.asdict(found),
    }


def _in_process(name: str, setting: str, every: int, blocks: int | None) -> dict[str, Any]:
    """In a process of its own, in which no model has run."""
    context = multiprocessing.get_context("fork")  # with what is imported already: that takes longer than the training
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(train(name, setting, every, blocks)))
    process.start()
    sending.close()
    try:
        row: dict[str, Any] = receiving.recv()
    except EOFError:
        raise SystemExit(f"{name} failed") from None
    finally:
        process.join()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*cases()], default=[*cases()], metavar="NAME")
    parser.add_argument("--setting", choices=[*SETTINGS], default="default")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        rows.append(_in_process(name, options.setting, options.every, options.blocks))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["is_same"] and not row["strange"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
