"""launch/kubernetes.yaml: what its pods would do, with the variables that the operator sets; there is no cluster
here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from launch.job import compose_for
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[2]
JOB: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]


def pod_spec(kind: str) -> dict[str, Any]:
    return REPLICAS[kind]["template"]["spec"]


@pytest.mark.parametrize(("kind", "rank"), [("Master", 0), ("Worker", 3)])
def test_pod_starts_its_node_of_a_possible_job(tmp_path: Path, kind: str, rank: int) -> None:
    repo = tmp_path / "mixtrain"
    (repo / "launch").mkdir(parents=True)
    (repo / "launch" / "torchrun.sh").symlink_to(ROOT / "launch" / "torchrun.sh")
    python = repo / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    (container,) = pod_spec(kind)["containers"]
    env = {
        "PATH": "/usr/bin:/bin",
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "HOSTNAME": "pod",
    }
    result = subprocess.run(container["command"], cwd=repo, env=env, capture_output=True, text=True, timeout=LONG)
    assert (result.returncode, result.stderr) == (0, "")

    _, module, *arguments = result.stdout.splitlines()
    split = arguments.index("--")
    options, overrides = parse_args([*arguments[:split], "train.py"]), arguments[split + 1 :]
    assert module == "launch.agent"
    assert (options.rdzv_endpoint, options.rdzv_id) == ("job-master-0:23456", JOB["metadata"]["name"])
    assert options.rdzv_conf.startswith(f"is_host={int(rank == 0)},")
    nodes, ranks = int(options.nnodes), int(options.nproc_per_node)
    assert nodes == sum(spec["replicas"] for spec in REPLICAS.values())
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    config = compose_for(overrides, nodes * ranks)
    assert config.checkpoint.resume == "auto" and config.checkpoint.interval > 0
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    for folder in (config.run_dir, config.data.cache_dir, str(Path(options.log_dir).relative_to(repo))):
        assert f"{container['workingDir']}/{Path(folder).parts[0]}" in mounts
    assert set(mounts.values()) == {volume["name"] for volume in pod_spec(kind)["volumes"]}


def test_pods_come_back_and_have_time_to_save() -> None:
    assert set(REPLICAS) == {"Master", "Worker"}
    for kind, spec in REPLICAS.items():
        assert spec["restartPolicy"] == "OnFailure"  # ExitCode would take 75 for final
        assert pod_spec(kind)["terminationGracePeriodSeconds"] >= 300
        assert pod_spec(kind)["containers"][0]["name"] == "pytorch"
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert f"WORKDIR {pod_spec('Master')['containers'][0]['workingDir']}\n" in (ROOT / "Dockerfile").read_text()
