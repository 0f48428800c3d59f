"""`memscale watch`: readings of real endpoints, what is between two of them, and a real training in another process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import prometheus_client
import prometheus_client.parser  # noqa: F401
import psutil
import pytest

from memscale._errors import ConfigError
from memscale._execute.telemetry import Telemetry
from memscale.cli import main
from memscale.report import metrics, watch
from tests.parity import plan_of

GB = 10**9


def telemetry(num_steps: int, moved_bytes: int, step_s: float = 0.0) -> Telemetry:
    return Telemetry(
        "Chain",
        plan_of([], budget_bytes=8 * GB, predicted_allocated_bytes=5 * GB, predicted_reserved_bytes=6 * GB),
        held_bytes={
            ("device", "parameters"): 2 * GB,
            ("device", "activations"): GB,
            ("host", "optimizer state"): 4 * GB,
        },
        peak_bytes={"allocated": 5 * GB, "reserved": 6 * GB},
        moved_bytes={("activations", "out"): moved_bytes, ("parameters", "out"): moved_bytes},
        num_steps=num_steps,
        step_s=step_s,
        samples_per_second=17.0,
    )


@pytest.fixture
def served() -> Iterator[tuple[str, list[Telemetry]]]:
    """A real server of metrics, and what it shows."""
    shown = [telemetry(10, 3 * GB)]
    server = metrics.serve(lambda: shown[-1], "127.0.0.1", 0)
    yield server.url, shown
    server.close()


def two(served: tuple[str, list[Telemetry]]) -> watch.Frame:
    """Two steps in half a second."""
    url, shown = served
    earlier = watch.read(url)
    shown.append(telemetry(12, 4 * GB))
    later = watch.read(url)
    return watch.Frame(watch.Reading(1.0, earlier.values, earlier.model), watch.Reading(1.5, later.values, later.model))


def test_a_frame_says_what_is_and_what_happened(served: tuple[str, list[Telemetry]]) -> None:
    frame = two(served)
    assert frame.step_ms == pytest.approx(250)
    assert watch.link_rows(frame) == [("to the next tier", "8.000 GB", "4.000 GB/s", "1.000 GB")]
    text = "\n".join(watch.frame_lines(frame))
    assert text.startswith("Chain: nothing (mode")
    assert "step 12, 250.0 ms a step, 17.0 samples/s" in text
    reserved = ("reserved", "6.000 GB", "6.000 GB", "8.000 GB", "######################........ 75%")
    assert reserved in watch.peak_rows(frame)
    assert all(cell in text for cell in reserved)
    assert ["host", "-", "-", "4.000 GB", "-", "-", "4.000 GB"] in [list(row) for row in watch.held_rows(frame)]


def test_a_step_takes_its_own_time_and_not_that_between_readings(served: tuple[str, list[Telemetry]]) -> None:
    url, shown = served
    earlier = watch.read(url)
    shown.append(telemetry(11, 4 * GB, step_s=1.7))
    later = watch.read(url)
    frame = watch.Frame(watch.Reading(1.0, earlier.values), watch.Reading(2.0, later.values))
    assert frame.step_ms == pytest.approx(1700)
    assert watch.link_rows(frame) == [("to the next tier", "8.000 GB", "1.176 GB/s", "2.000 GB")]


def test_before_the_first_step_there_is_no_time(served: tuple[str, list[Telemetry]]) -> None:
    url, shown = served
    shown.append(Telemetry("Chain"))
    reading = watch.read(url)
    lines = watch.frame_lines(watch.Frame(reading, reading))
    assert lines[0] == "Chain: no plan yet"
    assert lines[1].startswith("step 0, -")


def test_the_view_has_the_same_cells(served: tuple[str, list[Telemetry]]) -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(watch.frame_view(two(served)))
    text = console.export_text()
    console.file.close()
    for word in ("250.0 ms a step", "to the next tier", "6.000 GB", "75%", "optimizer state"):
        assert word in text


def test_no_header_is_cut_in_a_terminal_of_eighty_columns(served: tuple[str, list[Telemetry]]) -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(watch.frame_view(two(served)))
    text = console.export_text()
    console.file.close()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert all(word in text for kind in watch.KINDS for word in kind.split())


@pytest.mark.parametrize("form", ["port", "address", "url"])
def test_endpoints_are_found(served: tuple[str, list[Telemetry]], form: str) -> None:
    url, _ = served
    address = url.removeprefix("http://").removesuffix("/metrics")
    target = {"port": address.partition(":")[2], "address": address, "url": url}[form]
    assert watch.find_endpoint(target) == url


@pytest.mark.parametrize("target", ["1", "0", "99999999999999999999", "file:///etc/passwd", "127.0.0.1:1", "nonsense"])
def test_where_nobody_serves_the_command_says_so(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", target]) == 2
    said = capsys.readouterr().err
    assert "serves metrics of memscale" in said or "nothing that memscale serves" in said


def test_frames_end_with_the_server() -> None:
    server = metrics.serve(lambda: telemetry(1, 0), "127.0.0.1", 0)
    seen = watch.frames(server.url, 0.01)
    assert next(seen).later.total("memscale_steps_total") == 1
    server.close()
    assert list(seen) == []
    with pytest.raises(ConfigError):
        watch.find_endpoint(server.url)


TRAINING = """
import sys, torch, memscale
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)))
config = memscale.Config(mode="conservative", force_optimize=True, observability_port=0, enable_logging=False)
memscale.wrap(model, config, sample_input=torch.randn(32, 64))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
print("ready", flush=True)
for line in sys.stdin:
    step()
    print("stepped", flush=True)
"""


@pytest.mark.slow
def test_a_real_training_by_its_process(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    training = subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert training.stdin is not None
    assert training.stdout is not None
    try:
        assert training.stdout.readline() == "ready\n"
        assert psutil.pid_exists(training.pid)
        assert main(["watch", str(training.pid), "--once", "--interval", "0.05"]) == 0
        shown = capsys.readouterr().out
        assert "Sequential: checkpoint" in shown
        assert "step 1" in shown
        seen = watch.frames(watch.find_endpoint(str(training.pid)), 0.01)
        first = next(seen)
        training.stdin.write("go\n")
        training.stdin.flush()
        assert training.stdout.readline() == "stepped\n"
        frame = next(seen)
        assert frame.later.total("memscale_steps_total") == first.later.total("memscale_steps_total") + 1
        assert frame.step_ms is not None
    finally:
        training.stdin.close()
        training.wait(timeout=120)
        training.stdout.close()
    assert main(["watch", str(training.pid)]) == 2
