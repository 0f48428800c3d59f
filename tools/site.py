"""Hooks of mkdocs: what makes a site of documents that are also read as files of the repository.

`make docs` builds the site. Three things differ from the files:

- pages that `mkdocs.yml` does not name are added to the section of their folder, so that none is left out;
- README, CHANGELOG and others of the root become pages;
- links that leave `docs/` lead to those pages; a link to a file that is no page becomes its name.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
ROOT_PAGES = {
    "README.md": "project.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "security.md",
}
"""Files of the root, and the pages that they become."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LIST = re.compile(r"^([-*]|\d+\.) ")

Nav = list[dict[str, list[str]]]


def complete(nav: Nav, pages: list[str]) -> Nav:
    """The navigation with every page: what is not named comes last in the section that its folder is called by."""
    named = {page for section in nav for entries in section.values() for page in entries}
    sections = {title.lower(): entries for section in nav for title, entries in section.items()}
    full = {title: list(entries) for title, entries in sections.items()}
    for page in sorted(set(pages) - named):
        folder = page.split("/")[0]
        full.get(folder, full["reference"]).append(page)
    return [{title: full[title.lower()]} for section in nav for title in section]


def pages_of(docs: pathlib.Path) -> list[str]:
    """All pages, those that files of the root become included."""
    found = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    return sorted([*found, *ROOT_PAGES.values()])


def rewrite(markdown: str, source: str, docs: pathlib.Path = ROOT / "docs") -> str:
    """A file's text as that of a page. `source` is its path in the repository."""
    parts = _FENCE.split(markdown.rstrip("\n"))
    return "".join(part if _FENCE.match(part) else _page_text(part, source, docs) for part in parts) + "\n"


def _page_text(text: str, source: str, docs: pathlib.Path) -> str:
    """Text between blocks of code. A link may go over the end of a line."""
    text = _LINK.sub(lambda link: _relinked(link, source, docs), text)
    lines: list[str] = []
    for line in text.split("\n"):
        if _LIST.match(line) and lines and lines[-1].strip() and not _is_in_list(lines):
            lines.append("")  # a list right below a paragraph is one on GitHub, but not here
        lines.append(line)
    return "\n".join(lines)


def _is_in_list(lines: list[str]) -> bool:
    """Whether the last line belongs to a list."""
    for line in reversed(lines):
        if _LIST.match(line):
            return True
        if not line.startswith(" "):
            return False
    return False


def _relinked(link: re.Match[str], source: str, docs: pathlib.Path) -> str:
    image, text, address = link.groups()
    target, mark, anchor = address.partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is None or (docs / page).is_dir():
        return f"{text} (`{path}`)" if path.strip("/") != text.strip("`") else f"`{path}`"
    here = ROOT_PAGES.get(source) or source.removeprefix("docs/")
    return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{mark}{anchor})"


# ---- what mkdocs calls


def on_config(config: Any) -> Any:
    config.nav = complete(config.nav, pages_of(pathlib.Path(config.docs_dir)))
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    sources = {page: name for name, page in ROOT_PAGES.items()}
    source = sources.get(page.file.src_uri) or f"docs/{page.file.src_uri}"
    return re.sub(r'\b(src|srcset)="docs/', r'\1="', rewrite(markdown, source))
