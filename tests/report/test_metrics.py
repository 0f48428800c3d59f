"""Metrics as Prometheus sees them: real scrapes over the loopback, the dashboard and the page that name them."""

from __future__ import annotations

import gc
import json
import pathlib
import re
import socket
import sys
import urllib.error
import urllib.request
from typing import Any

import prometheus_client  # noqa: F401  its own set-up is not a trace that a test leaves
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import memscale
from memscale._execute.telemetry import Telemetry
from memscale.report import metrics
from tests.models import features, small, square_loss
from tests.parity import plan_of

ROOT = pathlib.Path(__file__).parent.parent.parent
DASHBOARD = ROOT / "examples" / "grafana_dashboard.json"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
SEEN = Telemetry(
    "Chain",
    plan_of([], predicted_allocated_bytes=2, predicted_reserved_bytes=3),
    held_bytes={("device", "parameters"): 5},
    peak_bytes={"live": 7},
    moved_bytes={("activations", "out"): 11},
    loss_scale=2.0,
    num_steps=13,
    samples_per_second=17.0,
)


def config(**fields: Any) -> memscale.Config:
    return memscale.Config(
        **{"mode": "conservative", "observability_port": 0, "enable_logging": False, "force_optimize": True, **fields}
    )


def scrape(url: str) -> dict[str, list[Any]]:
    """Samples by the name under which they stand in a scrape."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bmemscale_\w+", text))


def train(model: torch.nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(steps):
        square_loss(model(features(number))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_wrapped_model_is_scraped_until_it_is_detached() -> None:
    model = memscale.wrap(small(), config(), sample_input=features(0))
    url = model._memscale_executor.metrics_url
    assert url.startswith("http://127.0.0.1:")
    train(model)
    found = scrape(url)
    plan = model._memscale_executor.plan
    assert {sample.labels["model"] for samples in found.values() for sample in samples} == {"Chain"}
    assert found["memscale_steps_total"][0].value == 3
    assert found["memscale_samples_total"][0].value == 24
    assert found["memscale_predicted_peak_bytes"][0].value == plan.predicted_peak_bytes
    assert found["memscale_peak_bytes"][0].value == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert found["memscale_plan"][0].labels["mode"] == "conservative"
    memscale.detach(model)
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def test_it_answers_before_the_first_step() -> None:
    model = memscale.wrap(small(), config())
    assert scrape(model._memscale_executor.metrics_url)["memscale_steps_total"][0].value == 0
    memscale.detach(model)


def test_a_model_that_is_gone_serves_nothing() -> None:
    model = memscale.wrap(small(), config())
    url = model._memscale_executor.metrics_url
    del model
    gc.collect()
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def test_a_saved_plan_is_served_too() -> None:
    model = small()
    executor = memscale.execute(model, plan_of([], budget_bytes=1 << 40), config())
    assert "memscale_steps_total" in scrape(executor.metrics_url or "")
    executor.detach()


def test_a_port_in_use_is_an_error_that_leaves_no_trace() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        model = small()
        with pytest.raises(memscale.ConfigError, match=rf"observability_port={port} is in use.*or 0 for any"):
            memscale.wrap(model, config(observability_port=port))
        assert not hasattr(model, "_memscale_executor")
        with pytest.raises(memscale.ConfigError, match="is in use"):
            memscale.execute(model, plan_of([], budget_bytes=1 << 40), config(observability_port=port))
        assert not hasattr(model, "_memscale_executor")
        assert not model._forward_pre_hooks


def test_wrapping_again_takes_the_same_port() -> None:
    model = memscale.wrap(small(), config())
    port = int(model._memscale_executor.metrics_url.split(":")[2].split("/")[0])
    memscale.wrap(model, config(observability_port=port))
    memscale.wrap(model, config(observability_port=port))
    assert scrape(f"http://127.0.0.1:{port}/metrics")
    memscale.detach(model)


def test_each_process_of_a_node_takes_the_next_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setenv("LOCAL_RANK", "3")
    model = memscale.wrap(small(), config(observability_port=free - 3))
    assert model._memscale_executor.metrics_url == f"http://127.0.0.1:{free}/metrics"
    memscale.detach(model)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(memscale.ConfigError, match=r"observability_host='192\.0\.2\.1'"):
        memscale.wrap(small(), config(observability_host="192.0.2.1"))


def test_a_missing_extra_gives_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(memscale.MemScaleError, match=r'pip install .*"\.\[observability\]"'):
        memscale.wrap(small(), config())


def test_every_metric_is_in_a_scrape() -> None:
    server = metrics.serve(lambda: SEEN, "127.0.0.1", 0)
    found = scrape(server.url)
    server.close()
    server.close()
    missing = {metric.shown_name for metric in metrics.METRICS} - set(found)
    assert missing == {"memscale_plan_actions"}, "this plan has no action"
    assert found["memscale_moved_bytes_total"][0].labels == {
        "model": "Chain",
        "kind": "activations",
        "direction": "out",
    }


def test_the_dashboard_asks_for_what_a_scrape_has() -> None:
    model = memscale.wrap(small(), config())
    train(model)
    with urllib.request.urlopen(model._memscale_executor.metrics_url, timeout=60) as answer:
        declared = set(re.findall(r"^# TYPE (\S+)", answer.read().decode(), re.M))
    memscale.detach(model)
    asked = named_in(" ".join(_expressions(json.loads(DASHBOARD.read_text()))))
    assert asked
    assert asked <= declared
    unused = {metric.shown_name for metric in metrics.METRICS} - asked
    assert not unused, "a metric that no panel shows"


def _expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if "expr" in node else []
        own += [node["query"]] if isinstance(node.get("query"), str) else []
        return own + [text for value in node.values() for text in _expressions(value)]
    return [text for value in node for text in _expressions(value)] if isinstance(node, list) else []


def test_the_page_lists_every_metric_as_it_is() -> None:
    text = PAGE.read_text()
    for metric in metrics.METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.shown_name}` | {labels} | {metric.help} |" in text
    assert named_in(text) <= {metric.shown_name for metric in metrics.METRICS}
