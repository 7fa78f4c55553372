"""Read the endpoint as Prometheus does; check that the dashboard queries existing metrics."""

import json
import logging
import re
import socket
import time
import urllib.error
import urllib.request

import jax.numpy as jnp
import pytest
from commands import ROOT, free_port
from monitored import header
from prometheus_client.parser import text_string_to_metric_families

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run.monitoring import monitor as monitor_module
from jaxdist.run.monitoring import prometheus
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.monitoring.prometheus import _numbers
from jaxdist.run.run_directory import RunDirectory


def fetch(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "run"}
            assert sample.labels["run"] == "run"
            labels_text = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
            values[sample.name + (f"{{{labels_text}}}" if labels_text else "")] = sample.value
    return values


def start(tmp_path, port: int, process_id: int = 0) -> Monitor:
    config = MonitoringConfig(tracker=[], prometheus=str(port))
    run = RunDirectory.open(tmp_path / "run", process_id=process_id)
    return Monitor(config, run, total_steps=10, clock=lambda: 1234.5)


def train(monitor: Monitor, step: int) -> None:
    monitor.train(
        step,
        {"loss": jnp.float32(2.5), "grad_norm": 1.5, "learning_rate": 3e-4, "applied": True},
        tokens=100,
        step_time_s=0.5,
        data_wait_s=0.125,
        device_wait_s=0.25,
    )


def test_fetched_metrics_equal_the_reported_ones(tmp_path):
    port = free_port()
    monitor = start(tmp_path, port)
    header(monitor)
    train(monitor, 1)
    train(monitor, 2)
    monitor.eval(2, {"loss": 2.25})
    monitor.event("save", step=2, quiet=True)
    monitor.event("save", step=2, quiet=True)
    monitor.event("slow_loader", level=logging.WARNING, message="slow")
    values = fetch(port)
    expected = {
        "jaxdist_step": 2,
        "jaxdist_total_steps": 10,
        "jaxdist_loss": 2.5,
        "jaxdist_eval_loss": 2.25,
        "jaxdist_tokens_total": 200,
        "jaxdist_tokens_per_second": 200,
        "jaxdist_tokens_per_second_per_device": 25,
        "jaxdist_step_time_seconds": 0.5,
        "jaxdist_data_wait_seconds": 0.125,
        "jaxdist_device_wait_seconds": 0.25,
        "jaxdist_last_step_timestamp_seconds": 1234.5,
        "jaxdist_num_parameters": 124_439_808,
        "jaxdist_num_devices": 8,
        "jaxdist_warnings_total": 1,
        'jaxdist_events_total{event="save"}': 2,
        'jaxdist_events_total{event="slow_loader"}': 1,
        'jaxdist_run_info{device_kind="cpu",mesh="dp=4,tp=2",model="decoder"}': 1,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert "jaxdist_tokens" not in values  # it grows, so it is a counter and no gauge too
    assert "jaxdist_finite" not in values and "jaxdist_time_seconds" not in values
    train(monitor, 3)
    assert fetch(port)["jaxdist_tokens_total"] == 300
    monitor.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(port)


def test_silent_and_too_many_clients_are_disconnected(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prometheus._Handler, "timeout", 1.5)
    port = free_port()
    monitor = start(tmp_path, port)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    for client in silent:
        client.settimeout(5)
    begin = time.monotonic()
    assert silent[-1].recv(1) == b""  # at once: the others have all threads
    assert time.monotonic() - begin < 1
    assert [client.recv(1) for client in silent] == [b""] * 12  # after the time-out
    assert fetch(port)["jaxdist_run_info"] == 1
    monitor.close()
    assert capfd.readouterr().err == ""


def test_a_client_that_sends_its_request_slowly_is_disconnected(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prometheus._Handler, "timeout", 1.0)
    port = free_port()
    monitor = start(tmp_path, port)
    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(OSError):
        for _ in range(50):
            client.sendall(b"X")
            time.sleep(0.1)
    assert fetch(port)["jaxdist_run_info"] == 1
    monitor.close()
    assert capfd.readouterr().err == ""


def test_only_process_0_serves(tmp_path):
    port = free_port()
    monitor = start(tmp_path, port, process_id=1)
    train(monitor, 1)
    with pytest.raises(urllib.error.URLError):
        fetch(port)
    monitor.close()


def test_a_port_in_use_is_a_warning_and_the_run_continues(tmp_path, caplog, propagating):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monitor = start(tmp_path, port)
        train(monitor, 1)
        monitor.close()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"127.0.0.1:{port} " in warning


@pytest.mark.parametrize("address", ["0", ":9400", "localhost:70000", "localhost:http", "x:\u00b2"])
def test_an_impossible_address_is_refused(address):
    (problem,) = MonitoringConfig(prometheus=address).problems()
    assert f"prometheus={address!r}" in problem


def test_a_port_without_a_host_is_served_locally_only():
    assert MonitoringConfig(prometheus="9400").prometheus_address == "127.0.0.1:9400"
    assert MonitoringConfig(prometheus="9400").problems() == []
    assert MonitoringConfig(prometheus="0.0.0.0:9400").prometheus_address == "0.0.0.0:9400"


def test_the_dashboard_queries_served_metrics_only(tmp_path, monkeypatch):
    class GpuStats:
        def __init__(self, *_):
            pass

        def read(self):
            return {"gpu_power_w": 700.0, "gpu_temperature_c": 60.0, "gpu_utilization": 0.9}

        def close(self):
            pass

    memory = {"memory_bytes": 1, "memory_peak_bytes": 2}
    monkeypatch.setattr(monitor_module, "GpuStats", GpuStats)
    monkeypatch.setattr(monitor_module, "device_memory", lambda _: memory)
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    queries += [v["query"]["query"] for v in dashboard["templating"]["list"]]
    names = {name for text in queries for name in re.findall(r"jaxdist_\w+", text)}
    assert len(names) >= 15
    port = free_port()
    config = MonitoringConfig(tracker=[], prometheus=f"127.0.0.1:{port}", peak_tflops=1.0)
    run = RunDirectory.open(tmp_path / "run")
    flops = {"causal": 1e9}
    with Monitor(config, run, total_steps=10, flops_per_token=flops) as monitor:
        header(monitor)
        train(monitor, 1)
        monitor.eval(1, {"loss": 2.25})
        monitor.event("w", level=logging.WARNING, message="w")
        served = {name.partition("{")[0] for name in fetch(port)}
        monitor.summary("finished")
    assert names - served == set()


def test_units_are_those_of_prometheus():
    record = {"gpu_clock_mhz": 1980, "gpu_power_w": 700.0, "step_time_s": 0.5, "mfu": 0.4}
    assert _numbers({**record, "kind": "train", "note": "text", "applied": True}) == {
        "gpu_clock_hertz": 1.98e9,
        "gpu_power_watts": 700.0,
        "step_time_seconds": 0.5,
        "mfu": 0.4,
    }
