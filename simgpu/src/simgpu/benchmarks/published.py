"""Does simgpu stand in for a real card? Peak bytes of a plain training step against a published table.

The table (RTX 3090, fp32, AdamW) is read as GiB. Each model really trains two steps on simgpu, in a process of its own;
the peak is that of the second step, `zero_grad` first, when the optimizer's state exists. AdamW takes its default for
a GPU, the foreach implementation: torch picks it for simgpu too.

The batch is what a tokenizer gives for texts of different lengths: padded, with an attention mask. Whether the
published runs had padding is not known, and it matters a little: without it (`--unpadded`) transformers drops the
mask, and no layer saves a copy of it.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

GIB = 1 << 30
TOLERANCE_PERCENT = 3.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    kind: str
    batch: int
    sequence: int
    hidden: int
    layers: int
    heads: int
    published_gib: float
    host_bytes_needed: int
    """Device memory is host memory here, and a little more is needed beside it."""


CASES = {
    case.name: case
    for case in (
        Case(
            name="BERT-Base",
            kind="bert",
            batch=16,
            sequence=128,
            hidden=768,
            layers=12,
            heads=12,
            published_gib=3.14,
            host_bytes_needed=5 * GIB,
        ),
        Case(
            name="BERT-Large",
            kind="bert",
            batch=16,
            sequence=128,
            hidden=1024,
            layers=24,
            heads=16,
            published_gib=7.60,
            host_bytes_needed=9 * GIB,
        ),
        Case(
            name="GPT-2 Medium",
            kind="gpt2",
            batch=4,
            sequence=512,
            hidden=1024,
            layers=24,
            heads=16,
            published_gib=10.87,
            host_bytes_needed=13 * GIB,
        ),
        Case(
            name="GPT-2 Large",
            kind="gpt2",
            batch=2,
            sequence=512,
            hidden=1280,
            layers=36,
            heads=20,
            published_gib=14.87,
            host_bytes_needed=17 * GIB,
        ),
    )
}


def main(names: list[str], padded: bool = True) -> int:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"unknown model {unknown[0]!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    rows = [_run_in_subprocess(CASES[name], padded) for name in names or CASES]
    print(f"{'model':14s} {'batch x seq':>11s} {'bytes':>15s} {'GiB':>7s} {'published':>10s} {'difference':>11s}")
    missed = False
    for case, peak in rows:
        difference = (peak / GIB / case.published_gib - 1) * 100
        missed |= abs(difference) > TOLERANCE_PERCENT
        size = f"{case.batch} x {case.sequence}"
        measured = f"{peak:15,d} {peak / GIB:7.3f}"
        print(f"{case.name:14s} {size:>11s} {measured} {case.published_gib:10.2f} {difference:+10.2f} %")
    return int(missed)


def _run_in_subprocess(case: Case, padded: bool) -> tuple[Case, int]:
    available = _available_host_bytes()
    if available < case.host_bytes_needed:
        raise SystemExit(
            f"{case.name} needs {case.host_bytes_needed / GIB:.0f} GiB of free host memory, "
            f"{available / GIB:.1f} GiB are free. Free some, or name the models to run."
        )
    _say(f"{case.name}: two training steps of batch {case.batch} x {case.sequence} ...")
    command = [
        sys.executable,
        "-m",
        "simgpu.benchmarks",
        "published-worker",
        case.name,
        *([] if padded else ["--unpadded"]),
    ]
    # Freed device memory must go back to the system at once, or the host runs out before the device does.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    answer = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True)
    return case, int(json.loads(answer.stdout.splitlines()[-1])["peak_bytes"])


def _available_host_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise SystemExit("/proc/meminfo does not tell the available memory")


def worker(name: str, padded: bool) -> int:
    """Runs one model; the last line on stdout is the answer as JSON."""
    print(json.dumps({"peak_bytes": measure(CASES[name], padded)}))
    return 0


def measure(case: Case, padded: bool = True) -> int:
    """The peak of device bytes in the second training step."""
    import torch

    import simgpu  # noqa: F401  registers the device

    torch.manual_seed(0)
    started = time.monotonic()
    with torch.device("simgpu"):
        model = _model(case).train()
        batch = _batch(case, padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in (1, 2):
        torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss = model(**batch).loss
        _say(f"  step {step}: forward done, loss {loss.item():.4f}, {time.monotonic() - started:.0f} s")
        loss.backward()
        optimizer.step()
        del loss
        peak = int(torch.accelerator.max_memory_allocated())
        _say(f"  step {step}: peak {peak:,d} bytes, {time.monotonic() - started:.0f} s")
    return peak


def _model(case: Case) -> Any:
    transformers: Any = importlib.import_module("transformers")  # an optional dependency, and an untyped one
    if case.kind == "bert":
        config = transformers.BertConfig(
            hidden_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            intermediate_size=4 * case.hidden,
        )
        return transformers.BertForMaskedLM(config)
    config = transformers.GPT2Config(
        n_embd=case.hidden,
        n_layer=case.layers,
        n_head=case.heads,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    return transformers.GPT2LMHeadModel(config)


def _batch(case: Case, padded: bool) -> dict[str, Any]:
    import torch

    vocabulary = 30522 if case.kind == "bert" else 50257
    ids = torch.randint(0, vocabulary, (case.batch, case.sequence))
    mask = torch.ones_like(ids)
    if padded:
        mask[-1, case.sequence * 3 // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
