# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The files that other services read: workflows, hooks before a commit, and the pins that they share."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = [pytest.param(file, id=file.name) for file in sorted(ROOT.glob(".github/workflows/*.yml"))]
MAKEFILE = (ROOT / "Makefile").read_text()


def steps(file: Path) -> list[dict]:
    return [step for job in yaml.safe_load(file.read_text())["jobs"].values() for step in job["steps"]]


def test_there_are_workflows():
    assert {parameter.id for parameter in WORKFLOWS} >= {"ci.yml", "weekly.yml", "release.yml"}


@pytest.mark.parametrize("file", WORKFLOWS)
def test_workflow_runs_what_is_there(file):
    found = yaml.safe_load(file.read_text())
    # YAML reads the key `on` as a truth value.
    assert found["name"] and (found.get("on") or found[True]) and found["permissions"] == {"contents": "read"}
    commands = [step["run"] for step in steps(file) if "run" in step]
    for command in commands:
        for target in re.findall(r"^make ([\w-]+)", command, re.MULTILINE):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    assert all("@" in step["uses"] for step in steps(file) if "uses" in step)


@pytest.mark.skipif(shutil.which("sed") is None or sys.platform == "darwin", reason="needs GNU sed")
def test_the_release_makes_links_absolute(tmp_path):
    """PyPI shows the README without the repository around it."""
    command = next(
        step["run"] for step in steps(ROOT / ".github/workflows/release.yml") if "sed -i" in step.get("run", "")
    )
    shutil.copy(ROOT / "README.md", tmp_path)
    environment = {
        **os.environ,
        "GITHUB_SERVER_URL": "https://host",
        "GITHUB_REPOSITORY": "a/b",
        "GITHUB_REF_NAME": "v1",
    }
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, check=True)
    before, after = (re.findall(r"\]\(([^)]*)\)", (folder / "README.md").read_text()) for folder in (ROOT, tmp_path))
    for old, new in zip(before, after, strict=True):
        place = "raw" if old.endswith(".svg") and old.startswith("docs") else "blob"
        expected = old if old.startswith("https://") else f"https://host/a/b/{place}/v1/{old}"
        if old.startswith("../../"):
            expected = f"https://host/a/b/{old[6:]}"
        assert new == expected


def test_ci_tests_the_versions_of_python_that_the_project_allows():
    project = (ROOT / "pyproject.toml").read_text()
    tested = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    oldest = re.search(r'requires-python = ">=(.*)"', project).group(1)
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert tested["python"][0] == oldest == named[0] and tested["python"][-1] == named[-1]


def test_make_uses_the_oldest_transformers_that_the_project_allows():
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r"^OLDEST_TRANSFORMERS := (\d+\.\d+)", MAKEFILE, re.MULTILINE).group(1)
    assert f'"transformers>={oldest},' in project


def test_pre_commit_has_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    assert [repo["rev"] for repo in hooks if "ruff" in repo["repo"]] == [f"v{pinned}"]


def test_every_extra_is_pinned():
    """The requirements themselves; what they bring is seen when `make` installs it."""
    project = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'"([\w-]+)[>=<~]+[\d.]+', project))
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert "mkdocs-material" in wanted and wanted <= pinned
