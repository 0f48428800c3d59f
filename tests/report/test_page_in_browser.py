"""The report in a real browser, without a network: charts are drawn, hovering answers, nothing complains.

`make test-pages` runs this; it needs Chromium from the system's packages (Debian: apt-get install chromium).
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memscale
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
    for chart in ("memory0", "memory1"):
        assert page.locator(f"#{chart} .nsewdrag").bounding_box()["height"] >= 200, "the legend leaves room to read"
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


@pytest.mark.parametrize(("share", "phase"), [(0.15, "forward, "), (0.65, "backward, "), (0.97, "optimizer")])
@pytest.mark.parametrize("chart", ["memory0", "memory1"])
def test_memory_says_where_in_the_step_and_in_the_model_one_is(
    browser: Any, page_file: pathlib.Path, chart: str, share: float, phase: str
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector(f"#{chart} .trace path", state="attached")
    box = page.locator(f"#{chart} .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    page.wait_for_selector(f"#{chart} .hoverlayer .legend")
    told = page.locator(f"#{chart} .hoverlayer .legend").text_content()
    assert phase in told
    if phase != "optimizer":
        assert "bert.encoder.layer." in told
    assert all(f"{name} : " in told for name in ("parameters", "live", "allocated", "reserved"))
    page.close()


def test_memory_is_stacked_by_kind_under_its_lines(browser: Any, page_file: pathlib.Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector("#memory1 .trace path", state="attached")
    for chart in ("memory0", "memory1"):
        kinds = {"parameters", "optimizer state", "gradients", "activations", "temporaries", "inputs"}
        legend = set(page.locator(f"#{chart} .legendtext").all_text_contents())
        assert legend >= kinds | {"live", "allocated", "reserved"}
        assert "budget 300.0 MB" in page.locator(f"#{chart} .annotation-text").all_text_contents()
        filled = page.locator(f"#{chart} .scatterlayer .js-fill").evaluate_all(
            "paths => new Set(paths.map((path) => path.style.fill)).size"
        )
        assert filled == len(legend & kinds)
    page.close()


def test_peak_against_time_has_all_that_was_weighed_this_plan_and_the_bound(
    browser: Any, page_file: pathlib.Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector("#front .trace path", state="attached")
    assert {"exact, weighed", "exact", "this plan"} <= set(page.locator("#front .legendtext").all_text_contents())
    points = page.locator("#front .scatterlayer .trace").evaluate_all(
        "traces => traces.map((trace) => trace.querySelectorAll('.points path').length)"
    )
    assert points[0] > 50
    assert points[-1] == 1
    words = " ".join(page.locator("#front .annotation-text").all_text_contents())
    assert "within 300.0 MB" in words
    assert "no exact plan is faster" in words
    page.locator("#front").scroll_into_view_if_needed()
    star = page.locator("#front .scatterlayer .trace").last.locator(".points path").bounding_box()
    page.mouse.move(star["x"] + star["width"] / 2, star["y"] + star["height"] / 2)
    page.wait_for_selector("#front .hovertext")
    assert "x" in page.locator("#front .hovertext").first.inner_html()
    page.close()


def _write_run(folder: pathlib.Path) -> None:
    """Apart from the test: what drives the browser keeps the frames that call it, with what they hold."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = memscale.Config(force_optimize=True, enable_logging=False, offload_dir=str(folder))
    with memscale.optimize(model, optimizer, config) as executor:
        with memscale.measure("cpu") as measured:
            for _ in range(3):
                model(torch.randn(512, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        executor.report(folder / "run.html", step_ms=12.5, live_peak_bytes=measured.peak_bytes)


@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "laptop"])
def test_a_run_shows_what_was_measured_and_what_waits(browser: Any, tmp_path: pathlib.Path, width: int) -> None:
    _write_run(tmp_path)
    context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "run.html").as_uri())
    for chart in ("measured", "elsewhere"):
        page.wait_for_selector(f"#{chart} .trace path", state="attached")
        assert {"predicted", "measured"} <= set(page.locator(f"#{chart} .legendtext").all_text_contents())
        bars = page.locator(f"#{chart} .point path").all()
        assert len(bars) >= 2
        assert all(bar.bounding_box()["width"] > 5 and bar.bounding_box()["height"] > 5 for bar in bars)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    context.close()


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
    box = sorted(bars, key=lambda bar: bar["height"])[-2]  # the head is the highest
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#layers .hovertext")
    told = page.locator("#layers .hovertext").first.inner_html()
    assert "activations" in told
    assert "bert.encoder.layer." in told
    assert "frees" in told, "the reason, with the numbers that its rule saw"
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.evaluate("element => element.open")
    page.close()
