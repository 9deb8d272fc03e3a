"""The manifests: validated by Kubernetes' schemas and Kubeflow's models; their commands are run."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "bootseer"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
_DEADLINE_S = 300.0
Document = dict[str, Any]


def documents(text: str) -> list[Document]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def kustomized(folder: str) -> list[Document]:
    program = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([program, "kustomize", DEPLOY / "kustomize" / folder], capture_output=True, check=True)
    return documents(done.stdout.decode())


@functools.cache
def validator() -> Callable[..., str]:
    """The function of kubernetes_validate, which otherwise parses a megabyte of schemas in each call."""
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)
    return utils.validate


def validated(document: Document) -> None:
    for version in VERSIONS:
        validator()(document, version, strict=True)


def pod_templates(value: object) -> Iterator[Document]:
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for each in value.values():
            yield from pod_templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from pod_templates(each)


@pytest.mark.parametrize("folder", ["node", "service", "service-postgresql"])
def test_kustomizations_are_what_kubernetes_knows(folder: str) -> None:
    for document in kustomized(folder):
        validated(document)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_what_kubernetes_and_kubeflow_know(path: Path) -> None:
    import kubeflow_trainer_api.models as trainer
    from kubeflow.training import models as training

    models = {
        "JobSet": trainer.JobsetV1alpha2JobSet,
        "TrainJob": trainer.TrainerV1alpha1TrainJob,
        "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    }
    for document in documents(path.read_text()):
        if (kind := document["kind"]) in models:
            # Models drop unknown fields.
            assert json.loads(models[kind].from_dict(document).to_json()) == document
        elif kind == "PyTorchJob":
            spec = document["spec"]
            assert spec.keys() <= set(training.KubeflowOrgV1PyTorchJobSpec.attribute_map.values())
            for replica in spec["pytorchReplicaSpecs"].values():
                assert replica.keys() <= set(training.KubeflowOrgV1ReplicaSpec.attribute_map.values())
                assert [each["name"] for each in replica["template"]["spec"]["containers"]] == ["pytorch"]
        else:
            validated(document)
        if kind in ("JobSet", "TrainJob", "TrainingRuntime", "PyTorchJob"):
            for template in pod_templates(document):
                validated({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]})


def commands() -> dict[str, list[str]]:
    """The command of each example of a job."""
    found = {}
    for path in EXAMPLES:
        for document in documents(path.read_text()):
            for words in re.findall(r'"command": (\[.*?\])', json.dumps(document)):
                found[path.stem] = json.loads(words)
    return found


def test_all_examples_start_the_same_way() -> None:
    found = commands()
    assert found.keys() == {"job", "jobset", "pytorchjob", "trainjob"}
    assert len({tuple(words) for words in found.values()}) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_pods_of_an_example_find_each_other_by_the_headless_service(tmp_path: Path) -> None:
    """The name has no address when the first pod starts, and two later."""
    words = commands()["job"]
    hosts, resolver, secret = tmp_path / "hosts", tmp_path / "resolv.conf", tmp_path / "secret"
    hosts.write_text("127.0.0.1 localhost\n")
    resolver.write_text("")
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o400)
    waits = (
        "import json, os, time\n"
        "path = os.environ['BOOTSEER_PEERS_DIR'] + '/members.json'\n"
        "print('runs', flush=True)\n"
        f"until = time.monotonic() + {_DEADLINE_S}\n"
        "while len(json.load(open(path))['peers']) < 2 and time.monotonic() < until: time.sleep(0.1)\n"
        "print(len(json.load(open(path))['peers']), flush=True)\n"
        "input()\n"
    )
    replaced = {
        "/opt/bootseer/current/bin/bootseer": str(Path(sys.executable).with_name("bootseer")),
        "--peers-secret=/etc/bootseer/peers/secret": f"--peers-secret={secret}",
        "--num-nodes=4": "--num-nodes=2",
        "--trace-to=service": "--trace-to=spool",
    }
    assert replaced.keys() <= set(words)
    command = [replaced.get(word, word) for word in words[:-1]] + [sys.executable, "-c", waits]
    within = f'mount --bind {hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf && exec "$@"'
    pods = []
    for node in ("a", "b"):
        env = {**os.environ, "NODE_NAME": node, "POD_UID": f"uid-{node}", "BOOTSEER_RUNTIME": str(tmp_path / "run")}
        env |= {"BOOTSEER_SPOOL": str(tmp_path / "spool"), "BOOTSEER_CACHE": str(tmp_path / node)}
        pods.append(
            subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", within, "sh", *command],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for pod in pods:
            assert pod.stdout is not None
            assert pod.stdout.readline() == "runs\n"
        with hosts.open("a") as file:
            file.write("127.0.0.72 moe\n127.0.0.73 moe\n")
        for pod in pods:
            assert pod.stdout is not None
            assert pod.stdout.readline() == "2\n"
    finally:
        for pod in pods:
            said = pod.communicate("\n", timeout=_DEADLINE_S)
            assert (pod.returncode, "no peers" in said[1]) == (0, False), said


@pytest.mark.parametrize("path", ["docs/kubernetes.md", "deploy/kustomize/service/kustomization.yaml",
                                  "deploy/helm/bootseer/templates/NOTES.txt"])  # fmt: skip
def test_tokens_made_as_described_have_no_newline(path: str, tmp_path: Path) -> None:
    """The Prometheus operator uses a secret unchanged, and headers may not contain newlines."""
    found = re.search(r"for scope in .*?; done", (DEPLOY.parent / path).read_text())
    assert found is not None
    subprocess.run(["sh", "-euc", found[0]], cwd=tmp_path, check=True)
    made = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert made.keys() == {"admin", "ingest", "read"}
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in made.values())


def rendered(values: Document) -> list[Document]:
    """The output of `helm template` for the chart, from gotpl's implementation of Go templates and Helm functions."""
    import jsonschema
    from gotpl.exts.helm import HelmTemplateEngine

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    given = merged(yaml.safe_load((CHART / "values.yaml").read_text()), values)
    jsonschema.validate(given, json.loads((CHART / "values.schema.json").read_text()))
    context = {
        "Values": given,
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": "bootseer", "Namespace": "bootseer", "Service": "Helm"},
    }
    sources = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    texts = HelmTemplateEngine(sources, strict=True).render({name: context for name in sources if name[0] != "_"})
    assert texts.pop("NOTES.txt").strip()
    return [document for text in texts.values() for document in documents(text)]


def merged(values: Document, given: Document) -> Document:
    """Merge like Helm: tables by key; other values are replaced."""
    result = dict(values)
    for key, value in given.items():
        result[key] = merged(values.get(key, {}), value) if isinstance(value, dict) else value
    return result


def named(found: list[Document]) -> dict[str, Document]:
    """Documents by kind and name, without fields that only the kustomizations or only the chart have."""
    for document in found:
        if document["kind"] != "RuntimeClass":
            document["metadata"]["namespace"] = "bootseer"
        document["metadata"].pop("annotations", None)
    text = re.sub(r'"imagePullPolicy": "\w+", |, "imagePullPolicy": "\w+"', "", json.dumps(found))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in json.loads(text)}


@pytest.mark.parametrize("database", ["", "bootseer-database"])
def test_the_chart_makes_what_the_kustomizations_make(database: str) -> None:
    service = "service-postgresql" if database else "service"
    plain = [*kustomized("node"), *kustomized(service), *kustomized("monitoring")]
    found = rendered({"service": {"databaseSecret": database}, "podMonitor": {"enabled": True}})
    assert named(found) == named([each for each in plain if each["kind"] != "Namespace"])


def test_the_charts_values_reach_the_manifests() -> None:
    from jsonschema import ValidationError

    found = rendered({
        "image": {"tag": "9"},
        "imagePullSecrets": ["pull"],
        "node": {
            "remove": True,
            "nodeSelector": {"gpu": "yes"},
            "cache": "/nvme/bootseer",
            "agent": {"port": 9000, "cacheLimit": "500g", "options": "--idle 60"},
            "containerd": {"enabled": False, "restart": False, "baseRuntime": "nvidia"},
        },
        "service": {
            "raw": "s3://b/p",
            "tlsSecret": "tls",
            "args": ["--workers=4"],
            "env": [{"name": "A", "value": "b"}],
            "volume": {"storageClass": "fast"},
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"operator": "Exists"}],
        },
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tlsConfig": {"serverName": "b.example"}},
        "jobs": {"namespaces": ["a", "b"]},
    })  # fmt: skip
    for document in found:
        if document["kind"] != "PodMonitor":
            validated(document)
    kinds = named([each for each in found if each["metadata"].get("namespace") not in ("a", "b")])
    pod = kinds["DaemonSet/bootseer-node"]["spec"]["template"]["spec"]
    assert {"--restart=no", "--base-runtime=nvidia", "--no-containerd", "--remove"} <= set(pod["containers"][0]["args"])
    assert pod["containers"][0]["env"][0]["value"] == "--listen 0.0.0.0:9000 --cache-limit 500g --idle 60"
    assert pod["containers"][0]["env"][2] == {"name": "BOOTSEER_CACHE", "value": "/nvme/bootseer"}
    assert kinds["RuntimeClass/bootseer"]["scheduling"]["nodeSelector"] == pod["nodeSelector"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "gpu": "yes"}
    pod = kinds["Deployment/bootseer-service"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][2:] == [
        "--raw=s3://b/p",
        "--tls-cert=/etc/bootseer/tls/tls.crt",
        "--tls-key=/etc/bootseer/tls/tls.key",
        "--workers=4",
    ]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    endpoint = kinds["PodMonitor/bootseer-service"]["spec"]["podMetricsEndpoints"][0]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "b.example"})
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert [each["metadata"]["namespace"] for each in found if each["kind"] == "Role"] == ["a", "b"]
    for wrong in ({"node": {"agnet": {}}}, {"node": {"agent": {"port": "9464"}}}, {"image": {"pullPolicy": "always"}}):
        with pytest.raises(ValidationError):
            rendered(wrong)
    nothing = rendered({"node": {"enabled": False}, "service": {"enabled": False}, "runtimeClass": {"enabled": False}})
    assert nothing == []
