"""The fleet's manifests say what KubeRay reads, fit the fleet's spec, and let nobody reach Ray's ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from paceline_fleet.cluster import own_environment
from paceline_fleet.spec import FleetSpec, read_spec

from tests.unit.deploy.files import BASE, KUBERNETES, USER, documents

FOLDER = KUBERNETES / "fleet"
GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": {"type": "object"},  # a pod's, which `make check-deploy` holds against Kubernetes' schemas
}
WORKERS = {
    "groupName": {"type": "string"},
    "replicas": {"type": "integer"},
    "minReplicas": {"type": "integer"},
    "maxReplicas": {"type": "integer"},
    "numOfHosts": {"type": "integer"},
}
HEAD = {"serviceType": {"type": "string"}, "enableIngress": {"type": "boolean"}}


def _closed(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


RAY_CLUSTER = _closed(
    {
        "rayVersion": {"type": "string"},
        "suspend": {"type": "boolean"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "headGroupSpec": _closed(GROUP | HEAD, *GROUP),
        "workerGroupSpecs": {"type": "array", "items": _closed(GROUP | WORKERS, "groupName", *GROUP)},
    },
    "headGroupSpec",
)
"""Fields of `spec` of ray.io/v1 RayCluster, as the types of KubeRay 1.1 have them; newer ones have more."""


@pytest.fixture(scope="module")
def cluster() -> Any:
    (found,) = documents(FOLDER / "ray-cluster.yaml")
    return found


@pytest.fixture(scope="module")
def spec() -> FleetSpec:
    return read_spec(FOLDER / "spec.yaml")


def templates(cluster: Any) -> dict[str, Any]:
    groups = {"head": cluster["spec"]["headGroupSpec"], "worker": cluster["spec"]["workerGroupSpecs"][0]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def container(cluster: Any, node: str) -> Any:
    (found,) = templates(cluster)[node]["containers"]
    return found


def flags(cluster: Any, node: str) -> dict[str, str]:
    one = container(cluster, node)
    words = [word for word in (*one["command"], *one["args"]) if word.startswith("--") and "=" in word]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def test_the_cluster_has_the_fields_that_kuberay_reads(cluster: Any) -> None:
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    found = Draft202012Validator(RAY_CLUSTER).iter_errors(cluster["spec"])
    assert [f"{one.json_path}: {one.message}" for one in found] == []
    # Otherwise KubeRay puts a command and probes of its own in place of these.
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}


@pytest.mark.parametrize("node", ["head", "worker"])
def test_ray_asks_for_its_token_and_nodes_outlive_their_head(
    cluster: Any, spec: FleetSpec, node: str
) -> None:
    assert spec.ray is not None
    given = {one["name"]: one.get("value") for one in container(cluster, node)["env"]}
    own = own_environment(spec.ray.token_file)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_gcs_rpc_server_reconnect_timeout_s"):
        assert given[name] == own[name]


def test_the_head_keeps_its_state_and_the_fleets_files_on_its_claim(cluster: Any, spec: FleetSpec) -> None:
    given = {one["name"]: one.get("value", "") for one in container(cluster, "head")["env"]}
    assert given["RAY_gcs_storage"] == "rocksdb"
    mounts = {one["mountPath"]: one["name"] for one in container(cluster, "head")["volumeMounts"]}
    (claimed,) = [
        one["name"] for one in templates(cluster)["head"]["volumes"] if "persistentVolumeClaim" in one
    ]
    for path in (Path(given["RAY_gcs_storage_path"]), spec.directory):
        assert mounts[str(path.parent)] == claimed


def test_workers_and_commands_find_the_head(cluster: Any, spec: FleetSpec) -> None:
    head = f"{cluster['metadata']['name']}-head-svc:{flags(cluster, 'head')['port']}"  # KubeRay's Service
    assert flags(cluster, "worker")["address"] == head
    assert spec.ray is not None
    assert spec.ray.address == head


@pytest.mark.parametrize("node", ["head", "worker"])
def test_all_files_of_the_spec_are_mounted_for_reading(cluster: Any, spec: FleetSpec, node: str) -> None:
    assert spec.tls is not None
    assert spec.ray is not None
    files = [spec.token_files.clients, spec.token_files.stacks, spec.ray.token_file]
    files += [spec.tls.cert, spec.tls.key, spec.tls.ca]
    mounts = {one["mountPath"]: one for one in container(cluster, node)["volumeMounts"]}
    volumes = {one["name"]: one for one in templates(cluster)[node]["volumes"]}
    for folder in {str(file.parent) for file in files}:
        assert mounts[folder]["readOnly"] is True
        assert volumes[mounts[folder]["name"]]["secret"]["defaultMode"] == 0o440
    if node == "worker":
        assert Path(mounts["/models"]["mountPath"]) == Path(spec.models[0].model or "").parent
    assert {one["name"] for one in mounts.values()} == volumes.keys()


def test_a_node_has_what_a_stack_takes(cluster: Any, spec: FleetSpec) -> None:
    (model,) = spec.models
    node, limits = flags(cluster, "worker"), container(cluster, "worker")["resources"]["limits"]
    assert int(node["num-gpus"]) == limits["nvidia.com/gpu"] >= model.gpus
    assert float(node["num-cpus"]) >= model.cpus
    assert model.per_node == 1
    assert model.replicas.max == cluster["spec"]["workerGroupSpecs"][0]["maxReplicas"]
    assert model.surge == 0  # no pod has room for a second one
    assert model.drain_timeout_s < templates(cluster)["worker"]["terminationGracePeriodSeconds"]
    assert flags(cluster, "head")["num-cpus"] == "0"


def test_clients_find_the_stacks_under_the_name_of_the_certificate(cluster: Any, spec: FleetSpec) -> None:
    (service,) = documents(FOLDER / "service.yaml")
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    assert spec.tls is not None
    assert spec.tls.name == f"{service['metadata']['name']}.{kustomization['namespace']}.svc"
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    assert port["port"] == spec.port_range.start  # a pod has one stack, which takes the first


def test_nobody_but_its_pods_reaches_ray_and_clients_reach_the_stacks(cluster: Any, spec: FleetSpec) -> None:
    (policy,) = documents(FOLDER / "network-policy.yaml")
    pods = {"matchLabels": {"ray.io/cluster": cluster["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == pods
    own, clients = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": pods}]}
    (ports,) = clients["ports"]
    assert range(ports["port"], ports["endPort"] + 1) == spec.port_range
    assert clients["from"]  # an empty one would mean everybody
    ray = {
        int(flags(cluster, node)[name]) for node, name in [("head", "port"), ("head", "node-manager-port")]
    }
    assert not ray & set(spec.port_range)


@pytest.mark.parametrize("node", ["head", "worker"])
def test_a_container_has_no_rights(cluster: Any, node: str) -> None:
    pod, one = templates(cluster)[node], container(cluster, node)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == USER
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # PACELINE_PORT and its like would be unknown settings
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_kustomization_names_all_files_beside_it() -> None:
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    (generator,) = kustomization["configMapGenerator"]
    named = {(FOLDER / one).resolve() for one in (*kustomization["resources"], *generator["files"])}
    assert named == {*FOLDER.glob("*.yaml"), BASE / "namespace.yaml"} - {FOLDER / "kustomization.yaml"}
