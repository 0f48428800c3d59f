"""What tests cost, by file: reads the JUnit file that `make test` and `make test-all` leave behind.

    python tools/durations.py build/test-durations.xml [--most 15] [--tests]

Processor time is what a test costs on a machine of any load; wall time is what the run showed.
"""

from __future__ import annotations

import argparse
import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable


@dataclasses.dataclass
class Cost:
    """What the tests of one name took together."""

    num_tests: int = 0
    processor_s: float = 0.0
    wall_s: float = 0.0


def costs(report: ElementTree.Element, *, by_test: bool = False) -> dict[str, Cost]:
    """By file, or by test function with all its parameters; the dearest first."""
    found: dict[str, Cost] = {}
    for case in report.iter("testcase"):
        name = case.attrib["classname"]
        if by_test:
            name += "." + case.attrib["name"].partition("[")[0]
        cost = found.setdefault(name, Cost())
        cost.num_tests += 1
        cost.wall_s += float(case.attrib["time"])
        cost.processor_s += sum(float(each.attrib["value"]) for each in _processor_times(case))
    return dict(sorted(found.items(), key=lambda item: -item[1].processor_s))


def _processor_times(case: ElementTree.Element) -> Iterable[ElementTree.Element]:
    return (each for each in case.iter("property") if each.attrib["name"] == "processor_s")


def table(found: dict[str, Cost], most: int | None = None) -> str:
    """The dearest as lines of text, under the total."""
    total = Cost(
        *(sum(getattr(cost, field) for cost in found.values()) for field in ("num_tests", "processor_s", "wall_s"))
    )
    rows = [("all of them", total), *list(found.items())[:most]]
    lines = [f"{'processor':>10} {'wall':>10} {'tests':>6}"]
    lines += [f"{cost.processor_s:>8.1f} s {cost.wall_s:>8.1f} s {cost.num_tests:>6}  {name}" for name, cost in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What tests cost, by file.")
    parser.add_argument("report", help="the JUnit file of a run")
    parser.add_argument("--most", type=int, help="show only so many, the dearest")
    parser.add_argument("--tests", action="store_true", help="by test function instead of by file")
    arguments = parser.parse_args()
    report = ElementTree.parse(arguments.report).getroot()  # nosec B314
    print(table(costs(report, by_test=arguments.tests), arguments.most))


if __name__ == "__main__":
    main()
