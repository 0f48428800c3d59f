"""The pytest plugin: it costs nothing until it is used, and its fixtures do what they say."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]


def test_loading_the_plugin_imports_neither_torch_nor_simgpu():
    code = "import sys, simgpu_pytest; sys.exit('torch' in sys.modules or 'simgpu' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def outcomes(pytester):
    def run(code: str) -> dict[str, int]:
        pytester.makepyfile(code)
        found = pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()
        return {name: count for name, count in found.items() if not name.startswith("warning")}

    return run


def test_no_races_fails_a_test_with_a_race(outcomes):
    assert outcomes(
        """
        import torch
        def race():
            x = torch.ones(10, device="simgpu") * 2
            with torch.Stream(device="simgpu"):
                x.add_(1)
        def test_at_the_end(no_races):
            race()
        def test_when_called(no_races):
            race()
            no_races()
        def test_in_a_block(no_races):
            with no_races:
                race()
        def test_without_a_race(no_races):
            torch.ones(10, device="simgpu").add_(1)
            no_races()
            with no_races():
                pass
        """
    ) == {"passed": 2, "failed": 2, "errors": 1}


def test_cap_holds_for_one_test_only(outcomes):
    assert outcomes(
        """
        import pytest, simgpu, torch
        def test_capped(cap, simgpu_device):
            cap(1 << 20)
            cap(1 << 19, device=1)
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 20, device=simgpu_device)
        def test_not_capped(simgpu_device):
            assert simgpu.get_cap() == simgpu.get_cap(1) == 1 << 40
            assert str(simgpu_device) == "simgpu:0"
        """
    ) == {"passed": 2}


def test_what_a_test_changes_is_put_back(outcomes):
    assert outcomes(
        """
        import simgpu, torch
        def test_changes_everything(simgpu_device):
            simgpu.set_card("T4")
            simgpu.set_schedule_seed(5)
            simgpu.set_race_mode("raise")
            simgpu.set_poison(False)
            simgpu.set_defer_copies(False)
            simgpu.fail_allocation(1).__enter__()
            torch.accelerator.set_device_index(1)
        def test_sees_defaults(simgpu_device):
            assert simgpu.get_card().name == "RTX 3090"
            assert torch.accelerator.current_device_index() == 0
            assert torch.empty(10, device="simgpu").isnan().all()
            host = torch.zeros(3, pin_memory=True)
            host.copy_(torch.ones(3, device="simgpu"), non_blocking=True)
            assert host.isnan().all()
            assert simgpu.take_reports() == []
        """
    ) == {"passed": 2}


def test_no_leaks_fails_a_test_that_leaves_bytes(outcomes):
    assert outcomes(
        """
        import simgpu_pytest
        import torch
        simgpu_pytest.LETS_GO_S = 0.1
        kept = []
        def test_leaks(no_leaks):
            kept.append(torch.ones(10, device="simgpu"))
        def test_leaks_pinned(no_leaks):
            kept.append(torch.ones(10).pin_memory())
        def test_is_clean(no_leaks):
            torch.ones(10, device="simgpu")
        """
    ) == {"passed": 3, "errors": 2}
