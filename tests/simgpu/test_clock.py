"""The virtual clock: a deterministic model of a chosen card, and how much copying hides behind compute."""

import pytest
import torch

import simgpu

pytestmark = pytest.mark.full

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    simgpu.reset_clock()


def instant_card(**changes):
    figures = {
        "name": "test",
        "fp32_tflops": 10.0,
        "bf16_tflops": 40.0,
        "fp16_tflops": 80.0,
        "memory_gbps": 1000.0,
        "link_gbps": 10.0,
        "pageable_link_gbps": 5.0,
        "copy_engines": 2,
        "launch_us": 0.0,
    }
    return simgpu.Card(**(figures | changes))


def elapsed(work) -> float:
    A.synchronize()
    before = simgpu.virtual_ms()
    work()
    A.synchronize()
    return simgpu.virtual_ms() - before


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 0.2), (torch.bfloat16, 0.05), (torch.float16, 0.025)])
def test_a_matrix_product_costs_its_flops_at_the_cards_speed_for_the_type(dtype, expected):
    simgpu.set_card(instant_card(memory_gbps=1e9))
    a = torch.zeros(1000, 1000, dtype=dtype, device="simgpu")
    assert elapsed(lambda: a @ a) == pytest.approx(expected)  # 2e9 operations


def test_an_elementwise_operator_costs_its_bytes():
    simgpu.set_card(instant_card())
    a = torch.zeros(250_000, device="simgpu")
    assert elapsed(lambda: a + a) == pytest.approx(0.003)  # 3 MB at 1000 GB/s
    assert elapsed(lambda: a.add_(1)) == pytest.approx(0.002)  # read and written
    assert elapsed(lambda: a.zero_()) == pytest.approx(0.001)
    assert elapsed(lambda: torch.add(a, a, out=a[:])) == pytest.approx(0.003)


@pytest.mark.parametrize("rows", [1, 30, 1000])
def test_a_product_into_out_costs_what_the_product_costs(rows):
    simgpu.set_card(instant_card(memory_gbps=1e9))
    a, b = torch.zeros(rows, 200, device="simgpu"), torch.zeros(200, 500, device="simgpu")
    out = torch.empty(rows, 500, device="simgpu")
    expected = pytest.approx(2 * rows * 200 * 500 / 10e12 * 1e3)
    assert elapsed(lambda: a @ b) == expected
    assert elapsed(lambda: torch.mm(a, b, out=out)) == expected
    assert elapsed(lambda: torch.addmm(out, a, b, out=out)) == expected
    assert elapsed(lambda: out.addmm_(a, b)) == expected


def test_an_operator_over_a_list_is_one_launch():
    simgpu.set_card(instant_card(launch_us=4.0))
    tensors = [torch.zeros(1000, device="simgpu") for _ in range(10)]
    before = simgpu.counters().kernels
    assert elapsed(lambda: torch._foreach_add_(tensors, 1.0)) == pytest.approx(0.004 + 10 * 8000 / 1e9)
    assert simgpu.counters().kernels == before + 1
    assert all(torch.equal(tensor.cpu(), torch.ones(1000)) for tensor in tensors)


def test_the_device_says_what_its_clock_counts():
    card = instant_card(launch_us=3.0)
    simgpu.set_card(card)
    assert torch.simgpu.get_device_properties(0).clock == card


def test_a_lookup_costs_the_rows_it_takes():
    simgpu.set_card(instant_card())
    table = torch.zeros(100_000, 100, device="simgpu")
    rows = torch.zeros(1000, dtype=torch.long, device="simgpu")
    assert elapsed(lambda: torch.nn.functional.embedding(rows, table)) < 0.01


def test_copies_cost_their_bytes_over_the_link():
    simgpu.set_card(instant_card())
    pinned, pageable = (
        torch.zeros(10_000_000, dtype=torch.uint8).pin_memory(),
        torch.zeros(10_000_000, dtype=torch.uint8),
    )
    x = torch.zeros(10_000_000, dtype=torch.uint8, device="simgpu")
    assert elapsed(lambda: x.copy_(pinned, non_blocking=True)) == pytest.approx(1.0)
    assert elapsed(lambda: pinned.copy_(x, non_blocking=True)) == pytest.approx(1.0)
    assert elapsed(lambda: x.copy_(pageable)) == pytest.approx(2.0)


@pytest.mark.parametrize(("engines", "expected"), [(2, 1.0), (1, 2.0)])
def test_both_directions_at_once_need_two_copy_engines(engines, expected):
    simgpu.set_card(instant_card(copy_engines=engines))
    x = torch.zeros(10_000_000, dtype=torch.uint8, device="simgpu")
    y = torch.zeros_like(x)
    up, down = (torch.zeros(10_000_000, dtype=torch.uint8).pin_memory() for _ in range(2))
    streams = [torch.Stream(device="simgpu") for _ in range(2)]

    def both():
        with streams[0]:
            x.copy_(up, non_blocking=True)
        with streams[1]:
            down.copy_(y, non_blocking=True)

    assert elapsed(both) == pytest.approx(expected)


def test_a_copy_that_waits_does_not_hold_up_one_that_need_not():
    simgpu.set_card(instant_card())
    a = torch.zeros(5000, 1000, device="simgpu")
    w = torch.zeros(1000, 1000, device="simgpu")
    x, y = (torch.zeros(5_000_000, dtype=torch.uint8, device="simgpu") for _ in range(2))
    host = [torch.zeros(5_000_000, dtype=torch.uint8).pin_memory() for _ in range(2)]
    late, free = (torch.Stream(device="simgpu") for _ in range(2))

    def work():
        a @ w  # 1 ms
        late.wait_stream(A.current_stream())
        with late:
            x.copy_(host[0], non_blocking=True)
        with free:
            y.copy_(host[1], non_blocking=True)

    assert elapsed(work) == pytest.approx(1.5)


def prefetch(overlap: bool) -> float:
    """Six matrix products whose weights come from the host, one ahead or just in time."""
    weights = [torch.zeros(1000, 1000).pin_memory() for _ in range(6)]
    x = torch.zeros(2000, 1000, device="simgpu")
    main = A.current_stream()
    side = torch.Stream(device="simgpu") if overlap else main

    def fetch(host):
        with side:
            w = torch.empty(host.shape, device="simgpu")
            w.copy_(host, non_blocking=True)
            return w, side.record_event()

    def work():
        y = x
        ahead = fetch(weights[0])
        for i in range(6):
            w, event = ahead
            ahead = fetch(weights[i + 1]) if i < 5 else None
            main.wait_event(event)
            w.record_stream(main)
            y = y @ w

    return elapsed(work)


def test_overlap_is_seen(no_races):
    simgpu.set_card(instant_card())
    simgpu.reset_clock()
    serial = prefetch(overlap=False)  # 6 x (0.4 copy + 0.4 compute)
    report = simgpu.overlap_report()
    assert serial == pytest.approx(4.8, rel=0.02)
    assert report.to_device_ms == pytest.approx(2.4)
    assert report.compute_ms == pytest.approx(2.4, rel=0.02)
    assert report.hidden_copy_ms == pytest.approx(0.0, abs=1e-9)
    assert report.exposed_copy_ms == pytest.approx(2.4)
    simgpu.reset_clock()
    assert prefetch(overlap=True) == pytest.approx(2.8, rel=0.02)  # the first copy and six products
    report = simgpu.overlap_report()
    assert report.hidden_copy_ms == pytest.approx(2.0, rel=0.02)
    assert report.exposed_copy_ms == pytest.approx(0.4, rel=0.02)


def test_the_model_is_deterministic():
    times = set()
    for _ in range(5):
        simgpu.reset_clock()
        prefetch(overlap=True)
        times.add(simgpu.virtual_ms())
    assert len(times) == 1


def test_attention_and_convolution_have_flops():
    simgpu.set_card(instant_card(memory_gbps=1e9))
    q = torch.zeros(1, 4, 500, 50, device="simgpu", requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    forward = elapsed(lambda: attend(q, q, q))
    assert forward == pytest.approx(4 * 4 * 500 * 500 * 50 / 10e12 * 1e3, rel=0.01)
    out = attend(q, q, q)
    assert elapsed(lambda: out.backward(torch.ones_like(out))) > 2 * forward
    x, w = torch.zeros(2, 8, 32, 32, device="simgpu"), torch.zeros(16, 8, 3, 3, device="simgpu")
    expected = 2 * 2 * 16 * 30 * 30 * 8 * 9 / 10e12 * 1e3
    assert elapsed(lambda: torch.nn.functional.conv2d(x, w)) == pytest.approx(expected, rel=0.01)


def test_cards():
    assert set(simgpu.CARDS) == {"RTX 3090", "RTX 4090", "A100", "T4"}
    assert simgpu.get_card().name == "RTX 3090"
    times = {}
    a = torch.zeros(2000, 2000, device="simgpu")
    for name in simgpu.CARDS:
        simgpu.set_card(name)
        assert simgpu.get_card().name == name
        assert name in torch.simgpu.get_device_name()
        times[name] = elapsed(lambda: a @ a)
    assert times["RTX 4090"] < times["RTX 3090"] < times["A100"] < times["T4"]
    simgpu.set_card("T4")
    assert not torch.simgpu.is_bf16_supported(including_emulation=False)
    with pytest.raises(ValueError, match="unknown card 'H900'; known are RTX 3090"):
        simgpu.set_card("H900")


def test_launches_cost_host_time():
    simgpu.set_card(instant_card(launch_us=100.0))
    x = torch.zeros(4, device="simgpu")

    def launch_ten():
        for _ in range(10):
            x.add_(1)

    assert elapsed(launch_ten) == pytest.approx(1.0, rel=0.01)
