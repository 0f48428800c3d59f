"""What threads do with the bytes of a waiting tensor: who must be waited for, and what is kept of failed writes."""

from __future__ import annotations

import pytest
import torch

from memscale.techniques.offload.store.spot_jobs import Job, SpotJobs

pytestmark = pytest.mark.unit


def test_a_part_waits_for_jobs_on_its_own_bytes_and_for_those_on_the_whole():
    jobs, first, second, whole = SpotJobs(), Job(), Job(), Job()
    jobs.add((0, 4), first)
    jobs.add((4, 8), second)
    assert jobs.using((0, 4)) == [first], "not for its neighbour's"
    assert jobs.using((0, 8)) == [first, second]
    assert jobs.using((2, 6)) == [first, second]
    jobs.add((0, 8), whole)
    assert jobs.using((4, 8)) == [second, whole]
    second.set_result(None)
    assert jobs.using((4, 8)) == [whole]


def test_the_last_write_of_every_byte_is_known():
    jobs, first, second, whole = SpotJobs(), Job(), Job(), Job()
    jobs.add_write((0, 8), whole)
    jobs.write_anew((0, 4))
    jobs.add_write((0, 4), first)
    jobs.write_anew((4, 8))
    jobs.add_write((4, 8), second)
    assert jobs.writes_of((0, 4)) == [whole, first], "some of it may still be as the whole left it"
    assert jobs.writes_of((0, 8)) == [whole, first, second]
    jobs.write_anew((0, 8))
    assert jobs.writes_of((0, 8)) == []
    assert jobs.using((0, 8)) == [whole, first, second], "they use the bytes nevertheless"


def test_what_could_not_be_written_is_kept_until_it_is_written_anew():
    jobs = SpotJobs()
    kept = jobs.rescued
    for place in ((0, 4), (4, 8)):
        kept[place] = torch.ones(4)
    jobs.write_anew((0, 4))
    assert [*kept] == [(4, 8)]
    kept[0, 4] = torch.ones(4)  # a thread may do so at any time
    assert jobs.rescued is kept
    jobs.write_anew((0, 8))
    assert not kept
