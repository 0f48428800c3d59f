"""Take README's picture: the first screen of a report, light and dark.

    python -m tools.make_screenshot      needs Chromium (Debian: apt-get install chromium) and pip install ".[pages]"

It runs the command that README shows beside it. Each file says in a text of its own which bytes it shows, so that
`tests/test_docs.py` finds a picture that is not that of the example any more.
"""

from __future__ import annotations

import json
import pathlib
import struct
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from benchmarks.pictures import BROWSER_FLAGS, find_browser
from memscale.cli import main as memscale

ROOT = pathlib.Path(__file__).parent.parent
COMMAND = ("gpt2-medium", "--batch", "4", "--seq", "512", "--gpu", "RTX 3070")
"""README shows it; docs/start/will_it_fit.md shows what `estimate` says of the same."""
IMAGES = ROOT / "docs" / "images"
Scheme = Literal["light", "dark"]
PICTURES: Mapping[Scheme, pathlib.Path] = {"light": IMAGES / "report-light.png", "dark": IMAGES / "report-dark.png"}
SIZE = {"width": 1120, "height": 700}
_KEY = b"memscale"


def take(browser: Any, page_file: pathlib.Path, pictures: Mapping[Scheme, pathlib.Path]) -> None:
    """The page down to the end of the two charts of memory, in each colour scheme."""
    for scheme, path in pictures.items():
        page = browser.new_page(color_scheme=scheme, viewport=SIZE)
        page.goto(page_file.as_uri())
        page.wait_for_selector("#memory1 .trace path", state="attached")
        charts = page.locator(".pair").bounding_box()
        shown = {"x": 0, "y": 0, "width": SIZE["width"], "height": charts["y"] + charts["height"]}
        picture = page.screenshot(full_page=True, clip=shown)
        names, texts = (page.locator(f"dl {tag}").all_text_contents() for tag in ("dt", "dd"))
        path.write_bytes(_with_note(picture, dict(zip(names, texts, strict=True))))
        page.close()


def _with_note(picture: bytes, numbers: dict[str, str]) -> bytes:
    """A PNG file with what it shows, as a text that no viewer draws."""
    body = b"tEXt" + _KEY + b"\0" + json.dumps(numbers).encode("latin-1")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = picture.rindex(b"IEND") - 4
    return picture[:end] + chunk + picture[end:]


def numbers_of(path: pathlib.Path) -> dict[str, str]:
    """The numbers that a picture shows, by name: "plain peak" and so on."""
    _, _, rest = path.read_bytes().partition(b"tEXt" + _KEY + b"\0")
    found: dict[str, str] = json.loads(rest[: rest.index(b"}") + 1])
    return found


def main() -> int:
    """Write the report of README's command, and take its picture."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory:
        page = pathlib.Path(directory) / "report.html"
        code = memscale(["report", *COMMAND, "--output", str(page)])
        if code != 0:
            return code
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_browser(), args=list(BROWSER_FLAGS))
            take(browser, page, PICTURES)
            browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
