"""A function of the process is replaced for one thread, or by several of ours, and comes back in any order."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from memscale._torch.interception import intercept, replaced_in_this_thread


def library() -> Any:
    made = types.ModuleType("library")
    made.answer = lambda number=1: f"plain {number}"  # type: ignore[attr-defined]
    return made


def saying(word: str) -> Any:
    return lambda pass_on, *args, **kwargs: f"{word} {pass_on(*args, **kwargs)}"


def in_another_thread(function: Any) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


def test_only_the_thread_that_asked_for_it_sees_the_replacement() -> None:
    made = library()
    original = made.answer
    with replaced_in_this_thread(made, answer=lambda number: f"replaced {number}"):
        assert made.answer(2) == "replaced 2"
        assert in_another_thread(lambda: made.answer(number=2)) == "plain 2"
    assert made.answer is original


def test_two_threads_have_each_their_own() -> None:
    made = library()
    original = made.answer
    both_are_in = threading.Barrier(2, timeout=60)
    answers: dict[str, str] = {}

    def use(name: str) -> None:
        with replaced_in_this_thread(made, answer=lambda: name):
            both_are_in.wait()
            answers[name] = made.answer()
            both_are_in.wait()

    threads = [threading.Thread(target=use, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {"first": "first", "second": "second"}
    assert made.answer is original


def test_an_error_inside_puts_the_function_back() -> None:
    made = library()
    original = made.answer
    with pytest.raises(ValueError, match="oh"), replaced_in_this_thread(made, answer=lambda: None):
        raise ValueError("oh")
    assert made.answer is original


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_several_are_asked_the_latest_first_and_leave_in_any_order(first_to_leave: int) -> None:
    made = library()
    original = made.answer
    undos = [intercept(made, "answer", saying("one")), intercept(made, "answer", saying("two"))]
    assert made.answer() == "two one plain 1"
    undos[first_to_leave]()
    assert made.answer() == f"{('two', 'one')[first_to_leave]} plain 1"
    undos[1 - first_to_leave]()
    undos[1 - first_to_leave]()  # a second time does nothing
    assert made.answer is original


def test_what_a_stranger_put_in_front_stays() -> None:
    made = library()
    undo = intercept(made, "answer", saying("ours"))
    beneath = made.answer
    made.answer = strangers = lambda: f"stranger's {beneath()}"
    again = intercept(made, "answer", saying("later"))
    assert made.answer() == "later stranger's ours plain 1"
    undo()
    assert made.answer() == "later stranger's plain 1"
    again()
    assert made.answer is strangers
    assert made.answer() == "stranger's plain 1"


def test_what_a_class_inherits_it_inherits_again() -> None:
    class Base:
        def answer(self) -> str:
            return "base"

    class Child(Base):
        pass

    undo = intercept(Child, "answer", saying("ours"))
    assert (Child().answer(), Base().answer()) == ("ours base", "base")
    undo()
    assert "answer" not in vars(Child)


class Housed:
    def __init__(self, place: str) -> None:
        self.place = place

    @property
    def device(self) -> str:
        """Where it is."""
        return self.place

    @device.setter
    def device(self, place: str) -> None:
        self.place = place


def test_reading_a_property_can_be_answered() -> None:
    class Inheriting(Housed):
        pass

    original, mine, other = vars(Housed)["device"], Inheriting("here"), Housed("here")
    leave = intercept(Housed, "device", lambda pass_on, it: f"not {pass_on(it)}" if it is mine else pass_on(it))
    assert (mine.device, other.device) == ("not here", "here")
    assert Housed.device.__doc__ == "Where it is."
    mine.device = "there"
    assert mine.device == "not there"
    leave()
    assert mine.device == "there"
    assert vars(Housed)["device"] is original
