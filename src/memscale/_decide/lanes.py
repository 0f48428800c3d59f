"""What the time model says happens when: a step as spans of the device, of both ways of the link and of the host.

    lanes_of(model, trace, choice)

The model reckons run by run (a block's forward, its backward, what lies between): the slowest of the lanes sets the
pace where transfers overlap, and the lanes follow one another where they block. See NOTE [pace] and NOTE [side by side]
in `step_time.py`. What tiles add to a step is not drawn.
"""

from __future__ import annotations

import dataclasses

from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.step_time import Moved
from memscale._profile import Segment, StepTrace
from memscale.report.step_times import Lane, Span, StepTimes


def lanes_of(model: CostModel, trace: StepTrace, choice: Choice) -> StepTimes:
    """The step of this trace, which the choice gave, and the optimizer's step behind it."""
    spans: list[Span] = []
    now_ms, halves = 0.0, bool(choice.run.precision)
    streamed = [fqn for fqn, treatment in choice.blocks if treatment.streams]
    early = dict(choice.run.early_state)
    for owner, segments, more in model.runs_of(trace, streamed):
        if segments[0].phase == "backward" and owner in early:
            more = dataclasses.replace(more, in_bytes=more.in_bytes + early[owner])
        run_ms = model.pace.run_ms(segments, halves=halves, more=more)
        spans += _spans_of(model, owner, segments, more, now_ms, halves)
        now_ms += run_ms
    behind = _optimizer_spans(model, choice, now_ms)
    return StepTimes(tuple(spans + behind), max((span.end_ms for span in behind), default=now_ms))


def _spans_of(
    model: CostModel, owner: str, segments: list[Segment], more: Moved, start_ms: float, halves: bool
) -> list[Span]:
    pace = model.pace
    compute_ms = sum(pace.compute_ms(segment, halves=halves) for segment in segments)
    host_ms = sum(segment.num_launches for segment in segments) * pace.hardware.launch_s * 1e3
    in_bytes = sum(segment.fetched_bytes for segment in segments) + more.in_bytes + more.first_bytes
    out_bytes = sum(segment.sent_bytes for segment in segments) + more.out_bytes
    in_ms, out_ms = pace.link_ms(in_bytes), pace.link_ms(out_bytes)
    first_ms = pace.link_ms(more.first_bytes)
    if pace.overlaps:
        begins = {
            "link in": start_ms,
            "compute": start_ms + first_ms,
            "host": start_ms,
            "link out": start_ms + first_ms,
        }
    else:  # what is fetched is waited for, and what is sent, too
        begins = {"link in": start_ms, "compute": start_ms + in_ms, "host": start_ms + in_ms}
        begins["link out"] = begins["compute"] + max(compute_ms, host_ms)
    lengths: dict[Lane, tuple[float, int | None]] = {
        "compute": (compute_ms, None),
        "link in": (in_ms, round(in_bytes)),
        "link out": (out_ms, round(out_bytes)),
        "host": (host_ms, None),
    }
    phase = segments[0].phase
    return [
        Span(lane, begins[lane], begins[lane] + ms, phase, owner, num_bytes)
        for lane, (ms, num_bytes) in lengths.items()
        if ms > 0
    ]


def _optimizer_spans(model: CostModel, choice: Choice, start_ms: float) -> list[Span]:
    """The step behind backward: on the device, what travels for it, and what the host steps by itself."""
    run, streamed_bytes = choice.run, model.streamed_bytes(choice)
    optimizer = model.optimizer
    total_ms = float(optimizer.step_ms(run, streamed_bytes))
    device_ms = min(total_ms, float(optimizer.manner(run).step_ms(optimizer, run, streamed_bytes)))
    spans = [Span("compute", start_ms, start_ms + device_ms, "optimizer")] if device_ms else []
    away_bytes = sum(round(num_bytes) for num_bytes in optimizer.bytes_away(run, streamed_bytes))
    travels = run.steps_on_device or not streamed_bytes
    if away_bytes and travels:
        begin_ms = start_ms + device_ms if run.steps_on_device else start_ms
        end_ms = min(start_ms + total_ms, begin_ms + float(model.pace.link_ms(away_bytes)))
        gradient_bytes = round(optimizer.waiting_gradient_bytes(run, streamed_bytes))  # they come, and do not leave
        both: dict[Lane, int] = {"link in": away_bytes - run.early_bytes, "link out": away_bytes - gradient_bytes}
        spans += [Span(lane, begin_ms, end_ms, "optimizer", num_bytes=size) for lane, size in both.items() if size > 0]
    if total_ms > device_ms:
        where: Lane = "compute" if run.steps_on_device else "host"
        spans.append(Span(where, start_ms + device_ms, start_ms + total_ms, "optimizer"))
    return spans
