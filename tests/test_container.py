"""The container image is built from the lock file; scripts/container/build.sh tests it."""

import re
import subprocess
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "container"))
import locked

LOCK = (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("script", ["build.sh", "smoke.sh"])
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "container" / script)], check=True)


def test_package_that_differs_from_lock_is_reported():
    lock = "# versions\na==1.0\nb-c==2 ; python_version < '3'\nb-c==3 ; python_version >= '3'\n"
    assert locked.differences({"A": "1.0", "b_c": "3", "jaxdist": "0.1", "pip": "1"}, lock) == []
    wrong = locked.differences({"a": "1.1", "b_c": "2", "d": "1"}, lock)
    assert [line.split(" ")[0] for line in wrong] == ["a", "b-c", "d"]


def test_cuda_and_build_packages_are_locked():
    """jax allows version ranges: without a lock line the image would change every week."""
    names = re.findall("^([a-z0-9-]+)==", LOCK, flags=re.M)
    libraries = "cublas cuda-cupti cuda-nvrtc cudnn-cu13 cufft cusolver cusparse nccl-cu13"
    libraries += " nvjitlink nvshmem-cu13 cuda-nvcc cuda-runtime"
    assert {f"nvidia-{name}" for name in libraries.split()} | {"setuptools"} <= {*names}
    steps = (ROOT / "Containerfile").read_text()
    assert "-c constraints.txt setuptools" in steps and "--no-build-isolation" in steps
