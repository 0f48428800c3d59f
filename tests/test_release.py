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


def test_the_workflow_runs_what_ci_runs_on_versions_that_we_claim():
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
    assert "bash .ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    packaged = (ROOT / "pyproject.toml").read_text()
    runs = jobs["test"]["strategy"]["matrix"]["include"]
    pythons, torches = ({run[name] for run in runs} for name in ("python", "torch"))
    assert re.search(r'requires-python = ">=(.+)"', packaged)[1] in pythons
    assert any(torch.startswith(re.search(r'"torch>=(.+)"', packaged)[1]) for torch in torches)
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert pinned in torches
    assert len(pythons) == len(torches) == 2
    assert len({(run["python"], run["torch"]) for run in runs}) == 4


def test_the_workflow_builds_the_documents():
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
    assert "make docs" in [step.get("run") for step in jobs["docs"]["steps"]]


def test_the_changelog_has_this_version_in_about_ten_lines():
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert any(release.startswith(f"[{memscale.__version__}]") for release in released)
    for release in released:
        assert len(re.findall(r"^- ", release, re.MULTILINE)) <= 12, release.split("\n")[0]


def test_a_report_asks_for_what_doctor_prints():
    forms = {path.stem: path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"}
    assert sorted(forms) == ["card", "problem", "wish"]
    for form in forms.values():
        asked = [part["attributes"].get("description", "") for part in yaml.safe_load(form.read_text())["body"]]
        assert any("memscale doctor" in text for text in asked), form.name
