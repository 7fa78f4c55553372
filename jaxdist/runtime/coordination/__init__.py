"""Exchange values between the processes of a job without using devices.

Most exchanges use the key-value store of jax's coordination service, which runs in process 0. A
collective on the devices (`process_allgather`) would need a compiled program and idle devices, hang
if a process has failed, and not run in a background thread.

| module | offers |
|---|---|
| `service` | `put`, `get`, `published`: values by key; process id; the agreed stop step |
| `group` | `Group`: `gather`, and `decide` (process 0 decides, all get its result or its error) |
| `barrier` | `Barrier`: all wait for all; one process can abort it |
| `failure_broadcast` | `announce_failure`: one process's failure ends all, with the cause |
| `transfer` | `FileServer`, `FileClient`: files from the disk of one host to another |

Other channels: before joining (`runtime.rendezvous`), files (`transfer`), signals of schedulers
(`runtime.signals`), progress files (`run.resilience.watchdog`), `abort.json` and `*.error.json`
(`failure_broadcast`), and files of launchers, which outlive process 0 (`tools.launch.rendezvous`).
"""

from jaxdist.runtime.coordination.group import Group, gather
from jaxdist.runtime.coordination.service import (
    own_address,
    process_id_and_count,
    publish,
    published,
)
