"""A cut link between two hosts: more scenarios than `tests/test_launch_network.py`.

    python -m pytest -s scripts/bench/network_scenarios.py      # as root; about three minutes

With a long heartbeat timeout the watchdog detects the cut. A permanently cut link ends the job.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_launch_network import FIRST, Run, cut_and_mend, hosts, uncut  # noqa: E402, F401, after


def test_the_watchdog_finds_a_cut_link(hosts, tmp_path, uncut):  # noqa: F811, a fixture
    """Both hosts name the network; the run resumes with the same bits."""
    cut_and_mend(hosts, tmp_path, uncut, "watchdog")


def test_a_link_that_stays_cut_ends_the_job_with_its_name(hosts, tmp_path):  # noqa: F811, a fixture
    """Both launchers give up and name the missing process."""
    run = Run(hosts, tmp_path / "job", *FIRST["heartbeat"][0], restarts=1)
    (run.folder / "pace").write_text("0.03")
    run.wait_for_step(3)
    hosts.cut(1)
    began = time.monotonic()
    codes = run.end()
    assert all(code not in (0, 75) for code in codes)
    for host, words in (
        (0, "process 1 of 2 has not joined at h0:29400"),
        (1, "process 1 on h1 cannot reach the coordinator h0:29400 (process 0)"),
    ):
        assert words in run.output(host), run.output(host)[-4000:]
        assert "giving up" in run.output(host)
    print(f"given up after {time.monotonic() - began:.0f} s")
