"""Settings of the runtime section: which coordinator addresses are valid."""

import pytest
from refusals import missing

from jaxdist.runtime.config import RuntimeConfig


@pytest.mark.parametrize(
    ("address", "valid"),
    [
        ("n0:29400", True),
        ("[fd00::10]:29400", True),
        ("fd00::10", False),
        ("fd00::10:29400", False),
        ("n0", False),
        ("n0:0", False),
    ],
)
def test_coordinator_is_a_host_and_a_port(address, valid):
    settings = RuntimeConfig(coordinator_address=address, num_processes=2, process_id=0)
    problems = settings.problems()
    assert not problems if valid else missing(problems[0], address, "host:port") == []
