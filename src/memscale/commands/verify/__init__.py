"""`memscale verify`: models trained plain and wrapped on this machine's card, with what was predicted and seen.

    cases      what is trained, and in which ways
    record     what comes out: data, which is written as JSON and sent back
    trial      one model trained in one way, in a process of its own
    session    all of them, one after the other; whatever happens to one of them is a result
    words      a record as text and as a page

Each trial has a process of its own, so that what it takes of the card is its own, an error in it ends nothing else, and
the process that waits for it never touches the card.
"""

from memscale.commands.verify.cases import CardCase, default_cases, named_cases
from memscale.commands.verify.record import Numbers, Record, Trial
from memscale.commands.verify.session import Session

__all__ = ["CardCase", "Numbers", "Record", "Session", "Trial", "default_cases", "named_cases"]
