"""The front of peak against time as an SVG, written by hand: no plotting library, the same bytes every time."""

from __future__ import annotations

import html
import math

from memscale._plan import FrontPoint, Plan
from memscale._units import show_bytes

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 64, 48
_EXACT, _LOSSY, _CHOSEN, _TEXT, _GRID, _FAINT = "#5e9fd4", "#d08770", "#bf616a", "#2e3440", "#e5e9f0", "#6b7280"


def draw(plan: Plan, front: tuple[FrontPoint, ...]) -> str:
    """Time to the right, peak upwards; the budget as a dashed line, the chosen plan in red."""
    area = _Area(front, plan.budget_bytes)
    title = f"{plan.model_class} on {plan.device_name}, {plan.optimizer_name}, mode {plan.mode}: peak against time"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
            _text(LEFT, 24, title, size=13),
            _text(LEFT, 42, "; ".join(plan.inputs) + ". Peaks and times are predicted.", size=11, color=_FAINT),
            *area.grid(),
            *area.budget_line(plan.budget_bytes),
            *area.steps(front),
            *(area.point(point) for point in front),
            "</svg>",
            "",
        ]
    )


class _Area:
    """Where a point of the front lies in the drawing."""

    def __init__(self, front: tuple[FrontPoint, ...], budget_bytes: int) -> None:
        highest = max(point.peak_bytes for point in front)
        self.top_bytes = max(highest, min(budget_bytes, 2 * highest)) * 1.08
        self.low = min([1.0, *(point.slowdown for point in front)])
        self.high = max(self.low + 0.1, *(point.slowdown for point in front))

    def x(self, slowdown: float) -> float:
        return LEFT + (slowdown - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT - 20) + 10

    def y(self, num_bytes: float) -> float:
        return HEIGHT - BOTTOM - num_bytes / self.top_bytes * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> list[str]:
        parts = []
        step = _round_step(self.top_bytes / 6)
        for number in range(int(self.top_bytes / step) + 1):
            y = self.y(number * step)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>')
            parts.append(_text(LEFT - 6, y + 4, show_bytes(number * step), size=11, anchor="end", color=_FAINT))
        step = _round_step((self.high - self.low) / 6)
        for number in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            x = self.x(number * step)
            parts.append(
                _text(x, HEIGHT - BOTTOM + 18, f"{number * step:.2f}x", size=11, anchor="middle", color=_FAINT)
            )
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 10, "step time over the plain step", size=11, anchor="end"))
        return parts

    def budget_line(self, budget_bytes: int) -> list[str]:
        if budget_bytes > self.top_bytes:
            return [_text(WIDTH - RIGHT, TOP - 6, f"budget {show_bytes(budget_bytes)}, above", size=11, anchor="end")]
        y = self.y(budget_bytes)
        line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_TEXT}" '
        return [
            f'{line}stroke-dasharray="5 4"/>',
            _text(WIDTH - RIGHT, y - 5, f"budget {show_bytes(budget_bytes)}", size=11, anchor="end"),
        ]

    def steps(self, front: tuple[FrontPoint, ...]) -> list[str]:
        """As a staircase: between two points the lower peak costs its own time."""
        parts = []
        for is_exact, color in ((True, _EXACT), (False, _LOSSY)):
            corners: list[tuple[float, float]] = []
            for point in (p for p in front if p.is_exact == is_exact):
                x, y = self.x(point.slowdown), self.y(point.peak_bytes)
                corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
            if len(corners) > 1:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
                parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-opacity="0.5"/>')
        return parts

    def point(self, point: FrontPoint) -> str:
        color = _CHOSEN if point.is_chosen else _EXACT if point.is_exact else _LOSSY
        what = f"{show_bytes(point.peak_bytes)}, {point.slowdown:.2f}x: {point.what}"
        exact = "" if point.is_exact else " (not exact)"
        circle = (
            f'<circle cx="{self.x(point.slowdown):.1f}" cy="{self.y(point.peak_bytes):.1f}" '
            f'r="{6 if point.is_chosen else 4}" fill="{color}"><title>{html.escape(what + exact)}</title></circle>'
        )
        if not point.is_chosen:
            return circle
        x, y = self.x(point.slowdown) + 10, self.y(point.peak_bytes) - 8
        return circle + _text(x, y, f"this plan: {show_bytes(point.peak_bytes)}", color=_CHOSEN)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "start", color: str = _TEXT) -> str:
    escaped = html.escape(content)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escaped}</text>'
