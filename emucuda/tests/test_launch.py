"""Starting programs: the child has the card, this process and its environment stay as they were."""

import os
import sys

import pytest
from conftest import run_on_the_card

import emucuda


def test_the_default_card_is_an_rtx_3090(on_the_card):
    code = """
import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps([p.name, p.total_memory, p.major, p.minor, p.multi_processor_count, torch.cuda.device_count()]))
"""
    assert on_the_card(code) == ["NVIDIA GeForce RTX 3090", 25438126080, 8, 6, 82, 1]


def test_another_card_with_other_memory_and_context(on_the_card):
    code = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(), *torch.cuda.mem_get_info(), torch.cuda.get_device_capability()]))
"""
    answer = on_the_card(code, card="h100", total_bytes=8 << 30, context_bytes=1 << 30)
    assert answer == ["NVIDIA H100 80GB HBM3", 7 << 30, 8 << 30, [9, 0]]


def test_this_process_is_left_alone():
    before = dict(os.environ)
    variables = emucuda.environment(emucuda.Settings(lag=3))
    assert dict(os.environ) == before
    assert variables["EMUCUDA_LAG"] == "3"
    assert "libcudart.so.13" in variables["LD_PRELOAD"]
    assert not emucuda.is_active()
    with pytest.raises(emucuda.NotOnTheCard, match="python -m emucuda"):
        emucuda.counters()


def test_what_was_preloaded_already_stays():
    variables = emucuda.environment(base={"LD_PRELOAD": "libother.so"})
    assert variables["LD_PRELOAD"].endswith(":libother.so")


def test_a_script_sees_its_own_name_arguments_and_folder(tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 7")
    script = tmp_path / "program.py"
    script.write_text("import sys, neighbour; print(sys.argv[1:], sys.path[0], neighbour.value); sys.exit(5)")
    done = emucuda.run([str(script), "a", "-m"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, f"['a', '-m'] {tmp_path} 7\n"), done.stderr


def test_a_module_runs_as_python_would_run_it():
    done = emucuda.run(["-m", "json.tool", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage:" in done.stdout


def test_the_command_line(tmp_path):
    import subprocess

    command = [sys.executable, "-m", "emucuda"]
    done = subprocess.run([*command, "--lag", "2", "--races", "-c", "import os; print(os.environ['EMUCUDA_LAG'])"],
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    done = subprocess.run([*command, "--card", "abacus", "-c", ""], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "no card named 'abacus'" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "There is nothing to run" in done.stderr


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="not less than the card's"):
        emucuda.Settings(total_bytes=100, context_bytes=100)
    with pytest.raises(ValueError, match="cannot be negative"):
        emucuda.Settings(lag=-1)


def test_events_are_behind_by_the_lag(on_the_card):
    code = """
import json, torch
x = torch.empty(8, device="cuda")
event = torch.cuda.Event()
answers = []
x.add_(1); event.record(); answers.append(event.query())
for _ in range(6): x.add_(1)
answers.append(event.query())
event.record(); answers.append(event.query()); event.synchronize(); answers.append(event.query())
print(json.dumps(answers))
"""
    assert on_the_card(code, lag=4) == [False, True, False, True]
    assert on_the_card(code) == [True, True, True, True]


def test_cuda_starts_without_a_fault_handler():
    done = run_on_the_card("import os, torch; torch.cuda.init()", env={"PYTHONFAULTHANDLER": "0"})
    assert done.returncode == 0, done.stderr


def test_copies_above_the_limit_are_counted_and_not_made(on_the_card):
    code = """
import json, torch, emucuda
here = torch.ones(1000)  # kept, so that what comes back is not put into its memory
small, large = torch.ones(4).cuda(), here.cuda()
print(json.dumps([small.sum().numel(), small.cpu()[0].item(), large.cpu()[0].item() == 1.0,
                  emucuda.counters().host_to_device_bytes]))
"""
    assert on_the_card(code, copy_limit_bytes=64) == [1, 1.0, False, 4016]


@pytest.mark.parametrize("expandable", [False, True])
def test_what_the_allocator_reserves_is_what_the_card_has_given(on_the_card, expandable):
    code = """
import json, torch, emucuda
def now(): return [torch.cuda.memory_reserved(), emucuda.counters().used_bytes]
blocks = [torch.empty(7 << 20, dtype=torch.uint8, device="cuda") for _ in range(9)]
x = torch.arange(1000.0).cuda()
answers = [now(), x.cpu()[999].item()]
del blocks[::2], x
torch.cuda.empty_cache()
answers.append(now())
del blocks
torch.cuda.empty_cache()
print(json.dumps([*answers, now()]))
"""
    mib = 1 << 20
    before, value, half, after = on_the_card(code, env={"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"})
    assert value == 999.0
    # Packed by twos into segments of 20 MiB, or one segment that grows by pages of 20 MiB; and 2 MiB for the small one.
    assert before == [82 * mib if expandable else 102 * mib] * 2
    assert half[0] == half[1] < before[0]
    assert after == [0, 0]
