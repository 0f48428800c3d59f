"""What stands in several files says the same: the version, and what is run before a change lands."""

import pathlib
import re

import pytest
import yaml

import memscale

pytestmark = pytest.mark.unit
ROOT = pathlib.Path(__file__).parent.parent


def test_the_version_is_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    packaged = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert memscale.__version__ == packaged == str(cited)


def test_the_workflow_runs_what_ci_runs_on_pythons_that_we_claim():
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
    assert "bash .ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    oldest = re.search(r'requires-python = ">=(.+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert oldest in jobs["test"]["strategy"]["matrix"]["python"]


def test_a_report_asks_for_what_doctor_prints():
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert len(forms) == 2
    for form in forms:
        asked = [part["attributes"].get("description", "") for part in yaml.safe_load(form.read_text())["body"]]
        assert any("memscale doctor" in text for text in asked), form.name
