"""What ordinary PyTorch code does with a device: it must work here as on a card."""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, TensorDataset

import simgpu

pytestmark = pytest.mark.full

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_races):
    torch.manual_seed(0)


def test_the_device_is_the_accelerator():
    assert A.is_available()
    assert A.current_accelerator() == torch.device("simgpu")
    assert A.device_count() == 2
    assert A.current_device_index() == 0
    assert A.get_device_capability()
    assert torch.get_device_module("simgpu") is torch.simgpu
    assert torch.get_device_module() is torch.simgpu


def test_the_device_module_has_the_usual_names():
    module = torch.simgpu
    assert module.is_available()
    assert module.is_initialized()
    assert module._initialized
    assert module.device_count() == 2
    assert module.current_device() == 0
    assert module.get_device_name().startswith("simgpu")
    assert module.get_device_properties().total_memory == simgpu.get_cap()
    assert module.mem_get_info()[1] == simgpu.get_cap()
    assert module.memory_allocated() == A.memory_allocated()
    assert module.max_memory_allocated() >= module.memory_allocated()
    assert module.memory_reserved() >= module.memory_allocated()
    assert module.max_memory_reserved() >= module.memory_reserved()
    assert module.memory_stats()["allocated_bytes.all.current"] == module.memory_allocated()
    assert module.get_amp_supported_dtype() == [torch.bfloat16, torch.float16]
    assert module.is_bf16_supported()
    module.reset_peak_memory_stats()
    module.reset_accumulated_memory_stats()
    module.empty_cache()
    module.synchronize()
    stream = module.Stream()
    with module.stream(stream):
        assert module.current_stream() == stream
        module.Event().record()
    with module.device(1):
        assert module.current_device() == 1
    with module.device_of(torch.ones(1, device="simgpu:1")):
        assert module.current_device() == 1
    assert module.current_device() == 0


def test_mixed_devices_are_refused():
    x, host = torch.ones(3, device="simgpu"), torch.ones(3)
    for operation in (
        lambda: x + host,
        lambda: host + x,
        lambda: torch.cat([x, host]),
        lambda: F.linear(x, torch.ones(2, 3)),
        lambda: host.index_select(0, torch.tensor([0], device="simgpu")),
        lambda: x.index_select(0, torch.tensor([0])),
        lambda: host[torch.tensor([0], device="simgpu")],
        lambda: torch.where(x > 0, x, host),
        lambda: F.embedding(torch.tensor([0]), torch.ones(2, 3, device="simgpu")),
        lambda: F.cross_entropy(x.unsqueeze(0), torch.tensor([0])),
        lambda: x.add_(host),
        lambda: torch.tensor(1.0).add_(torch.tensor(1.0, device="simgpu")),
        lambda: x.index_put_((torch.tensor([0]),), host[:1]),
        lambda: torch.ops.aten.native_dropout_backward(x, host > 0, 2.0),
    ):
        with pytest.raises((RuntimeError, ValueError), match=r"same device|different device|indices should be"):
            operation()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_refuses_operands_of_another_device(dropout):
    q = torch.ones(2, 2, 8, 8, device="simgpu")
    for operands in (
        (q, q, q, torch.zeros(8, 8)),
        (q, q, q, torch.ones(8, 8, dtype=torch.bool)),
        (q, q.cpu(), q, None),
        (q, q, q.to("simgpu:1"), None),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            F.scaled_dot_product_attention(*operands, dropout_p=dropout)


def test_scalars_and_indices_on_the_cpu_are_allowed_as_on_a_card():
    x = torch.arange(6.0, device="simgpu")
    assert (x + torch.tensor(2.0)).tolist() == [2, 3, 4, 5, 6, 7]
    assert x[torch.tensor([1, 3])].tolist() == [1, 3]
    x[torch.tensor([0, 2])] = 9.0
    assert x.tolist() == [9, 1, 9, 3, 4, 5]
    assert torch.where(x > 4, x, torch.tensor(0.0)).tolist() == [9, 0, 9, 0, 0, 5]


def test_convolution_network_equals_the_cpus():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
    )
    x = torch.randn(2, 4, 8, 8)
    twin = copy.deepcopy(net).to("simgpu")
    for inputs, model in ((x, net), (x.to("simgpu"), twin)):
        model(inputs).square().sum().backward()
    assert torch.equal(net(x), twin(x.to("simgpu")).cpu())
    for want, have in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(have.grad.cpu(), want.grad)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_convolutions_of_every_dimension(dimension):
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimension - 1](3, 4, 3, padding=1)
    x = torch.randn(2, 3, *[6] * dimension)
    want = convolution(x)
    assert torch.equal(convolution.to("simgpu")(x.to("simgpu")).cpu(), want)


def test_data_dependent_operators():
    x = torch.tensor([3.0, -1.0, 2.0, -1.0], device="simgpu")
    assert x.sort()[0].tolist() == [-1, -1, 2, 3]
    assert torch.unique(x).tolist() == [-1, 2, 3]
    assert x[x > 0].tolist() == [3, 2]
    assert x.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert torch.randperm(8, device="simgpu").sum().item() == 28
    assert torch.arange(5, device="simgpu").tolist() == [0, 1, 2, 3, 4]
    assert torch.multinomial(x.softmax(0), 2).shape == (2,)
    assert torch.tril(torch.ones(3, 3, device="simgpu")).sum().item() == 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_histograms_of_integers_as_on_a_card(dtype):
    experts = torch.randint(0, 60, (1000,))
    counted = torch.histc(experts.to("simgpu", dtype), bins=60, min=0, max=59)
    assert counted.dtype == dtype
    assert torch.equal(counted.cpu().long(), torch.bincount(experts, minlength=60))


def test_save_and_load_keep_the_device_and_can_change_it():
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(3, device="simgpu:1"), "b": torch.ones(2, device="simgpu").t()}, buffer)
    for target in (None, "cpu", "simgpu:0"):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=target)
        assert loaded["a"].device == torch.device(target or "simgpu:1")
        assert loaded["a"].tolist() == [0, 1, 2]


def test_state_dicts_travel():
    layer = nn.Linear(3, 3).to("simgpu")
    twin = nn.Linear(3, 3)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight.cpu())
    layer.load_state_dict({name: t * 2 for name, t in twin.state_dict().items()})
    assert torch.equal(layer.weight.cpu(), twin.weight * 2)


def test_deepcopy_and_pickle_keep_values_and_device():
    base = torch.arange(6.0, device="simgpu")
    for twin in (copy.deepcopy((base, base[2:])), pickle.loads(pickle.dumps((base, base[2:])))):
        assert twin[0].device == base.device
        assert twin[1].tolist() == [2, 3, 4, 5]
        twin[0][2] = 9
    assert base[2].item() == 2
    layer = copy.deepcopy(nn.Linear(3, 3).to("simgpu"))
    assert layer.weight.device.type == "simgpu"
    assert layer.weight.requires_grad


def test_printing():
    assert "device='simgpu:0'" in repr(torch.ones(3, device="simgpu"))
    assert "simgpu" in repr(nn.Parameter(torch.ones(2, 2, device="simgpu")))


def test_numpy_is_refused_and_dlpack_does_not_pretend():
    with pytest.raises(TypeError, match="can't convert simgpu"):
        torch.ones(3, device="simgpu").numpy()


def test_module_to_keeps_the_parameter_objects():
    layer = nn.Linear(4, 4)
    weight = layer.weight
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for target in ("simgpu", torch.bfloat16, torch.float32, "simgpu:1", "cpu"):
        layer.to(target)
        assert layer.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight


def test_module_to_with_swapped_parameters():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = nn.Linear(4, 4)
        weight = layer.weight
        layer.to("simgpu")
        assert layer.weight is weight
        assert weight.device.type == "simgpu"
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_methods_generated_for_the_backend():
    assert torch.ones(2).simgpu().is_simgpu
    assert not torch.ones(2).is_simgpu
    assert nn.Linear(2, 2).simgpu().weight.is_simgpu
    assert torch.ones(2).untyped_storage().simgpu().device.type == "simgpu"


def test_meta_modules_and_device_contexts():
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    layer.to_empty(device="simgpu")
    assert layer.weight.isnan().all()
    with torch.device("simgpu"):
        assert nn.Linear(4, 4).weight.device.type == "simgpu"
        assert torch.zeros(3).device.type == "simgpu"


def test_random_numbers_are_seeded_apart_from_the_cpus():
    torch.manual_seed(3)
    host = torch.rand(4)
    first = torch.rand(4, device="simgpu")
    torch.manual_seed(3)
    second = torch.rand(4, device="simgpu")
    assert torch.equal(first, second)
    assert torch.equal(host, torch.rand(4))  # the device did not draw from the CPU's generator
    F.dropout(torch.ones(100, device="simgpu"))
    torch.manual_seed(3)
    torch.rand(4)
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.rand(4)
    nn.init.normal_(torch.empty(7, device="simgpu"))
    assert torch.equal(after, torch.rand(1))


def test_generators():
    generator = torch.Generator(device="simgpu").manual_seed(5)
    assert generator.device.type == "simgpu"
    first = torch.randn(3, device="simgpu", generator=generator)
    state = generator.get_state()
    second = torch.randn(3, device="simgpu", generator=generator)
    generator.set_state(state)
    assert torch.equal(second, torch.randn(3, device="simgpu", generator=generator))
    assert torch.equal(first, torch.randn(3, device="simgpu", generator=torch.Generator("simgpu").manual_seed(5)))
    assert generator.clone_state().initial_seed() == 5


def test_generators_of_another_device_are_refused():
    with pytest.raises(RuntimeError, match="'simgpu:0' generator device but found 'cpu'"):
        torch.randn(3, device="simgpu", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="found 'simgpu:1'"):
        torch.empty(3, device="simgpu").normal_(generator=torch.Generator("simgpu:1"))


def test_generators_can_be_copied():
    generator = torch.Generator(device="simgpu").manual_seed(5)
    torch.randn(3, device="simgpu", generator=generator)
    copy_of_it = copy.deepcopy(generator)
    assert copy_of_it.device == generator.device
    first = torch.randn(3, device="simgpu", generator=generator)
    assert torch.equal(first, torch.randn(3, device="simgpu", generator=copy_of_it))


def test_fork_rng_and_state_functions():
    torch.simgpu.manual_seed_all(1)
    assert torch.simgpu.initial_seed() == 1
    states = torch.simgpu.get_rng_state_all()
    with torch.random.fork_rng([0], device_type="simgpu"):
        first = torch.rand(3, device="simgpu")
    assert torch.equal(first, torch.rand(3, device="simgpu"))
    torch.simgpu.set_rng_state_all(states)
    assert torch.equal(first, torch.rand(3, device="simgpu"))
    torch.manual_seed(2**63 + 5)  # seeds of 64 bits


def test_data_loader_pins():
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.cat([batch.to("simgpu", non_blocking=True) for batch in batches]).sum().item() == 28


def test_data_loader_workers_pin():
    loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4, pin_memory=True, num_workers=1)
    assert [batch.is_pinned() for (batch,) in loader] == [True] * 4


def test_autocast_lists():
    a = torch.ones(4, 4, device="simgpu")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("simgpu", dtype=dtype):
            assert (a @ a).dtype == dtype
            assert F.linear(a, a).dtype == dtype
            assert F.conv1d(a.unsqueeze(0), a.unsqueeze(-1)).dtype == dtype
            assert a.to(dtype).softmax(-1).dtype == torch.float32
            assert F.layer_norm(a.to(dtype), (4,)).dtype == torch.float32
            assert torch.cat([a, a.to(dtype)]).dtype == torch.float32
            with torch.autocast("simgpu", enabled=False):
                assert (a @ a).dtype == torch.float32
            with pytest.raises(RuntimeError, match="unsafe to autocast"):  # as on a card
                F.binary_cross_entropy(a, a)


def test_selective_checkpoint():
    w = torch.randn(16, 16, device="simgpu", requires_grad=True)
    x = torch.randn(4, 16, device="simgpu")

    def run(x):
        return (torch.mm(x, w).relu() @ w).sum()

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    checkpoint(run, x, use_reentrant=False, context_fn=contexts).backward()
    gradient, w.grad = w.grad, None
    run(x).backward()
    assert torch.equal(gradient, w.grad)


def test_dispatch_modes_see_the_operators_and_not_the_innards():
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    host, x = torch.ones(3).pin_memory(), torch.empty(3, device="simgpu")
    x.copy_(host, non_blocking=True)
    with Names() as mode:
        A.synchronize()  # runs the deferred copy
    assert mode.names == []
    with Names() as mode:
        F.layer_norm(torch.ones(2, 4, device="simgpu"), (4,))
    assert mode.names == ["aten.ones.default", "aten.native_layer_norm.default"]


def test_custom_operators_run_on_their_cpu_kernel():
    @torch.library.custom_op("simgpu_tests::halve", mutates_args=("log",), device_types="cpu")
    def halve(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
        assert x.device.type == "cpu"
        log.add_(1)
        return x / 2

    log = torch.zeros(1, device="simgpu")
    y = halve(torch.ones(4, device="simgpu"), log)
    assert y.device.type == "simgpu"
    assert y.tolist() == [0.5] * 4
    assert log.item() == 1


def test_custom_operators_can_be_taken_back_and_defined_anew(run_python):
    run_python(
        """
        def store(x, y, z, k): y.copy_(x * z + k)

        def call(*arguments): return torch._C._jit_get_operation("simgpu_tests::changing")[0](*arguments)

        one = torch.ones(2, device="simgpu")
        for _ in range(20):
            library = torch.library.Library("simgpu_tests", "FRAGMENT")
            library.define("changing(Tensor x) -> Tensor")
            library.impl("changing", lambda x: x * 2, "CPU")
            assert call(one).tolist() == [2, 2]
            library._destroy()
            library = torch.library.Library("simgpu_tests", "FRAGMENT")
            library.define("changing(Tensor x, Tensor(a!) y, Tensor z, int k) -> ()")
            library.impl("changing", store, "CPU")
            y = torch.zeros(2, device="simgpu")
            call(one, y, one, 3)
            assert y.tolist() == [4, 4]
            library._destroy()
        """
    )


def test_eight_bit_blockwise_state():
    x = torch.randn(4096, device="simgpu")
    blocks = x.view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale).round().clamp_(-127, 127).to(torch.int8)
    assert ((codes.float() * scale).view(-1) - x).abs().max().item() < 0.05
    assert codes.untyped_storage().nbytes() == 4096


def test_reinterpreting_views():
    x = torch.ones(4, device="simgpu")
    assert x.view(torch.int32)[0].item() == 0x3F800000
    assert x.to(torch.bfloat16).view(torch.uint8).shape == (8,)
    assert torch.view_as_real(torch.ones(2, dtype=torch.complex64, device="simgpu")).shape == (2, 2)


def test_conjugate_and_negative_views():
    x = torch.tensor([1 + 2j, 3 - 4j], device="simgpu")
    assert x.conj().cpu().tolist() == [1 - 2j, 3 + 4j]
    assert x.conj().imag.tolist() == [-2, 4]
    assert x.conj().clone().tolist() == [1 - 2j, 3 + 4j]
    y = torch.zeros(2, dtype=torch.complex64)
    y.copy_(x.conj())
    assert y.tolist() == [1 - 2j, 3 + 4j]
    host = torch.zeros(2, dtype=torch.complex64, pin_memory=True)
    host.copy_(x.conj(), non_blocking=True)
    A.synchronize()
    assert host.tolist() == [1 - 2j, 3 + 4j]


def test_in_place_writes_are_noticed_by_autograd():
    a = torch.ones(3, device="simgpu", requires_grad=True)
    b = a * 2
    c = b * b
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        c.sum().backward()
    x = torch.zeros(4, 4, device="simgpu", requires_grad=True)
    y = x * 1
    y[0].mul_(3)
    y.view(-1)[5] = 7
    y.sum().backward()
    assert x.grad.sum().item() == 4 * 3 + 12 - 1


def test_optimizer_in_backward():
    layer = nn.Linear(16, 16).to("simgpu")
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in layer.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 16, device="simgpu")).sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    assert not torch.equal(before, layer.weight)


def test_parameter_streaming_by_storage_resize():
    layer = nn.Linear(64, 64, bias=False).to("simgpu")
    host = layer.weight.detach().cpu().pin_memory()
    x = torch.ones(2, 64, device="simgpu")
    expected = layer(x).detach().clone()
    before = A.memory_allocated()
    layer.weight.untyped_storage().resize_(0)
    assert before - A.memory_allocated() == 64 * 64 * 4
    side = torch.Stream(device="simgpu")
    side.wait_stream(A.current_stream())
    with side:
        layer.weight.untyped_storage().resize_(64 * 64 * 4)
        layer.weight.data.copy_(host, non_blocking=True)
    A.current_stream().wait_stream(side)
    assert torch.equal(layer(x), expected)
    layer.weight.record_stream(A.current_stream())


def test_encoder_layer_in_evaluation_mode():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        want = layer(x)
        torch.testing.assert_close(layer.to("simgpu")(x.to("simgpu")).cpu(), want)


def test_compile_with_an_eager_backend(run_python):
    run_python(
        """
        function = torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager")
        x = torch.ones(4, device="simgpu", requires_grad=True)
        function(x).backward()
        assert x.grad.tolist() == [2.0] * 4
        """,
        PYTHONWARNINGS="default",
    )


def test_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.ones(100, device="simgpu") + 1
    assert any(event.key == "aten::add" for event in profile.key_averages())


def test_save_on_cpu_pins_only_when_told_the_device():
    w = torch.randn(8, 8, device="simgpu", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="simgpu"):
        loss = (w @ w).relu().sum()
    loss.backward()
    gradient, w.grad = w.grad, None
    (w @ w).relu().sum().backward()
    assert torch.equal(gradient, w.grad)


def test_functional_transforms_and_double_backward():
    x = torch.randn(3, device="simgpu", dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: (x.sin() * x).sum(), (x,))
    assert torch.func.vmap(lambda row: row.sum())(torch.ones(3, 4, device="simgpu")).tolist() == [4.0] * 3
    assert torch.func.grad(lambda x: (x**2).sum())(torch.ones(3, device="simgpu")).tolist() == [2.0] * 3


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(3, device="simgpu")
        y = (x * 2).add_(1)
        assert y.view(3, 1).t().tolist() == [[3.0] * 3]
        assert y.cpu().tolist() == [3.0] * 3


def test_sparse_tensors_are_refused_with_a_reason():
    with pytest.raises((NotImplementedError, RuntimeError), match=r"simgpu|sparse|Sparse"):
        torch.eye(3, device="simgpu").to_sparse()


def product_of_wide(bias, left, right):
    return torch.addmm(bias.float(), left.float(), right.float()).to(bias.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_halves_are_summed_in_32_bits_and_rounded_once(dtype):
    """As on a card; the CPU's own products of halves are not all the same, and can take a hundred times as long."""
    bias, left, right = torch.randn(256).to(dtype), torch.randn(256, 700).to(dtype), torch.randn(700, 256).to(dtype)
    assert not torch.equal(torch.addmm(bias, left, right), product_of_wide(bias, left, right))  # else nothing is shown
    wide = product_of_wide(bias, left, right)
    on_device = [t.to("simgpu").requires_grad_() for t in (bias, left, right)]
    before = A.memory_allocated()
    product = torch.addmm(*on_device)
    assert A.memory_allocated() - before == 256 * 256 * 2  # nothing in 32 bits on the device
    assert product.dtype == dtype
    assert torch.equal(product.cpu(), wide)
    product.backward(torch.ones_like(product))
    ones = torch.ones(256, 256)
    assert torch.equal(on_device[1].grad.cpu(), (ones @ right.float().T).to(dtype))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(on_device[1], on_device[2].float())
