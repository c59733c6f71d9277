"""The version is written in pyproject.toml; whatever else shows one agrees with it."""

import datetime
import re

import yaml

from testing.repository import DOCS, ROOT, project_version

CHART = ROOT / "deploy" / "helm" / "twinfang" / "Chart.yaml"


def test_the_newest_release_of_the_changelog_is_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest, *_ = re.findall(r"(?m)^## (.*)$", changelog)
    assert unreleased == "[Unreleased]"
    version, date = re.fullmatch(r"\[([\d.]+)\] - ([\d-]+)", newest).groups()
    assert version == project_version()
    datetime.date.fromisoformat(date)


def test_the_chart_and_images_have_this_version():
    chart = yaml.safe_load(CHART.read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (project_version(),) * 2
    for page in (ROOT / "README.md", DOCS / "deploy.md"):
        tags = re.findall(r"twinfang-(?:router|cpu|cuda):([\d.]+\d)", page.read_text(encoding="utf-8"))
        assert tags
        assert set(tags) == {project_version()}, page
