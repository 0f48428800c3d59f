"""A command whose trials are words, for the tests of `benchmarks.trials`: one hangs, one works on, one ends it."""

from __future__ import annotations

import sys
import time

from benchmarks import trials


def attempt(word: str) -> trials.Result:
    print("what libraries say is no answer")
    if word == "hang":
        time.sleep(3600)
    while word == "work":
        pass
    if word == "end":
        sys.exit(3)
    return {"status": f"tried {word}"}


if __name__ == "__main__":
    sys.exit(trials.serve(attempt))
