"""Attempts to break it: odd types, empty tensors, views, resizes, out=, aliasing and strange lifetimes."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F

import simgpu

pytestmark = pytest.mark.full

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks, no_races):
    torch.manual_seed(0)


ODD_TYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@pytest.mark.parametrize("dtype", ODD_TYPES, ids=str)
def test_every_type_travels_there_and_back(dtype):
    host = torch.arange(7).to(torch.float32).to(dtype)
    for pinned in (False, True):
        source = host.pin_memory() if pinned else host
        back = source.to("simgpu", non_blocking=True).to("cpu")
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), host.view(torch.uint8))
    widest = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(host.to("simgpu").to(widest).cpu(), host.to(widest))


def test_copies_that_also_convert_and_broadcast():
    x = torch.zeros(3, 4, dtype=torch.float64, device="simgpu")
    x.copy_(torch.arange(4, dtype=torch.int16).pin_memory(), non_blocking=True)
    assert x.tolist() == [[0, 1, 2, 3]] * 3
    host = torch.empty(4, 3, dtype=torch.bfloat16, pin_memory=True)
    host.t().copy_(x, non_blocking=True)  # into a transposed view, with another type
    A.synchronize()
    assert host.t().tolist() == [[0, 1, 2, 3]] * 3
    del x


def test_strided_copies_touch_only_their_elements():
    host = torch.zeros(4, 6, pin_memory=True)
    x = torch.ones(4, 3, device="simgpu")
    host[:, ::2].copy_(x, non_blocking=True)
    A.synchronize()
    assert host.tolist() == [[1, 0, 1, 0, 1, 0]] * 4
    y = torch.zeros(4, 6, device="simgpu")
    y[:, 1::2].copy_(host[:, ::2], non_blocking=True)
    assert y.cpu().tolist() == [[0, 1, 0, 1, 0, 1]] * 4
    del x, y, host


def test_empty_tensors_everywhere():
    before = A.memory_allocated()
    e = torch.empty(0, 3, device="simgpu", requires_grad=True)
    assert (e @ torch.ones(3, 2, device="simgpu")).shape == (0, 2)
    assert e.sum().item() == 0
    (e * 2).sum().backward()
    assert e.grad.shape == (0, 3)
    assert torch.cat([e, e]).shape == (0, 3)
    assert e.cpu().shape == (0, 3)
    torch.empty(0).pin_memory().to("simgpu", non_blocking=True)
    torch.empty(0, pin_memory=True).copy_(torch.empty(0, device="simgpu"), non_blocking=True)
    A.synchronize()
    F.dropout(e, 0.5)
    assert F.scaled_dot_product_attention(*[torch.zeros(1, 2, 0, 4, device="simgpu")] * 3).shape == (
        1,
        2,
        0,
        4,
    )
    torch._foreach_add_([e.detach()], 1.0)
    del e
    gc.collect()
    assert A.memory_allocated() == before


def test_resize_keeps_what_was_there():
    x = torch.arange(4.0, device="simgpu")
    x.resize_(2, 3)
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]
    x.resize_(2)
    assert x.tolist() == [0, 1]
    view = x[1:]
    x.untyped_storage().resize_(4096)
    assert view.tolist() == [1.0]
    x.resize_as_(torch.empty(5, 5, device="simgpu"))
    assert x.shape == (5, 5)
    del x, view


@pytest.mark.parametrize("size", [(0,), (3,), (10,)])
def test_out_variants_resize_and_alias(size):
    out = torch.empty(size, device="simgpu")
    result = F.relu
    a = torch.tensor([-1.0, 0.0, 2.0], device="simgpu")
    if size == (10,):
        out.resize_(0)
    result = torch.add(a, 1, out=out)
    assert result is out
    assert out.tolist() == [0, 1, 3]
    torch.mul(out, out, out=out)
    assert out.tolist() == [0, 1, 9]
    values, indices = torch.empty(0, device="simgpu"), torch.empty(0, dtype=torch.long, device="simgpu")
    torch.sort(out, descending=True, out=(values, indices))
    assert values.tolist() == [9, 1, 0]
    assert indices.tolist() == [2, 1, 0]
    base = torch.zeros(6, device="simgpu")
    torch.add(a, 1, out=base[::2])
    assert base.tolist() == [0, 0, 1, 0, 3, 0]
    del out, result, a, values, indices, base


def test_views_of_views_write_through():
    base = torch.zeros(4, 4, device="simgpu")
    base.t()[1:, 2].add_(1)
    base.diagonal().mul_(5).add_(2)
    base.unfold(0, 2, 2)[0, 0].fill_(7)
    expected = torch.zeros(4, 4)
    expected.t()[1:, 2].add_(1)
    expected.diagonal().mul_(5).add_(2)
    expected.unfold(0, 2, 2)[0, 0].fill_(7)
    assert torch.equal(base.cpu(), expected)
    del base


def test_overlapping_in_place_writes_are_refused_as_on_the_cpu():
    x = torch.zeros(1, device="simgpu").expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.add_(1)
    del x


def test_a_storage_outlives_its_tensor_and_can_be_adopted_again():
    before = A.memory_allocated()
    x = torch.arange(4.0, device="simgpu")
    storage = x.untyped_storage()
    del x
    assert A.memory_allocated() - before == 512
    y = torch.empty(0, device="simgpu").set_(storage)
    assert y.tolist() == [0, 1, 2, 3]
    z = torch.empty(0, device="simgpu").set_(storage, 1, (2,), (1,))
    assert z.tolist() == [1, 2]
    del storage, y, z
    assert A.memory_allocated() == before
    with pytest.raises(RuntimeError, match=r"storage on simgpu|expected to be on|device"):
        torch.empty(0, device="simgpu").set_(torch.ones(3).untyped_storage())


def test_swapping_and_assigning_data_frees_once():
    before = A.memory_allocated()
    a, b = torch.ones(1000, device="simgpu"), torch.zeros(2000, device="simgpu")
    a.data, b.data = b.data, a.data
    assert (a.shape, b.shape) == ((2000,), (1000,))
    a.data = a.data
    a.set_(b)
    del a, b
    gc.collect()
    assert A.memory_allocated() == before


def test_a_tensor_freed_with_its_copy_still_pending_on_its_own_stream():
    before = A.memory_allocated()
    host = torch.arange(1000.0).pin_memory()
    x = torch.empty(1000, device="simgpu")
    x.copy_(host, non_blocking=True)
    out = torch.empty(1000, pin_memory=True)
    out.copy_(x, non_blocking=True)
    del x, host  # stream order makes this safe
    assert A.memory_allocated() == before
    A.synchronize()
    assert out[-1].item() == 999
    del out


def test_a_pinned_buffer_dropped_with_its_copy_pending_stays_until_it_ran():
    in_use = simgpu.pinned_stats().requested_bytes
    x = torch.zeros(1000, device="simgpu")
    x.copy_(torch.arange(1000.0).pin_memory(), non_blocking=True)
    assert simgpu.pinned_stats().requested_bytes > in_use
    assert x[-1].item() == 999
    del x
    A.synchronize()
    assert simgpu.pinned_stats().requested_bytes == in_use


@pytest.mark.parametrize("to_device", [True, False])
def test_a_pinned_buffer_resized_with_its_copy_pending_stays_until_it_ran(to_device):
    in_use = simgpu.pinned_stats().requested_bytes
    x, host = torch.zeros(1000, device="simgpu"), torch.empty(1000, pin_memory=True)
    host.fill_(3)
    (x.copy_(host, non_blocking=True) if to_device else host.copy_(x, non_blocking=True))
    host.untyped_storage().resize_(0)
    assert simgpu.pinned_stats().requested_bytes == in_use + 4000
    A.synchronize()
    assert simgpu.pinned_stats().requested_bytes == in_use
    assert x.unique().tolist() == [3 if to_device else 0]


def test_results_that_are_operands():
    x = torch.ones(4, device="simgpu")
    assert x.contiguous() is x
    assert x.to("simgpu") is x
    assert x.expand(2, 4).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.broadcast_tensors(x, x)[0].data_ptr() == x.data_ptr()
    assert x.view_as(x).data_ptr() == x.data_ptr()
    del x


def test_host_scalars_are_never_taken_over():
    scalar = torch.tensor(2.0)
    x = torch.ones(3, device="simgpu")
    for _ in range(3):
        x.add_(scalar)
        x + scalar
    assert scalar.item() == 2.0
    assert scalar.device.type == "cpu"
    del x


def test_failing_operators_leave_nothing_behind():
    x = torch.ones(3, 4, device="simgpu")
    before = A.memory_allocated()
    for operation in (
        lambda: x @ x,
        lambda: x.view(5),
        lambda: torch.cat([x, x.t()]),
        lambda: x[7],
        lambda: F.cross_entropy(x, torch.tensor([0, 9, 1], device="simgpu")),
        lambda: torch.linalg.cholesky(-torch.eye(3, device="simgpu")),
        lambda: x.index_select(0, torch.tensor([9], device="simgpu")),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            operation()
    gc.collect()
    assert A.memory_allocated() == before


UNRAISED = ("_foreach_zero_", "_foreach_lerp_")
"""Operators over lists after which autograd takes tensors for unchanged, in PyTorch's CUDA build, too."""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_foreach_add_", (1.0,)),
        ("_foreach_mul_", ([2.0, 3.0],)),
        ("_foreach_sqrt_", ()),
        ("_foreach_copy_", ("list",)),
        ("_foreach_addcdiv_", ("list", "list", 1.0)),
        ("_foreach_lerp_", ("list", 0.5)),
        ("_foreach_zero_", ()),
    ],
)
def test_operators_over_lists_raise_versions_as_on_a_card(name, arguments):
    tensors = [torch.ones(3, device="simgpu"), torch.ones(2, device="simgpu")]
    others = [torch.full_like(tensor, 2.0) for tensor in tensors]
    getattr(torch, name)(tensors, *(others if each == "list" else each for each in arguments))
    assert [tensor._version for tensor in tensors] == [0 if name in UNRAISED else 1] * 2


def test_operators_over_lists_change_inference_tensors():
    with torch.inference_mode():
        tensors = [torch.ones(3, device="simgpu")]
        torch._foreach_add_(tensors, 1.0)
        assert tensors[0].tolist() == [2.0] * 3


def test_tensor_lists_and_foreach_with_mixed_shapes():
    xs = [torch.ones(n, device="simgpu") for n in (0, 1, 700)]
    ys = torch._foreach_add(xs, xs)
    torch._foreach_mul_(ys, 3.0)
    assert [y.sum().item() for y in ys] == [0, 6, 4200]
    norms = torch._foreach_norm(ys)
    assert norms[1].item() == 6
    torch._foreach_copy_(xs, ys)
    assert xs[2].sum().item() == 4200
    del xs, ys, norms


def test_the_zero_tensor_of_forward_mode_differentiation():
    with warnings.catch_warnings(), torch.autograd.forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts its own formulas on first use
        x = torch.autograd.forward_ad.make_dual(torch.ones(3, device="simgpu"), torch.full((3,), 2.0, device="simgpu"))
        y = (x * x).sum()
        assert torch.autograd.forward_ad.unpack_dual(y).tangent.item() == 12
    del x, y


def test_hooks_that_raise_in_forward_leave_the_device_usable():
    layer = torch.nn.Linear(4, 4).to("simgpu")

    def explode(*_):
        raise KeyError("on purpose")

    handle = layer.register_forward_hook(explode)
    with pytest.raises(KeyError):
        layer(torch.ones(2, 4, device="simgpu"))
    handle.remove()
    layer(torch.ones(2, 4, device="simgpu")).sum().backward()
    del layer, handle


def test_very_many_small_tensors():
    before = A.memory_allocated()
    tensors = [torch.ones(1, device="simgpu") for _ in range(5000)]
    assert A.memory_allocated() - before == 5000 * 512
    assert torch.stack(tensors).sum().item() == 5000
    del tensors
    assert A.memory_allocated() == before


def test_scalar_conversions_and_comparisons():
    x = torch.tensor([1.5, 2.5], device="simgpu")
    assert float(x[0]) == 1.5
    assert int(x[1]) == 2
    assert bool((x > 1).all())
    assert torch.equal(x, x.clone())
    assert torch.allclose(x, x + 1e-9)
    assert x.max().item() == 2.5
    assert 2.5 in x
    del x
