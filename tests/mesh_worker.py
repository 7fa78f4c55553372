"""Train on a mesh, from a checkpoint or from scratch, and record digests of the results.

    python tests/mesh_worker.py '{"devices": 8, "jobs": [...], "out": "records.jsonl", ...}'

A job has `mesh` and `flags`, `source` (checkpoint directory to resume from, or ""), `target`
(directory to save to after `save_after` steps, or ""), and `steps` to train. Its record has the
digest of every restored leaf, of every saved leaf and of every batch, and every loss.
"""

import gc
import hashlib
import json
import math
import os
import sys
from pathlib import Path

FLAGS = [
    "--model.d_model=64",
    "--model.num_layers=4",
    "--model.num_heads=8",
    "--model.mlp_dim=64",
    "--train.seq_len=16",
    "--train.global_batch_size=64",
    "--optim.warmup_steps=2",
    "--data.packing=best_fit",
]


def main() -> None:
    gc.set_threshold(100_000, 50, 100)  # as `run_command` does for commands
    settings = json.loads(sys.argv[1])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", settings["devices"])
    if settings.get("processes", 1) > 1:
        address = f"127.0.0.1:{settings['port']}"
        jax.distributed.initialize(
            address,
            settings["processes"],
            settings["process"],
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            heartbeat_timeout_seconds=60,
            shutdown_timeout_seconds=30,
        )
    parts: dict = {}
    for job in settings["jobs"]:
        key = (job["mesh"], *job["flags"])
        if key not in parts:
            parts[key] = assemble_parts(job, settings["data"])
        record = run(job, parts[key])
        if jax.process_index() == 0:
            with Path(settings["out"]).open("a") as out:
                out.write(json.dumps(record) + "\n")
    if settings.get("processes", 1) > 1:
        jax.distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)


def assemble_parts(job: dict, data: str):
    import jax

    from jaxdist.config import read_run
    from jaxdist.core.mesh import MeshSpec
    from jaxdist.run.setup import assemble

    flags = [*FLAGS, f"--data.sources={data}", f"--mesh={job['mesh']}", *job["flags"]]
    config = read_run(flags, command="mesh_worker")
    return assemble(config, jax.devices()[: MeshSpec.parse(job["mesh"]).num_devices])


def run(job: dict, parts) -> dict:
    import numpy as np

    from jaxdist.checkpoint import CheckpointConfig, Checkpointer
    from jaxdist.data import Loader, Position, open_datasets, resume_position

    config = parts.config
    dataset, _ = open_datasets(config.data, seq_len=config.train.seq_len, seed=config.seed)
    quiet = {"log": lambda line: None}
    record: dict = {"job": job["name"], "batches": [], "losses": []}
    if job["source"]:
        reader = Checkpointer(Path(job["source"]), CheckpointConfig(), read_only=True, **quiet)
        state, meta, step = reader.restore(parts.abstract_state())
        position = resume_position(meta["data"], dataset, seed=config.seed)
    else:
        state, step, position = parts.in_model_order(parts.init_state()), 0, Position()
    record |= {"start": step, "restored": leaf_digests(state)}
    state = parts.in_execution_order(state)
    loader = Loader(
        dataset,
        global_batch_size=config.train.global_batch_size,
        seed=config.seed,
        sharding=parts.step.batch_sharding,
        start=position,
    )
    for number in range(1, job["steps"] + 1):
        batch = next(loader)
        record["batches"].append(
            digest({k: in_row(gathered(v), batch[k]) for k, v in batch.items()})
        )
        record["held"] = batch["tokens"].addressable_shards[0].data.shape
        state, metrics = parts.step.train(state, batch, math.inf)
        record["losses"].append(float(np.asarray(metrics["loss"])))
        if job["target"] and number == job["save_after"]:
            saved = parts.in_model_order(state)
            record["saved"] = leaf_digests(saved)
            writer = Checkpointer(Path(job["target"]), CheckpointConfig(), **quiet)
            writer.save(step + number, saved, {"data": loader.state()}, force=True)
            writer.close()
    loader.close()
    return record


def leaf_digests(state) -> dict[str, str]:
    import jax

    from jaxdist.checkpoint import pytree

    leaves = pytree.leaves_of(state)
    assert len({leaf.name for leaf in leaves}) == len(jax.tree.leaves(state))
    return {leaf.name: digest({"": gathered(pytree.plain(leaf))}) for leaf in leaves}


def in_row(values, array):
    """Return a complete field [rows, seq] with its positions in ascending order."""
    import numpy as np

    from jaxdist.core.parallel import context

    size = context.num_position_shards(array.sharding)
    positions = [context.position_ids_of(i, values.shape[1] // size, size) for i in range(size)]
    return values if size == 1 else values[:, np.argsort(np.concatenate(positions))]


def gathered(array):
    import numpy as np
    from jax.experimental import multihost_utils

    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def digest(arrays: dict) -> str:
    hasher = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name} {array.shape} {array.dtype} ".encode() + array.tobytes())
    return hasher.hexdigest()[:16]


if __name__ == "__main__":
    main()
