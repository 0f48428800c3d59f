"""Layers are found by structure: blocks once each, every parameter accounted for once."""

from __future__ import annotations

import pytest
from torch import nn

from memscale._profile.layers import describe_layers, find_blocks, find_pieces
from tests.models import SUITE, Case, Chain, Dictionary, Parallel, Shared, TwoLinears, case

EXPECTED = {
    "mlp": [f"blocks.{i}" for i in range(6)],
    "resnet": [f"stage{s}.{i}" for s in (1, 2) for i in range(4)],
    "transformer encoder": [f"layers.{i}" for i in range(4)],
    "bert": [f"bert.encoder.layer.{i}" for i in range(4)],
    "gpt2": [f"transformer.h.{i}" for i in range(4)],
    "t5": [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(3)],
    "llama": [f"model.layers.{i}" for i in range(4)],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks(name: str) -> None:
    assert list(find_blocks(case(name).build())) == EXPECTED[name]


@pytest.mark.parametrize("entry", SUITE, ids=lambda entry: entry.name)
def test_every_parameter_belongs_to_one_layer(entry: Case) -> None:
    model = entry.build()
    layers = describe_layers(model)
    unique = {id(p): p for p in model.parameters()}.values()
    owned = sum(p.nbytes for p in unique)
    direct = sum(p.nbytes for module in _spines(model) for p in module._parameters.values() if p is not None)
    assert sum(layer.param_bytes for layer in layers) == owned - direct
    trainable = sum(p.nbytes for p in unique if p.requires_grad)
    assert sum(layer.trainable_bytes for layer in layers) <= trainable
    assert len({layer.module_fqn for layer in layers}) == len(layers)
    for layer in layers:
        assert type(model.get_submodule(layer.module_fqn)).__name__ == layer.class_name


def _spines(model: nn.Module) -> list[nn.Module]:
    """Modules that are cut open: they hold blocks. Parameters of their own are nobody's."""
    inside = {id(part) for piece in find_pieces(model, find_blocks(model)).values() for part in piece.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def test_equal_blocks_have_equal_fingerprints() -> None:
    layers = {layer.module_fqn: layer for layer in describe_layers(case("gpt2").build())}
    prints = {layers[f"transformer.h.{i}"].fingerprint for i in range(4)}
    assert len(prints) == 1
    frozen = {layer.module_fqn: layer for layer in describe_layers(case("frozen gpt2").build())}
    assert frozen["transformer.h.0"].fingerprint != frozen["transformer.h.1"].fingerprint


def test_shared_modules_appear_once() -> None:
    assert list(find_blocks(Shared())) == ["blocks.0", "blocks.1"]
    assert sum(layer.param_bytes for layer in describe_layers(Shared())) == sum(p.nbytes for p in Shared().parameters())


def test_dictionaries_wrappers_and_roots() -> None:
    assert list(find_blocks(Dictionary())) == ["blocks.first", "blocks.second"]
    assert list(find_blocks(Parallel(Chain(TwoLinears())))) == ["module.blocks.0"]
    assert list(find_blocks(nn.Sequential(TwoLinears(), nn.ReLU(), TwoLinears()))) == ["0", "2"]


def test_containers_in_containers_are_opened_until_they_hold_blocks() -> None:
    model = nn.Sequential(nn.Sequential(TwoLinears(), TwoLinears()), nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    assert list(find_blocks(model)) == ["0.0", "0.1", "1"]


def test_no_blocks() -> None:
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Identity()):
        assert find_blocks(model) == {}
        assert sum(layer.param_bytes for layer in describe_layers(model)) == sum(p.nbytes for p in model.parameters())
