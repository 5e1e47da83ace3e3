"""pyproject.toml, pixi.toml, the README and CI say the same."""

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tests.documents import ROOT, commands, shell_blocks

import ptxemu.cli
from maxconv import _cli as cli
from maxconv._version import __version__
from maxconv.bench.models.catalogue import load_catalogue

SCHEMA = ROOT.parent / "shared" / "pixi" / "schema.json"
# What a package on PyPI is called on a conda channel, where the names differ.
CONDA_NAMES = {
    "max": "modular",
    "matplotlib": "matplotlib-base",
    "ortools": "ortools-python",
    "torch": "pytorch-cpu",
    "xgboost": "py-xgboost-cpu",
    "xgboost-cpu": "py-xgboost-cpu",
}


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = tomli.loads((ROOT / name).read_text(encoding="utf-8"))
    return loaded


PROJECT = load("pyproject.toml")["project"]
PIXI = load("pixi.toml")


def requirements(*extras: str) -> dict[str, Requirement]:
    """Returns what an installation takes by name; a pinned version stands before a range."""
    lines = [*PROJECT["dependencies"]]
    pending, seen = list(extras), set()
    while pending:
        extra = pending.pop()
        seen.add(extra)
        for line in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == PROJECT["name"]:
                pending += requirement.extras - seen
            else:
                lines.append(line)
    made: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name not in made or "==" in str(requirement.specifier):
            made[name] = requirement
    return made


def version_of(dependency: str | dict[str, str]) -> SpecifierSet:
    """Returns a conda version as Python's packages write it: a bare version means equality."""
    text = dependency if isinstance(dependency, str) else dependency["version"]
    return SpecifierSet(f"=={text}" if text[0].isdigit() else text)


def test_pixi_toml_is_valid() -> None:
    if not SCHEMA.is_file():
        pytest.skip("pixi's JSON schema is not beside the repository")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    assert not [f"{error.json_path}: {error.message}" for error in validator.iter_errors(PIXI)]
    assert list(validator.iter_errors({**PIXI, "task": {}})), "the schema accepts anything"


def test_the_versions_agree() -> None:
    assert PIXI["workspace"]["version"] == __version__
    assert PIXI["workspace"]["name"] == PROJECT["name"] == "maxconv"
    assert PIXI["workspace"]["license"] == PROJECT["license"] == "Apache-2.0"
    assert PIXI["workspace"]["description"] == PROJECT["description"]
    assert SpecifierSet(PIXI["dependencies"]["python"]) == SpecifierSet(PROJECT["requires-python"])


def test_the_dependencies_agree() -> None:
    expected = {
        CONDA_NAMES.get(name, name): requirement.specifier
        for name, requirement in requirements("test").items()
    }
    declared = {
        name: version_of(value) for name, value in PIXI["dependencies"].items() if name != "python"
    }
    assert declared == expected


def test_max_mojo_and_torch_are_pinned() -> None:
    base, test = requirements(), requirements("test")
    assert str(base["max"].specifier) == "==26.7.*"
    assert str(base["mojo"].specifier) == "==1.2.*"
    assert "torch" not in base
    assert str(requirements("torch")["torch"].specifier) == ">=2.7"
    # A range would make pip fetch CUDA packages.
    assert str(test["torch"].specifier) == "==2.13.0"
    assert str(requirements("bench")["torch"].specifier) == "==2.13.0"
    extras = {"torch", "demo", "bench", "plot", "models", "test", "tune"}
    assert set(PROJECT["optional-dependencies"]) == extras


def test_the_models_libraries_are_pinned() -> None:
    pinned = [
        requirement
        for requirement in map(Requirement, PROJECT["optional-dependencies"]["models"])
        if requirement.name != PROJECT["name"]
    ]
    libraries = {*load_catalogue().libraries.values()} - {PROJECT["name"]}
    assert {requirement.name for requirement in pinned} == libraries
    assert all(str(requirement.specifier).startswith("==") for requirement in pinned)
    # No test needs them, but for what MAX's own models import too.
    both = {requirement.name for requirement in pinned} & requirements("test").keys()
    assert both == {"transformers"}
    [version] = [str(r.specifier)[2:] for r in pinned if r.name == "transformers"]
    assert version in requirements("test")["transformers"].specifier


def test_modular_comes_from_modulars_channel_and_the_rest_from_conda_forge() -> None:
    channel = "https://conda.modular.com/max"
    assert PIXI["workspace"]["channels"] == [channel, "conda-forge"]
    from_modular = {name for name, value in PIXI["dependencies"].items() if isinstance(value, dict)}
    assert from_modular == {"modular", "mojo"}
    assert all(PIXI["dependencies"][name]["channel"] == channel for name in from_modular)


def documented(*names: str) -> list[str]:
    """Returns the commands in the shell blocks of documents, each on one line."""
    blocks = [block for name in names for block in shell_blocks(ROOT / name)]
    return [" ".join(words) for block in blocks for words in commands(block)]


@pytest.mark.parametrize("task", ["demo", "test", "bench", "check", "fmt"])
def test_each_task_is_the_documented_command(task: str) -> None:
    assert set(PIXI["tasks"]) == {"demo", "test", "bench", "check", "fmt"}
    shown = documented("README.md", "CONTRIBUTING.md")
    assert f"pixi run {task}" in shown
    for command in PIXI["tasks"][task]["cmd"].split(" && "):
        assert command in shown


def test_the_two_commands_of_the_readme() -> None:
    shown = "\n".join(documented("README.md"))
    for commands_ in (
        "pip install .\npython -m maxconv demo",
        "pip install .[test]\npython -m pytest",
    ):
        assert commands_ in shown


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "install --quiet '.[test]'" in script
    for task in ("test", "check"):
        command = PIXI["tasks"][task]["cmd"]
        assert re.search(rf"^\s+{re.escape(command)}\b|^step .*{re.escape(command)}$", script, re.M)
    check = (ROOT / ".ci" / "check").read_text()
    for command in ("ruff check", "ruff format --check", "mypy", "mojo_format_check"):
        assert f"\nstep {command}\n" in check
    for name in ("run", "check"):
        assert os.access(ROOT / ".ci" / name, os.X_OK)


def test_the_tasks_that_are_ours_are_subcommands() -> None:
    for task in ("demo", "bench"):
        module, *arguments = PIXI["tasks"][task]["cmd"].removeprefix("python -m ").split()
        assert module == "maxconv"
        assert cli.build_parser(arguments).parse_args(arguments).command == task


def test_the_console_scripts_are_the_command_lines() -> None:
    mains = {"maxconv": cli.main, "ptxemu": ptxemu.cli.main}
    assert PROJECT["scripts"].keys() == mains.keys()
    for script, main in mains.items():
        module, _, name = PROJECT["scripts"][script].partition(":")
        assert getattr(importlib.import_module(module), name) is main


def test_pixi_finds_the_package_in_the_tree() -> None:
    path = PIXI["activation"]["env"]["PYTHONPATH"]
    assert (Path(path.replace("$PIXI_PROJECT_ROOT", str(ROOT))) / "maxconv" / "_cli.py").is_file()
