"""The cards that can be emulated, read from `cards.json`; add a card by adding a row there."""

import dataclasses
import json
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a program can ask of a card."""

    name: str
    """What people call it: "RTX 3090"."""
    device_name: str
    """What the driver calls it: "NVIDIA GeForce RTX 3090"."""
    total_bytes: int
    """What the driver reports, which is less than what is printed on the box."""
    major: int
    minor: int
    multiprocessors: int
    l2_bytes: int
    bus_bits: int
    memory_clock_khz: int
    clock_khz: int

    def described(self) -> str:
        """The card as the C++ side reads it from the environment."""
        fields = dataclasses.asdict(self) | {"name": self.device_name}
        del fields["device_name"]
        return ";".join(f"{name}={value}" for name, value in fields.items())


def cards() -> tuple[Card, ...]:
    """Every card that can be emulated by its name."""
    data = json.loads((Path(__file__).parent / "cards.json").read_text())
    return tuple(Card(**row) for row in data["cards"])


def find_card(name: str) -> Card:
    """The card of this name, however it is spaced: "rtx3090", "NVIDIA GeForce RTX 3090".

    Raises ValueError for a name that is not in the table.
    """
    for card in cards():
        if _key(name) in (_key(card.name), _key(card.device_name)):
            return card
    known = ", ".join(card.name for card in cards())
    raise ValueError(f"emucuda has no card named {name!r}. It has: {known}. Add a row to cards.json for another one.")


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
