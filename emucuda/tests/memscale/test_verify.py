"""`memscale verify` on the card: the first person who has a real one gets an answer, and not a traceback."""

import pathlib

import pytest

from emucuda._launch import command
from memscale.commands.verify import Session, named_cases, words
from memscale.commands.verify.record import Record
from memscale.commands.verify.session import new_record

SEGMENT_BYTES = 20 << 20
"""What the allocator takes at once for tensors of 1 to 10 MiB. ResNet-18 has hardly ten of these, and of two runs under
one plan one was seen to need the last, and one was not."""


@pytest.mark.parametrize("model", ["bert-tiny", "resnet-18"])
def test_a_record_of_the_emulated_card(model: str, tmp_path: pathlib.Path) -> None:
    session = Session(command=command)
    record = new_record(session.look())
    assert not record.machine.computes
    assert record.machine.clock == "none"
    for record in session.run(record, named_cases([model], 2, 32 if "bert" in model else None)):  # noqa: B020
        record.save(tmp_path / "card.json")
    record = Record.load(tmp_path / "card.json")
    assert [trial.outcome for trial in record.trials if trial.way != "budget"] == ["trained"] * 3
    for trial in record.trials:
        if trial.outcome == "trained":
            assert trial.measured.allocated == pytest.approx(trial.predicted.allocated, rel=0.01), trial.way
            reserved, predicted = trial.measured.reserved, trial.predicted.reserved
            assert predicted - max(0.05 * predicted, SEGMENT_BYTES) <= reserved <= 1.005 * predicted, trial.way
        else:
            assert trial.outcome == "does not fit", trial.detail
    text = "\n".join(words.record_lines(record))
    assert "not meaningful: this device computes no values" in text
