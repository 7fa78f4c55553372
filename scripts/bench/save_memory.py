"""Check saves for leaks: memory in use and free memory in the C allocator over many saves.

    python scripts/bench/save_memory.py [SAVES]                       # 400 by default
    MALLOC_ARENA_MAX=2 python scripts/bench/save_memory.py [SAVES]

One process repeatedly saves a state of 36 arrays of 16 kB. Resident memory does not distinguish a
leak from freed memory in the arenas of the allocator; glibc's `malloc_info` does. A leak is growth
of "in use" from row to row.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp

from jaxdist.checkpoint import CheckpointConfig, Checkpointer

STATE = {"params": {f"w{i}": jnp.ones((64, 64)) for i in range(36)}}
EVERY = 50


def main() -> int:
    """Save, and print a row of a table after every fifty saves."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    libc = ctypes.CDLL("libc.so.6")
    print("| saves | arenas | held by the allocator | of it free | in use | resident |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="bench-save-memory-") as folder:
        config, where = CheckpointConfig(max_to_keep=3), Path(folder) / "checkpoints"
        keeper = Checkpointer(where, config, log=lambda _: None)
        for step in range(1, count + 1):
            keeper.save(step, STATE, {}, force=True)
            keeper.pop_events()
            if step % EVERY == 0:
                keeper.wait()
                gc.collect()
                print(row(step, libc, Path(folder) / "malloc.xml"), flush=True)
        libc.malloc_trim(0)
        print(row("trimmed", libc, Path(folder) / "malloc.xml"))
        keeper.close()
    return 0


def row(name: object, libc: ctypes.CDLL, page: Path) -> str:
    """Return a row of sizes in MB; separately mapped blocks count as in use until freed."""
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(str(page).encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    text = page.read_text()
    totals = text[text.rindex("</heap>") :]  # totals follow the last arena
    size = lambda pattern: int(re.search(pattern + r'"? (?:count="\d+" )?size="(\d+)"', totals)[1])
    held, mapped = size('<system type="current'), size('<total type="mmap')
    free = size('<total type="fast') + size('<total type="rest')
    resident = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    sizes = (held, free, held - free + mapped, 1024 * int(resident[1]))
    cells = " | ".join(f"{one / 1e6:.1f} MB" for one in sizes)
    return f"| {name} | {text.count('<heap ')} | {cells} |"


if __name__ == "__main__":
    sys.exit(main())
