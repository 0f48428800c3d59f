"""Write docs/results/cards/README.md: every record that `memscale verify` made, with predicted and measured figures.

memscale verify                                        # on a machine with a GPU: writes memscale-verify-CARD.json
cp memscale-verify-CARD.json docs/results/cards/
python -m tools.make_cards                             # writes the page

python -m tools.make_cards --emulated FILE MODEL...    # a record of the emulated card; needs `make cuda` once
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from memscale.commands.verify import Session, named_cases
from memscale.commands.verify.cases import WAYS
from memscale.commands.verify.record import Record
from memscale.commands.verify.session import new_record
from memscale.commands.verify.words import record_markdown

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "results" / "cards"
PAGE = FOLDER / "README.md"
_HEAD = """# Cards

What `memscale verify` found: models trained plain and wrapped, with predicted, allocated and reserved bytes and what
`nvidia-smi` shows side by side, step times, and whether the wrapped model trained the same. Each section is one file of
this folder, written by the command on that machine; `python -m tools.make_cards` writes this page from them.

**{real} of these records {verb} from a real GPU.** An emulated card is PyTorch's CUDA build on our stand-in for the
driver: its allocator is PyTorch's own, so bytes are facts, and nothing is computed. A simulated device computes on the
processor.

Do you have a card? Then run [the notebook](../../../notebooks/measure_on_a_card.ipynb), or:

```sh
pip install -c constraints.txt ".[hf]"
memscale verify            # --small leaves the two large models out
```

It takes some minutes, shows what it does, and writes `memscale-verify-CARD.json`. Please send that file back in an
issue: it holds the card's name, versions, bytes, times, losses of random data and hashes of random weights, and nothing
else.

Ways of training:

{ways}

GB = 1e9 bytes. "off by" is predicted over measured: of reserved bytes, else of what is allocated or live. On a real
card it may be a few percent: that is what is to be found out.
"""


def page(records: Sequence[tuple[str, Record]]) -> str:
    """The page for these files."""
    real = sum(1 for _, record in records if record.machine.clock == "wall" and record.machine.device_type != "cpu")
    ways = "\n".join(f"- **{way}**: {what}" for way, what in WAYS.items())
    head = _HEAD.format(real=real or "None", verb="is" if real <= 1 else "are", ways=ways)
    sections = [line for name, record in records for line in record_markdown(record, name)]
    return head + "\n" + "\n".join(sections).rstrip() + "\n"


def records() -> list[tuple[str, Record]]:
    """Every file of the folder."""
    return [(path.name, Record.load(path)) for path in sorted(FOLDER.glob("*.json"))]


def verify_emulated(path: pathlib.Path, models: Sequence[str]) -> None:
    """Run on the emulated card, which this process must run on (`python -m emucuda -m tools.make_cards ...`)."""
    from emucuda._launch import command  # type: ignore[import-not-found,import-untyped,unused-ignore]

    session = Session(on_progress=lambda text: print(text, flush=True), command=command)
    record = Record.load(path) if path.exists() else new_record(session.look())
    for latest in session.run(record, named_cases(models, None, None)):
        latest.save(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", type=pathlib.Path, metavar="FILE", help="verify on the emulated card first")
    parser.add_argument("models", nargs="*", help="what is trained there")
    options = parser.parse_args(argv)
    if options.emulated is not None:
        verify_emulated(options.emulated, options.models)
    PAGE.write_text(page(records()))


if __name__ == "__main__":
    main()
