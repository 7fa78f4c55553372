"""Freed memory that a process keeps, and when it is returned to the system."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")

BEGIN = """
import ctypes, os, resource, threading
import jax
from jaxdist.runtime import host_memory
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
"""


def run(script: str, **environ: str) -> list[str]:
    """Return the words that a new process prints."""
    command, environ = [sys.executable, "-c", BEGIN + script], {**os.environ, **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


STEPS = """
import jax.numpy as jnp
kept = host_memory.tune_malloc()
x = jnp.ones((5120, 32))
step = jax.jit(lambda x: jnp.max(jnp.sin(x @ x.T) @ x)).lower(x).compile()
pages = 5120 * 5120 * 4 // resource.getpagesize()
for _ in range(15):  # other blocks settle in between
    step(x).block_until_ready()
before = faults()
for _ in range(10):
    step(x).block_until_ready()
print(kept, (faults() - before) / pages)
"""


@pytest.mark.parametrize("environ", [{}, {"MALLOC_ARENA_TEST": "8"}])
def test_a_step_on_cpus_reuses_its_pages_unless_malloc_variables_are_set(environ):
    """Count page faults of ten steps per page of their temporaries of 100 MiB or more."""
    kept, faults = run(STEPS, JAX_PLATFORMS="cpu", **environ)
    assert kept == str(not environ)
    assert float(faults) < 4 if kept == "True" else float(faults) > 8


GROWTH = """
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
MB = 1 << 20

def block():
    address = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(200 * MB)))
    ctypes.memset(address, 1, 200 * MB)
    libc.malloc(ctypes.c_size_t(64))  # so that what is free on both sides stays apart
    return address

resident = lambda: host_memory.resident_bytes() // MB
print(host_memory.tune_malloc(), host_memory.give_back_memory())
held = block()
print(*[host_memory.give_back_memory() for _ in range(3)])
usual = resident()
for count in range(20):  # as a step whose memory never fits the hole of the last one
    blocks = [block() for _ in range(count)]
    [libc.free(one) for one in blocks]
    kept = resident()
    if host_memory.give_back_memory():
        break
print(usual, kept, resident(), count)
"""


def test_a_process_that_has_doubled_returns_free_memory():
    words = run(GROWTH, JAX_PLATFORMS="cpu")
    assert words[:5] == ["True", "True", "False", "False", "False"]
    usual, kept, after, count = map(int, words[5:])
    assert 1 < count < 19
    assert 2 * usual + 256 <= kept < 2 * usual + 256 + 210  # no more, and no less
    assert after < usual + 20


ARENAS = """
jax.config.update("jax_platforms", os.environ["PLATFORM"])
os.path.exists = lambda path: path in (os.environ["DEVICE"], "/proc/self/statm")
host_memory.tune_malloc()
barrier = threading.Barrier(12)
hold = lambda: [[bytes(5000) for _ in range(100)], barrier.wait()]
threads = [threading.Thread(target=hold) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL("libc.so.6")
libc.fopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, stream)
libc.fclose(stream)
"""


@pytest.mark.parametrize(
    ("platforms", "device", "environ", "arenas"),
    [
        ("cpu", "/dev/nvidiactl", {}, 1),
        ("", "", {}, 1),
        ("", "/dev/nvidiactl", {}, 2),
        ("cuda", "", {"MALLOC_ARENA_MAX": "9"}, 9),
    ],
)
def test_threads_share_arenas_unless_malloc_variables_are_set(platforms, device, environ, arenas):
    words = run(ARENAS, PLATFORM=platforms, DEVICE=device, **environ)
    assert words.count("<heap") == arenas
