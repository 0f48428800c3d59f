"""The walk of data: which modules `wrap` and `estimate` go through, and which pairs of them call both ways.

    python -m tools.walk                 the table
    python -m tools.walk --pairs         and the pairs, with how often each calls the other

A stranger who follows one call through the code meets these modules. Few of them, and few pairs that hand the data back
and forth, make it easy to follow. Counted with `sys.setprofile`, in this thread.

Not every pair is a detour. Of a pair that calls "directly" both ways, no call comes from PyTorch. The others are hooks
and modes: a rehearsal runs the model with the very hooks of the plan, so that modules which know nothing of one another
stand behind each other on the stack. `GpuKernels` alone makes seven of them: while a card is rehearsed on a CPU it is a
mode that every function of PyTorch passes in forward, also those that our own hooks call. The direct pairs are of two
kinds, and each of them is intended:

    a class and its base       the base calls what the class fills in: `LiveBytes` and `SegmentRecorder` and what keeps
                               books in them, `MethodOverride`, `RecomputedForward`
    who is told                somebody is given, to be called: the log of `LiveBytes`

What a stage asks in the middle of its work is data instead of a callback: a record of the techniques is handed
`Traced`, `OptimizerShares`, `Chosen` or `Trials`, and what records a step is handed the `Limit` of its live bytes. The
module that attaches a watcher of optimizer steps or of forwards (`SurroundedForward`), or puts a kernel in the place of
another, is not the one that is called then. What would be a tangle is two modules that import each other;
`tests/test_layering.py` lists the few that do.

When this was last counted, `wrap` had 140 modules, 3 pairs and 1 direct one, and `estimate` 179, 21 and 10. In the
last tree before the rooms were drawn the same tool counts 55, 6 and 3, and 79, 25 and 11. Modules grew with what a plan
can do (shapes, ranks, recovery, windows, the optimizer's step in turns) and with files that were cut into single ideas.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import inspect
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memscale
from memscale import cli
from memscale.report.tables import table

_PACKAGE = "memscale"
_CALLED_BY_TORCH = ("__torch_function__", "__torch_dispatch__")


@dataclasses.dataclass
class Walk:
    """What one call went through."""

    functions: set[str] = dataclasses.field(default_factory=set)
    modules: set[str] = dataclasses.field(default_factory=set)
    edges: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    direct: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """The calls among them that do not come through PyTorch."""
    num_calls: int = 0

    def record(self, work: Callable[[], Any]) -> None:
        sys.setprofile(self._see)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _see(self, frame: Any, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return  # what runs when a module is loaded is no part of the walk
        module = frame.f_globals.get("__name__", "")
        if not _is_ours(module):
            return
        self.num_calls += 1
        self.modules.add(module)
        self.functions.add(f"{module}.{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code}")
        caller, is_direct = _caller_of_ours(frame)
        if caller is not None and caller != module:
            self.edges[caller, module] += 1
            self.direct[caller, module] += is_direct

    @property
    def both_ways(self) -> list[tuple[str, str]]:
        return _pairs(self.edges)

    @property
    def both_ways_directly(self) -> list[tuple[str, str]]:
        return _pairs(+self.direct)

    def cells(self, name: str) -> tuple[str, ...]:
        counted = (self.edges, self.both_ways, self.both_ways_directly)
        numbers = (len(self.modules), len(self.functions), self.num_calls, *map(len, counted))
        return name, *(f"{number:,}" for number in numbers)


def _pairs(edges: collections.Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def _is_ours(module: str) -> bool:
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.")


def _caller_of_ours(frame: Any) -> tuple[str | None, bool]:
    """The nearest caller of the package, and whether PyTorch does not stand between the two."""
    is_direct, frame = frame.f_code.co_name not in _CALLED_BY_TORCH, frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if _is_ours(module):
            return str(module), is_direct
        is_direct = is_direct and module.partition(".")[0] != "torch"  # calls from its C++ have no frame
        frame = frame.f_back
    return None, False


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.rand(2, 16, 64)


def walk_wrap() -> Walk:
    """A small encoder on the CPU, checkpointing only."""
    model, sample = encoder()
    mode = memscale.OptimizationMode.CONSERVATIVE
    config = memscale.Config(mode=mode, force_optimize=True, enable_logging=False)
    os.environ["MEMSCALE_CACHE"] = "0"  # a plan that was kept would spare most of the way
    walk = Walk()
    walk.record(lambda: memscale.wrap(model, config, sample_input=sample))
    memscale.detach(model)
    return walk


def walk_estimate() -> Walk:
    """The command line, for a card that is not here, at a budget that needs every mode."""
    command = ["estimate", "bert-tiny", "--batch", "8", "--seq", "64", "--gpu", "RTX 3090", "--budget", "0.08"]
    walk = Walk()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        walk.record(lambda: cli.main(command))
    return walk


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", action="store_true", help="show the pairs that call both ways")
    options = parser.parse_args()
    for walk_once in (walk_wrap, walk_estimate):
        walk_once()  # what happens at first use only, such as loading a module, is no part of the walk
    walks = {"wrap": walk_wrap(), "estimate": walk_estimate()}
    header = ("walk", "modules", "functions", "calls", "edges", "both ways", "directly")
    print("\n".join(table([header, *(walk.cells(name) for name, walk in walks.items())], left=(0,))))
    if options.pairs:
        for name, walk in walks.items():
            print(f"\n{name}:")
            for a, b in walk.both_ways:
                how = "" if (a, b) in walk.both_ways_directly else " (through PyTorch)"
                print(f"  {a} -> {b}: {walk.edges[a, b]:,}; back: {walk.edges[b, a]:,}{how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
