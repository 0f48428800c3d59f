"""The race detector: it speaks when a wait is left out, and only then."""

import pytest
import torch

import emucuda


def offload(side: torch.cuda.Stream, *, wait: bool) -> torch.Tensor:
    x = torch.randn(1 << 16, device="cuda")
    host = torch.empty(1 << 16, pin_memory=True)
    x.mul_(2)
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    return host


def test_a_copy_that_waits_is_no_race():
    side = torch.cuda.Stream()
    with emucuda.watch_races():
        offload(side, wait=True)
    assert emucuda.take_reports() == []


def test_a_copy_that_does_not_wait_is_one():
    side = torch.cuda.Stream()
    with emucuda.watch_races():
        offload(side, wait=False)
    (report,) = emucuda.take_reports()
    assert "a copy on stream" in report
    assert "reads 262144 bytes" in report
    assert "not ordered after aten::mul_.Tensor, which writes them on the default stream" in report


@pytest.mark.parametrize("wait", ["event", "stream", "device", None])
def test_the_host_must_wait_before_it_reads_what_a_copy_brings(wait):
    side = torch.cuda.Stream()
    with emucuda.watch_races():
        host = offload(side, wait=True)
        event = side.record_event()
        if wait == "event":
            event.synchronize()
        elif wait == "stream":
            side.synchronize()
        elif wait == "device":
            torch.cuda.synchronize()
        host[1:].sum()
    reports = emucuda.take_reports()
    if wait:
        assert reports == []
    else:
        assert "aten::sum on the host reads" in reports[0]


def test_a_fetch_must_be_waited_for_by_the_stream_that_computes():
    side, host = torch.cuda.Stream(), torch.ones(1 << 16, pin_memory=True)
    for wait in (True, False):
        with emucuda.watch_races():
            with torch.cuda.stream(side):
                x = host.to("cuda", non_blocking=True)
            if wait:
                torch.cuda.current_stream().wait_stream(side)
            y = x + 1
            x.record_stream(torch.cuda.current_stream())
        reports = emucuda.take_reports()
        assert bool(reports) is not wait, reports
        torch.cuda.synchronize()
        del x, y


def test_training_on_one_stream_has_none():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with emucuda.watch_races():
        for _ in range(2):
            model(torch.randn(16, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert emucuda.take_reports() == []


def test_a_view_of_what_a_copy_brings_touches_nothing():
    side = torch.cuda.Stream()
    with emucuda.watch_races():
        host = offload(side, wait=True)
        host[1:].view(-1, 3).detach()
        torch.empty_like(host)
    assert emucuda.take_reports() == []
    torch.cuda.synchronize()
