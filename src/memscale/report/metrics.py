"""Prometheus metrics of a wrapped model: what they are called, and the small server that shows them.

    server = serve(recorder.read, host="127.0.0.1", port=9400)
    server.url                              # "http://127.0.0.1:9400/metrics"
    server.close()                          # the port is free, and no thread is left

`METRICS` is the whole list; docs/guides/observability.md shows it. prometheus-client is loaded when a server is made.
The server answers one request at a time, in one thread, so that nothing of it is left when it is closed.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from memscale._errors import ConfigError, MemScaleError, install_command, shortened, shown
from memscale._plan import Plan
from memscale.report.explain import what_is_done
from memscale.techniques import by_technique

if TYPE_CHECKING:
    from memscale._execute.telemetry import Telemetry

_POLL_S = 0.05
"""How soon a server that is being closed notices it."""
_REQUEST_TIMEOUT_S = 10.0
Values = Iterable[tuple[tuple[str, ...], float | None]]
"""The values of one metric: its labels beside the model's, and the number; None: there is none yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and how it is read from what was taken down."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[Telemetry], Values]
    labels: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """The name that it has in a scrape."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _one(read: Callable[[Telemetry], float | None]) -> Callable[[Telemetry], Values]:
    return lambda seen: [((), read(seen))]


def _of_plan(read: Callable[[Plan], float]) -> Callable[[Telemetry], Values]:
    return lambda seen: [] if seen.plan is None else [((), read(seen.plan))]


def _predicted(seen: Telemetry) -> Values:
    plan = seen.plan
    if plan is None:
        return []
    return [
        (("live",), plan.predicted_peak_bytes),
        (("allocated",), plan.predicted_allocated_bytes),
        (("reserved",), plan.predicted_reserved_bytes),
    ]


def _plan_in_force(seen: Telemetry) -> Values:
    plan = seen.plan
    if plan is None:
        return []
    labels = (plan.mode, plan.device_name, plan.optimizer_name, plan.decision_source, what_is_done(plan))
    return [(labels, 1.0)]


def _actions(seen: Telemetry) -> Values:
    actions = seen.plan.actions if seen.plan is not None else ()
    return [((name,), len(its)) for name, its in by_technique(actions).items()]


METRICS = (
    Metric(
        "memscale_held_bytes",
        "gauge",
        "Bytes by tier and kind after the latest step; activations are those that its forward left for backward.",
        lambda seen: seen.held_bytes.items(),
        ("tier", "kind"),
    ),
    Metric(
        "memscale_peak_bytes",
        "gauge",
        "The measured peak: allocated and reserved on an accelerator, live bytes of one measured step on a CPU.",
        lambda seen: [((number,), num_bytes) for number, num_bytes in seen.peak_bytes.items()],
        ("number",),
    ),
    Metric(
        "memscale_predicted_peak_bytes",
        "gauge",
        "The peak that the plan in force promises, as the same numbers.",
        _predicted,
        ("number",),
    ),
    Metric(
        "memscale_baseline_peak_bytes",
        "gauge",
        "The predicted peak of the unmodified model.",
        _of_plan(lambda plan: plan.baseline_peak_bytes),
    ),
    Metric("memscale_budget_bytes", "gauge", "What the plan may take.", _of_plan(lambda plan: plan.budget_bytes)),
    Metric(
        "memscale_predicted_slowdown",
        "gauge",
        "Predicted step time over that of the unmodified model; a model, not measured.",
        _of_plan(lambda plan: plan.predicted_slowdown),
    ),
    Metric(
        "memscale_plan",
        "gauge",
        "1 for the plan in force, which the labels describe.",
        _plan_in_force,
        ("mode", "device", "optimizer", "source", "what"),
    ),
    Metric("memscale_plan_actions", "gauge", "Actions of the plan in force, by technique.", _actions, ("technique",)),
    Metric("memscale_plans", "counter", "How often another plan came into force.", _one(lambda seen: seen.num_plans)),
    Metric(
        "memscale_moved_bytes",
        "counter",
        "Bytes that went to the next tier (out) and came back (in), by kind.",
        lambda seen: seen.moved_bytes.items(),
        ("kind", "direction"),
    ),
    Metric(
        "memscale_waited_seconds",
        "counter",
        "Time in which the training thread was blocked by a transfer. Waits between streams are not in it.",
        _one(lambda seen: seen.waited_s),
    ),
    Metric("memscale_recomputes", "counter", "Blocks computed again.", _one(lambda seen: seen.num_recomputes)),
    Metric(
        "memscale_recompute_seconds",
        "counter",
        "The host's time in that; an accelerator may still be at work when the host is done.",
        _one(lambda seen: seen.recompute_s),
    ),
    Metric(
        "memscale_skipped_steps",
        "counter",
        "Steps not taken because fp16 gradients had overflowed.",
        _one(lambda seen: seen.num_skipped_steps),
    ),
    Metric(
        "memscale_loss_scale",
        "gauge",
        "What fp16 gradients are multiplied with now.",
        _one(lambda seen: seen.loss_scale),
    ),
    Metric("memscale_steps", "counter", "Optimizer steps.", _one(lambda seen: seen.num_steps)),
    Metric(
        "memscale_step_seconds",
        "counter",
        "Time in these steps and between them, up to the end of the latest.",
        _one(lambda seen: seen.step_s),
    ),
    Metric("memscale_samples", "counter", "Samples trained on.", _one(lambda seen: seen.num_samples)),
    Metric(
        "memscale_samples_per_second",
        "gauge",
        "Of the latest step, with the time before it since the step that came before.",
        _one(lambda seen: seen.samples_per_second),
    ),
)
"""Every metric has the label `model`, the model's class, first."""


class _Collector:
    """What a scrape asks: every metric as it is now."""

    def __init__(self, read: Callable[[], Telemetry | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = self._read()
        if seen is None:
            return
        for metric in METRICS:
            family_type = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = family_type(metric.name, metric.help, labels=("model", *metric.labels))
            for labels, value in metric.read(seen):
                if value is not None:
                    family.add_metric((seen.model_class, *labels), value)
            yield family


class _QuietHandler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S  # a client that says nothing must not keep others waiting for ever

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is nothing to report."""


class MetricsServer:
    """Shows metrics until it is closed."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        host, port = server.server_address[:2]
        self.url = f"http://{host!s}:{port}/metrics"
        self._thread = threading.Thread(
            target=server.serve_forever, args=(_POLL_S,), name="memscale-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """The port is free again, and the thread is gone. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def serve(read: Callable[[], Telemetry | None], host: str, port: int) -> MetricsServer:
    """Show what `read` gives at every scrape.

    Args:
        read: Gives what was taken down last; None where nobody trains any more. Is called in the server's thread.
        host: The address to listen on.
        port: The port; 0: any that is free.

    Returns:
        The server, which listens already.

    Raises:
        MemScaleError: prometheus-client is not installed.
        ConfigError: The port is taken, or the address is not one of this machine.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError as error:
        raise MemScaleError(
            f"observability_port={port} needs prometheus-client, which is not installed: "
            f"{install_command('observability')}"
        ) from error
    registry = CollectorRegistry()
    registry.register(_Collector(read))
    try:
        return MetricsServer(make_server(host, port, make_wsgi_app(registry), handler_class=_QuietHandler))
    except OSError as error:
        raise ConfigError(_why_not(host, port, error)) from error


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"observability_port={port} is in use: another program or another wrapped model listens on {host}:{port}; "
            "choose another port, or 0 for any that is free"
        )
    return f"observability_port={port} cannot be opened on observability_host={shown(host)}: {shortened(str(error))}"
