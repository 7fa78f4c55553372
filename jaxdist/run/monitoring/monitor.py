"""The monitor: reports of a run on the console and in files."""

from __future__ import annotations

import errno
import logging
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxdist.config.monitoring import TENSORBOARD, MonitoringConfig, parse_profile_steps
from jaxdist.core.step.row_logps import ROW_SUMS
from jaxdist.data.order import Link
from jaxdist.hardware import gpu_of, peak_flops
from jaxdist.run.metrics_log import ExitReason, Record, RecordWriter, read_outline
from jaxdist.run.monitoring import console
from jaxdist.run.monitoring.alerts import Alerts, ExpertLoads
from jaxdist.run.monitoring.environment import GpuStats
from jaxdist.run.monitoring.profiler import Profiler
from jaxdist.run.monitoring.prometheus import Prometheus
from jaxdist.run.monitoring.summary import RunSummary, Throughput, by_source, device_memory
from jaxdist.run.monitoring.timers import CompileTracker, steady_clock
from jaxdist.run.monitoring.trackers import Identity, TensorBoard, Trackers, run_id_of
from jaxdist.run.run_directory import RunDirectory, flatten
from jaxdist.runtime import coordination
from jaxdist.runtime.progress import in_time, waiting

logger = logging.getLogger("jaxdist")

SUMMARY_S = 60.0
"""Time limit for writing summary.json. A run without it counts as failed and is restarted."""

TOTALS_INTERVAL_STEPS = 1000
"""Steps between two `totals` events, which limit the records that a resumed run must read."""


class Monitor:
    """Console, metrics.jsonl, trackers, Prometheus endpoint and profiler of one run.

    Every process has one; only process 0 writes, except requested traces. As a context manager it
    closes the sinks. If an exception ends a run without a summary, it writes one: "error", or
    "interrupted" for Ctrl-C. Log records have their colored text as the attribute `styled`.

    Args:
        unit: `Parts.unit`, which names the rates (`tokens_per_s`, `images_per_s` ...).
        compute_dtype: dtype of the peak FLOP/s of a known device, also with narrower products.
        devices: all devices of the job; `jax.devices()` by default.
        trace_requested: returns whether a trace was requested since the last call.
        on_record: called with each train and eval record, on every process.
        clock: seconds since 1970, for the times of records.
        is_held: keep records in memory and write nothing before `commit`.
    """

    def __init__(
        self,
        config: MonitoringConfig,
        run: RunDirectory,
        *,
        total_steps: int,
        start_step: int = 0,
        flops_per_token: Mapping[str, float] | None = None,
        unit: str = "tokens",
        compute_dtype: str = "float32",
        devices: Sequence[Any] | None = None,
        config_text: str = "",
        trace_requested: Callable[[], bool] = lambda: False,
        on_record: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] | None = None,
        is_held: bool = False,
    ):
        import jax

        devices = list(jax.devices()) if devices is None else list(devices)
        self.config, self.run = config, run
        self.total_steps, self.start_step, self.unit = total_steps, start_step, unit
        self.device_kind = str(devices[0].device_kind)
        peak = config.peak_tflops * 1e12 or peak_flops(self.device_kind, compute_dtype)
        self.throughput = Throughput(
            num_devices=len(devices),
            flops_per_token=flops_per_token,
            peak_flops=peak,
        )
        self._local_devices = [d for d in devices if d.process_index == jax.process_index()]
        self.profiler = Profiler(
            parse_profile_steps(config.profile) if config.profile and run.is_writer else None,
            run.profiles,
            process=jax.process_index(),
            trace_requested=trace_requested,
        )
        self._gpu_stats = GpuStats(
            self._local_devices, os.environ, logger.info if run.is_writer else lambda line: None
        )
        self._clock, self._on_record = clock or steady_clock(), on_record
        self._begin = self._clock()
        self._steps_here = 0
        self._ended = False
        self._trackers: list[CompileTracker] = []
        self._records: RecordWriter | None = None
        self._tensorboard: TensorBoard | None = None
        self._prometheus: Prometheus | None = None
        self._experiments: Trackers | None = None
        resumed = run.is_writer and run.resumed
        earlier = read_outline(run.metrics, start_step) if resumed else []
        self.run_summary = RunSummary(earlier, start_step=start_step, unit=unit)
        self._share_units()
        self._alerts = Alerts(
            self.run_summary,
            self.event,
            self._gpu_stats.read,
            num_processes=jax.process_count(),
            compares=run.is_writer,
            log_interval_steps=config.log_interval_steps,
        )
        self._expert_loads = ExpertLoads(self.event, self._plot)
        self._is_held, self._config_text = True, config_text
        if self.run_summary.first_start is None:
            self.run_summary.first_start = self._begin
        if run.is_writer:
            self._records = RecordWriter(run.metrics, is_held=True)
            totals = {"total_steps": total_steps, "num_devices": len(devices), "unit": unit}
            self._write_event("start", {"time": self._begin, "step": start_step, **totals})
        if not is_held:
            self.commit()

    def train(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        tokens: float,
        step_time_s: float,
        data_wait_s: float,
        device_wait_s: float | None = None,
        link: Link | None = None,
        row_sources: Sequence[str] = (),
        stage: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Report a step; call it on every process.

        It reads the metrics (`Metrics`) from the devices, which blocks until they exist. `tokens`
        is the number of `unit` in the step over the job. `step_time_s` includes both waits;
        `device_wait_s` None = not measured. `link` is the ledger entry; `row_sources` are the
        sources of its rows, for loss and tokens of each source. `stage` has `global_batch_size`,
        `seq_len` and `flops_per_token` of the step if these change. Return the scalar metrics as
        Python numbers; those that are means over no labels are None.
        """
        metrics = dict(metrics)
        by_layer = metrics.pop("layer_statistics", None)
        layer_sums = metrics.pop("layer_sums", None)
        by_row = [metrics.pop(name) for name in ROW_SUMS if name in metrics]
        values = read(metrics)
        if layer_sums is not None:
            self._expert_loads.add(layer_sums, values["weight"])
        if values.get("weight") == 0:  # means over no labels
            values |= dict.fromkeys(values.keys() & {"loss", "accuracy", "grad_norm"})
        self._steps_here += 1
        self.run_summary.units += tokens
        if self._steps_here > 1:  # the first step of a start compiles and fills the prefetch
            self.throughput.add(tokens, step_time_s)
            self.run_summary.add_times(step_time_s, data_wait_s, device_wait_s)
            self._alerts.step_times(step, step_time_s, data_wait_s, device_wait_s)
        self._alerts.values(step, values)
        shape = dict(stage)
        self.throughput.flops_per_token = shape.pop(
            "flops_per_token", self.throughput.flops_per_token
        )
        on_log = step % self.config.log_interval_steps == 0 or self._steps_here == 1
        ends = step == self.total_steps
        rate = tokens / step_time_s
        record: dict[str, Any] = {
            "kind": "train",
            "time": self._clock(),
            "step": step,
            **values,
            **shape,
            self.unit: self.run_summary.units,
            f"{self.unit}_per_s": rate,
            f"{self.unit}_per_s_per_device": rate / self.throughput.num_devices,
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
            **({} if device_wait_s is None else {"device_wait_s": device_wait_s}),
            **self.throughput.mfu_fields(rate),
        }
        if link is not None:
            record["first_sample"] = link.first_sample
            record |= {"data_ledger": link.digest} if link.digest else {}
        if by_row and row_sources:
            record |= by_source(self.run_summary.last, self.unit, by_row, row_sources)
        record |= device_memory(self._local_devices)
        if on_log or ends:
            readings = self._gpu_stats.read()
            record |= readings
            self.run_summary.add_readings(readings)
            self.run_summary.memory_peak_bytes = record.get("memory_peak_bytes", 0)
        self.run_summary.last = record
        if self._prometheus is not None:
            self._prometheus.train(record, self.unit)
        if self._records is not None:
            self._records.write(record)
            if self._steps_here % TOTALS_INTERVAL_STEPS == TOTALS_INTERVAL_STEPS // 10:
                num_devices = self.throughput.num_devices
                seconds = (self._clock() - self._begin) * num_devices
                self._write_event("totals", self.run_summary.totals(seconds, num_devices))
        if (on_log or ends) and self.run.is_writer:
            self._show_step(record, list(values))
        if step % self.config.log_interval_steps == 0 or ends:
            self._expert_loads.report(step)
        if by_layer is not None and step % self.config.layer_statistics_steps == 0:
            self._report_layers(step, by_layer)
        self._alerts.processes(step)
        if ends:
            self.profiler.stop(step)
        self._on_record(record)
        return values

    def eval(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Report an evaluation of the state after `step`; return its metrics as Python numbers."""
        values = read(metrics)
        record = {"kind": "eval", "time": self._clock(), "step": step, **values}
        self.run_summary.evals.append(record)
        if self._prometheus is not None:
            self._prometheus.eval(record)
        if self._records is not None:
            self._records.write(record)
            line = console.eval_line(record, total_steps=self.total_steps)
            self._log(line, in_bar=True)
        self._plot(step, {f"eval/{k}": v for k, v in values.items()})
        self._on_record(record)
        return values

    def event(
        self,
        event: str,
        *,
        message: str = "",
        level: int = logging.INFO,
        quiet: bool = False,
        **fields: Any,
    ) -> None:
        """Record a save, a restore, a warning, ...: one line each, on process 0 only.

        `fields["step"]` is the last reported step by default. The console line is `message`, by
        default `event key=value ...`; a `quiet` event has none.
        """
        if level >= logging.WARNING:
            self.run_summary.warnings += 1
        if self._prometheus is not None:
            self._prometheus.event(event, is_warning=level >= logging.WARNING)
        if self._records is None:
            return
        record = {"step": self.run_summary.last["step"], **fields}
        if level >= logging.WARNING:
            record["level"] = logging.getLevelName(level).lower()
        if message:
            record["message"] = message
        self._write_event(event, record)
        if not quiet:
            self._log(message or console.event_line(event, fields), level)

    def rewind(self, step: int, message: str) -> None:
        """Record a rollback to the checkpoint of `step`: records of later steps no longer count."""
        self.event("rollback", step=step, message=message, level=logging.WARNING)
        if self._tensorboard is not None:
            self._tensorboard.hide(step + 1)
        if self._records is not None:
            kept = RunSummary(read_outline(self.run.metrics, step), start_step=step, unit=self.unit)
            for name in ("units", "last", "evals", "skipped_steps"):
                setattr(self.run_summary, name, getattr(kept, name))
        self._share_units()

    def header(self, facts: Mapping[str, Any]) -> None:
        """Print the first lines of a run, and write `facts` as one `run` event.

        `facts` include `mesh`, `mesh_reason`, `model`, `num_parameters`, `precision`, `data`,
        `tokens_per_row` (1 unless the unit is tokens), the batch as `per_device_batch` (rows of one
        microbatch on one replica) × `num_replicas` × `accumulation`, and `notes` on kernels etc.
        """
        if self._records is None:
            return
        batch = facts["per_device_batch"] * facts["num_replicas"] * facts["accumulation"]
        facts = {
            **facts,
            "global_batch_size": batch,
            "num_devices": self.throughput.num_devices,
            "device_kind": self.device_kind,
            "unit": self.unit,
            "peak_flops": self.throughput.peak_flops,
            "mfu_convention": self.throughput.convention,
            "flops_per_token": self.throughput.flops_per_token,
        }
        fields = {name: value for name, value in facts.items() if value not in (None, "")}
        self._write_event("run", {"step": self.start_step, **fields})
        if self._prometheus is not None:
            names = ("model", "mesh", "device_kind", "num_parameters", "num_devices")
            self._prometheus.facts(
                total_steps=self.total_steps, **{name: facts[name] for name in names}
            )
        self._log_block([*console.header_rows(facts), ("run", str(self.run.path))])

    def track_compiles(self, tracker: CompileTracker) -> CompileTracker:
        """Log the compilations of a tracker, the second and later ones as warnings; return it."""
        tracker.report_to(self._alerts.compilation)
        self._trackers.append(tracker)
        return tracker

    def summary(
        self, exit_reason: ExitReason | str, *, next_commands: Sequence[str] = (), **fields: Any
    ) -> dict[str, Any]:
        """Return the summary with `fields`; process 0 writes summary.json and prints its content.

        Raise OSError if the file could not be written within `SUMMARY_S`.
        """
        exit_reason = ExitReason(exit_reason)
        wall_s = self._clock() - self._begin
        summary: dict[str, Any] = {
            "exit_reason": exit_reason,
            "total_steps": self.total_steps,
            "run_dir": self.run.path,
            "device_kind": self.device_kind,
            **self.run_summary.summary(self.throughput, self._trackers, wall_s),
        }
        self.profiler.stop()
        if self.profiler.traces:
            summary["profiles"] = self.profiler.traces
        if gpu := gpu_of(self.device_kind):
            summary["cost"] = summary["device_hours"] * gpu.price_per_hour
        summary |= fields
        self._ended = True
        if self._records is None:
            return summary
        self._write_event("end", {"step": summary["step"], "exit_reason": exit_reason})
        write = lambda: self.run.write_summary(summary)
        if not in_time("writing summary.json", write, SUMMARY_S):
            late = errno.ETIMEDOUT
            raise TimeoutError(late, os.strerror(late), str(self.run.summary))
        if self._experiments is not None:
            self._experiments.finish(summary)
        self._log_block(console.closing_rows(summary, next_commands))
        return summary

    def abort(self, why: str) -> None:
        """Write summary.json (interrupted, `why`) unless it is written; callable on any thread."""
        if not self._ended and not self._is_held:
            self.summary(ExitReason.INTERRUPTED, error=why)

    def close(self) -> None:
        """Flush and close all sinks; a second call does nothing."""
        with waiting("writing the last metrics"):
            for sink in (self._prometheus, self._tensorboard, self._experiments, self._records):
                if sink is not None:
                    sink.close()
        self._prometheus = self._tensorboard = self._experiments = self._records = None
        self._gpu_stats.close()
        self.profiler.stop()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not self._ended and not self._is_held:
            first_line = (str(error).splitlines() or [""])[0]
            is_interrupt = isinstance(error, KeyboardInterrupt)
            reason = ExitReason.INTERRUPTED if is_interrupt else ExitReason.ERROR
            try:
                self.summary(reason, error=f"{type(error).__name__}: {first_line}"[:300])
            except Exception as second:  # a full disk must not hide why the run failed
                logger.warning("summary.json was not written: %s", second)
        self.close()

    def commit(self) -> None:
        """Open the files on process 0, and write the records held back until now."""
        self._is_held = False
        if self._records is None:
            return
        if self.config.prometheus:
            self._prometheus = Prometheus(self.config.prometheus_address, self.run.path.name)
        self._records.commit()
        if TENSORBOARD in self.config.tracker:
            first = self.start_step + 1 if self.run.resumed else None
            self._tensorboard = TensorBoard(self.run.tensorboard, first)
            if self._config_text:
                self._tensorboard.text("config", self._config_text)
        if others := [name for name in self.config.tracker if name != TENSORBOARD]:
            identity = Identity(
                run_id=run_id_of(self.run_summary.first_start or self._begin),
                name=self.run.path.name,
                settings=flatten(tomllib.loads(self._config_text)),
                directory=str(self.run.path),
            )
            self._experiments = Trackers(others, identity)
        if self._records.torn:
            self.event(
                "torn_line",
                bytes=self._records.torn,
                level=logging.WARNING,
                message=f"metrics.jsonl ended in a line truncated by an earlier failure; its "
                f"{self._records.torn} bytes were removed",
            )

    def _share_units(self) -> None:
        self.run_summary.units = coordination.decide("units", lambda: self.run_summary.units)

    def _write_event(self, event: str, fields: Mapping[str, Any]) -> None:
        assert self._records is not None
        self._records.write({"kind": "event", "event": event, "time": self._clock(), **fields})

    def _log(self, line: str, level: int = logging.INFO, *, in_bar: bool = False) -> None:
        logger.log(level, console.plain(line), extra={"styled": line, "in_bar": in_bar})

    def _log_block(self, rows: Sequence[console.Row]) -> None:
        for line in console.block(rows):
            self._log(line)

    def _show_step(self, record: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Log the step line, with medians of recent steps as rates, and plot its numbers."""
        rate, unit = self.throughput.tokens_per_s, self.unit
        smoothed = dict(record)
        if rate is not None:
            smoothed[f"{unit}_per_s"] = rate
            smoothed[f"{unit}_per_s_per_device"] = rate / self.throughput.num_devices
            smoothed["step_time_s"] = self.throughput.step_time_s
            smoothed |= self.throughput.mfu_fields(rate)
        eta_s = self.throughput.eta_s(self.total_steps - record["step"])
        self._log(
            console.step_line(
                smoothed,
                total_steps=self.total_steps,
                unit=unit,
                num_devices=self.throughput.num_devices,
                eta_s=eta_s,
                metrics=metrics,
            ),
            in_bar=True,
        )
        sources = [name for name in record if name.startswith(("loss/", f"{unit}/"))]
        shape = [name for name in ("global_batch_size", "seq_len") if name in record]
        points = {f"train/{name}": record[name] for name in [*metrics, *sources, *shape]}
        speeds = ("mfu", "mfu_full", "step_time_s", "memory_bytes", "memory_peak_bytes")
        for name, value in smoothed.items():
            if name in (*speeds, f"{unit}_per_s", f"{unit}_per_s_per_device"):
                points[f"speed/{name}"] = value
            elif name.startswith("gpu_"):
                points[f"gpu/{name.removeprefix('gpu_')}"] = value
        points["speed/data_wait_share"] = self._alerts.data_wait.share
        self._plot(record["step"], points)

    def _report_layers(self, step: int, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Write an event and points per layer of statistics, float32 [layers] or [] each."""
        import jax

        fields = jax.tree.map(lambda x: x.tolist(), jax.device_get(dict(statistics)))
        self.event("layer_statistics", quiet=True, step=step, **fields)
        points = {
            f"{kind}/{name}" + f"/{i:03d}" * isinstance(value, list): x
            for kind, parameters in fields.items()
            for name, value in parameters.items()
            for i, x in enumerate(value if isinstance(value, list) else [value])
        }
        self._plot(step, points)

    def _plot(self, step: int, points: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            self._tensorboard.scalars(step, points)
        if self._experiments is not None:
            self._experiments.log(step, points)


def read(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Fetch replicated scalars in one transfer; return them as Python numbers by name."""
    import jax
    import numpy as np

    fetched = jax.device_get(dict(metrics))  # a pytree: its keys come back sorted
    return {name: np.asarray(fetched[name]).item() for name in metrics}
