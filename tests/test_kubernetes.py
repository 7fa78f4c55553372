"""Kubernetes manifests: their contents, and rejected settings.

No cluster is needed. Kubeflow's models of the API check the golden manifest. `kubernetes_cases` has
the reactions of Kubernetes and JobSet to exit codes, from their documentation.
"""

import re
import subprocess
import types

import locked
import pytest
import yaml
from commands import ROOT
from kubernetes_cases import (
    EVERYTHING,
    config,
    container,
    environ_of,
    job,
    job_set,
    labels_of,
    outcome,
    pod,
)
from refusals import refused

from jaxdist import runtime
from jaxdist.checkpoint.local.copies import FailureDomain, failure_domain_of
from jaxdist.settings import problems_of
from jaxdist.tools.launch import kubernetes
from jaxdist.tools.launch.__main__ import main as launch
from jaxdist.tools.launch.kubernetes import KubernetesConfig, manifest_text
from jaxdist.tools.launch.membership import LegalSizes


@pytest.mark.parametrize("nodes", [1, 8])
def test_every_pod_resolves_its_process_id(nodes):
    manifest = job_set(config(name="llama", nodes=nodes))
    assert job(manifest)["completionMode"] == "Indexed"
    assert job(manifest)["completions"] == job(manifest)["parallelism"] == nodes
    environs = [
        environ_of(manifest, labels_of(index, 3, "uid-of-attempt-3"), f"node-{index}")
        for index in range(nodes)
    ]
    plans = [runtime.resolve(environ) for environ in environs]
    assert [plan.process_id for plan in plans] == list(range(nodes))
    assert {plan.num_processes for plan in plans} == {nodes}
    assert {plan.attempt for plan in plans} == {3}
    domains = [failure_domain_of(environ, "a-pod") for environ in environs]
    assert domains == [FailureDomain("", f"node-{index}") for index in range(nodes)]
    if nodes == 1:
        return
    # JobSet's names: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN
    (replicated,) = manifest["spec"]["replicatedJobs"]
    host = f"llama-{replicated['name']}-0-0.{manifest['spec']['network']['subdomain']}"
    assert {plan.coordinator_address for plan in plans} == {f"{host}:29400"}
    assert {plan.num_hosts for plan in plans} == {nodes}
    assert {plan.token for plan in plans} == {"uid-of-attempt-3"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (runtime.EXIT_PREEMPTED, "this pod again"),
        (runtime.EXIT_CONFIG, "FailJobSet"),
        (runtime.EXIT_SDC, "FailJobSet"),
        (runtime.EXIT_INTERRUPTED, "FailJobSet"),
        (runtime.EXIT_FAILURE, "RestartJobSet"),
        (runtime.EXIT_HANG, "RestartJobSet"),
        (137, "RestartJobSet"),  # killed: out of memory, or its node is lost
        (143, "RestartJobSet"),
    ],
)
def test_kubernetes_reacts_to_exit_codes_as_documented(code, expected):
    assert outcome(job_set(config(max_restarts=7)), code) == expected


def test_manifest_with_all_flags_matches_the_golden_file():
    golden = ROOT / "tests" / "kubernetes_golden.yaml"
    assert manifest_text(EVERYTHING) == golden.read_text(), f"check the change, then write {golden}"


@pytest.mark.parametrize("job_config", [config(), EVERYTHING], ids=["least", "everything"])
def test_api_models_accept_every_field(job_config):
    """Kubeflow's models, generated from the schemas that JobSet and Kubernetes publish."""
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the dev extra")
    manifest = job_set(job_config)
    assert api.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest  # drops unknown
    pod(manifest)["terminationGracePeriod"] = 30
    assert api.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() != manifest
    container(manifest)["args"] = [1]
    with pytest.raises(ValueError, match="args"):
        api.JobsetV1alpha2JobSet.from_dict(manifest)


def test_a_run_in_a_bucket_needs_no_volume():
    manifest = job_set(config(volume=(), run_dir="s3://bucket/runs/a", secret_env=("KEY=aws:key",)))
    assert problems_of(config(volume=(), run_dir="gs://bucket/runs/a")) == []
    (memory,) = pod(manifest)["volumes"]
    assert "emptyDir" in memory
    assert container(manifest)["args"][0] == "--run-dir=s3://bucket/runs/a"
    names = [entry["name"] for entry in container(manifest)["env"]]
    assert "JAXDIST_CACHE" not in names and "KEY" in names
    both = job_set(config(run_dir="s3://bucket/runs/a"))
    assert "JAXDIST_CACHE" in [entry["name"] for entry in container(both)["env"]]


@pytest.mark.parametrize("spelling", ["join_timeout_s", "join-timeout-s"])
def test_pods_have_a_long_join_timeout_by_default(spelling):
    assert "--runtime.join-timeout-s=1800" in container(job_set(config()))["args"]
    own = [f"--runtime.{spelling}", "60"]
    assert container(job_set(config(arguments=own)))["args"][1:] == own


@pytest.mark.parametrize("form", [["--config={}"], ["--config", "{}"]])
def test_a_config_file_is_sent_as_a_config_map(tmp_path, form):
    file = tmp_path / "own.toml"
    file.write_text('[train]\n# "quoted": and more\nsteps = 400\n')
    words = [word.format(file) for word in form]
    first, second = yaml.safe_load_all(manifest_text(config(name="mine", arguments=words)))
    assert first["kind"] == "ConfigMap" and first["data"] == {"run.toml": file.read_text()}
    (volume,) = (v for v in pod(second)["volumes"] if "configMap" in v)
    assert volume["configMap"]["name"] == first["metadata"]["name"]
    (mount,) = (m for m in container(second)["volumeMounts"] if m["name"] == volume["name"])
    assert container(second)["args"][1] == f"--config={mount['mountPath']}/run.toml"


AWKWARD = ["1e-4", "0o17", "y", "on", "null", "1_0", "1:30", "a: b", "# c", "it's", 'say "x"',
           "two\nlines", " edge ", "-", "ü", "podFailurePolicy: x"]  # fmt: skip


def test_arguments_reach_the_program_unchanged():
    text = manifest_text(config(arguments=AWKWARD))
    (manifest,) = yaml.safe_load_all(text)
    assert container(manifest)["args"][1:-1] == AWKWARD
    # Readers of YAML 1.1 and 1.2 disagree about these values: only quoted they are strings for all.
    for word in ("1e-4", "0o17", "y"):
        assert f'- "{word}"\n' in text


def test_dollar_references_in_arguments_and_variables_are_escaped():
    manifest = job_set(config(arguments=["$(HOME)"], env=("A=$(B)",)))
    assert container(manifest)["args"][1] == "$$(HOME)"  # an escaped $(HOME)
    assert {"name": "A", "value": "$$(B)"} in container(manifest)["env"]


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"device": ("rdma/hca",)}, ["--device 'rdma/hca'", "rdma/hca=8"]),
        ({"volume": ()}, ["--volume is missing", "ReadWriteMany"]),
        ({"volume": ("runs",)}, ["--volume 'runs'", "CLAIM:/PATH"]),
        ({"volume": ("runs:runs",)}, ["--volume 'runs:runs'"]),
        ({"run_dir": "/tmp/x"}, ["--run-dir /tmp/x", "/runs"]),
        ({"run_dir": "/runs/../x"}, ["--run-dir /runs/../x"]),
        ({"run_dir": "runs/x"}, ["--run-dir runs/x"]),
        ({"run_dir": "az://bucket/x"}, ["--run-dir az://bucket/x", "s3://BUCKET/PATH"]),
        ({"run_dir": "s3://bucket", "volume": ()}, ["--run-dir s3://bucket"]),
        ({"arguments": ["--run_dir", "x"]}, ["--run-dir is set after --"]),
        ({"node_selector": ("a",)}, ["--node-selector 'a'"]),
        ({"toleration": (":NoSchedule",)}, ["--toleration ':NoSchedule'", "KEY=VALUE"]),
        ({"env": ("A",)}, ["--env 'A'", "NAME=VALUE"]),
        ({"secret_env": ("A=b",)}, ["--secret-env 'A=b'", "SECRET:KEY"]),
        ({"user_id": 0}, ["user_id=0", "1 or more"]),
        ({"stop_timeout_s": 5}, ["stop_timeout_s=5", "30 or more"]),
    ],
)
def test_malformed_texts_and_paths_outside_volumes_are_rejected(fields, facts):
    (problem,) = problems_of(config(**fields))
    assert all(fact in problem for fact in facts), problem


@pytest.mark.parametrize(
    "fields",
    [
        {"run_dir": "/runs"},
        {"env": ("A=",), "secret_env": ("JAXDIST_JOB_TOKEN=token:value",)},
        {"toleration": ("example.com/key", "key:NoExecute", "key=:NoSchedule")},
    ],
    ids=["run_dir", "variables", "taints"],
)
def test_other_spellings_are_accepted(fields):
    assert problems_of(config(**fields)) == []


FLAGS = ["--image=host/jaxdist:1", "--volume=runs:/runs"]


@pytest.fixture
def cluster(monkeypatch):
    """Record kubectl calls; `code` is the exit status, None = kubectl is not installed."""
    seen = types.SimpleNamespace(calls=[], code=0)

    def run(words, *, input, text):
        if seen.code is None:
            raise FileNotFoundError(words[0])
        seen.calls.append((words, input))
        return types.SimpleNamespace(returncode=seen.code)

    monkeypatch.setattr(kubernetes, "read_sizes", lambda arguments: LegalSizes())
    monkeypatch.setattr(kubernetes.subprocess, "run", run)
    return seen


def test_dry_run_sends_nothing(cluster, capsys):
    assert kubernetes.main([*FLAGS, "--dry-run", "--", "--steps", "5"]) == 0
    (manifest,) = yaml.safe_load_all(capsys.readouterr().out)
    assert "--steps" in container(manifest)["args"] and cluster.calls == []


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (None, 2)])
def test_the_manifest_is_passed_to_kubectl(cluster, code, expected):
    cluster.code = code
    assert kubernetes.main([*FLAGS, "--name=mine"]) == expected
    if code is not None:
        ((words, text),) = cluster.calls
        assert words == ["kubectl", "apply", "-f", "-"]
        assert yaml.safe_load(text)["metadata"]["name"] == "mine"


def test_bad_training_arguments_are_rejected(cluster, monkeypatch):
    monkeypatch.setattr(kubernetes, "read_sizes", lambda arguments: 2)
    assert kubernetes.main([*FLAGS, "--", "--no-such=1"]) == 2
    assert cluster.calls == []


def test_the_removed_command_names_its_replacement():
    with refused("launch skypilot", "docs/kubernetes.md"):
        launch(["skypilot", "--gpus=H100:8"])


def test_documented_task_file_starts_one_launcher_per_node():
    task = yaml.safe_load(re.search(r"```yaml sky\n(.*?)```", PAGE, flags=re.S)[1])
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [runtime.EXIT_PREEMPTED]
    environ = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = task["run"].replace("exec python", "exec printf '%s\\n'")
    command = ["bash", "-c", script]
    environ["PATH"] = "/usr/bin:/bin"
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    flags, rest = words[2 : words.index("--")], words[words.index("--") + 1 :]
    assert words[:2] == ["-m", "jaxdist.launch"] and rest[0] == "--config"
    values = dict(flag.removeprefix("--").split("=") for flag in flags)
    assert values["nnodes"] == str(task["num_nodes"]) and values["node-rank"] == "1"
    assert values["coordinator-address"] == "10.0.0.1:29400"
    assert values["run-dir"].startswith(*task["volumes"])


PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_page_documents_the_exit_codes_of_the_manifest():
    manifest = job_set(config())
    rows = {row[0]: row[1] for row in re.findall(r"^\| (\d[^|]*)\| ([^|]*)\|$", PAGE, flags=re.M)}
    documented = {
        int(code): text for cell, text in rows.items() for code in re.findall(r"\b\d+", cell)
    }
    assert set(documented) == {0, 2, 75, 85, 87, 130}
    for code, text in documented.items():
        if code:
            assert ("job ends" in text) == (outcome(manifest, code) == "FailJobSet"), code


def test_image_uses_pinned_versions_and_is_not_root():
    steps = (ROOT / "Containerfile").read_text()
    user = KubernetesConfig().user_id
    assert f"\nUSER {user}:{user}\n" in steps and f"--uid {user}" in steps
    assert "ARG EXTRAS=cuda13,s3\n" in steps and '-c constraints.txt ".[${EXTRAS}]"' in steps
    for sources in re.findall(r"^COPY (.*) \S+$", steps, flags=re.M):
        assert all((ROOT / source).exists() for source in sources.split())


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
