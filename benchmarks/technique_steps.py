"""One training step under one technique at a time: live bytes by kind over the step, for a picture on each one's page.

    python -m benchmarks.technique_steps        trains on simgpu, writes docs/results/technique_steps.json

A small GPT-2 trains three steps plain and under each technique, and the last is measured. Bytes are facts. The axis of
the picture is not time: each change of the live bytes is as wide as any other, so that phases of a step can be seen.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch

import benchmarks
import memscale
from benchmarks import pictures
from benchmarks.peers.work import Shape, Training, build_batch, build_model

DATA = benchmarks.ROOT / "docs" / "results" / "technique_steps.json"
NUM_POINTS = 160
SHAPE = Shape(layers=6, width=256, heads=4, vocabulary=1024, batch=8, length=128)
"""Activations are most of it."""
FEW_TOKENS = Shape(layers=6, width=384, heads=4, vocabulary=1024, batch=1, length=64)
"""Parameters, gradients and state are most of it."""
MANY_WORDS = Shape(layers=2, width=128, heads=4, vocabulary=16384, batch=8, length=128)
"""Logits, and what the backward of their loss makes of them, are most of it."""
WAYS: dict[str, tuple[str, Shape, dict[str, Any]]] = {
    "checkpointing": ("every block is checkpointed", SHAPE, {"mode": "conservative", "enable_bucketed_step": False}),
    "offloading": ("optimizer state and activations wait on the host", SHAPE, {"enable_checkpointing": False}),
    "step_in_backward": (
        "each parameter is stepped in backward",
        FEW_TOKENS,
        {"mode": "conservative", "enable_checkpointing": False, "step_in_backward": True},
    ),
    "loss_by_rows": (
        "the gradient of the loss is made by rows",
        MANY_WORDS,
        {"mode": "conservative", "enable_checkpointing": False, "enable_bucketed_step": False},
    ),
}
"""Of each page: what the picture shows, what is trained, and what the plan may use."""
KINDS = {
    "parameters": "#4c566a",
    "optimizer state": "#8f7ab8",
    "gradients": "#d08770",
    "activations": "#5e9fd4",
    "temporaries": "#e5c07b",
}
"""In the order in which they are stacked, with their colours; what is always there lies at the bottom."""


def measure(shape: Shape, options: dict[str, Any] | None) -> dict[str, Any]:
    """The third step on simgpu, plain or under a plan that goes as low as these options allow."""
    import simgpu

    simgpu.set_race_mode("off")
    model, batch = build_model(shape), build_batch(shape)
    if options is None:
        model = model.to("simgpu")
    else:
        config = memscale.Config(device="simgpu", force_optimize=True, enable_logging=False, **options)
        model = memscale.wrap(model, config, batch)
    place = {name: tensor.to("simgpu") for name, tensor in batch.items()}
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), place)
    for _ in range(2):
        training.step()
    gc.collect()
    with memscale.measure("simgpu") as measured:
        loss = training.step()
    if options is not None:
        memscale.detach(model)
    samples = [{kind: sample.by_kind[kind] for kind in KINDS} for sample in measured.timeline]  # type: ignore[index]
    # Before the forward, what is there is only being found out.
    first = next(number for number, sample in enumerate(samples) if sample["activations"])
    return {"peak_bytes": measured.peak_bytes, "loss": loss, "timeline": thinned(samples[first:])}


def thinned(samples: Sequence[dict[str, int]], num_points: int = NUM_POINTS) -> list[dict[str, int]]:
    """The highest of each of so many equal stretches, so that the peak is kept."""
    edges = [len(samples) * number // num_points for number in range(num_points + 1)]
    stretches = [samples[first:last] for first, last in itertools.pairwise(edges) if last > first]
    return [max(stretch, key=lambda sample: sum(sample.values())) for stretch in stretches]


def figure_of(data: dict[str, Any], name: str) -> Any:
    """The plain step and that of one technique, side by side."""
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    for column, side in enumerate(("plain", "wrapped"), 1):
        _draw(figure, data[name][side], column)
    figure.update_layout(pictures.layout(f"One step of a small GPT-2 on simgpu, live bytes: {WAYS[name][0]}"))
    figure.layout.title.font.size = 13
    for column, text in enumerate(("plain", name.replace("_", " ")), 1):
        figure.update_xaxes(title_text=f"{text}: forward, backward, step →", showticklabels=False, col=column)
    figure.update_yaxes(ticksuffix="B", exponentformat="SI", gridcolor="#e5e9f0", rangemode="tozero")
    return figure


def _draw(figure: Any, side: dict[str, Any], column: int) -> None:
    for kind, color in KINDS.items():
        figure.add_scatter(
            y=[sample[kind] for sample in side["timeline"]],
            name=kind,
            stackgroup=f"side{column}",
            mode="none",
            fillcolor=color,
            legendgroup=kind,
            showlegend=column == 1,
            row=1,
            col=column,
        )
    sums = [sum(sample.values()) for sample in side["timeline"]]
    at = max(range(len(sums)), key=sums.__getitem__)
    label = f"peak {side['peak_bytes'] / 1e6:.1f} MB"
    figure.add_annotation(x=at, y=sums[at], text=label, showarrow=False, yshift=10, row=1, col=column)


def main() -> None:
    data: dict[str, Any] = {}
    for name, (_, shape, options) in WAYS.items():
        plain, wrapped = measure(shape, None), measure(shape, options)
        assert wrapped["loss"] == plain["loss"], f"{name} trains something else"
        data[name] = {"shape": str(shape), "plain": plain, "wrapped": wrapped}
        print(f"{name}: {plain['peak_bytes'] / 1e6:.1f} to {wrapped['peak_bytes'] / 1e6:.1f} MB", flush=True)
    DATA.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
