"""What is drawn; the cases themselves run by `python -m emucuda.random_cards`."""

from emucuda.random_cards import CONTEXT_BYTES, FAMILIES, LOOPS, MODES, OPTIMIZERS, _Batches, drawn, passes


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


class _Plan:
    def __init__(self, allocated_bytes, reserved_bytes):
        self.predicted_allocated_bytes, self.predicted_reserved_bytes = allocated_bytes, reserved_bytes
        self.predicted_peak_bytes = allocated_bytes


def test_a_plan_that_was_replaced_is_held_only_to_what_was_taken_under_it(monkeypatch):
    monkeypatch.setattr("memscale.report.explain.what_is_done", lambda plan: "nothing")
    first, second = _Plan(100, 150), _Plan(80, 120)
    batches = _Batches([first, second, second], [90, 80, 76], [130, 120, 120])
    found = batches.figures()
    assert (found["predicted_allocated_bytes"], found["allocated_bytes"]) == (80, 80)
    assert (found["predicted_reserved_bytes"], found["reserved_bytes"]) == (120, 120)
    assert found["exceeds_by"] == 0
    assert _Batches([first, second], [105, 80], [130, 120]).figures()["exceeds_by"] == 105 / 100 - 1
    assert _Batches([first, second], [90, 80], [165, 120]).figures()["exceeds_by"] == 165 / 150 - 1
