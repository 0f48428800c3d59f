"""timm's sweep of training on an RTX 3090: a model fits with one batch and runs out of memory with the next.

Each row is two inequalities: the step at the batch that fits needs at most what the card had for PyTorch, and that at
the next needs more. Models run as they did then: timm 0.6.7, torch 1.12 with attention as matrix products, fp16
autocast of the forward with the rules of a card, SGD with Nesterov's momentum, parameter by parameter, and gradients
that `zero_grad` fills with zeros and keeps. The batch that fits is rehearsed as it is, in the layout that was measured.
What a step needs beyond weights, gradients and momentum grows with the batch; where that puts the next batch near the
card's room, it is rehearsed as well.

What a step needs is the least room in which the model of PyTorch's allocator does not run out of memory, found by
bisection: between what is allocated and what would be reserved if there were enough.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.published import old_timm
from benchmarks.published.page import Entry
from memscale import Hardware
from memscale._decide.allocator import OutOfMemoryError
from memscale._planning.reserved.allocation_log import AllocationLog
from memscale._planning.reserved.allocations import reserved_of
from memscale._planning.reserved.recording import record_steps
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal

GB = 1e9
CARD_BYTES = 25.447e9
"""What the driver offers of an RTX 3090's 24 GiB: 23.70 GiB, as out-of-memory messages of that time say."""
CONTEXT_BYTES = 1.3e9
"""All kernels loaded, as CUDA 11.3 did. Those messages leave 1.2 to 1.6 GiB for it: an estimate, the same for all."""
ROOM_BYTES = CARD_BYTES - CONTEXT_BYTES
OTHER_ROOMS_GB = (23.0, 23.7, 24.5)
"""For which the page says how many inequalities would hold."""
NEAR_SHARE = 0.1
"""A figure that is no nearer to the room than this need not be exact."""
PRECISION_BYTES = 50_000_000
NUM_STEPS = 2
TRANSFORMERS = ("vit_", "deit", "beit", "swin", "mixer", "xcit", "cait", "crossvit", "convit", "pit_", "twins", "volo")
NUM_CLASSES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    model: str
    pixels: int
    layout: str
    """"nchw" or "nhwc": channels first or last."""
    fits: int
    fails: int

    @property
    def is_transformer(self) -> bool:
        return is_transformer(self.model)


def is_transformer(model: str) -> bool:
    """By its name."""
    return any(name in model for name in TRANSFORMERS)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    row: Row
    fits_bytes: float
    fails_bytes: float
    """What the steps with both batches need; not a number where the model does not run here."""
    trouble: str = ""

    @property
    def verdict(self) -> str:
        if math.isnan(self.fits_bytes):
            return "missed: not predicted"
        if self.fits_bytes <= ROOM_BYTES < self.fails_bytes:
            return "holds"
        return "missed: said not to fit" if self.fits_bytes > ROOM_BYTES else "missed: said to fit"


def num_held(needs_gb: Sequence[float], room_gb: float) -> int:
    """How many of a row's two inequalities hold, if the card had so much room."""
    return (needs_gb[0] <= room_gb) + (needs_gb[1] > room_gb) if needs_gb else 0


class CardAutocast(TorchFunctionMode):
    """What a card's autocast computes in fp32, and a CPU's does not."""

    WIDE = frozenset((F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.normalize and args[0].dtype == torch.float16:
            return _normalized(*args, **(kwargs or {}))
        if func in self.WIDE and args[0].dtype == torch.float16:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


def _normalized(x: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> torch.Tensor:
    """Norms are wide, and so is what is divided by them; what they are taken of is not turned into fp32 before."""
    norms = torch.norm(x, p, dim, keepdim=True, dtype=torch.float32)
    return x / norms.clamp_min(eps).expand_as(x)


class Training(nn.Module):
    """A classifier with its loss, as the sweep trains it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor, momenta: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """`momenta` are what the optimizer keeps on the card."""
        with torch.autocast("cpu", torch.float16), CardAutocast():
            scores = self.model(images)
            scores = scores[0] if isinstance(scores, tuple) else scores  # of two heads the first is trained
            return F.cross_entropy(scores.float(), labels)


def chosen(rows: Sequence[Row], others: int) -> list[Row]:
    """Transformers, then every so manieth model of all others by name (0: none), both layouts of a model together.

    Their order is by chance, but always the same: what has been run is a sample of all, whenever it ends.
    """
    names = sorted({row.model for row in rows if not row.is_transformer})
    wanted = set(names[::others] if others else ())
    found = [row for row in rows if row.is_transformer or row.model in wanted]
    return sorted(found, key=lambda row: (not row.is_transformer, zlib.crc32(row.model.encode()), row.layout))


def predict_all(rows: Sequence[Row], say: Callable[[str], None]) -> Iterator[Outcome]:
    """Rows of one model come together: what both layouts have in common is rehearsed once."""
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.model}, {row.layout}")
        yield predict(row)


def predict(row: Row) -> Outcome:
    try:
        fits, fails = _needed_by(row)
    except Exception as error:  # a model that this timm does not have, or whose step goes by values
        warnings.warn(f"{row.model} is not predicted: {error}", stacklevel=2)
        return Outcome(row, math.nan, math.nan, f"{type(error).__name__}: {error}".partition("\n")[0])
    return Outcome(row, fits, fails)


def _needed_by(row: Row) -> tuple[int, int]:
    fits = _needed_bytes(row.model, row.pixels, row.fits, row.layout)
    fixed = 3 * sum(parameter.numel() * parameter.element_size() for parameter in _model(row.model).parameters())
    fails = fixed + (fits - fixed) * row.fails // row.fits
    if abs(fails / ROOM_BYTES - 1) < NEAR_SHARE:
        fails = _needed_bytes(row.model, row.pixels, row.fails, row.layout)
    return fits, fails


def _needed_bytes(name: str, pixels: int, batch: int, layout: str) -> int:
    """Where a layer of patches is the only convolution, both layouts are one."""
    num_convolutions = sum(isinstance(module, nn.Conv2d) for module in _model(name).modules())
    return _needed_in_layout(name, pixels, batch, layout if num_convolutions > 1 else "nchw")


@functools.lru_cache(1)
def _model(name: str) -> Training:
    timm = old_timm.load()
    try:
        with old_timm.on_meta():
            return Training(timm.create_model(name, num_classes=NUM_CLASSES))
    except (NotImplementedError, RuntimeError):  # it needs values to be built
        return Training(timm.create_model(name, num_classes=NUM_CLASSES)).to("meta")


_KNOWN: dict[tuple[str, int, int, str], int] = {}
"""What steps need, by the model's structure: many names stand for one."""


def _needed_in_layout(name: str, pixels: int, batch: int, layout: str) -> int:
    model = _model(name)
    key = (structure_of(model), pixels, batch, layout)
    if key not in _KNOWN:
        order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        images = torch.empty(batch, 3, pixels, pixels, device="meta").to(memory_format=order)
        _KNOWN[key] = needed_bytes(record_training(model.to(memory_format=order), images))  # type: ignore[call-overload]
    return _KNOWN[key]


def structure_of(model: nn.Module) -> str:
    """The same for models of the same modules with the same settings and shapes."""
    lines = [repr(model)]
    for module_fqn, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str, tuple))}
        shapes = [tuple(tensor.shape) for tensor in (*module.parameters(False), *module.buffers(False))]
        lines.append(f"{module_fqn} {sorted(plain.items())} {shapes}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def record_training(model: nn.Module, images: torch.Tensor) -> AllocationLog:
    """The optimizer's step is left out: it needs less than backward; what it keeps is there."""
    labels = torch.empty(len(images), dtype=torch.int64, device="meta")
    momenta = [torch.empty_like(parameter, requires_grad=False) for parameter in model.parameters()]
    rehearsal = FakeRehearsal(model, Inputs((images, labels, momenta), {}), "cuda")
    rehearsal.holds_gradients = True
    return record_steps(rehearsal, model, "none", num_steps=1, hardware=Hardware.from_name("RTX 3090"))


def needed_bytes(log: AllocationLog) -> int:
    """The least room that suffices for the steps, to `PRECISION_BYTES`."""
    free = reserved_of(log, num_steps=NUM_STEPS)
    low, high = free.allocated_peak_bytes, free.reserved_peak_bytes
    while high - low > PRECISION_BYTES:
        middle = (low + high) // 2
        try:
            reserved_of(log, num_steps=NUM_STEPS, capacity_bytes=middle)
        except OutOfMemoryError:
            low = middle
        else:
            high = middle
    return high


def entry(outcome: Outcome) -> Entry:
    row, is_predicted = outcome.row, not math.isnan(outcome.fits_bytes)
    needs_gb = [round(num_bytes / GB, 2) for num_bytes in (outcome.fits_bytes, outcome.fails_bytes)]
    return Entry(
        name=name_of(row),
        card="GeForce RTX 3090",
        published=f"{row.fits} fits, {row.fails} fails",
        predicted=f"needs {needs_gb[0]} and {needs_gb[1]} GB" if is_predicted else outcome.trouble,
        difference=f"{ROOM_BYTES / GB:.1f} GB",
        verdict=outcome.verdict,
        note="",
        figures=needs_gb if is_predicted else [],
    )


def inequality_lines(entries: Sequence[Entry]) -> list[str]:
    """How many inequalities hold, of transformers and of all, and how many would if the card had another room."""
    rows = [(is_transformer(entry.name), entry.figures) for entry in entries]
    rooms_gb = sorted((*OTHER_ROOMS_GB, ROOM_BYTES / GB))
    lines = ["| room for PyTorch | transformers | others | all |", "|---|---|---|---|"]
    for room_gb in rooms_gb:
        held = [(kind, num_held(figures, room_gb)) for kind, figures in rows]
        kinds = ([n for kind, n in held if kind], [n for kind, n in held if not kind], [n for _, n in held])
        shares = (
            f"{sum(kind)} of {2 * len(kind)} ({sum(kind) / (2 * len(kind)):.1%})" if kind else "-" for kind in kinds
        )
        lines.append(f"| {room_gb:.2f} GB | " + " | ".join(shares) + " |")
    return lines


def name_of(row: Row) -> str:
    return f"{row.model}, {row.pixels} px, {row.layout}"


# ---- the table of figures


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(*columns) for columns in json.loads(path.read_text())["rows"]]


def read_csv(path: pathlib.Path) -> list[Row]:
    """timm's columns, with `fits_batch` and `fails_batch`; rows that never failed say nothing."""
    layout = "nhwc" if "nhwc" in path.name else "nchw"
    with path.open(newline="") as file:
        return [
            Row(
                found["model"],
                int(found["train_img_size"]),
                layout,
                int(found["fits_batch"]),
                int(found["fails_batch"]),
            )
            for found in csv.DictReader(file)
            if found["fails_batch"]
        ]
