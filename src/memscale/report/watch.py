"""`memscale watch`: a training as a view that changes, from the metrics that it serves.

    url = find_endpoint("9400")                 # of a port, a process or an address
    earlier, later = read(url), read(url)
    frame_lines(Frame(earlier, later))          # text; `frame_view` is the same for rich

Nothing of the training is touched but its port: see `Config(observability_port=...)`. Rates are between two readings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from memscale._errors import ConfigError, MemScaleError, install_command, quoted, shown
from memscale._units import show_bytes
from memscale.report.tables import table

TIERS = ("device", "host", "disk")
KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")
NUMBERS = ("live", "allocated", "reserved")
_TIMEOUT_S = 10.0
_MOST_DIGITS = 10
"""The most digits that the number of a port or of a process has."""
_BAR_WIDTH = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What was served at one moment."""

    seconds: float
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    """Values by the metric's name and its labels, without that of the model."""
    model: str = ""

    def value(self, name: str, **labels: str) -> float | None:
        """One number; None where it is not served."""
        return self.values.get((name, frozenset(labels.items())))

    def label_of(self, name: str, label: str) -> str:
        """A label of a metric that is there once; "" where it is not."""
        found = [dict(labels).get(label, "") for metric, labels in self.values if metric == name]
        return found[0] if found else ""

    def total(self, name: str, **labels: str) -> float:
        """The sum over all labels but these."""
        wanted = set(labels.items())
        return sum(value for (metric, has), value in self.values.items() if metric == name and wanted <= has)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Two readings: what is, and what happened in between."""

    earlier: Reading
    later: Reading

    @property
    def passed_s(self) -> float:
        """The time of the steps that ended in between. That between the readings is not: a step of 1.7 s that is looked
        at every second would take 1 s or 2."""
        return self.change("memscale_step_seconds_total") or self.later.seconds - self.earlier.seconds

    def change(self, name: str, **labels: str) -> float:
        """How much a count has grown."""
        return max(0.0, self.later.total(name, **labels) - self.earlier.total(name, **labels))

    @property
    def step_ms(self) -> float | None:
        """Time by the steps in it; None where none has ended."""
        num_steps = self.change("memscale_steps_total")
        return self.passed_s / num_steps * 1e3 if num_steps else None


# ---- reading


def find_endpoint(target: str) -> str:
    """Where the metrics of a port, a process (by its id) or an address are served.

    Raises:
        ConfigError: Nothing of ours answers there; the message says what to do.
    """
    if not (target.isdecimal() and len(target) <= _MOST_DIGITS):
        url = target if "://" in target else f"http://{target}"
        url = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
        if not url.startswith(("http://", "https://")) or not _answers(url):
            raise ConfigError(f"nothing that memscale serves answers at {shown(url)}")
        return url
    number = int(target)
    ports = [number] if 0 < number < 65536 else []
    for port in [*ports, *_ports_of(number)]:
        if _answers(f"http://127.0.0.1:{port}/metrics"):
            return f"http://127.0.0.1:{port}/metrics"
    raise ConfigError(
        f"neither port {target} nor a process of that number serves metrics of memscale on this machine: train with "
        "memscale.Config(observability_port=9400), and watch 9400; until its plan is made a training serves none"
    )


def _ports_of(pid: int) -> list[int]:
    """The ports on which a process listens, its children's included."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        found = [connection for each in family for connection in each.net_connections(kind="tcp")]
    except (psutil.Error, OverflowError):
        return []
    return sorted({connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN})


def _answers(url: str) -> bool:
    try:
        return bool(read(url).values)
    except (OSError, ValueError):
        return False


def read(url: str) -> Reading:
    """What is served there now; `OSError` where nobody serves any more."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise MemScaleError(
            f"metrics are read by prometheus-client, which is not installed: {install_command('observability')}"
        ) from error
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # nosec B310  http or https: checked
            text = answer.read().decode()
    except http.client.HTTPException as error:  # no address, no HTTP, or an answer that breaks off
        raise OSError(f"{shown(url)}: {quoted(error)}") from error
    values, model = {}, ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("memscale_"):
                labels = dict(sample.labels)
                model = labels.pop("model", model)
                values[sample.name, frozenset(labels.items())] = sample.value
    return Reading(time.monotonic(), values, model)


def frames(url: str, interval_s: float) -> Iterator[Frame]:
    """A frame for each interval, until nobody serves any more."""
    earlier = None
    with contextlib.suppress(OSError):
        earlier = read(url)
        while True:
            time.sleep(interval_s)
            later = read(url)
            yield Frame(earlier, later)
            # Where no step has ended yet, the next frame looks back further: its time is that of whole steps.
            earlier = later if later.total("memscale_steps_total") > earlier.total("memscale_steps_total") else earlier


# ---- showing


def head_lines(frame: Frame) -> list[str]:
    """What is trained, how, and how fast."""
    now = frame.later
    what = now.label_of("memscale_plan", "what")
    device, mode = (now.label_of("memscale_plan", label) for label in ("device", "mode"))
    plan = f"{what} (mode {mode}, on {device})" if what else "no plan yet"
    samples = now.value("memscale_samples_per_second")
    slowdown = now.value("memscale_predicted_slowdown")
    parts = [
        f"step {now.total('memscale_steps_total'):.0f}",
        "-" if frame.step_ms is None else f"{frame.step_ms:.1f} ms a step",
        *([f"{samples:.1f} samples/s"] if samples is not None else []),
        *([f"predicted {slowdown:.2f}x the plain step"] if slowdown is not None else []),
        f"{_share(frame.change('memscale_waited_seconds_total'), frame.passed_s)} of the time blocked by transfers",
    ]
    return [f"{now.model}: {plan}", ", ".join(parts)]


def _share(part: float, whole: float) -> str:
    return f"{min(1.0, part / whole):.0%}" if whole > 0 else "-"


def peak_rows(frame: Frame) -> list[tuple[str, ...]]:
    """The numbers of the peak: measured, predicted, and of the budget."""
    now = frame.later
    budget = now.value("memscale_budget_bytes")
    rows: list[tuple[str, ...]] = []
    for number in NUMBERS:
        seen = now.value("memscale_peak_bytes", number=number)
        said = now.value("memscale_predicted_peak_bytes", number=number)
        if seen is not None or said is not None:
            of_budget = seen if seen is not None else said
            rows.append((number, _bytes(seen), _bytes(said), _bytes(budget), _bar(of_budget, budget)))
    return rows


PEAK_HEADER = ("peak", "measured", "predicted", "budget", "of the budget")
HELD_HEADER = ("held after a step", *KINDS, "in all")
LINK_HEADER = ("link", "in all", "a second", "a step")


def _bytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else show_bytes(num_bytes)


def _bar(part: float | None, whole: float | None) -> str:
    if not part or not whole:
        return ""
    share = part / whole
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * share))
    return f"{'#' * filled}{'.' * (_BAR_WIDTH - filled)} {share:.0%}"


def held_rows(frame: Frame) -> list[tuple[str, ...]]:
    """Bytes by tier and kind."""
    now = frame.later
    rows: list[tuple[str, ...]] = []
    for tier in TIERS:
        found = [now.value("memscale_held_bytes", tier=tier, kind=kind) for kind in KINDS]
        if any(found):
            rows.append((tier, *map(_bytes, found), _bytes(sum(value or 0.0 for value in found))))
    return rows


def link_rows(frame: Frame) -> list[tuple[str, ...]]:
    """What travels, both ways."""
    rows: list[tuple[str, ...]] = []
    for direction, words in (("out", "to the next tier"), ("in", "back")):
        total = frame.later.total("memscale_moved_bytes_total", direction=direction)
        if total:
            moved = frame.change("memscale_moved_bytes_total", direction=direction)
            num_steps = frame.change("memscale_steps_total")
            rate = f"{show_bytes(moved / frame.passed_s)}/s" if frame.passed_s > 0 else "-"
            rows.append((words, show_bytes(total), rate, show_bytes(moved / num_steps) if num_steps else "-"))
    return rows


def _parts(frame: Frame) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    found = ((PEAK_HEADER, peak_rows(frame)), (HELD_HEADER, held_rows(frame)), (LINK_HEADER, link_rows(frame)))
    return [(header, rows) for header, rows in found if rows]


def frame_lines(frame: Frame) -> list[str]:
    """The frame as plain text."""
    lines = head_lines(frame)
    for header, rows in _parts(frame):
        lines += ["", *table([header, *rows], left=(0, len(header) - 1) if header is PEAK_HEADER else (0,))]
    return lines


def frame_view(frame: Frame) -> Any:
    """The frame as something that rich draws."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    drawn: list[Any] = [Text(line) for line in head_lines(frame)]
    for header, rows in _parts(frame):
        view = Table(show_edge=False, pad_edge=False)
        for column, name in enumerate(header):
            is_left = column == 0 or name == PEAK_HEADER[-1]
            longest = max(map(len, name.split()))  # in 80 columns, headers are broken between words and not cut
            view.add_column(name, justify="left" if is_left else "right", min_width=longest)
        for row in rows:
            view.add_row(*(Text(cell) for cell in row))
        drawn += [Text(""), view]
    return Group(*drawn)
