"""`RunConfig`: a table of contents of the rooms' own settings, and the rules between rooms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config.reading import headed, read_settings, section_problems
from jaxdist.data.config import DataConfig
from jaxdist.mesh import MeshSpec
from jaxdist.models.configs import (
    CNN_RULES,
    CnnConfig,
    CustomConfig,
    DecoderConfig,
    ModelConfig,
)
from jaxdist.monitoring.config import MonitoringConfig
from jaxdist.optim import OptimConfig
from jaxdist.precision import PrecisionConfig
from jaxdist.runtime.settings import RuntimeConfig
from jaxdist.sharding import RULES, MeshConfig, legal_meshes, mesh_problems
from jaxdist.step import EvalConfig, TrainConfig
from jaxdist.types import ConfigError, setting

ALIASES = {
    "mesh": "mesh.shape",
    "zero": "mesh.zero",
    "steps": "train.steps",
    "run-dir": "run_dir",
}
"""Short flags of the commands that take a whole run's settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run is made of; what is not said here has its room's default."""

    name: str = setting("default", "name of the run; its directory is runs/<name>-<time>")
    seed: int = setting(0, "of the initial parameters, the data order and all random bits")
    run_dir: str = setting("", "run directory; empty = runs/<name>-<time>")
    resume: str = setting(
        "auto",
        "auto = go on from the newest valid checkpoint of the run directory if there is one; "
        "never = refuse a directory that holds a run; or the path of a run to go on with",
    )
    simulate: int = setting(0, "simulated CPU devices; 0 = the machine's own devices")
    model: ModelConfig = dataclasses.field(default_factory=DecoderConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    monitoring: MonitoringConfig = dataclasses.field(default_factory=MonitoringConfig)
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)

    def problems(self) -> list[str]:
        """Every violated rule: of each section, of the top level, and between sections."""
        problems = section_problems(self)
        sound = not problems
        if self.simulate < 0:
            problems.append(f"simulate={self.simulate} must be ≥ 0 devices; 0 = the machine's own.")
        if not self.name or "/" in self.name:
            problems.append(f"name={self.name!r} must be a plain word: it names the run directory.")
        if not sound:  # sizes of 0 would make nonsense of the rules between sections
            return problems
        problems += self._length_problems()
        spec = self._known_mesh()
        return problems + (self.mesh_problems(spec) if spec is not None else [])

    def mesh_problems(self, spec: MeshSpec) -> list[str]:
        """What the model, the batch and the sequence break on a mesh; [] for custom models."""
        if isinstance(self.model, CustomConfig):
            return []
        is_decoder = isinstance(self.model, DecoderConfig)
        split_sequence = is_decoder and self.mesh.sequence_parallel and spec.tensor > 1
        return mesh_problems(
            spec,
            self.model.dims,
            rules=CNN_RULES if isinstance(self.model, CnnConfig) else RULES,
            zero=self.mesh.zero,
            global_batch_size=self.train.global_batch_size,
            num_microbatches=self.train.num_microbatches,
            seq_len=self.train.seq_len if split_sequence else None,
        )

    def check_mesh(self, spec: MeshSpec) -> None:
        """Raise `ConfigError` with every problem of a mesh and up to three legal ones nearby."""
        problems = self.mesh_problems(spec)
        if not problems:
            return
        nearby = legal_meshes(spec, spec.num_devices, self.mesh_problems)
        if nearby:
            names = " or ".join(f"--mesh {other}" for other in nearby)
            problems.append(f"legal with {spec.num_devices} devices, nearest first: {names}")
        raise ConfigError(headed("mesh", problems))

    def _known_mesh(self) -> MeshSpec | None:
        """The mesh, as far as it is known before devices are counted."""
        if self.mesh.shape == "auto":
            return None
        try:
            return MeshSpec.parse(self.mesh.shape, self.simulate or None)
        except ConfigError:
            return None

    def _length_problems(self) -> list[str]:
        model = self.model
        if not isinstance(model, DecoderConfig) or model.positions == "rotary":
            return []
        if self.train.seq_len <= model.max_seq_len:
            return []
        return [
            f"train.seq_len={self.train.seq_len} is longer than model.max_seq_len="
            f"{model.max_seq_len}, the learned position table. Shorten one or lengthen the other."
        ]


def read_run(argv: Sequence[str], *, command: str, summary: str = "") -> RunConfig:
    """A run's settings from `--config FILE.toml` and flags; see `read_settings`."""
    return read_settings(RunConfig, argv, command=command, summary=summary, aliases=ALIASES)
