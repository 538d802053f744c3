"""The manifests name what exists, fit together, and leave nothing open that need not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from service_kit.probes import LIVENESS

from tests.unit.deploy.files import AUTOSCALING, BASE, USER, Machine, documents, manifests, unsafe_warnings
from tests.unit.docs.metrics_table import scheduler_table

MARGIN_S = 20.0  # of the grace period: what the services do before and after their drains
CONTAINERS = ("executor", "scheduler")


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    return manifests()


@pytest.fixture(scope="module")
def pod(objects: dict[str, dict[str, Any]]) -> Any:
    return objects["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def containers(pod: Any) -> dict[str, Any]:
    both = [*pod["initContainers"], *pod["containers"]]
    assert [one["name"] for one in both] == list(CONTAINERS)
    return {one["name"]: one for one in both}


@pytest.fixture(scope="module")
def settings(containers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both services read from their arguments and files."""
    machine = Machine(tmp_path_factory.mktemp("pod"), BASE / "settings")
    return {name: machine.parse(name, containers[name]["args"]) for name in CONTAINERS}


def probes(container: Any) -> dict[str, Any]:
    return {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}


@pytest.mark.parametrize("name", CONTAINERS)
def test_probes_ask_the_health_port_for_a_status_that_it_has(
    name: str, containers: dict[str, Any], settings: dict[str, Any]
) -> None:
    ports = {probe["grpc"]["port"] for probe in probes(containers[name]).values()}
    assert ports == {settings[name].health_port}
    assert settings[name].health_host == "0.0.0.0"
    asked = {which: probe["grpc"].get("service", "") for which, probe in probes(containers[name]).items()}
    # A service that loads, drains or has no executor is alive, and restarting it would not help.
    assert asked == {"startup": LIVENESS, "liveness": LIVENESS, "readiness": ""}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_frozen_container_is_killed_without_waiting_for_its_drain(
    name: str, pod: Any, containers: dict[str, Any]
) -> None:
    for which in ("startup", "liveness"):
        grace_s = probes(containers[name])[which]["terminationGracePeriodSeconds"]
        assert grace_s < pod["terminationGracePeriodSeconds"] / 10


@pytest.mark.parametrize("name", CONTAINERS)
def test_declared_ports_are_those_of_the_settings(
    name: str, containers: dict[str, Any], settings: dict[str, Any]
) -> None:
    declared = {port["containerPort"] for port in containers[name]["ports"]}
    open_ports = {settings[name].health_port, settings[name].metrics_port}
    assert declared == open_ports | ({settings[name].port} if name == "scheduler" else set())


def test_only_the_scheduler_listens_for_others_and_asks_for_tls_and_tokens(settings: dict[str, Any]) -> None:
    scheduler, executor = settings["scheduler"], settings["executor"]
    assert unsafe_warnings(scheduler) == []
    assert unsafe_warnings(executor) == []
    assert scheduler.tls_cert is not None
    assert scheduler.credentials.demanded
    assert executor.host == "127.0.0.1"
    assert executor.credentials.demanded
    assert list(scheduler.executor) == [f"{executor.host}:{executor.port}"]
    assert scheduler.executor_token_file == executor.auth_token_file
    assert scheduler.instance


def test_a_stack_drains_before_it_is_killed_and_the_executor_last(
    pod: Any, containers: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert containers["executor"]["restartPolicy"] == "Always"  # a sidecar: stopped after the scheduler
    prestop_s = containers["scheduler"]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains_s = sum(settings[name].drain_timeout_s for name in CONTAINERS)
    assert pod["terminationGracePeriodSeconds"] >= prestop_s + drains_s + MARGIN_S


def test_the_executor_has_as_many_gpus_as_ranks(containers: dict[str, Any], settings: dict[str, Any]) -> None:
    gpus = containers["executor"]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == settings["executor"].tensor_parallel


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_have_no_rights_and_bounded_memory(
    name: str, pod: Any, containers: dict[str, Any]
) -> None:
    context, own = pod["securityContext"], containers[name]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert {context[one] for one in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    resources = containers[name]["resources"]
    assert {"cpu", "memory"} <= resources["requests"].keys()
    assert "memory" in resources["limits"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # PACELINE_PORT and its like would be unknown settings
    assert not any(key in pod for key in ("hostNetwork", "hostPID", "hostIPC"))


@pytest.mark.parametrize("name", CONTAINERS)
def test_secrets_are_files(name: str, pod: Any, containers: dict[str, Any], settings: dict[str, Any]) -> None:
    assert "env" not in containers[name]
    assert "envFrom" not in containers[name]
    mounts = {mount["mountPath"]: mount for mount in containers[name]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    files = {
        "executor": ["auth_token_file"],
        "scheduler": ["tls_cert", "tls_key", "tokens_file", "executor_token_file"],
    }
    for setting in files[name]:
        folder = str(Path(getattr(settings[name], setting)).parent)
        mount = mounts[folder[folder.index("/etc/paceline/") :]]
        assert mount["readOnly"] is True
        assert "subPath" not in mount  # it would not follow changes
        secret = volumes[mount["name"]]["secret"]
        assert secret["defaultMode"] == 0o440  # readable through fsGroup


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_mount_has_a_volume_and_what_must_be_written_is_writable(
    name: str, pod: Any, containers: dict[str, Any]
) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    writable = {
        mount["mountPath"] for mount in containers[name]["volumeMounts"] if not mount.get("readOnly", False)
    }
    assert {mount["name"] for mount in containers[name]["volumeMounts"]} <= volumes.keys()
    kernels = {"/var/cache/paceline", "/dev/shm"} if name == "executor" else set()
    assert writable == {"/tmp"} | kernels


def test_every_volume_is_mounted_and_memory_is_shared_by_ranks(pod: Any, containers: dict[str, Any]) -> None:
    mounted = {mount["name"] for one in containers.values() for mount in one["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert all("sizeLimit" in one["emptyDir"] for one in volumes.values() if "emptyDir" in one)
    assert volumes["model"]["persistentVolumeClaim"]["readOnly"] is True


def test_all_objects_select_the_pods(objects: dict[str, dict[str, Any]]) -> None:
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    spread = objects["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert all(one["labelSelector"]["matchLabels"] == labels for one in spread)
    for one in objects.values():
        assert one["metadata"]["name"] == "paceline"
        assert "namespace" not in one["metadata"]  # the kustomization sets it


def test_a_client_that_resolves_the_service_finds_each_stack(
    objects: dict[str, dict[str, Any]], containers: dict[str, Any], settings: dict[str, Any]
) -> None:
    service = objects["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service
    names = {port["name"]: port["containerPort"] for port in containers["scheduler"]["ports"]}
    (port,) = service["ports"]
    assert names[port["targetPort"]] == port["port"] == settings["scheduler"].port


def test_the_network_lets_clients_to_the_scheduler_and_monitoring_to_metrics_and_nothing_out(
    objects: dict[str, dict[str, Any]], settings: dict[str, Any]
) -> None:
    policy = objects["NetworkPolicy"]["spec"]
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    assert policy["egress"] == []
    clients, monitoring = policy["ingress"]
    assert [port["port"] for port in clients["ports"]] == [settings["scheduler"].port]
    metrics = {settings[name].metrics_port for name in CONTAINERS}
    assert {port["port"] for port in monitoring["ports"]} == metrics
    assert all(rule["from"] for rule in policy["ingress"])  # an empty one would mean everybody


def test_the_autoscaler_follows_metrics_that_exist(objects: dict[str, dict[str, Any]]) -> None:
    gauges = {line.split("`")[1] for line in scheduler_table().splitlines() if "| gauge |" in line}
    followed = {
        one["pods"]["metric"]["name"] for one in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert followed
    assert followed <= gauges
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["kind"] == objects["Deployment"]["kind"]
    assert target["name"] == objects["Deployment"]["metadata"]["name"]


def test_prometheus_scrapes_the_metrics_ports(
    objects: dict[str, dict[str, Any]], containers: dict[str, Any], settings: dict[str, Any]
) -> None:
    ports = {port["name"]: port["containerPort"] for one in containers.values() for port in one["ports"]}
    scraped = {ports[one["port"]] for one in objects["PodMonitor"]["spec"]["podMetricsEndpoints"]}
    assert scraped == {settings[name].metrics_port for name in CONTAINERS}
    for name in CONTAINERS:
        assert settings[name].metrics_host == "0.0.0.0"


@pytest.mark.parametrize("folder", [BASE, AUTOSCALING], ids=lambda folder: folder.name)
def test_the_kustomization_names_all_files_beside_it(folder: Path) -> None:
    (kustomization,) = documents(folder / "kustomization.yaml")
    named = kustomization["resources"]
    assert all((folder / one).exists() for one in named)
    beside = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert beside <= set(named)
    for generator in kustomization.get("configMapGenerator", []):
        assert {str(path.relative_to(folder)) for path in folder.glob("settings/*")} == set(
            generator["files"]
        )


def test_the_services_read_the_files_of_the_config_map(pod: Any, containers: dict[str, Any]) -> None:
    (kustomization,) = documents(BASE / "kustomization.yaml")
    (generator,) = kustomization["configMapGenerator"]
    (volume,) = [one for one in pod["volumes"] if "configMap" in one]
    assert volume["configMap"]["name"] == generator["name"]
    keys = {Path(one).name for one in generator["files"]}
    for container in containers.values():
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
        (argument,) = container["args"]
        read = Path(argument.removeprefix("--config="))
        assert str(read.parent) == mount["mountPath"]
        assert read.name in keys


def test_the_autoscaler_alone_owns_the_number_of_stacks() -> None:
    (kustomization,) = documents(AUTOSCALING / "kustomization.yaml")
    (patch,) = kustomization["patches"]
    (operation,) = yaml.safe_load(patch["patch"])
    assert operation == {"op": "remove", "path": "/spec/replicas"}
    assert "replicas" in manifests()["Deployment"]["spec"]  # or there would be nothing to remove, an error
