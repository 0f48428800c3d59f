"""What every test gets: one thread, seeds, and a check that it left nothing behind."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import random
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings as hypothesis_settings
from torch import nn
from torch.nn.modules import module as module_internals
from torch.optim import optimizer as optimizer_internals
from torch.utils import _python_dispatch
from torch.utils import checkpoint as checkpoint_internals

# Before the first backward of any test: autograd makes its threads then, for the devices that there are.
import simgpu  # noqa: F401
from memscale._execute.executor import Executor
from memscale._measurement import measure
from memscale._torch.live_bytes import LiveBytes
from memscale._torch.overrides import ForwardOverride, OwnHook

# bitsandbytes logs once in a process that an optional kernel is missing, with the error itself. pytest keeps the record
# and so the tensors of the step, by its traceback: whichever test came first would seem to leak them.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: False)

_BORN: weakref.WeakSet[Any] = weakref.WeakSet()
_FAILED = pytest.StashKey[bool]()
_STARTED_S = pytest.StashKey[float]()
_OF_A_SLOW_TEST = 20
"""How many ordinary tests take as long as one that is marked `slow`."""
MOST_KEPT_BYTES = 1_000_000
"""Constants that libraries make on their first use."""
_AUTOGRAD_LETS_GO_S = 60.0
"""Its thread for a device drops a pass, and the modes in it, a moment after `backward()` has returned, which is a long
one on a busy machine. Only a test that fails waits to the end."""
# A suite that tries a new case in every run fails by chance. `make search-cases` looks for new ones.
hypothesis_settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis_settings.register_profile("search", derandomize=False, deadline=None, print_blob=True)
_OURS = (LiveBytes, ForwardOverride, OwnHook, Executor)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle-files",
        type=int,
        metavar="SEED",
        help="Run the files of tests in an order drawn from this seed: no file may need what another one left behind.",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("shuffle_files")
    return [] if seed is None else [f"the files are shuffled; run them in this order again with --shuffle-files {seed}"]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """`make check` runs the files marked `unit`; importing the others would cost it more than it may take."""
    if not config.option.markexpr.startswith("unit ") or collection_path.suffix != ".py":
        return None
    return True if "mark.unit" not in collection_path.read_text() else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After the tests of other lanes have been left out."""
    seed = config.getoption("shuffle_files")
    items[:] = with_long_files_first(items) if seed is None else with_files_shuffled(items, seed)


def with_files_shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """The same tests file by file, the files in another order: fixtures of a file are set up once, as before."""
    by_file = _by_file(items)
    files = sorted(by_file)
    random.Random(seed).shuffle(files)
    return [item for file in files for item in by_file[file]]


def with_long_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same tests file by file, so that short files are left for the end: a long one there would keep one core busy
    and leave the others idle. A slow test counts as many."""
    by_file = _by_file(items)
    lengths = {
        file: sum(_OF_A_SLOW_TEST if item.get_closest_marker("slow") else 1 for item in mine)
        for file, mine in by_file.items()
    }
    return [item for file in sorted(by_file, key=lambda file: -lengths[file]) for item in by_file[file]]


def _by_file(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    return by_file


def _load_profile(config: pytest.Config) -> None:
    hypothesis_settings.load_profile(config.getoption("--hypothesis-profile") or "fixed")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Importing `torch.testing._internal.common_utils` loads a profile of its own, for all files that come later."""
    _load_profile(collector.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_STARTED_S] = _processor_s()
    _load_profile(item.config)


def _processor_s() -> float:
    """Processor time of this process and of those that it has waited for: the same on a machine of any load."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MEMSCALE_CACHE"] = "0"  # every test plans for itself
    os.environ["MEMSCALE_MEASURE"] = "0"  # also in processes that tests start: the same figures everywhere
    os.environ["MEMSCALE_PROGRESS"] = "0"  # what is shown of long work depends on how long it takes
    torch.set_num_threads(1)  # workers share the cores; also: sums in one order
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without one


@pytest.fixture(scope="session", autouse=True)
def _births() -> Iterator[None]:
    """Register every object of ours that may hold on to a model or a tensor."""
    patched = pytest.MonkeyPatch()
    for kind in _OURS:
        patched.setattr(kind, "__new__", _registering_new)
    yield
    patched.undo()


def _registering_new(kind: type, *args: Any, **kwargs: Any) -> Any:
    instance = object.__new__(kind)
    _BORN.add(instance)
    return instance


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> None:
    """Leak checks collect garbage in every test; what was imported need not be walked through each time."""
    gc.collect()  # see `freeze_what_is_left`
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_module_keeps_tensors(_quick_collections: None) -> Iterator[None]:
    """A file of tests leaves no tensors behind but constants."""
    yield
    freeze_what_is_left()


def freeze_what_is_left() -> None:
    """Put what is alive out of sight of the collector, and so of `measure()`: it must be little.

    It stays there, so that a file or a test costs no more after many others than after none.
    """
    gc.collect()
    with measure("cpu") as living:
        pass
    kept = living.peak_bytes
    assert kept < MOST_KEPT_BYTES, f"{kept:,} bytes of tensors outlive their tests"
    del living
    gc.collect()  # garbage that is frozen, also that of counting, would outlive every test
    gc.freeze()


@pytest.fixture(scope="module")
def plain_runs() -> Iterator[dict[Any, Any]]:
    """Runs of plain models, by case, for the tests of one file: each is trained once."""
    runs: dict[Any, Any] = {}
    yield runs
    runs.clear()  # the last test still holds them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_settings_of_bitsandbytes() -> Iterator[None]:
    """It keeps settings by the ids of parameters, and those of the dead, too, whose ids later ones may have."""
    yield
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    if call.when == "teardown":  # `tools/durations.py` reads it from the JUnit file
        item.user_properties.append(("processor_s", round(_processor_s() - item.stash[_STARTED_S], 3)))
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_survives(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No hook, thread, open file, patched function, logger handler or object of ours outlives a test."""
    before = _world()
    gradients_on = torch.is_grad_enabled()
    yield
    if request.node.stash.get(_FAILED, False):
        _BORN.clear()  # the traceback holds everything alive
        return
    caplog.get_records("call").clear()  # a record may hold an error, and the error its frames
    survivors = _survivors()
    assert not survivors, f"still alive after the test: {survivors}"
    after = _world()
    imported = after["patched functions"].keys() - before["patched functions"].keys()
    before["patched functions"] |= {name: after["patched functions"][name] for name in imported}
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"the test left a trace: {changed}"
    assert torch.is_grad_enabled() == gradients_on


def _survivors() -> list[str]:
    if not _BORN:
        return []
    gc.collect()  # models have cycles of their own; what is still there after this is held by somebody
    deadline = time.monotonic() + _AUTOGRAD_LETS_GO_S
    while _BORN and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    left = [repr(instance) for instance in _BORN]
    _BORN.clear()
    return left


def _world() -> dict[str, Any]:
    logger = logging.getLogger("memscale")
    return {
        "threads": {thread.name for thread in threading.enumerate() if _is_ours(thread)},
        "open files": _open_files(),
        "dispatch modes": len(_python_dispatch._get_current_dispatch_mode_stack()),
        "logger": (tuple(logger.handlers), logger.level, logger.propagate, logger.disabled),
        "global module hooks": {name: tuple(table) for name, table in _global_tables(module_internals)},
        "global optimizer hooks": {name: tuple(table) for name, table in _global_tables(optimizer_internals)},
        "patched functions": _patchable(),
        "gradient checkpointing": checkpoint_internals._enable_checkpoint_early_stop,
    }


def _is_ours(thread: threading.Thread) -> bool:
    """Autograd's own threads show up as dummies once they have met Python."""
    return thread.is_alive() and not isinstance(thread, threading._DummyThread)


def _open_files() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/sys/")):
            found.add(target)
    return {target for target in found if not target.endswith((".so", ".pyc", ".py"))}


def _global_tables(owner: Any) -> list[tuple[str, Any]]:
    return [(name, table) for name, table in vars(owner).items() if name.startswith("_global_") and table is not None]


def _patchable() -> dict[str, Any]:
    """What somebody could be tempted to replace globally."""
    found = {
        f"{owner.__name__}.{name}": getattr(owner, name)
        for owner, names in (
            (nn.Module, ("__call__", "_call_impl", "__getattr__", "__setattr__", "__getstate__", "__reduce_ex__")),
            (nn.Linear, ("forward",)),
            (F, ("dropout", "scaled_dot_product_attention", "cross_entropy", "multi_head_attention_forward")),
            (torch.Tensor, ("backward", "__torch_function__")),
            (torch.autograd, ("backward", "grad")),
            (torch.autograd.Variable, ("_execution_engine",)),
            (torch.optim.Optimizer, ("zero_grad", "step")),
            (torch.optim.AdamW, ("__init__",)),
            (torch.amp.GradScaler, ("step",)),
            (nn.parallel.DistributedDataParallel, ("forward", "_post_forward")),
            (random, ("random", "uniform")),
            (numpy.random, ("rand", "uniform", "random")),
            (checkpoint_internals, ("checkpoint", "_checkpoint_without_reentrant_generator")),
            (checkpoint_internals.CheckpointFunction, ("apply",)),
        )
        for name in names
        if hasattr(owner, name)
    }
    masking = sys.modules.get("transformers.masking_utils")
    if masking is not None:
        found["find_packed_sequence_indices"] = masking.find_packed_sequence_indices
    return found
