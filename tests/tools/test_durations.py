"""The summary of what tests cost is made of what the suite itself writes down."""

from __future__ import annotations

import pathlib
import runpy
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.unit
TOOL = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "tools" / "durations.py"))
REPORT = """
<testsuites><testsuite>
  <testcase classname="tests.test_a" name="test_x[1]" time="1.5">
    <properties><property name="processor_s" value="0.5"/><property name="other" value="9"/></properties>
  </testcase>
  <testcase classname="tests.test_a" name="test_x[2]" time="0.5">
    <properties><property name="processor_s" value="0.25"/></properties>
  </testcase>
  <testcase classname="tests.test_b" name="test_y" time="3.0">
    <properties><property name="processor_s" value="2.0"/></properties>
  </testcase>
</testsuite></testsuites>
"""


def test_files_are_summed_and_the_dearest_come_first() -> None:
    found = TOOL["costs"](ElementTree.fromstring(REPORT))
    assert list(found) == ["tests.test_b", "tests.test_a"]
    assert (found["tests.test_a"].num_tests, found["tests.test_a"].processor_s) == (2, 0.75)
    assert found["tests.test_a"].wall_s == 2.0
    total, dearest = TOOL["table"](found, most=1).splitlines()[1:]
    assert total.split() == ["2.8", "s", "5.0", "s", "3", "all", "of", "them"]
    assert dearest.split() == ["2.0", "s", "3.0", "s", "1", "tests.test_b"]


def test_parameters_of_a_test_are_one() -> None:
    found = TOOL["costs"](ElementTree.fromstring(REPORT), by_test=True)
    assert found["tests.test_a.test_x"].num_tests == 2
