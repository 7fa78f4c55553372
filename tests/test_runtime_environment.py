"""The environment matrix: the process that each launcher and each GPU assignment gives."""

import re

import pytest
from refusals import refused

from jaxdist.runtime import resolve, visible_gpus
from jaxdist.runtime.cluster_environment import RuntimeConfig, expand_counts, expand_hosts
from jaxdist.settings import ConfigError

EIGHT = ",".join(map(str, range(8)))
SECRET = {"JAXDIST_JOB_TOKEN": "s"}


def slurm(**changes: str | None) -> dict[str, str]:
    """Return variables of task 3 of 4 on two nodes, two GPUs each, as in SLURM 22.05 and 24.11."""
    environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_GPUS_ON_NODE": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def one_per_node(**changes: str | None) -> dict[str, str]:
    return slurm(
        SLURM_NTASKS="2",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_PROCID="1",
        SLURM_LOCALID="0",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        **changes,
    )


def eight_per_node(local: int, **changes: str | None) -> dict[str, str]:
    return slurm(
        SLURM_NTASKS="16",
        SLURM_STEP_NUM_TASKS="16",
        SLURM_PROCID=str(8 + local),
        SLURM_LOCALID=str(local),
        SLURM_STEP_TASKS_PER_NODE="8(x2)",
        SLURM_GPUS_ON_NODE="8",
        **changes,
    )


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        pytest.param(one_per_node(), None, id="task_per_node"),
        pytest.param(
            one_per_node(CUDA_VISIBLE_DEVICES=None, SLURM_GPUS_ON_NODE=None), None, id="cpu"
        ),
        pytest.param(slurm(), (1,), id="task_per_gpu_all_visible"),
        pytest.param(slurm(CUDA_VISIBLE_DEVICES="1"), None, id="gpu_bind_single"),
        pytest.param(
            slurm(CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_PER_TASK="1"),
            None,
            id="gpus_per_task_renumbered_by_cgroups",
        ),
        pytest.param(
            slurm(CUDA_VISIBLE_DEVICES="2,3", SLURM_GPUS_ON_NODE="4", SLURM_GPUS_PER_TASK="2"),
            None,
            id="two_gpus_per_task",
        ),
        pytest.param(
            slurm(CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="4", SLURM_GPUS_PER_TASK="a100:2"),
            None,
            id="two_gpus_per_task_typed_and_renumbered",
        ),
        pytest.param(
            slurm(CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="4"), (2, 3), id="two_of_four"
        ),
        pytest.param(eight_per_node(5, CUDA_VISIBLE_DEVICES=EIGHT), (5,), id="eight_tasks"),
        pytest.param(eight_per_node(5, CUDA_VISIBLE_DEVICES="GPU-aaaa"), None, id="bound_by_uuid"),
        pytest.param(slurm(CUDA_VISIBLE_DEVICES="MIG-a,MIG-b"), (1,), id="mig_slices_by_uuid"),
        pytest.param(slurm(CUDA_VISIBLE_DEVICES=""), None, id="no_gpu_given"),
    ],
)
def test_slurm_assigns_each_task_its_gpus(environ, devices):
    assert resolve(environ).local_device_ids == devices


def test_unnumbered_gpus_are_assigned_by_count():
    environ = slurm(CUDA_VISIBLE_DEVICES=None, SLURM_GPUS_ON_NODE=None)
    assert resolve(environ, num_gpus=8).local_device_ids == (4, 5, 6, 7)
    assert resolve(environ, num_gpus=0).local_device_ids is None


def test_every_gpu_of_a_node_is_assigned_once():
    taken = []
    for local in range(8):
        environ = eight_per_node(local, CUDA_VISIBLE_DEVICES=EIGHT)
        taken += resolve(environ).local_device_ids
    assert taken == list(range(8))


def test_gpus_that_do_not_divide_are_refused():
    with refused("2 processes", "3 GPUs"):
        resolve(slurm(CUDA_VISIBLE_DEVICES="0,1,2", SLURM_GPUS_ON_NODE="3"))


def test_slurm_plan():
    plan = resolve(slurm())
    assert (plan.process_id, plan.num_processes) == (3, 4)
    assert (plan.local_process_id, plan.num_local_processes, plan.num_hosts) == (1, 2, 2)
    assert plan.coordinator_address.startswith("n1:")
    assert plan.attempt == 0
    assert plan.source == "SLURM job 17"


def test_the_coordinator_is_unique_to_each_step_and_restart():
    ports = {resolve(slurm(SLURM_PROCID=str(i))).coordinator_address for i in range(4)}
    assert len(ports) == 1
    ports.add(resolve(slurm(SLURM_STEP_ID="1")).coordinator_address)
    ports.add(resolve(slurm(SLURM_RESTART_COUNT="1")).coordinator_address)
    ports.add(resolve(slurm(SLURM_JOB_ID=str(17 + 4096))).coordinator_address)
    assert len(ports) == 4


def test_the_slurm_restart_count_is_the_attempt():
    assert resolve(slurm(SLURM_RESTART_COUNT="2")).attempt == 2


def test_processes_of_one_attempt_share_a_token_and_no_other_job_has_it():
    tokens = [resolve(slurm(SLURM_PROCID=str(i))).token for i in range(2)]
    assert tokens[0] == tokens[1] != ""
    assert resolve(slurm(SLURM_RESTART_COUNT="1")).token not in tokens
    assert resolve(slurm(SLURM_STEP_ID="7")).token not in tokens
    assert resolve(slurm(JAXDIST_JOB_TOKEN="secret")).token == "secret"
    assert "secret" not in repr(resolve(slurm(JAXDIST_JOB_TOKEN="secret")))


def test_an_explicit_coordinator_overrides_the_node_list():
    environ = slurm(JAXDIST_COORDINATOR_ADDRESS="login-ib:4000")
    assert resolve(environ).coordinator_address == "login-ib:4000"


def test_sbatch_without_srun_is_refused():
    environ = slurm(SLURM_STEP_NODELIST=None, SLURM_PROCID="0")
    with refused("4 tasks", "2 nodes", "srun"):
        resolve(environ)
    assert resolve(environ, RuntimeConfig(num_processes=1)).num_processes == 1


def test_a_step_of_one_task_runs_alone():
    environ = slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
    plan = resolve(environ)
    assert (plan.num_processes, plan.coordinator_address) == (1, "")


def test_a_step_on_fewer_nodes_than_its_job_is_a_separate_job():
    # Variables of srun --nodes=2 --ntasks=4 in a job of four nodes; those of the job remain.
    step = {"SLURM_STEP_NODELIST": "n[2,4]", "SLURM_STEP_NUM_NODES": "2"}
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NODELIST": "n[1-4]"}
    plain = {"SLURM_NNODES": "4", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "2(x4)"}
    plan = resolve(slurm(**step, **job, **plain))
    assert (plan.num_processes, plan.num_hosts, plan.num_local_processes) == (4, 2, 2)
    assert plan.coordinator_address.startswith("n2:")


def test_launcher_inside_an_allocation_overrides_slurm():
    environ = slurm(
        JAXDIST_COORDINATOR_ADDRESS="127.0.0.1:5000",
        JAXDIST_NUM_PROCESSES="2",
        JAXDIST_PROCESS_ID="1",
        JAXDIST_NUM_HOSTS="1",
        JAXDIST_NUM_LOCAL_PROCESSES="2",
        JAXDIST_LOCAL_PROCESS_ID="1",
        JAXDIST_ATTEMPT="3",
    )
    plan = resolve(environ)
    assert (plan.source, plan.num_processes, plan.attempt) == ("jaxdist.launch", 2, 3)
    assert plan.local_device_ids == (1,)


def test_open_mpi_on_one_host():
    environ = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PMIX_NAMESPACE": "prterun-host-4711@1",
    }
    plan = resolve(environ)
    assert plan.coordinator_address.startswith("127.0.0.1:")
    assert (plan.source, plan.process_id, plan.num_hosts) == ("Open MPI", 1, 1)


def test_open_mpi_4_on_several_hosts_needs_the_address_of_mpirun():
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    }
    assert resolve(environ).coordinator_address.startswith("10.96.0.1:")
    del environ["OMPI_MCA_orte_hnp_uri"]
    with refused("-x JAXDIST_COORDINATOR_ADDRESS="):
        resolve(environ)
    environ["JAXDIST_COORDINATOR_ADDRESS"] = "n1"
    assert resolve(environ | SECRET).coordinator_address == "n1:29400"


@pytest.mark.parametrize(
    "environ",
    [
        {
            "JAX_COORDINATOR_ADDRESS": "job-0.job:6666",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": "2",
        },
        {
            "COORDINATOR_ADDRESS": "job-0.job",
            "COORDINATOR_PORT": "6666",
            "NUM_PROCESSES": "4",
            "PROCESS_ID": "2",
        },
        {"MASTER_ADDR": "job-0.job", "MASTER_PORT": "6666", "WORLD_SIZE": "4", "RANK": "2"},
        {
            "JAXDIST_COORDINATOR_ADDRESS": "job-0.job:6666",
            "JAXDIST_NUM_PROCESSES": "4",
            "JOB_COMPLETION_INDEX": "2",
        },
    ],
    ids=["kubeflow_trainer", "jaxjob", "pytorchjob", "indexed_job"],
)
def test_kubernetes_style_environments(environ):
    plan = resolve(environ | SECRET)
    assert (plan.process_id, plan.num_processes) == (2, 4)
    assert plan.coordinator_address == "job-0.job:6666"


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "n0:1", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "n0:1", "JAX_PROCESS_ID": "1"}, "JAX_NUM_PROCESSES"),
        ({"MASTER_ADDR": "n0", "WORLD_SIZE": "2"}, "RANK"),
        (
            {"JAXDIST_COORDINATOR_ADDRESS": "n0", "JOB_COMPLETION_INDEX": "2"},
            "JAXDIST_NUM_PROCESSES",
        ),
    ],
)
def test_a_process_that_would_run_without_its_peers_is_refused(environ, missing):
    with pytest.raises(ConfigError) as refused:
        resolve(environ)
    (problem,) = refused.value.problems
    assert {missing, *environ} <= set(re.findall(r"[A-Z_]{4,}", problem))
    assert resolve(environ, RuntimeConfig(num_processes=1)).num_processes == 1
    # srun numbers the processes, whatever its script exports.
    assert resolve(slurm(**environ)).source == "SLURM job 17"


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["PMI_RANK=1"]),
        ({"PALS_RANKID": "1", "PALS_NODEID": "0"}, ["PALS_RANKID=1"]),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}, ["JSM_NAMESPACE_RANK=1"]),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}, ["FLUX_TASK_RANK=1"]),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, ["PMIX_RANK=1"]),
        ({"MASTER_ADDR": "h", "WORLD_SIZE": "1", "RANK": "3"}, ["process id 3", "job of 1"]),
        (slurm(SLURM_HET_SIZE="2", SLURM_NTASKS="5", SLURM_PROCID="0"), ["heterogeneous"]),
        (
            slurm(SLURM_HET_SIZE="2", SLURM_NTASKS="5", SLURM_STEP_NUM_TASKS=None),
            ["heterogeneous", "started 5 tasks", "has 4"],
        ),
        ({"SLURM_JOB_ID": "17", "SLURM_HET_SIZE": "2"}, ["2 components", "srun"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=1"]),
        ({"PMI_SIZE": "2", "PMI_ID": "1"}, ["PMI_SIZE=2", "PMI_RANK"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({"RANK": "3"}, ["RANK=3", "WORLD_SIZE"]),
        ({"JAXDIST_NUM_PROCESSES": "2"}, ["JAXDIST_NUM_PROCESSES=2"]),
        (slurm(SLURM_STEP_NODELIST=""), ["SLURM_STEP_NODELIST=''"]),
        (slurm(SLURM_STEP_NODELIST="n[a-b]"), ["n[a-b]"]),
        # mpiexec in an allocation, started by srun on each node
        (slurm(PMI_RANK="7", PMI_SIZE="8"), ["PMI_RANK=7"]),
    ],
)
def test_ranks_that_cannot_join_never_run_alone(environ, facts):
    with refused(*facts):
        resolve(environ)


def test_mpi_processes_join_the_coordinator_of_the_environment():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "JAXDIST_COORDINATOR_ADDRESS": "n0"}
    plan = resolve(environ | SECRET)
    assert (plan.process_id, plan.num_processes, plan.coordinator_address) == (1, 2, "n0:29400")
    assert resolve(slurm(PMI_RANK="3", PMI_SIZE="4")).source == "SLURM job 17"
    assert resolve({"PMI_RANK": "0", "PMI_SIZE": "1"}).num_processes == 1


@pytest.mark.parametrize("address", ["fd00::10", "fd00::a1b", "[fd00::10]"])
def test_ipv6_coordinators(address):
    environ = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
    assert resolve(environ | SECRET).coordinator_address == f"[{address.strip('[]')}]:29500"


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("MIG-aaa,MIG-bbb", ["MIG-aaa"]),
        ("0, 1", ["0", "1"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        ("0,-1,1", ["0"]),
        ("2,,1", ["2"]),
        ("0,0", []),
        ("NoDevFiles", []),
        ("", []),
    ],
)
def test_visible_gpus_are_those_of_cuda(text, visible):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == visible


@pytest.mark.parametrize(
    "environ",
    [
        {"JAX_COORDINATOR_ADDRESS": "n0:1"},
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"RANK": "major"},
        {"NUM_PROCESSES": "8"},
        {"PROCESS_ID": "1234"},
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_variables_of_one_process_are_not_a_job(environ):
    assert resolve(environ).source == "alone"


def test_flags_override_every_environment():
    settings = RuntimeConfig(coordinator_address="n9:1234", num_processes=2, process_id=0)
    plan = resolve(slurm(**SECRET), settings)
    assert (plan.source, plan.coordinator_address, plan.num_processes) == ("flags", "n9:1234", 2)


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2", "RANK": "1"}, RuntimeConfig()),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "JAXDIST_COORDINATOR_ADDRESS": "n0"},
            RuntimeConfig(),
        ),
        ({}, RuntimeConfig(coordinator_address="n9:1234", num_processes=2, process_id=0)),
    ],
)
def test_a_job_that_may_span_hosts_has_a_secret(environ, settings):
    with refused("JAXDIST_JOB_TOKEN", "secret"):
        resolve(environ, settings)
    with refused("JAXDIST_JOB_TOKEN"):
        resolve(environ | {"JAXDIST_JOB_TOKEN": ""}, settings)
    assert resolve(environ | SECRET, settings).token == "s"
    on_loopback = RuntimeConfig(coordinator_address="[::1]:1", num_processes=2, process_id=0)
    assert resolve({}, on_loopback).token == ""


def test_an_empty_environment_is_one_process():
    plan = resolve({})
    assert (plan.source, plan.num_processes, plan.process_id) == ("alone", 1, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1", "[::1]"])
def test_loopback_coordinator_of_several_hosts_is_refused(host):
    with refused(host.strip("[]"), "loopback", "1 host"):
        resolve(slurm(JAXDIST_COORDINATOR_ADDRESS=f"{host}:5000"))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID='x'", "whole number"]),
        ({"SLURM_PROCID": "4"}, ["process id 4", "job of 4"]),
        ({"JAXDIST_COORDINATOR_ADDRESS": "n1:99999"}, ["n1:99999", "host:port"]),
    ],
)
def test_contradictions_are_named(changes, facts):
    with refused(*facts):
        resolve(slurm(**changes))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-02,10]", ["n01", "n02", "n10"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("gpu[1-2].cluster.local", ["gpu1.cluster.local", "gpu2.cluster.local"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("a[1,3],b,c[09-10]", ["a1", "a3", "b", "c09", "c10"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


def test_counts_per_node():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
