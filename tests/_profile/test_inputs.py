"""The batch to profile with: given, or derived from a config."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

import memscale
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.rehearsal import loss_of
from tests.models import Mlp, case


def test_a_tensor_a_tuple_a_mapping() -> None:
    x = torch.ones(2)
    assert Inputs.from_sample(x).args == (x,)
    assert Inputs.from_sample((x, 3)).args == (x, 3)
    assert Inputs.from_sample({"x": x}).kwargs == {"x": x}
    inputs = Inputs(args=(x,))
    assert Inputs.from_sample(inputs) is inputs


def test_a_tokenizers_mapping() -> None:
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.ones(2, 3)})
    assert list(Inputs.from_sample(batch).kwargs) == ["input_ids"]


@pytest.mark.parametrize("sample", [[torch.ones(2)], "text", 3, {1, 2}, None])
def test_anything_else_is_named(sample: Any) -> None:
    with pytest.raises(TypeError, match=type(sample).__name__):
        Inputs.from_sample(sample)


def test_specs_name_every_tensor() -> None:
    inputs = Inputs(args=(torch.ones(2, 3), 7), kwargs={"a": {"b": torch.ones(4, dtype=torch.long)}})
    specs = inputs.specs()
    assert [(spec.shape, spec.dtype) for spec in specs] == [((2, 3), "float32"), ((4,), "int64")]
    assert specs[1].name == "a.b"


def test_mapping_tensors_leaves_the_rest() -> None:
    inputs = Inputs(args=(torch.ones(2), "x"), kwargs={"n": 3, "t": torch.ones(1)})
    mapped = inputs.map_tensors(lambda tensor: tensor * 2)
    assert torch.equal(mapped.args[0], torch.full((2,), 2.0))
    assert (mapped.args[1], mapped.kwargs["n"]) == ("x", 3)
    assert len(inputs.tensors()) == 2


def test_a_tensor_given_twice_stays_one() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    mapped = Inputs(kwargs={"input_ids": ids, "labels": ids, "others": ids.clone()}).map_tensors(torch.Tensor.clone)
    assert mapped.kwargs["input_ids"] is mapped.kwargs["labels"]
    assert mapped.kwargs["input_ids"] is not mapped.kwargs["others"]


@pytest.mark.parametrize(("kind", "has_mask"), [("Roberta", True), ("Bert", True), ("GPT2", False)])
def test_encoders_are_given_a_mask(kind: str, has_mask: bool) -> None:
    config = getattr(transformers, f"{kind}Config")(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForMaskedLM"
    inputs = derive_inputs(getattr(transformers, name)(config))
    assert inputs is not None
    assert ("attention_mask" in inputs.kwargs) is has_mask


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit", "llama", "albert"])
def test_derived_inputs_train_the_model(name: str) -> None:
    model = case(name).build()
    inputs = derive_inputs(model, batch=2)
    assert inputs is not None
    assert all(tensor.device.type == "meta" for tensor in inputs.tensors())
    real = inputs.map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    assert {tensor.shape[0] for tensor in real.tensors()} == {2}
    loss_of(model(*real.args, **real.kwargs)).backward()


def test_only_transformers_have_derived_inputs() -> None:
    assert derive_inputs(Mlp()) is None
    model: Any = Mlp()
    model.config = {"width": 3}
    assert derive_inputs(model) is None


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(memscale.MemScaleError, match="65 is longer than the 64"):
        derive_inputs(case("gpt2").build(), sequence_length=65)
    derived = derive_inputs(case("llama").build(), sequence_length=65)
    assert derived is not None, "rotary positions have no end"


def test_the_length_is_that_of_the_model() -> None:
    derived = derive_inputs(case("gpt2").build())
    assert derived is not None
    assert derived.kwargs["input_ids"].shape == (1, 64)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    ids: torch.Tensor
    more: dict[str, list[torch.Tensor]]
    name: str = "a name"


def test_records_are_looked_into_and_never_changed() -> None:
    shared, other = torch.zeros(2, 3), torch.zeros(2, 5)
    record = Record(shared, {"all": [other, shared]})
    inputs = Inputs((record, 7), {"again": (record,)})
    assert [spec.name for spec in inputs.specs()] == [
        "0.ids", "0.more.all.0", "0.more.all.1", "again.0.ids", "again.0.more.all.0", "again.0.more.all.1",
    ]  # fmt: skip
    assert inputs.size(0) == 2
    mapped = inputs.map_tensors(lambda tensor: tensor + 1)
    copied = mapped.args[0]
    assert copied is not record
    assert record.ids is shared
    assert torch.equal(copied.ids, torch.ones(2, 3))
    assert copied.more["all"][1] is copied.ids
    assert (copied.name, mapped.args[1]) == ("a name", 7)
    assert Inputs((Record, None)).tensors() == []
