"""Models by name and from files: shapes as published, nothing allocated, and a sentence for what cannot be."""

from __future__ import annotations

import logging
import pathlib
import sys
import textwrap

import pytest
import torch
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

from memscale import UnknownModelError, zoo
from memscale._profile.inputs import derive_inputs

# Counts as published with the models: an independent check that the numbers of the table are right.
NUM_PARAMETERS = {
    "bert-tiny": 4_416_698,
    "bert-mini": 11_201_594,
    "bert-small": 28_795_194,
    "bert-medium": 41_404_730,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "distilbert-base": 66_985_530,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "vit-huge": 632_045_800,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_241_732_096,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "whisper-tiny": 37_760_640,
    "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920,
    "clip-vit-base-patch32": 151_277_313,
    "clip-vit-large-patch14": 427_616_513,
    "resnet-18": 11_689_512,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "convnext-tiny": 28_589_128,
    "convnext-base": 88_591_464,
    "sd-1.5-unet": 859_520_964,
    "sdxl-unet": 2_567_463_684,
    "sd3-medium-transformer": 2_028_328_000,
    "flux.1-dev-transformer": 11_901_408_320,
    "flux.1-schnell-transformer": 11_891_178_560,
}

FACTORY = """
    import torch
    from torch import nn

    def model():
        return nn.Linear(4, 2)

    def with_sample():
        return nn.Linear(4, 2), torch.zeros(3, 4)

    def with_batch():
        return nn.Linear(4, 2), {"input": torch.zeros(3, 4)}

    def reads_values():
        return nn.Linear(4, int(torch.ones(2).sum()))

    def raises():
        raise KeyError("no such thing")

    def leaves():
        raise SystemExit("bye")

    def number():
        return 3

    def bad_sample():
        return nn.Linear(4, 2), "a sample"

    not_callable = 3
"""


@pytest.fixture
def factory_file(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "user_models.py"
    path.write_text(textwrap.dedent(FACTORY))
    return str(path)


def test_every_name_is_checked() -> None:
    assert set(NUM_PARAMETERS) == set(zoo.MODELS)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_has_the_published_number_of_parameters_and_no_weights(name: str) -> None:
    model = zoo.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert model.training


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("GPT2", "gpt2"),
        ("gpt2-small", "gpt2"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("bert-base-uncased", "bert-base"),
        ("BERT_large_cased", "bert-large"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl-unet"),
        ("black-forest-labs/FLUX.1-dev", "flux.1-dev-transformer"),
    ],
)
def test_usual_spellings_are_understood(alias: str, name: str) -> None:
    assert zoo.find_entry(alias) is zoo.MODELS[name]


def test_an_unknown_name_brings_near_ones() -> None:
    with pytest.raises(UnknownModelError, match="did you mean gpt2-medium"):
        zoo.build("gpt2-medum")


def test_a_strange_name_brings_the_whole_list() -> None:
    with pytest.raises(UnknownModelError, match=r"known are bert-tiny, .*llama-3\.2-3b"):
        zoo.build("zzzzzzzz")


@pytest.mark.parametrize("name", [name for name, entry in zoo.MODELS.items() if entry.library == "diffusers"])
def test_inputs_of_diffusion_models_are_derived(name: str) -> None:
    """The forward runs on them, without weights, and gives an image of the same size."""
    model = zoo.build(name).eval()
    inputs = derive_inputs(model, batch=2)
    assert inputs is not None
    image = inputs.kwargs.get("sample", inputs.kwargs.get("hidden_states"))
    with torch.no_grad(), torch.device("meta"):
        assert model(**inputs.kwargs).sample.shape == image.shape


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UnknownModelError, match=r"need diffusers, .*\.\[libraries\]"):
        zoo.build("sd-1.5-unet")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes the import fail, as without the package
    with pytest.raises(UnknownModelError, match=r"\.\[hf\]"):
        zoo.build("gpt2")


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"
LAZY = """
    def __getattr__(name):
        try:
            raise OSError("libcudart.so.11: cannot open shared object file" + " and so on" * 1000)
        except OSError as error:
            raise RuntimeError(f"Failed to import {name}") from error
"""


@pytest.mark.parametrize(("content", "said"), [(BROKEN, "torchvision::nms"), (LAZY, "libcudart")])
def test_a_package_that_cannot_be_imported_is_a_sentence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    """One that was built for another torch raises what it likes, at once or when a class is asked for."""
    (tmp_path / "transformers.py").write_text(textwrap.dedent(content))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnknownModelError, match=rf"transformers, which is installed and .*{said}.*\.\[hf\]") as caught:
        zoo.build("gpt2")
    assert len(str(caught.value)) < 1000
    monkeypatch.delitem(sys.modules, "transformers", raising=False)


def test_quiet_is_quiet_and_puts_the_level_back() -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    with zoo.quiet():
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
    assert logger.level == before


# ---- path/to/file.py:factory


def test_a_factory_gives_a_model_without_weights(factory_file: str) -> None:
    model, sample = zoo.load_factory(f"{factory_file}:model")
    assert next(model.parameters()).device.type == "meta"
    assert sample is None


def test_a_factory_is_given_weights_on_request(factory_file: str) -> None:
    model, _ = zoo.load_factory(f"{factory_file}:reads_values", with_weights=True)
    assert next(model.parameters()).shape == (2, 4)
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("name", ["with_sample", "with_batch"])
def test_a_factory_may_give_a_sample(factory_file: str, name: str) -> None:
    _, sample = zoo.load_factory(f"{factory_file}:{name}")
    tensor = sample["input"] if isinstance(sample, dict) else sample
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == (3, 4)


def test_a_factory_file_may_import_its_neighbours(tmp_path: pathlib.Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("width = 6\n")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom neighbour_of_mine import width\ndef build(): return nn.Linear(width, 1)\n"
    )
    path_before = list(sys.path)
    model, _ = zoo.load_factory(f"{tmp_path}/mine.py:build")
    assert next(model.parameters()).shape == (1, 6)
    assert sys.path == path_before


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("missing", "has no function 'missing'"),
        ("not_callable", "has no function 'not_callable'"),
        ("raises", "raised KeyError: 'no such thing'"),
        ("leaves", "raised SystemExit: bye"),
        ("reads_values", "--with-weights"),
        ("number", "must return a torch.nn.Module .* not int"),
        ("bad_sample", "must give its sample as a tensor, .* not str"),
    ],
)
def test_a_factory_that_does_not_work_is_a_sentence(factory_file: str, factory: str, said: str) -> None:
    with pytest.raises(UnknownModelError, match=said):
        zoo.load_factory(f"{factory_file}:{factory}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError"),
        ("1/0\n", "ZeroDivision"),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_sentence(tmp_path: pathlib.Path, content: str, said: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(UnknownModelError, match=f"cannot be imported: {said}"):
        zoo.load_factory(f"{path}:f")


@pytest.mark.parametrize("spec", ["model.py", "model.py:", ":f", "model.py:1f"])
def test_a_factory_must_be_named(spec: str) -> None:
    with pytest.raises(UnknownModelError, match="does not say which factory"):
        zoo.check_name(spec)


def test_a_missing_file_is_said_before_anything_is_imported() -> None:
    with pytest.raises(UnknownModelError, match=r"there is no file 'nowhere\.py'"):
        zoo.check_name("nowhere.py:build")
