"""What is drawn; the cases themselves run by `python -m emucuda.random_cards`."""

from emucuda.random_cards import CONTEXT_BYTES, FAMILIES, LOOPS, MODES, OPTIMIZERS, drawn, passes


def test_a_number_is_always_the_same_case():
    assert [drawn(1, number) for number in range(20)] == [drawn(1, number) for number in range(20)]
    assert drawn(1, 0) != drawn(2, 0)


def test_all_kinds_are_drawn():
    cases = [drawn(1, number) for number in range(200)]
    assert {case.family for case in cases} == set(FAMILIES)
    assert {case.mode for case in cases} == set(MODES)
    assert {case.loop for case in cases} == set(LOOPS)
    assert {case.optimizer for case in cases} == set(OPTIMIZERS)
    assert {case.overlaps for case in cases} == {True, False}


def test_what_others_hold_leaves_something():
    assert all(case.total_bytes - case.held_bytes - CONTEXT_BYTES > 0 for case in (drawn(1, n) for n in range(200)))


def test_running_out_of_memory_after_fits_is_a_failure():
    assert passes({"outcome": "trained"})
    assert passes({"outcome": "does not fit"})
    assert not passes({"outcome": "out of memory"})
    assert not passes({"outcome": "error"})
