"""Exchange values between the processes of a job without using devices.

Most exchanges use the key-value store of jax's coordination service, which runs in process 0. A
device collective (`process_allgather`) would need a compiled program and idle devices, would hang
after the failure of a process, and could not run in a background thread.

| module | offers |
|---|---|
| `service` | `put`, `get`, `published`: values by key; process id; the agreed stop |
| `group` | `Group`: process 0 decides, all get its result or its error; `Barrier`: can be aborted |
| `failure_broadcast` | `announce_failure`: end all processes when one fails, with the cause |
| `transfer` | `FileServer`, `FileClient`: copy files between the disks of hosts |

Other channels: before joining (`runtime.rendezvous`), files (`transfer`), signals of schedulers
(`runtime.signals`), progress files (`run.resilience.watchdog`), `abort.json` and `*.error.json`
(`failure_broadcast`), and files of launchers, which outlive process 0 (`tools.launch.rendezvous`).
"""

from jaxdist.runtime.coordination.group import Group, collect, decide, decide_from, scatter
from jaxdist.runtime.coordination.service import (
    own_address,
    process_id_and_count,
    publish,
    published,
)
