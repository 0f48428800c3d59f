"""`python -m emucuda.peaks`: what memscale predicts beside what the emulated card takes, one table.

    python -m emucuda.peaks                          # the five published models, plain and wrapped
    python -m emucuda.peaks bert-base gpt2-medium    # some of them
    python -m emucuda.peaks --json peaks.json        # the table as data

Each row is a process of its own on an RTX 3090: three training steps in fp32 with AdamW, figures of the third. All
figures are GiB, as the published ones. "live" is memscale's prediction of live storages; "allocated", "reserved" and
"total" (reserved and the context) are what PyTorch and the card say.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
_MARK = "emucuda.peaks: "


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A published training step: the shape of the model and the batch, and its peak on a real RTX 3090."""

    family: str
    width: int
    layers: int
    heads: int
    batch: int
    length: int
    published_gib: float | None
    """None: it ran out of memory."""


ROWS = {
    "bert-base": Row("bert", 768, 12, 12, 16, 128, 3.14),
    "bert-large": Row("bert", 1024, 24, 16, 16, 128, 7.60),
    "gpt2-medium": Row("gpt2", 1024, 24, 16, 4, 512, 10.87),
    "gpt2-large": Row("gpt2", 1280, 36, 20, 2, 512, 14.87),
    "gpt2-xl": Row("gpt2", 1600, 48, 25, 1, 512, None),
}
MODES = ("plain", "balanced")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m emucuda.peaks", description="Predicted and emulated peaks.")
    parser.add_argument("models", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="plain, or modes of memscale.Config")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(ROWS):
        parser.error(f"There is no model {sorted(unknown)[0]!r}. Models are {', '.join(ROWS)}.")
    print(f"{'model':12} {'mode':13} {'published':>9} {'live':>8} {'allocated':>9} {'reserved':>9} {'total':>8}")
    measured = []
    for name in options.models:
        for mode in options.modes:
            measured.append(_measured(name, mode))
            print(_line(measured[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


def _measured(name: str, mode: str) -> dict[str, Any]:
    """One row, from a process on the card."""
    from emucuda import Settings, run

    settings = Settings(copy_limit_bytes=1 << 20)  # nobody looks at the weights
    # Kernels that do nothing would be measured as those of an impossibly fast card: plan by the data sheet instead.
    env = os.environ | {"MEMSCALE_MEASURE": "0"}
    done = run(["-m", "emucuda.peaks", "--child", name, mode], settings, env=env, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"The row {name} {mode} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    row: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return row


def _line(row: dict[str, Any]) -> str:
    def gib(value: int | None) -> str:
        return "-" if value is None else f"{value / GIB:.4f}"

    published = ROWS[row["model"]].published_gib
    stated = "" if row["mode"] != "plain" else "OOM" if published is None else f"{published:.2f}"
    figures = "{:>8} {:>9} {:>9} {:>8}".format(
        *(gib(row[f"{kind}_bytes"]) for kind in ("live", "allocated", "reserved", "total"))
    )
    return (
        f"{row['model']:12} {row['mode']:13} {stated:>9} {figures}{'  out of memory' if row['out_of_memory'] else ''}"
    )


# ---- on the card


def _build(row: Row) -> Any:
    import torch
    import transformers

    sizes: dict[str, Any]
    config: Any
    kind: Any
    if row.family == "gpt2":
        sizes = {"n_embd": row.width, "n_layer": row.layers, "n_head": row.heads}
        config, kind = transformers.GPT2Config(**sizes), transformers.GPT2LMHeadModel
    else:
        sizes = {"hidden_size": row.width, "num_hidden_layers": row.layers, "num_attention_heads": row.heads}
        config = transformers.BertConfig(**sizes, intermediate_size=4 * row.width)
        kind = transformers.BertForMaskedLM
    with torch.device("cuda"):
        return kind(config).train()


def _wrapped(model: Any, inputs: Any, mode: str) -> int:
    """Wrap the model; memscale's prediction of live bytes."""
    import torch

    import memscale

    config = memscale.Config(mode=memscale.OptimizationMode(mode), force_optimize=True, enable_logging=False)
    memscale.wrap(model, config, sample_input=inputs)
    torch.cuda.empty_cache()  # segments that only building the model needed are none of the steps'
    predicted: int = model._memscale_executor.plan.predicted_peak_bytes
    return predicted


def _train(model: Any, inputs: Any, optimizer: Any) -> bool:
    """Three steps; the peaks are of the last one that began. False: out of memory."""
    import torch

    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        try:
            model(**inputs).loss.backward()
            optimizer.step()
        except torch.cuda.OutOfMemoryError:
            return False
    return True


def _child(name: str, mode: str) -> None:
    import torch

    import emucuda
    import memscale

    row = ROWS[name]
    ids = torch.randint(0, 30000, (row.batch, row.length)).cuda()
    inputs = {"input_ids": ids, "labels": ids}
    model = _build(row)
    optimizer = torch.optim.AdamW(model.parameters())
    live_bytes = None if mode == "plain" else _wrapped(model, inputs, mode)
    fits = _train(model, inputs, optimizer)
    reserved_bytes = torch.cuda.max_memory_reserved()
    figures = {
        "model": name,
        "mode": mode,
        "out_of_memory": not fits,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": reserved_bytes,
        "total_bytes": reserved_bytes + emucuda.Settings().context_bytes,
    }
    if live_bytes is None:  # after the figures were read: an estimate takes memory of its own for a moment
        live_bytes = memscale.estimate(model, inputs, optimizer=optimizer).baseline_peak_bytes
    print(_MARK + json.dumps(figures | {"live_bytes": live_bytes}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
    else:
        main()
