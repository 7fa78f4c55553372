"""How the processes of a job tell each other things without a device: one room for all of it.

Most of it goes through the key-value store of jax's coordination service, which lives in process 0
and which `jax.distributed.initialize` starts. Only `service` touches it.

| module | offers |
|---|---|
| `service` | `put`, `get`, `published`: values by key; `process_place`; the agreed stop step |
| `group` | `Group`: `gather`, and `decide` (process 0 decides, all get its answer or its error) |
| `barrier` | `Barrier`: all wait for all, and one that gives up frees the others |
| `failure_broadcast` | `announce_failure`: one process's failure ends all, each with the cause |
| `transfer` | `FileServer`, `FileClient`: files from the disk of one host to another's |

Why not a collective on the devices (`process_allgather`)? It needs a compiled program and every
device idle, it hangs when one process has failed, and it cannot run in a background thread.

Not everything can use the store. These are the other channels, each with its reason:

| channel | where | why not the store |
|---|---|---|
| TCP check-in | `runtime.rendezvous` | before joining there is no store |
| TCP, files | `transfer` | gigabytes would pass through process 0's memory |
| SIGTERM, SIGUSR1 | `runtime.signals` | what schedulers send; the service passes it on |
| progress files | `run.resilience.heartbeat` | must be readable when process 0 hangs |
| `abort.json` | `failure_broadcast` | ends hosts whose peer was killed without a word |
| launchers' files | `tools.launch.rendezvous` | launchers outlive the job's process 0 |
| `*.error.json` | `failure_broadcast` | from a process to the launcher on its host |
"""

from jaxdist.runtime.coordination.group import Group, gather
from jaxdist.runtime.coordination.service import own_address, process_place, publish, published
