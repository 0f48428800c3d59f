"""Threads, garbage collection and forks: the runtime's lock and Python's must never wait for one another.

NOTE [GIL and the runtime lock] in runtime.cpp is the rule; these tests hang, and are killed, if it is broken.
"""

import pytest

pytestmark = pytest.mark.full


@pytest.fixture
def in_time(run_python):
    """Runs code that used to hang with a broken lock order; its own watchdog gives a traceback of every thread."""

    def run(code: str) -> str:
        return run_python(
            "import faulthandler; faulthandler.dump_traceback_later(560, exit=True)\n" + code, timeout=600
        )

    return run


def test_backward_and_garbage_collection_in_other_threads(in_time):
    in_time(
        """
import gc, threading

stop = threading.Event()
def collect():
    while not stop.is_set():
        gc.collect()
def churn():
    side = torch.Stream(device="simgpu")
    while not stop.is_set():
        x = torch.ones(1000, device="simgpu")
        host = torch.empty(1000, pin_memory=True)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        x.record_stream(side)
        cycle = [x, host]
        cycle.append(cycle)
        del x, host, cycle
threads = [threading.Thread(target=collect), threading.Thread(target=churn), threading.Thread(target=churn)]
for thread in threads:
    thread.start()
model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).to("simgpu")
try:
    for _ in range(40):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(torch.randn(8, 32, device="simgpu")).sum()
        loss.backward()
finally:
    stop.set()
    for thread in threads:
        thread.join()
torch.accelerator.synchronize()
del model, loss
gc.collect()
assert torch.accelerator.memory_allocated() == 0, torch.accelerator.memory_allocated()
assert torch.accelerator.memory_stats()["active_bytes.all.current"] == 0
"""
    )


def test_several_training_threads_on_two_devices(in_time):
    in_time(
        """
import threading

results = {}
def train(name, device):
    side = torch.Stream(device=device)
    with side:
        torch.manual_seed(0)
        weight = torch.ones(16, 16, device=device, requires_grad=True)
        for _ in range(30):
            (weight @ weight).sum().backward()
            with torch.no_grad():
                weight -= 1e-4 * weight.grad
                weight.grad = None
    side.synchronize()
    results[name] = weight.sum().item()
threads = [threading.Thread(target=train, args=(i, f"simgpu:{i % 2}")) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(set(results.values())) == 1, results
"""
    )


def test_an_exception_inside_backward_leaves_nothing_behind(in_time):
    in_time(
        """
import gc

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on purpose")

for _ in range(5):
    x = torch.ones(1000, device="simgpu", requires_grad=True)
    loss = (Fails.apply(x * 2) * 3).sum()
    try:
        loss.backward()
    except ValueError as error:
        assert "on purpose" in str(error)
    else:
        raise AssertionError("nothing was raised")
    del x, loss
gc.collect()
assert torch.accelerator.memory_allocated() == 0
x = torch.ones(3, device="simgpu", requires_grad=True)
(x * 2).sum().backward()
assert x.grad.tolist() == [2.0] * 3
"""
    )


def test_a_forked_child_is_told_not_to_use_the_device(in_time):
    in_time(
        """
import os, warnings

warnings.simplefilter("ignore")  # forking with threads is what this is about
keep = torch.ones(3, device="simgpu", requires_grad=True)
(keep * 2).sum().backward()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        torch.ones(3, device="simgpu")
    except RuntimeError as error:
        code = 0 if "forked subprocess" in str(error) else 2
    if code == 0 and not torch.simgpu._is_in_bad_fork():
        code = 3
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (keep * 2).sum().item() == 6
"""
    )


def test_a_forked_child_can_drop_tensors_and_use_none(in_time):
    in_time(
        """
import os, warnings

warnings.simplefilter("ignore")
x, buffer = torch.ones(3, device="simgpu"), torch.ones(3).pin_memory()
pid = os.fork()
if pid == 0:
    accepted = []
    for name, use in {
        "in place": lambda: x.add_(1),
        "to host": lambda: x.cpu(),
        "to device": lambda: x.copy_(buffer, non_blocking=True),
        "within": lambda: x.clone(),
        "pin": lambda: torch.ones(3).pin_memory(),
    }.items():
        try:
            use()
            accepted.append(name)
        except RuntimeError as error:
            assert "forked subprocess" in str(error)
    del x, buffer  # must not wait for a lock that the parent had
    os._exit(len(accepted))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert x.tolist() == [1, 1, 1]
"""
    )


def test_data_loader_workers_fork_while_another_thread_uses_the_device(in_time):
    in_time(
        """
import threading, warnings
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
stop = threading.Event()
def churn():
    while not stop.is_set():
        torch.ones(100, device="simgpu").add_(1)
thread = threading.Thread(target=churn)
thread.start()
try:
    for _ in range(3):
        loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4, pin_memory=True, num_workers=2)
        total = sum(batch.to("simgpu", non_blocking=True).sum().item() for (batch,) in loader)
        assert total == 120, total
finally:
    stop.set()
    thread.join()
"""
    )
