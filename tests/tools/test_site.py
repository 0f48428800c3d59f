"""The site has every page, and its links lead where those of the files do."""

from __future__ import annotations

import inspect
import pathlib
import re
import subprocess
import sys
import types

import pytest
import yaml

from tools import site

ROOT = pathlib.Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """mkdocs' own tags are of no interest."""


def _nav() -> site.Nav:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]


@pytest.mark.unit
def test_the_navigation_names_existing_pages_once() -> None:
    named = [page for section in _nav() for entries in section.values() for page in entries]
    assert len(named) == len(set(named))
    missing = [page for page in named if page not in site.pages_of(DOCS)]
    assert not missing, f"mkdocs.yml names pages that do not exist: {missing}"


@pytest.mark.unit
def test_every_page_is_in_the_navigation() -> None:
    full = [
        page
        for section in site.complete(_nav(), site.pages_of(DOCS))
        for entries in section.values()
        for page in entries
    ]
    assert sorted(full) == site.pages_of(DOCS)


@pytest.mark.unit
def test_pictures_of_readme_are_found_from_its_page() -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="project.md"))
    text = site.on_page_markdown((ROOT / "README.md").read_text(), page, None, None)
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 2
    assert all((DOCS / name).exists() for name in pictures)


@pytest.mark.unit
def test_a_page_that_is_not_named_comes_last_in_its_section() -> None:
    nav: site.Nav = [{"Guides": ["guides/a.md"]}, {"Reference": ["glossary.md"]}]
    full = site.complete(nav, ["guides/a.md", "glossary.md", "guides/new.md", "other/odd.md"])
    assert full == [{"Guides": ["guides/a.md", "guides/new.md"]}, {"Reference": ["glossary.md", "other/odd.md"]}]
    assert nav[0] == {"Guides": ["guides/a.md"]}, "what is read is not changed"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("docs/guides/a.md", "[b](../design/b.md#c)", "[b](../design/b.md#c)"),
        ("docs/guides/a.md", "[status](../../README.md#status)", "[status](../project.md#status)"),
        ("docs/guides/a.md", "[example](../../examples/train.py)", "example (`examples/train.py`)"),
        ("README.md", "[all](docs/README.md)", "[all](README.md)"),
        (
            "README.md",
            "[guide](docs/guides/modes.md) and [changes](CHANGELOG.md)",
            "[guide](guides/modes.md) and [changes](changelog.md)",
        ),
        ("README.md", "[web](https://example.org/docs/x.md)", "[web](https://example.org/docs/x.md)"),
        ("docs/a.md", "```\n[kept](../README.md)\n```", "```\n[kept](../README.md)\n```"),
        ("README.md", "[over\ntwo lines](docs/a.md)", "[over\ntwo lines](a.md)"),
        ("docs/a.md", "Words:\n- one\n  goes on\n- two", "Words:\n\n- one\n  goes on\n- two"),
    ],
)
def test_links_and_lists_are_those_of_a_page(source: str, text: str, expected: str) -> None:
    assert site.rewrite(text, source) == expected + "\n"


@pytest.mark.unit
def test_every_public_name_is_on_the_page_of_the_api() -> None:
    import memscale

    text = (DOCS / "reference" / "api.md").read_text()
    for name in memscale.__all__:
        assert name == "__version__" or f"::: memscale.{name}\n" in text, name


@pytest.mark.unit
def test_public_functions_and_classes_teach() -> None:
    """An example, arguments, what is returned and what is raised; classes have an example, errors the base's."""
    import memscale

    for name in memscale.__all__:
        thing = getattr(memscale, name)
        text = inspect.getdoc(thing) or ""
        if inspect.isfunction(thing):
            wanted = ["Args:", "Raises:"]
            wanted += [] if inspect.signature(thing).return_annotation == "None" else ["Returns:"]
            assert [part for part in wanted if part not in text] == [], name
        if inspect.isfunction(thing) or (inspect.isclass(thing) and not issubclass(thing, memscale.MemScaleError)):
            assert "\n    " in text.split("Args:")[0], f"{name} has no example, indented to be shown as code"


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    api = (tmp_path / "reference" / "api.html").read_text()
    for name in ("wrap", "Estimate", "DoesNotFitError"):
        assert f'id="memscale.{name}"' in api
    for page in ("index.html", "start/faq.html", "changelog.html", "results/peers.html"):
        assert (tmp_path / page).exists(), page
