"""What an upgrade restarts, and how pools and routers follow one another.

tests/deploy/test_upgrade.py plays such upgrades with processes.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from testing.deploy.helm import CHART, RELEASE, Manifest, Parse, container_of, of_kind, render, run_helm

DEPLOY_PAGE = CHART.parents[2] / "docs" / "deploy.md"


@pytest.fixture(scope="module")
def deployments() -> dict[str, Manifest]:
    return of_kind(render(), "Deployment")


def test_a_new_version_of_the_chart_restarts_no_pod_whose_image_stays(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("{image: {tag: '7'}, routerImage: {tag: '7'}, autoscale: {enabled: true}}")
    chart = shutil.copytree(CHART, tmp_path / "twinfang")
    about = (chart / "Chart.yaml").read_text(encoding="utf-8")
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*$", r"\1: 9.9.9", about))
    before, after = (
        [
            document["spec"]["template"]
            for document in yaml.safe_load_all(
                run_helm("template", RELEASE, str(folder), "--kube-version", "1.34", "--values", str(values))
            )
            if document and document["kind"] == "Deployment"
        ]
        for folder in (CHART, chart)
    )
    assert len(before) == 4
    assert before == after


def test_a_decode_server_needs_no_prefill_server_of_its_version(
    deployments: dict[str, Manifest], parse: Parse
) -> None:
    assert parse(container_of(deployments["decode-default"])["args"]).local_prefill
    pools = {
        "refusing": {"flags": {"local-prefill": False}},
        "wanting": {"flags": {"local-prefill": True}},
        "both": {"flags": {"role": "both"}},
    }
    own = of_kind(render({"decodePools": pools}), "Deployment")
    found = {name: parse(container_of(own[f"decode-{name}"])["args"]).local_prefill for name in pools}
    assert found == {"refusing": False, "wanting": True, "both": False}


def test_old_servers_outlast_the_routers_that_need_them(deployments: dict[str, Manifest]) -> None:
    router = deployments["router"]["spec"]
    assert router["strategy"]["rollingUpdate"] == {"maxSurge": "100%", "maxUnavailable": 0}
    (container,) = router["template"]["spec"]["containers"]
    handover_s = 2 * container["readinessProbe"]["periodSeconds"] + 10  # they are up, and wait for servers
    for name in ("prefill-default", "decode-default"):
        spec = deployments[name]["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert spec["minReadySeconds"] > handover_s


def test_helm_waits_longer_than_a_model_may_load(deployments: dict[str, Manifest]) -> None:
    commands = re.findall(r"helm .*upgrade --install.*--wait.*", DEPLOY_PAGE.read_text(encoding="utf-8"))
    assert len(commands) >= 2
    longest_s = deployments["router"]["spec"]["progressDeadlineSeconds"]
    for command in commands:
        minutes = re.search(r"--timeout (\d+)m", command)
        assert minutes, command
        assert 60 * int(minutes[1]) >= longest_s, command
