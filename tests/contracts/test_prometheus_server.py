"""A real run, read by a real Prometheus (Debian: apt-get install prometheus), while OpenTelemetry's data are decoded.

`make test-loggers` runs this file; it is skipped where there is no `prometheus`.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from tests.collector import collector
from tests.end_to_end.cli import finish, metrics, start
from tests.end_to_end.failing import WORKFLOW
from tests.loggers import begin, steps
from tests.pages import ROOT
from tests.tiny import tiny_model, write_recipe

from leaderless.config.run import LoggerConfig
from leaderless.observability.loggers.registry import loggers_running

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no `prometheus`: apt-get install prometheus"),
    pytest.mark.skipif(
        find_spec("prometheus_client") is None or find_spec("opentelemetry.exporter") is None,
        reason="prometheus_client or opentelemetry-exporter-otlp-proto-http is not installed",
    ),
]


class Server(NamedTuple):
    """A Prometheus server, and the port at which it looks for a run."""

    address: str
    port: int


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Server]:
    """A server that reads a run at a port, and the run `found` wherever its file says."""
    port, address = free_port(), f"127.0.0.1:{free_port()}"
    found = str(tmp_path / "runs/found/loggers/prometheus.json")
    jobs = [
        {"job_name": "fixed", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]},
        {"job_name": "found", "file_sd_configs": [{"files": [found], "refresh_interval": "1s"}]},
    ]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with (tmp_path / "prometheus.txt").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            wait_for(f"http://{address}/-/ready", server)
            yield Server(f"http://{address}", port)
        finally:
            server.terminate()
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        time.sleep(0.1)
        try:
            with urlopen(url):
                return
        except OSError:
            assert server.poll() is None
    raise TimeoutError(url)


def ask(prometheus: Server, query: str) -> list[Mapping[str, str]]:
    """The series of an answer, each with its `value`."""
    with urlopen(f"{prometheus.address}/api/v1/query?{urlencode({'query': query})}") as answer:
        found = json.loads(answer.read())
    assert found["status"] == "success"
    return [one["metric"] | {"value": one["value"][1]} for one in found["data"]["result"]]


def value(prometheus: Server, query: str) -> float:
    (one,) = ask(prometheus, query)
    return float(one["value"])


def test_prometheus_and_a_collector_have_the_numbers_of_a_run_that_continues(
    tmp_path: Path, prometheus: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trial")
    monkeypatch.setenv("PACE_S", "0.25")  # each start is to last for several readings
    with collector() as receiver:
        loggers = [
            {"type": "prometheus", "options": {"port": prometheus.port}},
            {"type": "opentelemetry", "options": {"endpoint": receiver.address}},
        ]
        (tmp_path / "slow.yaml").write_text(WORKFLOW)
        changes: dict[str, object] = {"loggers": loggers, "run.tags": ["nightly"], "workflow": "slow.yaml"}
        changes["checkpoint"] = {"every_steps": 4}
        recipe = write_recipe(tmp_path, tiny_model(num_layers=1), changes)
        for last in (20, 40):
            outcome = finish(start(tmp_path, "leaderless", "train", recipe, f"steps={last}", is_forked=False))
            assert outcome.code == 0, outcome.errors
            assert (
                f"metrics for Prometheus are at http://127.0.0.1:{prometheus.port}/metrics"
                in outcome.output + outcome.errors
            )
            newest = metrics(tmp_path / "runs/tiny", with_times=True)[-1]
            # Prometheus has read the last step before the run has ended, though it may still be storing it.
            for _ in range(50):
                if (found := value(prometheus, 'last_over_time(leaderless_step{run="tiny"}[1h])')) == last:
                    break
                time.sleep(0.1)
            assert found == newest["step"] == last
    for name in ("reward/mean", "rollout/response_tokens", "policy/grad_norm", "time/step"):
        query = f'last_over_time({{metric="{name}",run="tiny"}}[1h])'
        assert value(prometheus, query) == pytest.approx(newest[name], rel=1e-12), name
    resets = value(prometheus, 'resets(leaderless_steps_total{run="tiny"}[10m])')
    assert resets == 1, "Prometheus knows that a counter has begun again"
    (info,) = ask(prometheus, "last_over_time(leaderless_run_info[1h])")
    assert info["tags"] == "nightly"
    # OpenTelemetry: each start is a trace, in which every step of the trace has its nodes.
    runs = [span for span in receiver.spans if span.name == "run"]
    assert len(runs) == 2
    assert {span.resource["service.name"] for span in receiver.spans} == {"trial"}, "the environment comes first"
    names = {span.name for span in receiver.spans}
    assert {"step 1", "step 20", "rollout", "reward", "policy", "checkpoint"} <= names
    by_id = {span.message.span_id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans)
    for span in receiver.spans:
        assert span.name == "run" or span.message.parent_span_id in by_id
    means = [point.message.as_double for point in receiver.points if point.name == "leaderless.reward.mean"]
    assert means == [line["reward/mean"] for line in metrics(tmp_path / "runs/tiny") if "reward/mean" in line]


def test_prometheus_finds_a_run_whose_port_was_picked_by_its_file(tmp_path: Path, prometheus: Server) -> None:
    directory = begin(tmp_path / "runs/found")
    config = LoggerConfig(type="prometheus", options={"port": 0})
    with loggers_running([config], directory.path, lambda _: None):
        steps(directory, {1: {"reward/mean": 0.25}})
        for _ in range(600):
            if found := ask(prometheus, 'leaderless_reward_mean{run="trial"}'):
                break
            time.sleep(0.1)
        (one,) = found
        assert (one["value"], one["instance"]) == ("0.25", "trial")
        with urlopen(f"{prometheus.address}/api/v1/metadata?metric=leaderless_steps") as answer:
            (described,) = json.loads(answer.read())["data"]["leaderless_steps"]
        assert described["type"] == "counter"


@pytest.mark.parametrize("page", ["loggers.md", "loggers.zh.md"])
def test_prometheus_takes_the_configuration_of_the_guide(tmp_path: Path, page: str) -> None:
    text = (ROOT / "docs/guides" / page).read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if "scrape_configs" in block)
    (tmp_path / "prometheus.yaml").write_text(block)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yaml"], check=True)
