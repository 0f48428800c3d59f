"""`memscale watch`: a view of a training that runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from memscale._errors import ConfigError
from memscale.report import watch


def run(target: str, interval: float, *, once: bool) -> None:
    url = watch.find_endpoint(target)
    seen = watch.frames(url, interval)
    if once:
        frame = next(seen, None)
        if frame is None:
            raise ConfigError(f"the training at {url} has ended")
        print("\n".join(watch.frame_lines(frame)))
        return
    _show(seen)
    print(f"the training at {url} has ended", file=sys.stderr)


def _show(seen: Iterator[watch.Frame]) -> None:
    """Show a view that changes on a terminal, and frame after frame elsewhere."""
    if not sys.stdout.isatty():
        for frame in seen:
            print("\n".join([*watch.frame_lines(frame), ""]), flush=True)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for frame in seen:
            live.update(watch.frame_view(frame), refresh=True)
