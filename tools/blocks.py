"""The code blocks of README.md and docs: found, run, and their printed output written anew.

    python -m tools.blocks        run every `$ memscale` command of the documents and rewrite what it printed

`tests/test_docs.py` runs the same blocks and fails where a document no longer says what happens. A line that is just
`...` stands for any lines; such a block is not rewritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import functools
import io
import pathlib
import re
import shlex
import sys

ROOT = pathlib.Path(__file__).parent.parent
NOT_RUN = {
    "simgpu.md": "its blocks register a device for the whole process",
    "huggingface.md": "fragments around a trainer of the reader's own",
}
"""Documents whose Python is for reading. A single such block elsewhere is fenced as `py`."""
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = "$ memscale "


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    path: pathlib.Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def command(self) -> str | None:
        """The `memscale` command line of a console block; None for anything else."""
        first, _, _ = self.text.partition("\n")
        return first.removeprefix("$ ") if self.language == "console" and first.startswith(_PROMPT) else None

    @property
    def printed(self) -> str:
        """What the document says that the command prints."""
        return self.text.partition("\n")[2]


def documents() -> list[pathlib.Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(path: pathlib.Path) -> list[Block]:
    text = path.read_text()
    return [Block(path, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in _FENCE.finditer(text)]


def python_blocks(path: pathlib.Path) -> list[Block]:
    return [] if path.name in NOT_RUN else [block for block in blocks_of(path) if block.language == "python"]


def console_blocks() -> list[Block]:
    return [block for path in documents() for block in blocks_of(path) if block.command is not None]


@functools.cache
def run_command(command: str) -> str:
    """What the command prints to stdout; it must succeed."""
    from memscale.cli import main

    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main(shlex.split(command)[1:])
    if code != 0:
        raise RuntimeError(f"`{command}` exits with {code}: {stderr.getvalue()}")
    return stdout.getvalue()


def agree(said: str, printed: str) -> bool:
    wanted = re.sub(r"^\.\.\.$", "...", said, flags=re.MULTILINE)
    return doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS)


def refresh(path: pathlib.Path) -> int:
    """Rewrite the output of every command in a document; returns how many changed."""
    text, changed = path.read_text(), 0
    for block in blocks_of(path):
        if block.command is None or "\n..." in block.text:
            continue
        print(f"{block}: {block.command} ...", file=sys.stderr, flush=True)
        printed = run_command(block.command)
        if printed != block.printed:
            first = block.text.partition("\n")[0]
            text = text.replace(f"```console\n{block.text}```", f"```console\n{first}\n{printed}```")
            changed += 1
    path.write_text(text)
    return changed


if __name__ == "__main__":
    print(f"{sum(refresh(path) for path in documents())} blocks rewritten")
