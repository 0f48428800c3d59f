"""The page "Will it fit?": its data is what was profiled, and it answers in a real browser."""

from __future__ import annotations

import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from memscale._hardware.cards import KNOWN_CARDS
from tools import make_fit_page

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "start" / "will_it_fit.md"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def _data() -> dict[str, Any]:
    text = make_fit_page.SCRIPT.read_text()
    found: dict[str, Any] = json.loads(text.removeprefix("window.FIT = ").removesuffix(";\n"))
    return found


@pytest.mark.unit
def test_the_page_loads_what_was_profiled() -> None:
    data = _data()
    assert data["entries"] == make_fit_page.read()["entries"], "run `python -m tools.make_fit_page --write`"
    assert make_fit_page.SCRIPT.read_text() == make_fit_page.script(make_fit_page.read()), (
        "what a card offers is another: run `python -m tools.make_fit_page --write`"
    )
    assert [card["name"] for card in data["cards"]] == [card.name for card in KNOWN_CARDS]
    assert all(card["budget_bytes"] < card["total_bytes"] for card in data["cards"])


@pytest.mark.unit
def test_fronts_begin_with_the_plain_step_and_go_down() -> None:
    for entry in _data()["entries"]:
        assert set(entry["modes"]) == {"conservative", "balanced", "aggressive"}
        for front in entry["modes"].values():
            peaks = [point[0] for point in front]
            assert peaks == sorted(peaks, reverse=True)
            assert front[0][1:] == [1.0, "nothing", True]
            assert peaks[0] == entry["live_bytes"]


@pytest.mark.unit
def test_the_ratio_is_the_largest_of_the_measured_rows() -> None:
    ratio = make_fit_page.largest_ratio()
    assert 1.0 < ratio < 1.3
    for entry in _data()["entries"]:
        expected = max(ratio, entry["reserved_bytes"] / entry["live_bytes"])
        assert entry["reserved_over_live"] == pytest.approx(expected, abs=1e-4), (
            "run python -m tools.make_fit_page --write"
        )
    assert f"emulated card ({ratio:.2f})" in PAGE.read_text()


@pytest.mark.unit
def test_every_element_that_the_script_asks_for_is_on_the_page() -> None:
    script = (PAGE.parent / "fit.js").read_text()
    for name in set(re.findall(r'element\("([\w-]+)"\)', script)):
        assert f'id="{name}"' in PAGE.read_text(), name
    for name in re.findall(r'<script src="([^"]+)"', PAGE.read_text()):
        assert (PAGE.parent / name).exists(), name


# ---- in a browser


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built site, on a port of this machine."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium is not None, "this test needs Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.full
def test_it_answers_for_what_is_picked(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{address}/start/will_it_fit.html")
    assert page.inner_text("#fit-answer"), "it has an answer before anything is picked"
    data = _data()
    entry = data["entries"][-1]
    page.select_option("#fit-model", entry["model"])
    page.select_option("#fit-shape", f"{entry['batch']}x{entry['length'] or 'images'}")
    page.select_option("#fit-mode", "balanced")
    largest = max(data["cards"], key=lambda card: card["budget_bytes"])
    smallest = min(data["cards"], key=lambda card: card["budget_bytes"])
    page.select_option("#fit-card", largest["name"])
    assert entry["reserved_bytes"] <= largest["budget_bytes"]
    assert page.inner_text("#fit-answer").startswith("Fits as it is.")
    page.select_option("#fit-card", smallest["name"])
    assert smallest["name"] in page.inner_text("#fit-answer")
    assert smallest["name"] in page.inner_text("#fit-command")
    rows = page.locator("#fit-table tbody tr")
    assert rows.count() == len(entry["modes"]["balanced"])
    needed = [point[0] * entry["reserved_over_live"] for point in entry["modes"]["balanced"][1:]]
    fits = entry["reserved_bytes"] <= smallest["budget_bytes"] or min(needed) <= smallest["budget_bytes"]
    assert page.locator("#fit-table tr.chosen").count() == int(fits)
    assert complaints == []
    page.close()


@pytest.mark.full
def test_it_is_used_with_the_keyboard_on_a_phone(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{address}/start/will_it_fit.html")
    before = page.inner_text("#fit-command")
    page.focus("#fit-card")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#fit-command") != before
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@pytest.mark.full
def test_links_of_the_site_lead_somewhere(browser: Any, address: str) -> None:
    """Every page, picture and file that any page of the site names is served, beginning with the start page."""
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    shown = page.eval_on_selector_all("a[href]", "links => links.map(link => link.href.split('#')[0])")
    to_see, seen, broken = {link for link in shown if link.startswith(address)}, set[str](), list[str]()
    assert len(to_see) > 40
    while to_see:
        link = to_see.pop()
        seen.add(link)
        answer = page.request.get(link)
        if answer.status != 200:
            broken.append(link)
        elif link.endswith(".html"):
            named = re.findall(r'(?:href|src|srcset)="([^"#]+)', answer.text())
            found = {urllib.parse.urljoin(link, html.unescape(name)).split("#")[0] for name in named}
            to_see |= {each for each in found if each.startswith(address)} - seen
    assert broken == []
    assert any(link.endswith(".svg") for link in seen)
    page.close()
