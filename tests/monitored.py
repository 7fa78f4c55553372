"""A monitor driven by tests, and readers of its output."""

import struct
from pathlib import Path

import jax.numpy as jnp

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.run_directory import RunDirectory

QUIET = MonitoringConfig(tracker=[], log_interval_steps=1)


class Clock:
    """A clock that advances only on request."""

    def __init__(self, now: float = 1_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> str:
        self.now += seconds
        return "value"


def start(tmp_path, config=QUIET, *, total_steps=10, process_id=0, **kwargs) -> Monitor:
    run = RunDirectory.open(tmp_path / "run", process_id=process_id)
    return Monitor(config, run, total_steps=total_steps, **kwargs)


def train(monitor: Monitor, step: int, **metrics) -> None:
    values = {"loss": jnp.float32(1 / step), **metrics}
    monitor.train(step, values, tokens=100, step_time_s=0.5, data_wait_s=0.0)


def of_kind(records, kind):
    return [r for r in records if r["kind"] == kind]


def events(records, name):
    return [r for r in records if r.get("event") == name]


def header(monitor: Monitor) -> None:
    facts = dict(
        mesh="dp=4,tp=2",
        mesh_reason="the model fits one device",
        model="decoder",
        num_parameters=124_439_808,
        per_device_batch=4,
        num_replicas=4,
        accumulation=2,
        tokens_per_row=128,
        data="corpus: text, 10 rows",
        precision="bfloat16 compute, float32 parameters",
        notes=["attention: XLA, because this is a CPU"],
    )
    monitor.header(facts)


def crc32c(data: bytes) -> int:
    """Compute the Castagnoli CRC, bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tensorboard_events(directory):
    from tensorboardX.proto import event_pb2

    for path in sorted(Path(directory).iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            (length_crc,) = struct.unpack_from("<I", data, at + 8)
            payload = data[at + 12 : at + 12 + length]
            (payload_crc,) = struct.unpack_from("<I", data, at + 12 + length)
            assert length_crc == masked_crc(data[at : at + 8]), path
            assert payload_crc == masked_crc(payload), path
            at += 16 + length
            yield event_pb2.Event.FromString(payload)


def scalars(directory):
    """Return (step, tag, value) as TensorBoard shows them: a session start purges later steps."""
    from tensorboardX.proto import event_pb2

    points = []
    for event in tensorboard_events(directory):
        if event.session_log.status == event_pb2.SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                points.append((event.step, value.tag, value.simple_value))
    return points
