"""The command line, run in process: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

import memscale
from memscale import zoo
from memscale._errors import install_command
from memscale.cli import main
from memscale.report import doctor
from memscale.report.page import Report
from tests.models import WIDTH, Chain, TwoLinears

GIB = 1024**3
HUGE = "1" + "0" * 400
LONG = "x" * 5000

MODEL_FILE = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def build():
        return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(64, 10)), torch.zeros(512, 64)

    def wide():
        return build()[0], torch.zeros(100_000, 64)

    def bare():
        return nn.Sequential(*(Block() for _ in range(6)))

    def short():
        return nn.Sequential(Block(), Block()), torch.zeros(512, 64)

    def heavy():
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), torch.zeros(4, 1024)

    def wrong_sample():
        return build()[0], torch.zeros(512, 63)

    class Loud(nn.Linear):
        def forward(self, x):
            print("a forward speaks")
            return super().forward(x)

    def loud():
        print("a factory speaks")
        return nn.Sequential(Loud(64, 64), Loud(64, 64)), torch.zeros(512, 64)

    class Leaves(nn.Linear):
        def forward(self, x):
            raise SystemExit(0)

    def leaves():
        return Leaves(64, 64), torch.zeros(512, 64)

    def factory_leaves():
        raise SystemExit(0)

    class Talkative(nn.Linear):
        def forward(self, x):
            raise ValueError("very long " * 1000)

    def talkative():
        return Talkative(64, 64), torch.zeros(512, 64)

    def talkative_factory():
        raise ValueError("very long " * 1000)

    class Speechless(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def speechless():
        raise Speechless

    class Uncommon(BaseException):
        pass

    class Raises(nn.Linear):
        def forward(self, x):
            raise Uncommon("not an Exception")

    def uncommon():
        return Raises(64, 64), torch.zeros(512, 64)

    def uncommon_factory():
        raise Uncommon("not an Exception")

    def interrupted():
        raise KeyboardInterrupt
"""


@pytest.fixture
def model_file(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "user_model.py"
    path.write_text(textwrap.dedent(MODEL_FILE))
    return str(path)


class Shell:
    """Runs command lines and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.stderr = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self._capsys.readouterr()
        found = main(arguments)
        captured = self._capsys.readouterr()
        self.stderr = captured.err
        assert found == code, captured.err
        return captured.out

    def complaint(self, *arguments: str, code: int = 2) -> str:
        """The last line on stderr of a command that must fail; nothing may be on stdout."""
        assert self(*arguments, code=code) == ""
        assert "Traceback" not in self.stderr
        *progress, sentence = self.stderr.splitlines()
        assert all(line.endswith(" ...") for line in progress), self.stderr
        assert sentence.startswith("memscale: ")
        return sentence


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


# ---- the program itself


def test_version(shell: Shell) -> None:
    assert shell("--version") == f"memscale {memscale.__version__}\n"


def test_help_lists_the_commands(shell: Shell) -> None:
    for text in (shell("--help"), shell()):
        assert all(command in text for command in ("estimate", "plan", "fit", "doctor", "cache", "bench"))


@pytest.mark.parametrize("factory", ["uncommon", "uncommon_factory"])
def test_what_is_no_exception_is_a_sentence_too(shell: Shell, model_file: str, factory: str) -> None:
    sentence = shell.complaint("estimate", f"{model_file}:{factory}", "--gpu", "T4")
    assert "raised Uncommon: not an Exception" in sentence


def test_help_does_not_import_torch() -> None:
    script = "import sys; from memscale.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_python_m_memscale_is_the_same_program() -> None:
    command = [sys.executable, "-m", "memscale", "estimate", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("memscale: no model called 'no-such-model'")
    assert done.stdout == ""


# ---- estimate


def test_estimate_prints_breakdown_modes_and_recommendation(shell: Shell, model_file: str) -> None:
    text = shell("estimate", f"{model_file}:build", "--gpu", "RTX 3090")
    assert "Sequential, 0.2 M parameters, on RTX 3090" in text
    assert "0: 512x64 float32; optimizer: adamw" in text
    for kind in ("parameters", "gradients", "optimizer state", "activations", "temporaries"):
        assert f"  {kind} " in text
    for mode in memscale.OptimizationMode:
        assert f"\n{mode.value} " in text
    assert "Recommended: conservative." in text
    assert "predicted on fake tensors, with the kernels that such a card is assumed to use" in text


def test_estimate_json_is_what_the_library_says(shell: Shell, model_file: str) -> None:
    data = json.loads(shell("estimate", f"{model_file}:build", "--gpu", "RTX 3090", "--json"))
    model, sample = zoo.load_factory(f"{model_file}:build")
    expected = memscale.estimate(model, sample, hardware=memscale.Hardware.from_name("RTX 3090"))
    assert data["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert data["estimate"] == json.loads(expected.to_json())
    assert sum(data["estimate"]["breakdown"].values()) == expected.baseline_peak_bytes


def test_estimate_under_a_budget_lowers_the_peak(shell: Shell, model_file: str) -> None:
    arguments = ("estimate", f"{model_file}:wide", "--gpu", "RTX 3090", "--json", "--budget")
    plain = json.loads(shell(*arguments, "10"))["estimate"]
    budget_gb = plain["baseline_peak_bytes"] * 0.8 / 1e9
    tight = json.loads(shell(*arguments, str(budget_gb)))["estimate"]
    assert tight["budget_bytes"] == round(budget_gb * 1e9)
    assert not tight["baseline_fits"]
    assert tight["recommended_mode"] == "conservative"
    plan = tight["by_mode"]["conservative"]["plan"]
    assert plan["predicted_peak_bytes"] < plan["predicted_reserved_bytes"] <= tight["budget_bytes"]
    for entry in tight["by_mode"].values():
        assert entry["host_bytes"] + entry["disk_bytes"] == entry["plan"]["host_bytes"] + entry["plan"]["movable_bytes"]


def test_estimate_says_when_nothing_fits(shell: Shell, model_file: str) -> None:
    text = shell("estimate", f"{model_file}:short", "--gpu", "RTX 3090", "--budget", "0.000001")
    assert "does not fit." in text
    assert "No mode fits: the lowest peak is" in text


def test_estimate_of_ranks_counts_buckets_or_shares(shell: Shell, model_file: str) -> None:
    def found(*options: str) -> dict[str, int]:
        text = shell("estimate", f"{model_file}:build", "--mode", "conservative", "--json", *options)
        breakdown: dict[str, int] = json.loads(text)["estimate"]["breakdown"]
        return breakdown

    alone, replica = found(), found("--world-size", "8", "--ddp")
    trained = 4 * (6 * (2 * 64 * 256 + 256 + 64) + 64 * 10 + 10)
    assert replica == alone | {"other": alone["other"] + trained}
    share = found("--world-size", "8", "--fsdp")
    assert trained / 8 <= share["params"] < trained / 8 * 1.02
    assert alone["optimizer"] / 8 <= share["optimizer"] < alone["optimizer"] / 7  # small tensors are rounded up


def test_what_is_reserved_for_shares_is_predicted(shell: Shell, model_file: str) -> None:
    asked = ("estimate", f"{model_file}:build", "--gpu", "RTX 3090", "--mode", "conservative", "--world-size", "8")
    text = shell(*asked, "--fsdp")
    assert "and reserves" in text
    assert "is not predicted" not in text
    assert json.loads(shell(*asked, "--fsdp", "--json"))["estimate"]["baseline_reserved_bytes"] > 0


def test_one_rank_is_a_plain_model(shell: Shell, model_file: str) -> None:
    """Nothing is shared out, and what is reserved is predicted as ever."""
    asked = ("estimate", f"{model_file}:build", "--gpu", "T4", "--mode", "conservative")
    assert shell(*asked, "--fsdp", "--world-size", "1") == shell(*asked)


@pytest.mark.parametrize("options", [("--world-size", "8"), ("--ddp",), ("--world-size", "8", "--ddp", "--fsdp")])
def test_ranks_are_said_with_how_they_train(shell: Shell, model_file: str, options: tuple[str, ...]) -> None:
    assert "--fsdp" in shell.complaint("estimate", f"{model_file}:build", *options)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no lengths"),
        ("12\nmany\n", "neither a length nor a length and a count"),
        ("0 3\n", "neither a length nor a length and a count"),
        ("1 2 3\n", "neither a length nor a length and a count"),
        ("99999999\n", "is above"),
    ],
)
def test_a_file_that_has_no_lengths_is_a_sentence(
    shell: Shell, model_file: str, tmp_path: pathlib.Path, content: str, words: str
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert words in shell.complaint("estimate", f"{model_file}:build", "--lengths", str(path))


def test_a_table_of_lengths_takes_no_single_length(shell: Shell, model_file: str, tmp_path: pathlib.Path) -> None:
    missing = str(tmp_path / "none.txt")
    assert "cannot be read" in shell.complaint("estimate", f"{model_file}:build", "--lengths", missing)
    assert "leave out --seq" in shell.complaint("estimate", f"{model_file}:build", "--lengths", missing, "--seq", "4")


def test_estimate_of_one_mode(shell: Shell, model_file: str) -> None:
    arguments = ("estimate", f"{model_file}:build", "--gpu", "RTX 3090", "--mode", "Aggressive", "--json")
    data = json.loads(shell(*arguments))["estimate"]
    assert list(data["by_mode"]) == ["aggressive"]
    assert data["recommended_mode"] == "aggressive"


def test_the_optimizer_counts(shell: Shell, model_file: str) -> None:
    def state_bytes(name: str) -> int:
        arguments = ("estimate", f"{model_file}:build", "--gpu", "RTX 3090", "--optimizer", name, "--json")
        breakdown: dict[str, int] = json.loads(shell(*arguments))["estimate"]["breakdown"]
        return breakdown["optimizer"]

    assert state_bytes("none") == state_bytes("sgd") == 0
    assert state_bytes("adamw") > 1.9 * state_bytes("sgd_momentum") > 0


def test_without_a_gpu_it_is_this_machine(shell: Shell, model_file: str) -> None:
    text = shell("estimate", f"{model_file}:build")
    assert f"on {memscale.Hardware.detect().device_name}" in text


def test_batch_and_length_reach_the_model(shell: Shell) -> None:
    data = json.loads(shell("estimate", "bert-tiny", "--batch", "3", "--seq", "40", "--gpu", "T4", "--json"))
    assert "input_ids: 3x40 int64" in data["estimate"]["inputs"]


def test_progress_goes_to_stderr(shell: Shell, model_file: str) -> None:
    shell("estimate", f"{model_file}:build", "--gpu", "T4")
    assert shell.stderr.splitlines() == [
        f"building {model_file}:build ...",
        f"profiling {model_file}:build on fake tensors ...",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_status_that_goes_away(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, others = Terminal(), set(threading.enumerate())
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    shell("doctor")
    assert "looking at this machine ..." in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased
    for thread in set(threading.enumerate()) - others:
        thread.join(timeout=60)  # rich tells its thread to end and does not wait for it


# ---- plan


def test_plan_is_written_and_can_be_loaded(shell: Shell, model_file: str, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "plan.json"
    text = shell("plan", f"{model_file}:short", "--gpu", "RTX 3090", "--force", "--output", str(output))
    plan = memscale.Plan.load(output)
    assert plan.actions
    assert plan.explain().partition("\n\n")[0] in text
    assert f"written to {output}" in shell.stderr


def test_plan_as_json_is_the_plan(shell: Shell, model_file: str) -> None:
    text = shell("plan", f"{model_file}:short", "--gpu", "RTX 3090", "--force", "--json")
    assert memscale.Plan.from_json(text).to_json() == text


@pytest.mark.parametrize(("flag", "overlaps"), [(None, True), ("--async", True), ("--no-async", False)])
def test_transfers_overlap_on_a_card_unless_told_otherwise(
    shell: Shell, model_file: str, flag: str | None, overlaps: bool
) -> None:
    arguments = ["plan", f"{model_file}:short", "--gpu", "RTX 3090", "--json", *([flag] if flag else [])]
    assert json.loads(shell(*arguments))["conditions"]["async_offload"] is overlaps


def test_plan_groups_layers_and_explains_each(shell: Shell, model_file: str) -> None:
    arguments = ("plan", f"{model_file}:build", "--gpu", "RTX 3090")
    assert "\n0 to 5 " in shell(*arguments)
    explained = shell(*arguments, "--explain")
    assert all(f"\n{index} " in explained for index in range(6))


def test_peak_against_time_is_drawn(shell: Shell, model_file: str, tmp_path: pathlib.Path) -> None:
    drawing, output = tmp_path / "front.html", tmp_path / "plan.json"
    arguments = ("plan", f"{model_file}:build", "--gpu", "RTX 3090", "--explain")
    assert "nothing else was looked into" in shell(*arguments)
    explained = shell(*arguments, "--pareto", str(drawing), "--output", str(output))
    plan = memscale.Plan.load(output)
    page = drawing.read_text()
    assert page.startswith(
        Report(plan).html().partition('<div class="chart" id="front"')[0].partition("Peaks are live")[0]
    )
    assert "plans that were weighed" in page
    assert len(plan.front) > 1
    assert "next smaller: none" not in explained
    assert plan.explain() in explained
    sentence = shell.complaint("plan", f"{model_file}:build", "--pareto", str(tmp_path))
    assert "--pareto" in sentence
    assert "directory" in sentence


def test_a_report_is_made_of_a_saved_plan_or_a_model(shell: Shell, model_file: str, tmp_path: pathlib.Path) -> None:
    saved, page = tmp_path / "plan.json", tmp_path / "page.html"
    shell("plan", f"{model_file}:short", "--gpu", "RTX 3090", "--output", str(saved))
    shell("report", str(saved), "--output", str(page))
    assert page.read_text() == Report(memscale.Plan.load(saved)).html()
    shell("report", f"{model_file}:short", "--gpu", "RTX 3090", "-o", str(page))
    assert "One step with this plan" in page.read_text()


def test_what_no_report_can_be_made_of_is_a_sentence(shell: Shell, tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    assert "not a plan" in shell.complaint("report", str(tmp_path / "broken.json"))
    assert "cannot be read" in shell.complaint("report", str(tmp_path / "missing.json"))
    assert "would be overwritten" in shell.complaint("report", str(tmp_path / "a.json"), "-o", str(tmp_path / "a.json"))
    assert "only --output applies" in shell.complaint("report", str(tmp_path / "a.json"), "--batch", "4")
    both = str(tmp_path / "both")
    assert "overwrite the other" in shell.complaint("plan", "gpt2", "--output", both, "--pareto", both)
    assert "directory" in shell.complaint("report", "gpt2", "--output", str(tmp_path))
    assert not (tmp_path / "memscale-report.html").exists()


@pytest.mark.parametrize("command", ["plan", "report"])
def test_what_the_host_has_no_room_for_may_wait_on_disk(
    shell: Shell, model_file: str, tmp_path: pathlib.Path, command: str
) -> None:
    made, place = tmp_path / "made", tmp_path / "waits"
    asked = (command, f"{model_file}:heavy", "--gpu", "RTX 3090", "--host", "0.02", "--budget", "0.18", "-o", str(made))
    assert "the budget is" in shell.complaint(*asked, code=1)
    shell(*asked, "--offload-dir", str(place))
    assert "on the host or the disk" in made.read_text() if command == "report" else memscale.Plan.load(made).fits
    assert not place.exists(), "a question writes nothing"


def test_a_place_on_disk_that_is_none_is_a_sentence(shell: Shell, model_file: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, says in ((str(file), "is not a directory"), (LONG, "cannot be used")):
        sentence = shell.complaint("plan", f"{model_file}:short", "--offload-dir", place)
        assert "--offload-dir" in sentence
        assert says in sentence
    (tmp_path / "a.json").write_text("{}")
    assert "only --output" in shell.complaint("report", str(tmp_path / "a.json"), "--offload-dir", str(tmp_path))


def test_a_plan_that_does_not_fit_exits_with_1(shell: Shell, model_file: str) -> None:
    sentence = shell.complaint("plan", f"{model_file}:short", "--gpu", "RTX 3090", "--budget", "0.000001", code=1)
    assert "the budget is" in sentence


# ---- doctor


def test_doctor_shows_hardware_versions_and_extras(shell: Shell) -> None:
    text = shell("doctor")
    assert memscale.Hardware.detect().device_name in text
    for name in ("total_bytes", "host_available_bytes", "memscale", "torch", "python", *doctor.EXTRA_OF, "simgpu"):
        assert f"\n  {name} " in text


def test_doctor_as_json(shell: Shell) -> None:
    data = json.loads(shell("doctor", "--json"))
    assert data["versions"]["memscale"] == memscale.__version__
    assert data["hardware"]["total_bytes"] == memscale.Hardware.detect().total_bytes
    assert {entry["name"] for entry in data["optional"]} == {*doctor.EXTRA_OF, "simgpu"}


def test_doctor_names_the_extra_of_what_is_missing() -> None:
    findings = doctor.examine()
    absent = doctor.Optional("peft", None, install_command("hf"))
    lines = doctor.lines(doctor.Findings(findings.hardware, findings.versions, (absent,)))
    assert any(
        line.startswith("  peft ") and 'missing; pip install -c constraints.txt ".[hf]"' in line for line in lines
    )


CONTRIBUTORS_EXTRAS = {"audit", "coverage", "dev", "docs", "pages", "peers"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "bert-tiny", "--seq", "9999", "--device", "cpu"), "512"),
        (("table", "--show", "--host", "-1"), "--host"),
        (("table", "--show", "--host", "nan"), "--host"),
        (("estimate", "bert-tiny", "--host", "8"), "comes with --gpu"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_done(
    shell: Shell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in shell.complaint(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("lines", "said"), [("16\n1024\n", "512"), ("16 0\n", "0 times")])
def test_lengths_that_cannot_come_are_refused(shell: Shell, tmp_path: pathlib.Path, lines: str, said: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(lines)
    assert said in shell.complaint("estimate", "bert-tiny", "--batch", "2", "--lengths", str(file), "--gpu", "T4")


@pytest.mark.parametrize(
    ("command", "option"),
    [("plan", "--output"), ("plan", "--pareto"), ("report", "--output"), ("estimate", "--snapshot")],
)
def test_the_file_that_a_model_comes_from_is_not_overwritten(
    shell: Shell, tmp_path: pathlib.Path, command: str, option: str
) -> None:
    source = tmp_path / "own.py"
    source.write_text("def make():\n    raise RuntimeError('not reached')\n")
    before = source.read_text()
    assert "would be overwritten" in shell.complaint(command, f"{source}:make", option, str(source))
    assert source.read_text() == before


def test_a_reader_who_has_seen_enough_ends_a_command_quietly(tmp_path: pathlib.Path) -> None:
    command = f"{sys.executable} -m memscale cache | true; exit ${{PIPESTATUS[0]}}"
    own = {**os.environ, "MEMSCALE_CACHE_DIR": str(tmp_path)}  # whoever works on this machine beside has another
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=own)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_standard_output_that_takes_no_more_is_a_sentence(buffering: str) -> None:
    """Buffered, the error comes when the buffer is flushed; unbuffered, at once."""
    command = f"PYTHONUNBUFFERED={buffering} {sys.executable} -m memscale --version > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    said = "memscale: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_standard_output_that_is_open_for_reading_only_is_a_sentence() -> None:
    command = f"{sys.executable} -m memscale --version 1</dev/null"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    said = "memscale: the output could not be written: Bad file descriptor\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_an_option_that_is_wrong_is_told_as_one_types_it(shell: Shell) -> None:
    said = shell.complaint("estimate", "gpt2", "--budget", "-1")
    assert (
        said.strip() == "memscale: --budget=-1.0 is not allowed; it must be a number of GB above 0 and of at most 1e+09"
    )


def test_every_extra_of_the_package_is_known_to_doctor() -> None:
    import importlib.metadata

    declared = set(importlib.metadata.metadata("memscale").get_all("Provides-Extra") or ())
    assert set(doctor.EXTRA_OF.values()) == declared - CONTRIBUTORS_EXTRAS


# ---- bad input: exit code 2 and a sentence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("estimate", "gpt2-medum"), "did you mean gpt2-medium"),
        (("estimate", "gpt2", "--gpu", "RTX 9999"), "known are: GTX 1080 Ti, "),
        (("estimate", "gpt2", "--batch", "-1"), "--batch"),
        (("estimate", "gpt2", "--batch", "many"), "--batch"),
        (("estimate", "gpt2", "--seq", "0"), "--seq"),
        (("estimate", "gpt2", "--batch", HUGE), "--batch"),
        (("estimate", "gpt2", "--seq", HUGE), "--seq"),
        (("estimate", "gpt2", "--seq", ""), "--seq"),
        (("estimate", "gpt2", "--budget", "1e300"), "--budget=1e+300"),
        (("estimate", "gpt2", "--budget", HUGE), "--budget=inf"),
        (("estimate", "gpt2", "--budget", "inf"), "--budget=inf"),
        (("estimate", "gpt2", "--budget", ""), "--budget"),
        (("estimate", "gpt2", "--utilization", "nan"), "--utilization=nan"),
        (("estimate", "gpt2", "--gpu", LONG), "known are: GTX 1080 Ti, "),
        (("estimate", "gpt2", "--gpu", ""), "known are: GTX 1080 Ti, "),
        (("estimate", "gpt2", "--optimizer", LONG), "one of adamw, adam"),
        (("estimate", "gpt2", "--mode", LONG), "'conservative', 'balanced', 'aggressive'"),
        (("estimate", LONG), "known are bert-tiny"),
        (("estimate", f"{LONG}.py:build"), "File name too long"),
        (("plan", "gpt2", "--output", LONG), "--output"),
        (("plan", "gpt2", "--pareto", LONG), "--pareto"),
        (("fit", "gpt2", "--vary", LONG), "batch or seq"),
        (("bench", "--fake", "--only", LONG), "there are: bert-base"),
        (("bench", "--fake", "--results", LONG), "--results"),
        (("bench", "--fake", "--results", "/dev/null"), "not a regular file"),
        (("estimate", "gpt2", "--seq", "5000"), "longer than the 1024 positions"),
        (("estimate", "vit-tiny", "--seq", "10"), "--seq does not apply"),
        (("estimate", "gpt2", "--budget", "-3"), "--budget=-3.0"),
        (("estimate", "gpt2", "--budget", "nan"), "--budget=nan"),
        (("estimate", "gpt2", "--utilization", "1.5"), "--utilization=1.5"),
        (("estimate", "gpt2", "--mode", "wild"), "'conservative', 'balanced', 'aggressive'"),
        (("estimate", "gpt2", "--optimizer", "lion"), "one of adamw, adam"),
        (("estimate", "nowhere.py:build"), "there is no file 'nowhere.py'"),
        (("estimate", "nowhere.py"), "does not say which factory"),
        (("estimate",), "MODEL"),
        (("plan", "gpt2", "--mode", "wild"), "'conservative', 'balanced', 'aggressive'"),
        (("plan", "gpt2", "--output", "/no/such/directory/plan.json"), "there is no directory /no/such/directory"),
        (("frobnicate",), "frobnicate"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_bad_input_is_a_sentence(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    sentence = shell.complaint(*arguments)
    assert said in sentence
    assert len(sentence) < 1000


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        ("missing", (), "has no function 'missing'"),
        ("bare", (), "let the factory return (model, sample)"),
        ("build", ("--batch", "2"), "gives its own sample"),
        ("wrong_sample", (), "could not be profiled"),
        ("talkative", (), "very long very long"),
        ("talkative_factory", (), "very long very long"),
        ("speechless", (), "raised Speechless"),
        ("factory_leaves", (), "raised SystemExit: 0"),
    ],
)
def test_a_bad_factory_is_a_sentence(
    shell: Shell, model_file: str, factory: str, options: tuple[str, ...], said: str
) -> None:
    sentence = shell.complaint("estimate", f"{model_file}:{factory}", "--gpu", "T4", *options)
    assert said in sentence
    assert len(sentence) < 1000


@pytest.mark.parametrize("command", ["estimate", "plan", "fit"])
def test_a_forward_that_leaves_does_not_end_the_program(shell: Shell, model_file: str, command: str) -> None:
    sentence = shell.complaint(command, f"{model_file}:leaves", "--gpu", "T4")
    assert "sys.exit(0)" in sentence


def test_an_interrupt_stays_one_and_is_said(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", f"{model_file}:interrupted", "--gpu", "T4"]) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("memscale: interrupted\n")


@pytest.mark.parametrize("command", ["estimate", "plan", "fit"])
def test_what_a_model_prints_is_not_among_the_results(shell: Shell, model_file: str, command: str) -> None:
    with open(model_file, "a") as file:
        file.write("\nprint('a file speaks')\n")
    json.loads(shell(command, f"{model_file}:loud", "--gpu", "T4", "--json"))
    for speaker in ("file", "factory", "forward"):
        assert f"a {speaker} speaks" in shell.stderr


def test_an_output_that_cannot_be_written_is_a_sentence(shell: Shell, model_file: str, tmp_path: pathlib.Path) -> None:
    sentence = shell.complaint("plan", f"{model_file}:build", "--gpu", "T4", "--output", str(tmp_path))
    assert sentence.endswith("that is a directory")


# ---- the published table, for a card that is not here


@pytest.mark.parametrize(
    ("name", "batch", "seq", "published_gib", "expected_gb"),
    [
        ("bert-base", 16, 128, 3.14, 3.357),
        pytest.param("bert-large", 16, 128, 7.60, 8.168, marks=pytest.mark.full),
        pytest.param("gpt2-medium", 4, 512, 10.87, 11.656, marks=pytest.mark.full),
        pytest.param("gpt2-large", 2, 512, 14.87, 15.678, marks=pytest.mark.full),
    ],
)
def test_baselines_of_the_published_table(
    shell: Shell, name: str, batch: int, seq: int, published_gib: float, expected_gb: float
) -> None:
    arguments = ("estimate", name, "--batch", str(batch), "--seq", str(seq), "--gpu", "RTX 3090", "--json")
    result = json.loads(shell(*arguments))["estimate"]
    assert result["baseline_fits"]
    assert result["baseline_peak_bytes"] / GIB == pytest.approx(published_gib, rel=0.035)
    assert result["baseline_peak_bytes"] / 1e9 == pytest.approx(expected_gb, abs=0.001)  # what the docs say


@pytest.mark.full
def test_gpt2_xl_does_not_fit_as_it_is(shell: Shell) -> None:
    arguments = ("estimate", "gpt2-xl", "--batch", "1", "--seq", "512", "--gpu", "RTX 3090", "--json")
    result = json.loads(shell(*arguments))["estimate"]
    assert not result["baseline_fits"]
    assert result["baseline_peak_bytes"] > memscale.Hardware.from_name("RTX 3090").total_bytes


# ---- fit


def test_fit_finds_the_largest_batch(shell: Shell, model_file: str) -> None:
    arguments = ("fit", f"{model_file}:short", "--gpu", "RTX 3090", "--budget", "1", "--mode", "conservative")
    text = shell(*arguments)
    assert "conservative: rehearsing at" in shell.stderr
    sizes = {
        line.split()[0]: line.split()[1] for line in text.splitlines() if line.startswith(("plain", "conservative"))
    }
    assert 1 < int(sizes["plain"]) < int(sizes["conservative"])
    data = json.loads(shell(*arguments, "--json"))
    assert data["by_mode"]["conservative"]["size"] == int(sizes["conservative"])
    assert data["by_mode"]["conservative"]["predicted_peak_bytes"] <= 1e9


def test_fit_says_what_cannot_be_varied(shell: Shell, model_file: str) -> None:
    assert "batch or seq" in shell.complaint("fit", f"{model_file}:build", "--vary", "width")
    assert "--batch is what is looked for" in shell.complaint("fit", f"{model_file}:build", "--batch", "4")
    assert "have no seq dimension" in shell.complaint("fit", f"{model_file}:build", "--vary", "seq")


# ---- cache


def test_cache_shows_and_deletes_the_plans_that_are_kept(
    shell: Shell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSCALE_CACHE", "1")
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path))
    assert "No plan is kept in" in shell("cache")
    model = Chain(TwoLinears())
    memscale.wrap(model, memscale.Config(enable_logging=False), sample_input=torch.zeros(4, WIDTH))
    memscale.detach(model)
    (tmp_path / "plans" / "notes.txt").write_text("not ours")
    assert f"Plans kept in {tmp_path / 'plans'}: 1" in shell("cache")
    assert "Chain" in shell("cache")
    assert json.loads(shell("cache", "--json"))[0]["plan"]["model_class"] == "Chain"
    next((tmp_path / "plans").glob("*.json")).write_text("garbage")
    assert "cannot be read" in shell("cache")
    assert shell("cache", "--clear") == f"Plans deleted from {tmp_path / 'plans'}: 1\n"
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["notes.txt"]
