"""A record as text for a terminal, and as Markdown for a page. Needs no torch."""

from __future__ import annotations

from memscale._units import show_bytes
from memscale.commands.verify.record import Machine, Record, Trial, parity_of
from memscale.report.tables import table

HEADER = (
    "model",
    "way",
    "predicted GB: alloc.",
    "reserved",
    "total",
    "measured GB: alloc.",
    "reserved",
    "total",
    "nvidia-smi",
    "off by",
    "ms predicted",
    "ms",
)
HEADER_CPU = ("model", "way", "predicted GB: live", "measured GB: live", "off by", "ms predicted", "ms")


def record_lines(record: Record) -> list[str]:
    """Everything, for a terminal."""
    rows = table([_header(record), *_rows(record)], left=(0, 1))
    return [
        *machine_lines(record.machine),
        "",
        *rows,
        "",
        *_parity_lines(record),
        *_troubles(record),
        *_promise_lines(record),
    ]


def machine_lines(machine: Machine) -> list[str]:
    """What it ran on, and what its figures are worth."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"{machine.device_name} ({machine.device_type}, {machine.architecture}): {show_bytes(machine.total_bytes)}, "
        f"{show_bytes(machine.free_bytes)} free; host {show_bytes(machine.host_total_bytes)}",
        versions,
        *([_CLOCKS[machine.clock]] if machine.clock in _CLOCKS else []),
    ]


_CLOCKS = {
    "modelled": "This device is simulated: bytes and values are facts, predicted times are by its modelled clock, and "
    "measured ones are this machine's, so the two do not compare.",
    "none": "This device computes no values (an emulated card): bytes are facts; losses, weights and times mean "
    "nothing.",
}


def _header(record: Record) -> tuple[str, ...]:
    return HEADER_CPU if record.machine.device_type == "cpu" else HEADER


def _rows(record: Record) -> list[tuple[str, ...]]:
    cells = _cpu_cells if record.machine.device_type == "cpu" else _card_cells
    return [cells(record, trial) for title in record.titles() for trial in record.trials if trial.title == title]


def _card_cells(record: Record, trial: Trial) -> tuple[str, ...]:
    seen, said = trial.measured, trial.predicted
    # A simulated device hands out what is live: nothing else is predicted of it.
    predicted = [_gb(number) for number in (said.allocated or said.live, said.reserved, said.total)]
    if trial.outcome != "trained":
        measured = [trial.outcome, "", "", "", ""]
    else:
        numbers = [_gb(number) for number in (seen.allocated, seen.reserved, seen.total, trial.nvidia_smi)]
        off = _off(said.reserved, seen.reserved) if said.reserved else _off(said.live, seen.allocated)
        measured = [*numbers, off]
    return (trial.title, trial.way, *predicted, *measured, *_times(record, trial))


def _cpu_cells(record: Record, trial: Trial) -> tuple[str, ...]:
    seen, said = trial.measured.live, trial.predicted.live
    measured = (_gb(seen), _off(said, seen)) if trial.outcome == "trained" else (trial.outcome, "")
    return (trial.title, trial.way, _gb(said), *measured, *_times(record, trial))


def _times(record: Record, trial: Trial) -> tuple[str, str]:
    predicted = "-" if trial.predicted_step_ms is None else f"{trial.predicted_step_ms:.1f}"
    is_known = trial.step_ms is not None and record.machine.clock != "none"
    return predicted, f"{trial.step_ms:.1f}" if is_known else "-"


def _gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.3f}"


def _off(predicted: int | None, seen: int | None) -> str:
    return f"{predicted / seen - 1:+.2%}" if predicted and seen else "-"


def _parity_lines(record: Record) -> list[str]:
    lines = [
        f"  {trial.title}, {trial.way}: {parity_of(record, trial.title, trial.way)}"
        for title in record.titles()
        for trial in record.trials
        if trial.title == title and parity_of(record, trial.title, trial.way) != "-"
    ]
    return ["the same training as the plain model", *lines] if lines else []


def _troubles(record: Record) -> list[str]:
    lines = [
        f"  {trial.title}, {trial.way}: {trial.outcome}: {trial.detail}"
        for trial in record.trials
        if trial.outcome != "trained"
    ]
    return ["", "did not train", *lines] if lines else []


def _promise_lines(record: Record) -> list[str]:
    """Whether any wrapped model took more than its budget."""
    wrapped = [trial for trial in record.trials if trial.budget_bytes is not None and trial.outcome == "trained"]
    over = [trial for trial in wrapped if (_bounded(record, trial) or 0) > (trial.budget_bytes or 0)]
    if not wrapped:
        return []
    words = ", ".join(f"{trial.title} {trial.way}" for trial in over) or "none"
    return ["", f"Wrapped models that took more than their budget: {words} (of {len(wrapped)})."]


def _bounded(record: Record, trial: Trial) -> int | None:
    """What the budget bounds on this device."""
    if record.machine.device_type == "cpu":
        return trial.measured.live
    return trial.measured.reserved if trial.predicted.reserved else trial.measured.allocated


# ---- a page


def _to_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def record_markdown(record: Record, file_name: str) -> list[str]:
    """One machine's section."""
    header = _header(record)
    machine, *rest = machine_lines(record.machine)
    return [
        f"## {record.machine.device_name}{_kind_words(record.machine)}",
        "",
        f"{machine}. {'; '.join(rest)} From [{file_name}]({file_name}), {record.made}.",
        "",
        _to_row(header),
        _to_row(tuple("---" if column < 2 else "---:" for column in range(len(header)))),
        *map(_to_row, _rows(record)),
        "",
        *(f"- {line.strip()}" for line in _parity_lines(record)[1:]),
        *(f"- {line.strip()}" for line in _troubles(record)[2:]),
        *_promise_lines(record),
        "",
    ]


def _kind_words(machine: Machine) -> str:
    if machine.device_type == "cpu":
        return ", a processor"
    return {"modelled": ", simulated", "none": ", emulated"}.get(machine.clock, "")
