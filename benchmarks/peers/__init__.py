"""MemScale beside what else saves memory: the same training, peak and time of each, and ours at the same figures.

    python -m benchmarks.peers [--only NAME ...] [--devices cpu simgpu emucuda] [--cuda-python PATH] [--page]

Each peer trains the same small GPT-2 on the CPU, on simgpu and on the emulated card, wherever it runs; what does not is
listed with the reason. Then MemScale is asked twice: for a plan within the peer's peak, which should be no slower, and
for the lowest plan that is no slower than the peer, which should be no larger; both are trained and read by the same
clock. It may do no more to the numbers than the peer: exact against exact, tiled against chunked, 8 bits against 8.

Rows are kept in docs/results/peers.json and are not made again while they are there; `--page` only writes the page
docs/results/peers.md from them. Peers that are not installed are listed so: `pip install -c constraints.txt ".[peers]"`
gets those that install from wheels; `liger-kernel` and `deepspeed` install without their dependencies, PyTorch's ILP
needs `pulp` and `pwlf`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import benchmarks
from benchmarks.peers import page
from benchmarks.peers.planners import DEVICE_OF, PLANNERS
from benchmarks.peers.trial import Answer, Order, ask
from benchmarks.peers.ways import PEERS
from benchmarks.peers.work import DEVICES, SHAPE
from benchmarks.table import commit, provenance

DATA = benchmarks.ROOT / "docs" / "results" / "peers.json"
PAGE = DATA.with_suffix(".md")
CUDA_PYTHON = benchmarks.ROOT / ".venv-cuda" / "bin" / "python"


class Store:
    """Rows so far."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        empty: dict[str, Any] = {"shape": str(SHAPE), "rows": []}
        self.data = json.loads(path.read_text()) if path.exists() else empty

    def find(self, order: Order) -> Answer | None:
        key = (order["kind"], order["device"], order["peer"])
        rows = (row for row in self.data["rows"] if (row["kind"], row["device"], row["peer"]) == key)
        return next(rows, None)

    def add(self, order: Order, answer: Answer) -> None:
        self.data.update(provenance())
        self.data["rows"].append({**order, **answer, "commit": commit()})
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


class Session:
    """Asks for what is not there yet."""

    def __init__(self, store: Store, cuda_python: pathlib.Path) -> None:
        self.store = store
        self.cuda_python = cuda_python

    def ask(self, order: Order) -> Answer:
        known = self.store.find(order)
        if known is not None:
            return known
        print(f"{order['kind']} {order['device']} {order['peer']} ...", file=sys.stderr, flush=True)
        answer = ask(order, str(self.cuda_python) if order["device"] == "emucuda" else sys.executable)
        print(f"  {answer.get('failure') or summary(answer)}", file=sys.stderr, flush=True)
        self.store.add(order, answer)
        return answer

    def compare(self, device: str, name: str) -> None:
        """The peer, then ours at its figures."""
        found = self.ask({"kind": "peer", "device": device, "peer": name})
        if "failure" in found:
            return
        # A budget bounds what the caching allocator reserves, where there is one.
        budget = found["reserved_bytes"] or found["peak_bytes"]
        self.ask({"kind": "peak", "device": device, "peer": name, "budget_bytes": budget})
        plain = self.store.find({"kind": "peer", "device": device, "peer": "plain"})
        if device == "simgpu" and plain is not None:
            slowdown = found["step_ms"] / plain["step_ms"]
            self.ask({"kind": "time", "device": device, "peer": name, "most_bytes": budget, "most_slowdown": slowdown})


def summary(answer: Answer) -> str:
    return ", ".join(
        f"{name}: {answer[name]}" for name in ("peak_bytes", "reserved_bytes", "step_ms", "what") if name in answer
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(peer.name for peer in PEERS), *PLANNERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=DEVICES)
    parser.add_argument("--cuda-python", type=pathlib.Path, default=CUDA_PYTHON, help="with the CUDA build of torch")
    parser.add_argument("--data", type=pathlib.Path, default=DATA, help="where rows are kept")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args(argv)
    store = Store(options.data)
    if not options.page:
        session = Session(store, options.cuda_python)
        for device in options.devices:
            for peer in PEERS:
                if peer.name in options.only:
                    session.compare(device, peer.name)
        for name in PLANNERS:
            device = DEVICE_OF.get(name, "cpu")
            if name in options.only and device in options.devices:
                session.ask({"kind": "planner", "device": device, "peer": name})
    options.data.with_suffix(".md").write_text(page.write(store.data))
    return 0
