"""What newcomers are told is so: links lead somewhere, paths and names exist, commands can be run."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from testing.markdown import Page, in_backticks, pages
from testing.repository import ROOT

CONTRIBUTING = Page(ROOT / "CONTRIBUTING.md")
SHOWN = [CONTRIBUTING, Page(ROOT / "tests" / "README.md"), Page(ROOT / "SECURITY.md")]
CHECKLISTS = {name: text for name, text in CONTRIBUTING.sections(3).items() if re.search(r"(?m)^1\. ", text)}
PATH = re.compile(r"[\w.*-]+(/[\w.*-]*)+|[\w-]+\.md")
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\(\))?")
GITHUB = ROOT / ".github"


def paths_in(text):
    return [path for path in in_backticks(text) if PATH.fullmatch(path)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not list(Page(page).broken_links())


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.path.name)
def test_paths_in_backticks_exist(page):
    found = paths_in(page.text)
    assert not [path for path in found if not any(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("name", CHECKLISTS)
def test_names_in_a_checklist_stand_in_the_files_that_it_names(name):
    text = CHECKLISTS[name]
    files = [file for path in paths_in(text) for file in ROOT.glob(path.rstrip("/"))]
    told = "\n".join(
        file.read_text(encoding="utf-8")
        for one in files
        for file in ([one] if one.is_file() else one.rglob("*.py"))
        if file.suffix != ".md"
    )
    words = set(re.findall(r"\w+", told))
    names = [one for one in in_backticks(text) if NAME.fullmatch(one) and not PATH.fullmatch(one)]
    parts = {part for one in names for part in one.removesuffix("()").split(".")}
    assert names
    assert not parts - words


def test_there_is_a_checklist_for_each_kind_of_change():
    assert len(CHECKLISTS) == 6, "the seventh, a model's family, is a page of its own"


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.path.name)
def test_verbs_and_modules_that_commands_name_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    for command in page.commands():
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= verbs, command
        for module in re.findall(r"python -m ([\w.]+)", command):
            assert importlib.util.find_spec(module) is not None, command


def test_the_pages_name_commands_at_all():
    text = " ".join(CONTRIBUTING.commands())
    assert "make test" in text
    assert "python -m pytest" in text


def test_pre_commit_runs_what_make_lint_runs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"(?m)^(\w+) := (.*)$", makefile))
    recipe = re.search(r"(?m)^lint:.*\n((?:\t.*\n)+)", makefile)[1]
    while "$(" in recipe:
        recipe = re.sub(r"\$\((\w+)\)", lambda variable: variables[variable[1]], recipe)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [f"\t@{hook['entry']}" for hook in hooks] == recipe.splitlines()
    for hook in hooks:
        settings = hook["language"], hook["pass_filenames"], hook["always_run"]
        assert settings == ("system", False, True), hook["id"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [("github-workflows", "workflows/*.yml"), ("github-issue-forms", "ISSUE_TEMPLATE/*.yml")],
)
def test_files_for_the_forge_are_valid(schema, files):
    tool, found = Path(sys.executable).parent / "check-jsonschema", sorted(GITHUB.glob(files))
    ran = subprocess.run(
        [tool, "--builtin-schema", f"vendor.{schema}", *found], capture_output=True, text=True, check=False
    )
    assert found
    assert ran.returncode == 0, ran.stdout


def test_continuous_integration_runs_what_developers_run_and_may_only_read():
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    *_, last = job["steps"]
    assert (ROOT / last["run"]).exists()
    for step in job["steps"]:
        assert re.fullmatch(r"[\w/-]+@v\d+", step.get("uses", "any/action@v1"))
