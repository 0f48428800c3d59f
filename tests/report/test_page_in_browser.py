"""The report in a real browser, without a network: charts are drawn, hovering answers, nothing complains.

`make test-pages` runs this; it needs Chromium from the system's packages (Debian: apt-get install chromium).
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.pictures import BROWSER_FLAGS, find_browser
from memscale.cli import main
from tools.make_screenshot import numbers_of, take

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", "bert-mini", "--gpu", "RTX 3090", "--budget", "0.3", "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=list(BROWSER_FLAGS))
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "laptop"])
def test_a_report_opens_offline(browser: Any, page_file: pathlib.Path, scheme: str, width: int) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_file.as_uri())
    for chart in ("memory0", "memory1", "lanes", "layers", "front"):
        page.wait_for_selector(f"#{chart} .trace path", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert complaints == []
    context.close()


def test_what_travels_when_answers(browser: Any, page_file: pathlib.Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector("#lanes .trace path", state="attached")
    page.locator("#lanes").scroll_into_view_if_needed()
    names = page.locator("#lanes .ytick text").all_text_contents()
    assert names == ["host", "link out", "link in", "compute"], "from the bottom"
    bars = [bar.bounding_box() for bar in page.locator("#lanes .point path").all()]
    box = max(bars, key=lambda bar: bar["width"])
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#lanes .hovertext")
    assert " ms" in page.locator("#lanes .hovertext").first.inner_html()
    page.close()


def test_memory_says_where_in_the_step_one_is(browser: Any, page_file: pathlib.Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector("#memory0 .trace path", state="attached")
    box = page.locator("#memory0").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#memory0 .hoverlayer .legend")
    told = page.locator("#memory0 .hoverlayer .legend").text_content()
    assert any(phase in told for phase in ("forward", "backward", "optimizer"))
    assert "activations" in told
    assert "reserved" in told
    page.close()


def test_layers_stand_side_by_side(browser: Any, page_file: pathlib.Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector("#layers .trace path", state="attached")
    bars = sorted((bar.bounding_box() for bar in page.locator("#layers .point path").all()), key=lambda bar: bar["x"])
    assert all(one["x"] + one["width"] <= other["x"] + 1 for one, other in itertools.pairwise(bars))
    page.close()


def test_the_picture_of_readme_can_be_taken(browser: Any, page_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "report.png"
    take(browser, page_file, {"light": picture})
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert numbers_of(picture)["budget"].endswith("fits")


def test_hovering_and_the_keyboard_answer(browser: Any, page_file: pathlib.Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector("#layers .trace path", state="attached")
    page.locator("#layers").scroll_into_view_if_needed()
    bars = [bar.bounding_box() for bar in page.locator("#layers .point path").all()]
    box = max(bars, key=lambda bar: bar["height"])
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#layers .hovertext")
    assert "activations" in page.locator("#layers .hovertext").first.inner_html()
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.evaluate("element => element.open")
    page.close()
