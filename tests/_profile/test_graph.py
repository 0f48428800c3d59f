"""The graph of a step, on request."""

from __future__ import annotations

import torch

from memscale._profile.graph import trace_step
from tests.models import WIDTH, Chain, TwoLinears


def test_the_graph_is_the_step_and_computes_what_autograd_does() -> None:
    torch.manual_seed(0)
    model, x = Chain(TwoLinears(), TwoLinears()), torch.randn(4, WIDTH)
    graph = trace_step(model, x)
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.mm.default in operators or torch.ops.aten.addmm.default in operators
    parameters = dict(model.named_parameters())
    loss, *gradients = graph(parameters, ((x,), {}))
    expected = model(x).square().mean()
    expected.backward()
    assert torch.equal(loss, expected)
    for gradient, parameter in zip(gradients, parameters.values(), strict=True):
        assert torch.equal(gradient, parameter.grad)
