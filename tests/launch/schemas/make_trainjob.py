"""Write `trainjob.json` anew: python tests/launch/schemas/make_trainjob.py CHECKOUT COMMIT.

CHECKOUT is one of kubeflow/trainer at COMMIT. Descriptions, rules in CEL and parts that no manifest
of ours uses are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

CRD = "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"
VOLUMES = ("name", "configMap", "emptyDir", "persistentVolumeClaim")


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    left_out = {"x-kubernetes-validations"}
    left_out |= {"description"} if isinstance(value.get("description"), str) else set()
    return {key: plain(item) for key, item in value.items() if key not in left_out}


def main(checkout: str, commit: str) -> None:
    (version,) = yaml.safe_load(Path(checkout, CRD).read_text())["spec"]["versions"]
    schema = plain(version["schema"]["openAPIV3Schema"])
    del schema["properties"]["status"]
    spec = schema["properties"]["spec"]["properties"]
    del spec["initializer"]
    pod = spec["runtimePatches"]["items"]["properties"]["trainingRuntimeSpec"]
    for name in ("template", "spec", "replicatedJobs", "template", "spec", "template", "spec"):
        pod = pod["properties"][name]
        pod = pod.get("items", pod)
    for name in ("affinity", "initContainers"):
        del pod["properties"][name]
    volume = pod["properties"]["volumes"]["items"]["properties"]
    pod["properties"]["volumes"]["items"]["properties"] = {name: volume[name] for name in VOLUMES}
    source = {
        "source": f"https://github.com/kubeflow/trainer/blob/{commit}/{CRD}",
        "licence": "Apache-2.0, Copyright The Kubeflow Authors",
        "changes": "parts of it, without descriptions; see make_trainjob.py",
    }
    content = {"about": source, "version": version["name"], "schema": schema}
    Path(__file__).with_name("trainjob.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
