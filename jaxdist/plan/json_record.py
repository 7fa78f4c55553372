"""A plan as one JSON object, with unrounded numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxdist.plan.advice import Advice
from jaxdist.plan.compiled.check import NotCompiled
from jaxdist.plan.estimate.search import Candidate, why_not
from jaxdist.plan.planner import Plan, stages_of

_MEMORY = (
    *("parts", "total_bytes", "state_bytes", "temporary_bytes", "host_bytes", "disk_bytes"),
    "phases",
)


def record_of(plan: Plan, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return the plan as JSON-compatible data; infinite numbers and NaN become None."""
    best = plan.search.choices[0] if plan.search.choices else None
    gpu = plan.cluster.gpu
    return _finite(
        {
            "name": plan.base.name,
            "gpu": gpu.name,
            "num_gpus": plan.cluster.num_gpus,
            "num_nodes": plan.cluster.num_nodes,
            "fits": plan.fits,
            "verdict_by": "compiler" if plan.compiled else "estimate",
            "total_bytes": plan.total_bytes,
            "usable_bytes": plan.choice.usable_bytes,
            "mesh": str(plan.choice.job.spec),
            "step_plan": plan.choice.job.plan.digest,
            "decisions": dict(plan.choice.job.plan.reasons),
            "flags": plan.choice.flags(plan.base),
            "memory": {
                **{name: getattr(plan.choice.memory, name) for name in _MEMORY},
                "is_upper_bound": plan.choice.memory.is_rough,
                "peak_phase": plan.choice.memory.peak,
            },
            "step": _step(plan.choice),
            "largest_batch": _largest(plan),
            "traffic": [dataclasses.asdict(flow) for flow in plan.flows],
            "cost": {
                "currency": "USD",
                "price_per_gpu_hour": gpu.price_per_hour,
                "spot_price_per_gpu_hour": gpu.spot_price_per_hour,
                "on_demand": dataclasses.asdict(plan.on_demand),
                "spot": dataclasses.asdict(plan.spot),
                "late": plan.limits.late(plan.on_demand),
                "dear": plan.limits.dear(plan.on_demand),
            },
            "checkpoints": dataclasses.asdict(plan.checkpoints),
            "spot_checkpoints": dataclasses.asdict(plan.spot_checkpoints),
            "restart": {**dataclasses.asdict(plan.restart), "total": vars(plan.restart.total)},
            "compiled": _outcome(plan),
            "meshes": [
                {
                    "mesh": str(choice.job.spec),
                    "fits": choice.fits,
                    "total_bytes": choice.memory.total_bytes,
                    "seconds": choice.time.seconds,
                    "tokens_per_s": choice.time.tokens_per_s,
                    "flags": choice.flags(plan.base),
                    "why_not": why_not(choice, best) if best is not None else "",
                }
                for choice in plan.search.choices
            ],
            "stages": [
                {
                    **stage._asdict(),
                    "total_bytes": run.memory.total_bytes,
                    "fits": run.fits,
                    **_step(run),
                }
                for stage, run in stages_of(plan.choice)
            ],
            "refused": [
                {"mesh": str(spec), "problem": problem}
                for spec, problem in plan.search.refused.items()
            ],
            "advice": [dataclasses.asdict(item) for item in advice],
        }
    )


def _largest(plan: Plan) -> dict[str, Any] | None:
    largest = plan.largest_batch
    if largest is None:
        return None
    return {
        "global_batch_size": largest.job.config.train.global_batch_size,
        "rows_per_replica": largest.job.rows,
        "total_bytes": largest.memory.total_bytes,
        "tokens_per_s": largest.time.tokens_per_s,
        "flags": largest.flags(plan.base),
    }


def _step(choice: Candidate) -> dict[str, Any]:
    time = choice.time
    return {
        "seconds": time.seconds,
        "likely_seconds": time.likely_seconds,
        "parts": time.parts,
        "communication_s": time.communication,
        "tokens": time.tokens_per_step,
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_gpu": time.tokens_per_s / time.num_gpus,
        "mfu_causal": time.mfu,
    }


def _outcome(plan: Plan) -> dict[str, Any] | None:
    step = plan.outcome
    if step is None:
        return None
    if isinstance(step, NotCompiled):
        return {"compiled": False, **dataclasses.asdict(step)}
    record = dataclasses.asdict(step)
    del record["program"]
    wire = {f"{kind} {axes}": moved for (kind, axes), moved in step.wire_bytes().items()}
    return {
        "compiled": True,
        "total_bytes": step.memory.total_bytes,
        "wire_bytes": wire,
        **record,
        "refuted": [
            {"mesh": str(choice.job.spec), "total_bytes": rejected.memory.total_bytes}
            for choice, rejected in plan.rejected
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
