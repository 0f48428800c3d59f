"""A predicted step as a snapshot: PyTorch's own tools read it, and it shows the bytes that are predicted."""

from __future__ import annotations

import io
import pathlib
import pickle
import sys
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from memscale import Config, Hardware
from memscale._decide.allocator.settings import parse_settings
from memscale._plan import Checkpoint
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.questions.snapshot import FIRST_ADDRESS, snapshot_of, step_snapshot
from memscale._profile.inputs import Inputs
from memscale.cli import main
from tests.models import features, small

pytestmark = pytest.mark.unit

EVENT = {"action", "addr", "size", "stream", "time_us", "frames", "compile_context", "pool_id", "user_metadata"}
SEGMENT = {
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
    "frames",
    "blocks",
}
BLOCK = {"address", "size", "requested_size", "state", "frames"}
"""The keys that torch 2.13 writes: emucuda/tests/memscale/test_snapshot.py looks at PyTorch's own."""


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(Job(small(), Config(), Hardware.from_name("RTX 3090"), "adamw"), Inputs((features(0),), {}))


def read(planner: Planner, *actions: Any) -> dict[str, Any]:
    found = pickle.loads(step_snapshot(planner, actions, planner.job.config))
    assert isinstance(found, dict)
    return found


def peaks(trace: list[dict[str, Any]]) -> tuple[int, int]:
    """Of requested and of reserved bytes, over the whole trace."""
    signs = {"alloc": 1, "free_completed": -1, "segment_alloc": 1, "segment_free": -1}
    signs |= {"segment_map": 1, "segment_unmap": -1}
    now = {False: 0, True: 0}
    most = dict(now)
    for event in trace:
        is_segment = event["action"].startswith("segment")
        now[is_segment] += signs.get(event["action"], 0) * event["size"]
        most[is_segment] = max(most[is_segment], now[is_segment])
    return most[False], most[True]


def test_it_has_the_keys_of_pytorchs_own(planner: Planner) -> None:
    snapshot = read(planner)
    assert set(snapshot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    [trace] = snapshot["device_traces"]
    assert all(set(event) == EVENT for event in trace)
    assert all(set(segment) == SEGMENT for segment in snapshot["segments"])
    assert all(set(block) == BLOCK for segment in snapshot["segments"] for block in segment["blocks"])


def test_it_is_plain_data(planner: Planner) -> None:
    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name} is needed to read it")

    Plain(io.BytesIO(step_snapshot(planner, (), planner.job.config))).load()


@pytest.mark.parametrize("actions", [(), (Checkpoint("blocks.0"),)], ids=["plain", "checkpointed"])
def test_it_shows_what_is_predicted(planner: Planner, actions: tuple[Any, ...]) -> None:
    held = planner.held(actions, planner.job.config)
    assert held is not None
    assert peaks(read(planner, *actions)["device_traces"][0])[1] == held.reserved_bytes


def test_what_is_left_is_what_the_trace_leaves(planner: Planner) -> None:
    snapshot = read(planner)
    live: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            del live[event["addr"]]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert live == {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    assert min(segment["address"] for segment in snapshot["segments"]) == FIRST_ADDRESS


def test_expandable_segments_are_mapped(planner: Planner) -> None:
    log = planner.steps((), planner.job.config)
    snapshot = snapshot_of(log, parse_settings("expandable_segments:True"))
    assert {event["action"] for event in snapshot["device_traces"][0]} >= {"alloc", "free_completed", "segment_map"}
    assert all(segment["is_expandable"] for segment in snapshot["segments"])


def test_frames_say_where(planner: Planner) -> None:
    names = {
        tuple((frame["filename"], frame["name"]) for frame in event["frames"])
        for event in read(planner)["device_traces"][0]
        if event["action"] == "alloc"
    }
    assert (("memscale", "parameters"),) in names
    assert {"forward", "backward", "optimizer"} <= {where[-1][1] for where in names}
    assert {where[0][0] for where in names} & set(planner.rehearsal.pieces), "modules are named"


def test_pytorchs_tools_read_it(planner: Planner) -> None:
    snapshot = read(planner)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot, filter_freed=True)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)
    assert "parameters" in _memory_viz.memory(snapshot, format_flamegraph=lambda text: text)
    assert "segments" in _memory_viz.segsum(snapshot)
    assert "alloc" in _memory_viz.trace(snapshot)


FACTORY = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(8, 64)
"""


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    written = tmp_path / "step.pickle"
    subject = f"{tmp_path / 'net.py'}:make"
    assert main(["estimate", subject, "--gpu", "RTX 3090", "--snapshot", str(written)]) == 0
    snapshot = pickle.loads(written.read_bytes())
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    capsys.readouterr()
    if not torch.accelerator.is_available():
        assert main(["estimate", subject, "--snapshot", str(written)]) == 2
        assert '--gpu "RTX 3090"' in capsys.readouterr().err
    assert main(["estimate", subject, "--gpu", "RTX 3090", "--snapshot", str(tmp_path / "no" / "file")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    sys.modules.pop("net", None)
