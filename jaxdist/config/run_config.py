"""`RunConfig`: the settings of a run, by section, and the rules between sections."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config.elastic import fit_devices
from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.config.offload import offload_mesh_problems, offload_problems
from jaxdist.config.resilience import ResilienceConfig
from jaxdist.core.axis import Workload
from jaxdist.core.mesh import MeshSpec, in_devices
from jaxdist.core.mesh_choice import Needs, default_mesh, legal_meshes, mesh_problems
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout, MeshConfig
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.core.types import Model, Objective, rows_per_example
from jaxdist.core.weights import GROUPS
from jaxdist.data.config import DataConfig, source_exists
from jaxdist.data.custom import is_custom
from jaxdist.data.hub_sets import is_hub_set
from jaxdist.data.images import is_cifar
from jaxdist.data.tokenizer import BYTE_VALUES, CODE_VOCAB_SIZE
from jaxdist.models import DecoderConfig, ModelConfig, build
from jaxdist.models.adapted_model import with_adapters
from jaxdist.models.adapters import LoraConfig
from jaxdist.models.huggingface.directory import (
    export_problems,
    folder_of,
    is_model,
    read_json,
    read_model,
)
from jaxdist.models.huggingface.families import left_out
from jaxdist.models.weights import Weight, weights_of
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.optim import OptimConfig
from jaxdist.runtime import hub, resolve
from jaxdist.runtime.cluster_environment import RuntimeConfig
from jaxdist.runtime.storage import locate, url_problem
from jaxdist.settings import ConfigError, Removed, problems_of, setting

_MAX_SIMULATED = 4096  # simulated devices per process; each costs a thread and memory
_SEARCH_S = 0.5  # time limit of the search for legal meshes to suggest
_GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run as a whole, such as name, seed and devices, and its sections."""

    name: str = setting("default", "name of the run (see run_dir)")
    seed: int = setting(
        0, "seed of the initial parameters, the data order and all random bits", ge=0
    )
    run_dir: str = setting("", "run directory, unless resume names one; empty = runs/NAME-TIME")
    resume: str = setting(
        "auto",
        "auto = resume from the newest valid checkpoint of the run directory if there is one; "
        "never = reject a directory that contains a run; or the path of a run to resume",
    )
    replay: str = setting(
        "",
        "RUN:STEP = do not train: repeat that step of a run several times from the checkpoint "
        "before it, and report whether its result is reproduced",
    )
    init_from: str = setting(
        "",
        "initial weights of a new run (with adapters, read at each start): the path or URL of a "
        "run directory, a checkpoint in it or a Hugging Face model directory, or "
        "ORG/NAME[@REVISION] on the hub; empty = random. A Hugging Face model also sets the "
        "defaults of name, the model, data.tokenizer and optim.peak_lr (2e-5; 2e-4 with adapters)",
    )
    reinit_params: list[str] = setting(
        [],
        "parts of the model that are initialized randomly and not loaded from init_from, e.g. "
        "head; names as `jaxdist convert inspect` prints them",
    )
    override: list[Literal["memory", "audit", "data", "operations"]] = setting(
        [],
        "checks to leave out. memory = that the step fits in GPU memory; audit = the mesh audit, "
        "which detects wrong sums over devices; data = that a resumed run's data are "
        "its checkpoint's (other data start at their first sample); operations = that a GPU's "
        "basic operations agree with numpy",
    )
    debug: bool = setting(
        False,
        "test an installation: a tiny model for a few steps on 2 simulated devices (with a mesh: "
        "on the real devices), synchronous saves, stop on NaN; files and flags override these "
        "defaults. Also deterministic GPU kernels, jax_enable_checks, no compilation cache",
    )
    simulate: int = setting(
        0, "simulated CPU devices of each process; 0 = the real devices", ge=0, le=_MAX_SIMULATED
    )
    model: ModelConfig = dataclasses.field(default_factory=DecoderConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    monitoring: MonitoringConfig = dataclasses.field(default_factory=MonitoringConfig)
    resilience: ResilienceConfig = dataclasses.field(default_factory=ResilienceConfig)
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        "ignore_params": Removed([], "Use reinit_params, which names these parts too."),
        "force": Removed(False, "Use override=memory."),
        "skip_audit": Removed(False, "Use override=audit."),
        "data.on_change": Removed("refuse", "Use override=data."),
        "mesh.reason": Removed(None, "Write it as a comment."),
        "mesh.sequence_parallel": Removed(True, "It is on if tp divides the positions."),
        "mesh.fsdp_over_context": Removed(True, "fsdp and cp shard parameters together."),
        "monitoring.straggler_interval_steps": Removed(50, "Use monitoring.log_interval_steps."),
        "monitoring.tensorboard": Removed(
            True, "Add it to monitoring.tracker, or remove it there.", item_of="monitoring.tracker"
        ),
        "monitoring.price_per_device_hour": Removed(0.0, "summary.json has the device_hours."),
        "pipeline.schedule": Removed("1f1b_lockstep", "Leave it out: all runs use 1F1B."),
        "runtime.cluster": Removed("auto", "Use runtime.num_processes=1 to run one process."),
        "runtime.compilation_cache_dir": Removed("", "Set the environment variable JAXDIST_CACHE."),
        "model.width": Removed(16, "Leave it out: widths are those of the paper.", True),
        "model.channels": Removed([32, 64], "Use model.mlp_dim for another size.", True),
        "model.image_size": Removed(32, "Images are those of CIFAR-10: leave it out.", True),
        "model.first_dense_layers": Removed(0, "Name their indices in model.dense_layers.", True),
        "model.norm_topk": Removed(True, "Use model.router.norm_topk.", True),
        "model.balance_loss": Removed(0.01, "Use model.router.balance_loss.", True),
        "model.router_z_loss": Removed(0.0, "Use model.router.z_loss.", True),
        "model.num_classes": Removed(10, "Classes are those of CIFAR-10: leave it out.", True),
        "train.replica_norms": Removed(False, "Use resilience.sdc_check_interval_steps."),
        "data.num_threads": Removed(0, "Use data.num_workers, or return a grain.IterDataset."),
        "data.prefetch": Removed(2, "Two batches are kept ready on the devices: leave it out."),
        "checkpoint.preflight": Removed(True, "A new run always tries a small save first."),
        "checkpoint.local_interval_minutes": Removed(5.0, "Use checkpoint.local_interval_steps."),
        "resilience.phase_timeout_s": Removed(3600.0, "Use resilience.step_timeout_s=0 for none."),
        "optim.decay_mask": Removed("matrices", "Use optim.groups for other decays.", True),
    }

    def problems(self) -> list[str]:
        """Return errors of the top level and, if values are valid, between sections."""
        problems = self._path_problems() + self._init_problems()
        # Values out of bounds would cause further errors below.
        if not 0 <= self.simulate <= _MAX_SIMULATED:
            return problems
        if any(problems_of(getattr(self, n), n) for n in ("model", "train", "mesh", "pipeline")):
            return problems
        problems += self._lora_problems() + self._data_problems() + offload_problems(self)
        problems += self._schedule_problems()
        problems += self.objective.run_problems(
            records=self.data.records,
            reads=self.model.reads,
            num_labels=self.model.num_labels,
            has_adapters=bool(self.lora.rank),
        )
        return problems + export_problems(self) + self._early_mesh_problems()

    @property
    def run(self) -> RunConfig:
        """The settings of the run, without the settings that a command adds."""
        return RunConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(RunConfig)})

    @property
    def named_directory(self) -> str:
        """The configured run directory, to start or resume in; "" = create a new one."""
        return self.run_dir if self.resume in ("auto", "never") else self.resume

    def remarks(self, *, has_own_schedule: bool = False) -> list[str]:
        """Return one line for each legal but unusual setting, for the log at the start.

        With `has_own_schedule`, the settings of the learning rate are not checked.
        """
        optim, steps = self.optim, self.train.steps
        lines = [
            f"the stage of train.batch_schedule or train.seq_schedule after step {first} is not "
            f"reached by train.steps={steps}"
            for first, *_ in self.train.stages
            if first >= steps and not self.train.epochs
        ]
        if self.lora.rank and not self.init_from:
            lines.append("lora.rank without init_from: the frozen weights are random")
        if self.init_from and is_model(self.init_from):
            lines += left_out(read_json(folder_of(self.init_from)))
        if has_own_schedule:
            return lines
        if 0 < steps <= optim.warmup_steps:
            lines.append(
                f"optim.warmup_steps={optim.warmup_steps} is not less than train.steps={steps}: "
                "the learning rate never reaches its peak"
            )
        if optim.schedule in ("cosine", "linear") and optim.decay_steps > steps:
            lines.append(
                f"optim.decay_steps={optim.decay_steps} is more than train.steps={steps}: "
                "the learning rate does not reach its minimum"
            )
        return lines

    def rows_per_example(self, model: Model | None = None) -> int:
        """Return the number of adjacent rows of an example of the model's objective."""
        return rows_per_example(self.make_objective() if model is None else model.objective)

    def make_objective(self) -> Objective | None:
        """Return the objective that replaces the model's own, or None."""
        return self.objective.make(has_adapters=bool(self.lora.rank))

    @property
    def precomputes_reference(self) -> bool:
        """Return whether rows contain log-probabilities by the weights that the run starts from."""
        return self.objective.precomputes(has_adapters=bool(self.lora.rank))

    def mesh_problems(self, spec: MeshSpec, model: Model | None = None) -> list[str]:
        """Return errors of a mesh for model and batches, or else for the stages of schedules.

        A custom model has dims only once it is built: pass it as `model` to check them.
        """
        source = self.model if model is None else model
        if model is None and not source.dims:  # only the batch can be checked
            spec = spec.replace(**{PIPELINE.name: 1, CONTEXT.name: 1})
        workload = Workload(
            dims=source.dims,
            rules=source.rules,
            settings={**self.model.size_settings, **self.model.stack_settings},
            units=self.lora.block_units(self.model),
            zero=self.mesh.zero,
            global_batch_size=self.train.global_batch_size,
            num_microbatches=self.train.accumulation,
            rows_per_example=self.rows_per_example(model),
            num_virtual_stages=self.pipeline.num_virtual_stages,
            layers_per_stage=self.pipeline.depths,
            context_attention=self.mesh.context_attention,
            context_len=self.train.seq_len if source.context_parallel else None,
            attention_dropout=source.attention_call.dropout,
        )
        problems = [*mesh_problems(spec, workload), *offload_mesh_problems(self, spec)]
        problems += self._eval_problems(spec, workload)
        return problems or self._stage_problems(spec, model, workload.dims)

    def _stage_problems(
        self, spec: MeshSpec, model: Model | None, dims: Mapping[str, int]
    ) -> list[str]:
        """Return an error for each rule of a mesh that a batch of the schedules violates."""
        problems = []
        ways = spec[TENSOR] * spec[CONTEXT]
        for stage in self.train.stages if len(self.train.stages) > 1 else ():
            run = dataclasses.replace(self, train=self.train.in_stage(stage))
            violated = run.mesh_problems(spec, model)
            if dims and self.train.seq_len % ways == 0 and stage.seq_len % ways:
                violated.append(
                    f"mesh tp × cp = {ways} divides train.seq_len={self.train.seq_len} but not "
                    f"{stage.seq_len}. Use lengths that are multiples of {ways}."
                )
            rows = f"{run.train.global_batch_size} rows of {stage.seq_len} tokens"
            problems += [f"from step {stage.first_step + 1} on, {rows}: {p}" for p in violated]
        return problems

    def _schedule_problems(self) -> list[str]:
        """Return an error for each setting that `train.seq_schedule` excludes."""
        data, train = self.data, self.train
        reasons = {
            f"model.kind={self.model.kind}": self.model.is_user_model or self.model.reads != "text",
            f"data.records={data.records}": data.records != "text",
            f"data.packing={data.packing}": data.packing == "best_fit",
            f"data.sources={data.sources}": any(map(is_custom, data.sources)),
            f"objective.teacher={self.objective.teacher}": bool(self.objective.teacher),
        }
        return [
            f"train.seq_schedule with {name}: only texts that this package packs, as stream or "
            "documents, can be cut to shorter rows, and only for its models without a teacher. "
            "Leave out one."
            for name, is_so in reasons.items()
            if is_so and train.seq_schedule
        ]

    def _eval_problems(self, spec: MeshSpec, workload: Workload) -> list[str]:
        """Return an error if an evaluation batch would split an example between replicas."""
        rows, size = self.eval.global_batch_size, workload.rows_per_example
        each = spec.num_replicas * size
        if size == 1 or rows % each == 0:
            return []
        return [
            f"eval.global_batch_size={rows} over {spec.num_replicas} replicas: the objective takes "
            f"{size} adjacent rows as an example, which must stay together. Use a multiple of "
            f"{each}, e.g. {-(-rows // each) * each}."
        ]

    def check_mesh(
        self, spec: MeshSpec, model: Model | None = None, num_devices: int | None = None
    ) -> None:
        """Raise `ConfigError` with every problem of a mesh and up to three similar legal meshes."""
        if problems := self._problems_with_fix(spec, model, num_devices):
            raise ConfigError(problems, heading="mesh")

    def choose_mesh(
        self,
        num_devices: int,
        *,
        model: Model | None = None,
        memory_bytes: int | None = None,
        needs: Needs | None = None,
    ) -> tuple[MeshSpec, str]:
        """Return the mesh of a run, and the reason for it as text.

        With `mesh.shape = "auto"`: `mesh_choice.default_mesh`, or the legal mesh nearest to it.
        `memory_bytes` is the memory of one device. `needs` estimates the memory of a mesh; without
        it only the state counts.
        """
        if self.mesh.spec is not None:
            spec = self.mesh.spec.resolve(num_devices)
            self.check_mesh(spec, model, num_devices)
            return spec, "from the settings"
        state_bytes = 0 if model is None else self.state_bytes(model)
        spec, reason = default_mesh(num_devices, state_bytes, memory_bytes, needs)
        problems = self.mesh_problems(spec, model)
        if problems:
            legal = self._legal(spec, num_devices, model)
            if not legal:
                self.check_mesh(spec, model, num_devices)
            rule = problems[0].partition(":")[0]
            reason = f"{reason}; {spec} is illegal ({rule}), and this mesh is the nearest legal one"
            spec = legal[0]
        return spec, reason

    def build_model(self) -> Model:
        """Build the model; this imports Flax, starts no device and creates no weights."""
        model = build(self.model, seq_len=self.train.seq_len)
        if objective := self.make_objective():
            model = dataclasses.replace(model, objective=objective)
        return with_adapters(self.lora, self.model, model)

    def layout(self, mesh: Any, model: Model, host_of: Mapping[int, str] | None = None) -> Layout:
        """Return the layout of arrays on a mesh of devices or an abstract mesh."""
        spec = MeshSpec.of(mesh)
        return Layout(
            mesh=mesh,
            rules=model.rules,
            zero=self.mesh.zero,
            sequence_parallel=(
                model.sequence and self.train.seq_len % (spec[TENSOR] * spec[CONTEXT]) == 0
            ),
            auto_tensor=model.tensor == "auto",
            context_attention=self.mesh.context_attention,
            stage_depths=self._stage_depths(spec, model),
            host_of=host_of or {},
        )

    def _stage_depths(self, spec: MeshSpec, model: Model) -> tuple[int, ...]:
        num_stages, size = spec[PIPELINE], rows_per_example(model.objective)
        if num_stages == 1 or not model.num_layers:
            return ()
        head = 6.0 * model.vocab_size * model.dims.get("d_model", 0)  # FLOPs per token
        layers = model.flops_per_token.get("causal", 0.0) - head
        share = head * model.num_layers / layers if layers > 0 else 0.0
        rows = max(size, self.train.global_batch_size // spec.num_replicas)
        choose = self.pipeline.choose_microbatches
        count = self.train.num_microbatches or choose(num_stages, rows, size)
        return self.pipeline.choose_depths(model.num_layers, num_stages, count, share)

    def state_bytes(self, model: Model, *, gradients: bool = True) -> int:
        """Return the bytes of parameter groups, moments and, with `gradients`, gradients."""
        of_trained = gradients * _GRADIENT_BYTES + self.optim.moment_bytes

        def element_bytes(weight: Weight) -> float:
            copies = sum(GROUPS[name].element_bytes(weight.dims) for name in self.optim.copies)
            return weight.num_bytes + copies + (weight.dims.update != "none") * of_trained

        return round(sum(weight.size * element_bytes(weight) for weight in weights_of(model)))

    def _path_problems(self) -> list[str]:
        problems = []
        if not re.fullmatch(r"[\w][\w.+-]*", self.name):
            problems.append(
                f"name={self.name!r} must be one word of letters, digits, _ and, after the first, "
                ". + -: it names the run directory. Use run_dir for a path."
            )
        urls = {"run_dir": self.run_dir, "resume": self.resume, "init_from": self.init_from}
        urls = {name: problem for name, path in urls.items() if (problem := url_problem(path))}
        if urls:
            return [*problems, *(f"{name}={problem}" for name, problem in urls.items())]
        here = locate(self.run_dir) if self.run_dir else None
        if here is not None and here.exists() and not here.is_directory():
            problems.append(
                f"run_dir={self.run_dir!r} is a file: a new or existing run directory is needed. "
                "Name another."
            )
        if self.resume not in ("auto", "never") and not _is_directory(self.resume):
            problems.append(
                f"resume={self.resume!r} is not auto, never, or the directory of a run. Check the "
                "path, or use auto."
            )
        start = self.init_from  # `_init_problems` checks hub names
        if start and not hub.is_hub_name(start) and not _is_directory(start):
            problems.append(
                f"init_from={start!r} is not a directory. Name a Hugging Face model directory, "
                "ORG/NAME on the hub or a run directory, or leave it empty."
            )
        run, _, step = self.replay.rpartition(":")
        if self.replay and not (re.fullmatch("0*[1-9][0-9]{0,17}", step) and _is_directory(run)):
            problems.append(
                f"replay={self.replay!r} is not RUN:STEP, a run directory and a step from 1 on. "
                "Use e.g. --replay runs/NAME:120; its anomalies.jsonl lists the bad steps."
            )
        return problems

    def _init_problems(self) -> list[str]:
        """Return an error for each setting that contradicts a Hugging Face model of `init_from`."""
        if self.reinit_params and not self.init_from:
            return [
                f"reinit_params={self.reinit_params} without init_from: all weights are random. "
                "Set init_from, or omit reinit_params."
            ]
        if not self.init_from or not is_model(self.init_from):
            return []
        try:
            stored = read_model(folder_of(self.init_from))
        except ConfigError as error:
            return [f"init_from={self.init_from!r}: {line}" for line in error.problems]
        if self.model.kind != stored.kind:
            return [
                f"model.kind={self.model.kind!r} with init_from={self.init_from!r}, which is a "
                f"{stored.kind}. Omit model.kind."
            ]
        free = {"dropout", "attention_dropout", "attention", "init_std"}
        # Old runs may have dropped an untied head, so it is not checked here but on loading.
        free |= {"tie_embeddings"} if self.model.tie_embeddings else set()
        free |= {"max_seq_len"} if stored.positions == "rotary" else set()
        if self.model.num_labels and not stored.num_labels:  # a new score head
            free |= {"num_labels", "tie_embeddings"}
        if self.reinit_params:  # the head or embedding may change size; loading checks the rest
            free |= {"vocab_size", "tie_embeddings", "num_labels"}
        return [
            f"model.{field.name}={getattr(self.model, field.name)} does not fit the weights of "
            f"init_from={self.init_from!r}: its config.json gives "
            f"{getattr(stored, field.name)}. Omit model.{field.name}."
            for field in dataclasses.fields(stored)
            if field.name not in free
            and getattr(self.model, field.name) != getattr(stored, field.name)
        ]

    def _lora_problems(self) -> list[str]:
        problems = self.lora.run_problems(self.model)
        if self.lora.rank and self.optim.freeze:
            problems.append(
                f"optim.freeze={self.optim.freeze} with lora.rank={self.lora.rank}: adapters "
                "freeze the other weights. Leave out optim.freeze; lora.targets selects adapters."
            )
        if self.lora.rank and self.precision.matmul_dtype != "auto":
            problems.append(
                f"precision.matmul_dtype={self.precision.matmul_dtype!r} with lora.rank: products "
                "of adapters have no such format. Leave one of them out."
            )
        return problems

    def _data_problems(self) -> list[str]:
        data, reads = self.data, self.model.reads
        sizes = {"bytes": BYTE_VALUES, "code": CODE_VOCAB_SIZE}
        num_tokens = 0 if any(map(is_custom, data.sources)) else sizes.get(data.tokenizer_name, 0)
        problems = self.model.run_problems(
            seq_len=self.train.seq_len,
            num_tokens=num_tokens,
            tokenizer=data.tokenizer_name,
            simulate=self.simulate,
            matmul_dtype=self.precision.matmul_dtype,
        )
        for source in data.sources:
            # Missing sources are reported elsewhere.
            exists = is_hub_set(source) or (not url_problem(source) and source_exists(source))
            if reads == "text" and is_cifar(source):
                problems.append(
                    f"data.sources has {source!r}, which contains images: a decoder reads text. "
                    "Use --model cnn, or a text source."
                )
            if reads == "images" and (source == "stdlib" or exists) and not is_cifar(source):
                problems.append(
                    f"data.sources has {source!r}, which is not a CIFAR-10 folder: this model "
                    "reads images. Name the folder of data_batch_1, or use --model decoder."
                )
        return problems

    def _early_mesh_problems(self) -> list[str]:
        spec, num_devices = self.mesh.spec, None
        with contextlib.suppress(ConfigError):  # joining the job reports it
            if self.simulate:
                num_devices = self.simulate * resolve(os.environ, self.runtime).num_processes
        try:
            if spec is None:
                if num_devices is not None and self.model.dims:
                    self.choose_mesh(num_devices)
                return []
            if num_devices is not None:
                spec = spec.resolve(num_devices)
                if fit_devices(self, num_devices) is not self:
                    return []
            elif spec.is_open:
                return []
        except ConfigError as error:
            return error.problems
        return self._problems_with_fix(spec, None, num_devices)

    def _problems_with_fix(
        self, spec: MeshSpec, model: Model | None, num_devices: int | None
    ) -> list[str]:
        problems = self.mesh_problems(spec, model)
        if num_devices is not None:
            try:
                spec.check_device_count(num_devices)
            except ConfigError as error:
                problems = error.problems + problems
        if not problems:
            return []
        nearest = self._nearest_legal(spec, num_devices or spec.num_devices, model)
        return [*problems[:-1], f"{problems[-1]} {nearest}"]

    def _nearest_legal(self, spec: MeshSpec, num_devices: int, model: Model | None) -> str:
        # Use fewer devices only if no mesh of this size is legal; each try factorizes one number.
        until = time.monotonic() + _SEARCH_S
        for count in range(num_devices, max(0, num_devices - 64), -1):
            if time.monotonic() > until:
                break
            if legal := self._legal(spec, count, model):
                names = " or ".join(f"--mesh {other}" for other in legal)
                return f"Legal with {in_devices(count)}, nearest first: {names}."
        return (
            f"No other mesh of {in_devices(num_devices)} or a few less was found that is legal "
            "without these changes."
        )

    def _legal(self, spec: MeshSpec, num_devices: int, model: Model | None) -> Sequence[MeshSpec]:
        return legal_meshes(spec, num_devices, lambda other: self.mesh_problems(other, model))


def _is_directory(path: str) -> bool:
    return locate(path).is_directory()
