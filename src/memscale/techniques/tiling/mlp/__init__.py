"""A position-wise MLP, a stretch of the sequence at a time; each stretch is recomputed in backward.

The wide hidden activations of one stretch exist at once, in forward and in backward. Weight gradients are summed over
the stretches inside one autograd function and handed over once, so that a parameter's gradient accumulates once a
backward, as DDP expects, and the user's hooks on parameters see the whole gradient.

Dropout inside is exact as long as it acts on tensors as wide as the MLP's output: the noise of the whole sequence is
drawn in one go, as the plain path draws it, and each stretch takes its part. Dropout on the wide hidden activations
would need noise as large as what tiling saves, other random functions cannot be drawn in parts at all: such a module
raises `TilingError` (`find_mlps` does not offer it).

Known limits: the output is one tensor of the input's leading shape; the module mixes no positions, which `find_mlps`
proves, and keeps no state (a BatchNorm inside is not position-wise). Hooks on modules inside the MLP fire once a
stretch in forward and once more in backward.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from memscale._plan import TileMlp
from memscale._torch.overrides import ForwardOverride, find_module
from memscale._torch.plain_path import is_plain_path
from memscale.techniques.tiling.common import (
    TilingError,
    at_least_one,
    autocast_now,
    draw_noise,
    dropout_call,
    dropped,
    names,
)

_SEQUENCE_DIM = -2

_RANDOM_FUNCTIONS = names(
    "alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d dropout_ alpha_dropout_ "
    "rrelu rrelu_ rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ "
    "multinomial normal normal_ uniform_ exponential_ geometric_ log_normal_ cauchy_ random_ poisson "
    "gumbel_softmax"
)


def attach_mlp(action: TileMlp, model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Tile this MLP until undone."""
    at_least_one(action.module_fqn, "num_tiles", action.num_tiles)
    TiledMlp(find_module(model, action.module_fqn), action).attach(undo)


class TiledMlp(ForwardOverride):
    """The forward of a tiled MLP."""

    def __init__(self, module: nn.Module, action: TileMlp) -> None:
        super().__init__(module)
        self.module_fqn = action.module_fqn
        self.num_tiles = action.num_tiles

    def call(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if len(args) == 1 and not kwargs else None
        if not self._can_tile(hidden):
            return self.inner()(*args, **kwargs)
        parameter_names, parameters = _named_parameters(self.module)
        run = _Run(self, parameter_names, hidden)
        return _TiledRun.apply(run, hidden, *parameters)  # type: ignore[no-untyped-call]

    def _can_tile(self, hidden: Any) -> bool:
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or is_plain_path():
            return False
        return self.num_tiles > 1 and hidden.shape[_SEQUENCE_DIM] >= self.num_tiles


def _named_parameters(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Each parameter once, whatever it is called; `functional_call` follows ties."""
    named = dict(module.named_parameters())
    return list(named), list(named.values())


class _Call(nn.Module):
    """Lets `functional_call` put parameters into a module and run what its tiled forward replaced."""

    def __init__(self, owner: TiledMlp) -> None:
        super().__init__()
        self.target = owner.module
        self.run = owner.inner()

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.run(hidden)


class _Run:
    """One call of a tiled MLP: what its backward needs beside the tensors."""

    def __init__(self, owner: TiledMlp, parameter_names: list[str], hidden: torch.Tensor) -> None:
        self.owner = owner
        self.names = [f"target.{name}" for name in parameter_names]
        self.length = hidden.shape[_SEQUENCE_DIM]
        self.noise = _SlicedDropout(owner.module_fqn, self.length, hidden.shape[-1])
        self.autocast = autocast_now(hidden.device.type)

    def stretches(self) -> list[slice]:
        size = -(-self.length // self.owner.num_tiles)
        return [slice(a, min(a + size, self.length)) for a in range(0, self.length, size)]

    def compute(self, piece: torch.Tensor, parameters: Any, stretch: slice) -> torch.Tensor:
        values = dict(zip(self.names, parameters, strict=True))
        with torch.autocast(**self.autocast), self.noise.of(stretch):
            output: torch.Tensor = functional_call(_Call(self.owner), values, (piece,))
        return output


def part(tensor: torch.Tensor, stretch: slice) -> torch.Tensor:
    return tensor[..., stretch, :]


class _SlicedDropout(TorchFunctionMode):
    """Dropout of a stretch multiplies with its part of the noise that the plain path would have drawn."""

    def __init__(self, module_fqn: str, length: int, width: int) -> None:
        super().__init__()
        self.module_fqn, self.length, self.width = module_fqn, length, width
        self.noises: list[torch.Tensor] = []
        self._stretch = slice(0)
        self._calls = 0

    def of(self, stretch: slice) -> _SlicedDropout:
        self._stretch, self._calls = stretch, 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dropout = dropout_call(func, args, kwargs)
        if dropout is not None:
            return dropped(func, self._dropout(*dropout))
        if getattr(func, "__name__", "") in _RANDOM_FUNCTIONS and not _is_off(args, kwargs):
            raise self._refusal(f"{func.__name__} draws random numbers")
        return func(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float, inplace: bool) -> torch.Tensor:
        index, self._calls = self._calls, self._calls + 1
        if index == len(self.noises):
            self.noises.append(self._draw(input, p))
        noise = part(self.noises[index], self._stretch)
        return input.mul_(noise) if inplace else input * noise

    def _draw(self, input: torch.Tensor, p: float) -> torch.Tensor:
        size = self._stretch.stop - self._stretch.start
        if input.dim() < 2 or input.shape[_SEQUENCE_DIM] != size or input.shape[-1] > self.width:
            raise self._refusal(f"its dropout acts on {tuple(input.shape)}, which is wider than its output")
        whole = list(input.shape)
        whole[_SEQUENCE_DIM] = self.length
        return draw_noise(input, whole, p)

    def _refusal(self, reason: str) -> TilingError:
        return TilingError(
            f"{self.module_fqn} cannot be tiled along the sequence: {reason}, and a stretch cannot draw what the whole "
            "sequence would have drawn. Take the action out of the plan, or set its dropout to 0."
        )


def _is_off(args: Any, kwargs: Any) -> bool:
    """Whether a random function is called with `training=False`."""
    return kwargs.get("training") is False or (len(args) > 2 and args[2] is False)


class _TiledRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, hidden: Any, *parameters: Any) -> Any:
        ctx.run = run
        output: Any = None
        for stretch in run.stretches():
            piece = run.compute(part(hidden, stretch).contiguous(), parameters, stretch)
            if output is None:
                output = _whole(piece, hidden, stretch)
            part(output, stretch).copy_(piece)
            del piece
        # Noise is saved as any tensor is, so that a checkpoint around this can drop it.
        noises, run.noise.noises = run.noise.noises, []
        ctx.num_parameters = len(parameters)
        ctx.save_for_backward(hidden, *parameters, *noises)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, *saved = ctx.saved_tensors
        parameters, ctx.run.noise.noises = saved[: ctx.num_parameters], saved[ctx.num_parameters :]
        needs = ctx.needs_input_grad[1:]
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        sums = _Sums(parameters)
        for stretch in ctx.run.stretches():
            found = _stretch_gradients(ctx.run, hidden, parameters, stretch, part(gradient, stretch), needs)
            if of_hidden is not None:
                part(of_hidden, stretch).copy_(torch.zeros(()) if found[0] is None else found[0])
            sums.add(found[1:])
            del found
        ctx.run.noise.noises = []
        return (None, of_hidden, *sums.in_their_dtypes())


def _whole(piece: torch.Tensor, hidden: torch.Tensor, stretch: slice) -> torch.Tensor:
    expected = (*part(hidden, stretch).shape[:-1], piece.shape[-1])
    if tuple(piece.shape) != expected:
        raise TilingError(f"a stretch of shape {tuple(part(hidden, stretch).shape)} came out as {tuple(piece.shape)}")
    return piece.new_empty((*hidden.shape[:-1], piece.shape[-1]))


def _stretch_gradients(
    run: _Run, hidden: torch.Tensor, parameters: list[Any], stretch: slice, gradient: torch.Tensor, needs: Any
) -> list[Any]:
    """Gradients of one stretch, on detached stand-ins: nobody's hooks fire, nothing accumulates."""
    tensors = [part(hidden, stretch).contiguous(), *parameters]
    stand_ins = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)]
    with torch.enable_grad():
        output = run.compute(stand_ins[0], stand_ins[1:], stretch)
    wanted = [tensor for tensor in stand_ins if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, gradient.to(output.dtype), allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in stand_ins]


class _Sums:
    """Parameter gradients, summed over the stretches: in single precision for half-precision parameters."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.dtypes = [parameter.dtype for parameter in parameters]
        self.totals: list[torch.Tensor | None] = [None] * len(parameters)

    def add(self, gradients: list[torch.Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self.totals[index]
            if total is None:
                wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
                self.totals[index] = gradient.to(wide)
            else:
                total.add_(gradient)

    def in_their_dtypes(self) -> list[torch.Tensor | None]:
        return [None if t is None else t.to(dtype) for t, dtype in zip(self.totals, self.dtypes, strict=True)]
