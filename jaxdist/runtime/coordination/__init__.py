"""Exchange values between the processes of a job without using devices.

Most exchanges use the key-value store of jax's coordination service, which runs in process 0. Only
`service` accesses it. A collective on the devices (`process_allgather`) would need a compiled
program and idle devices, hang if a process has failed, and not run in a background thread.

| module | offers |
|---|---|
| `service` | `put`, `get`, `published`: values by key; process id; the agreed stop step |
| `group` | `Group`: `gather`, and `decide` (process 0 decides, all get its result or its error) |
| `barrier` | `Barrier`: all wait for all; one process can abort it |
| `failure_broadcast` | `announce_failure`: one process's failure ends all, with the cause |
| `transfer` | `FileServer`, `FileClient`: files from the disk of one host to another |

Channels that cannot use the store:

| channel | where | reason |
|---|---|---|
| TCP check-in | `runtime.rendezvous` | there is no store before joining |
| TCP, files | `transfer` | gigabytes would pass through process 0's memory |
| SIGTERM, SIGUSR1 | `runtime.signals` | sent by schedulers; the service forwards them |
| progress files | `run.resilience.watchdog` | must be readable if process 0 hangs |
| `abort.json` | `failure_broadcast` | ends hosts whose peer was killed |
| launchers' files | `tools.launch.rendezvous` | launchers outlive process 0 |
| `*.error.json` | `failure_broadcast` | from a process to the launcher on its host |
"""

from jaxdist.runtime.coordination.group import Group, gather
from jaxdist.runtime.coordination.service import (
    own_address,
    process_id_and_count,
    publish,
    published,
)
