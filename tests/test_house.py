"""The house rules: who imports whom, how long things are, and that README, environment.yml and .ci/run say the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "minipar"
FILES = [file for file in sorted(HOUSE.rglob("*.py")) if file.parent.name not in ("checks", "solutions")]
CUTS = {"dp", "tp", "pp", "zero"}
PREDICTED = {
    *("facts", "order", "schedule", "costs", "simulate"),
    *("compute", "data", "stability", "activations", "collectives", "ledger"),
    *("quantities", "architecture", "catalogue", "layout", "planner"),
}
MEASURED = {"comm", "trace", "train", "pp", "report", "job", "launch"}
TALKS = {
    "comm": "the one file that sends messages",
    "checkpoint": "torch's storage for checkpoints",
    "peers": "torch's own parallelisms, for comparison",
}
LONGEST_FILE, LONGEST_FUNCTION = 400, 45  # lines
LONG: set[str] = set()  # exceptions, if there must be any: "file" or "file.function"


def name_of(file: Path) -> str:
    """minipar/show/svg.py -> "show/svg"."""
    return file.relative_to(HOUSE).as_posix().removesuffix(".py")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(node: ast.AST) -> list[str]:
    """Every module that is imported below the node, as a dotted name, but for those that only type checkers import."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            found += [f"{child.module}.{alias.name}" for alias in child.names]
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            found += imports(child)
    return found


def home(name: str) -> str:
    """The file that a dotted name leads to: minipar.show.svg.Sheet -> "show/svg"."""
    parts = name.split(".")[1:]
    while parts and not (HOUSE / "/".join(parts)).with_suffix(".py").exists():
        if (HOUSE / "/".join(parts) / "__init__.py").exists():
            return "/".join([*parts, "__init__"])
        parts.pop()
    return "/".join(parts) or "__init__"


@cache
def neighbours(module: str) -> frozenset[str]:
    """The files of minipar that this one imports."""
    names = imports(tree(HOUSE / f"{module}.py"))
    return frozenset(home(name) for name in names if name.startswith("minipar."))


def reach(module: str) -> set[str]:
    """The files that this one imports, and those that they import, and so on."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        for name in neighbours(ahead.pop()) - found:
            found.add(name)
            ahead.append(name)
    return found


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@cache
def floors() -> dict[str, list[str]]:
    """The map of the files in README.md, from the ground up: {"The cuts": ["dp", "tp", ...], ...}."""
    block = next(block for block in readme().split("```") if "\n  comm.py " in block)
    heading, found = "", dict[str, list[str]]()
    for line in block.strip("\n").splitlines():
        if line.startswith("  "):
            found.setdefault(heading, []).append(line.split()[0].removesuffix(".py"))
        else:
            heading = line
    return found


def floor(module: str) -> int:
    return next((number for number, modules in enumerate(floors().values()) if module in modules), -1)


# The floors.


def test_the_map_in_the_readme_names_every_file_once() -> None:
    named = [module for modules in floors().values() for module in modules]
    assert sorted(named) == sorted(name_of(file) for file in FILES)


def test_files_import_downward_only() -> None:
    upward = [
        f"{module} ({floor(module)}) imports {name} ({floor(name)})"
        for module in map(name_of, FILES)
        for name in neighbours(module)
        if floor(name) > floor(module)
    ]
    assert upward == []


def test_no_file_imports_itself_by_a_detour() -> None:
    assert [module for module in map(name_of, FILES) if module in reach(module)] == []


def test_the_floors_are_those_of_the_design() -> None:
    ground, above = {"launch", "comm", "mesh"}, {"model", "corpus", "schedule"}
    storeys = [{floor(module) for module in modules} for modules in (ground, above, CUTS, {"train"}, {"cli"})]
    assert storeys[0] == {0} and len(storeys[2]) == 1
    assert all(max(lower) < min(upper) for lower, upper in pairwise(storeys))


def test_no_cut_imports_another_cut() -> None:
    assert {cut: neighbours(cut) & CUTS for cut in CUTS} == dict.fromkeys(CUTS, frozenset())


def test_prediction_and_measurement_never_import_each_other() -> None:
    """What shares code with its measurement proves nothing."""
    for module in PREDICTED:
        assert reach(module) <= PREDICTED, module
        assert not reach(module) & MEASURED
    assert not reach("trace") & (PREDICTED - {"facts"})


def test_predictions_need_no_torch() -> None:
    names = ", ".join(f"minipar.{module}" for module in sorted(PREDICTED))
    subprocess.run([sys.executable, "-c", f"import {names}, sys; assert 'torch' not in sys.modules"], check=True)


def test_comm_alone_sends_messages() -> None:
    for file in FILES:
        attributes = [ast.unparse(node) for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute)]
        sends = any(name.startswith("torch.distributed") for name in [*imports(tree(file)), *attributes])
        assert name_of(file) in TALKS or not sends, name_of(file)


# Sizes and docstrings.


def test_a_file_can_be_read_in_one_sitting() -> None:
    lines = {name_of(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {name: number for name, number in lines.items() if number > LONGEST_FILE and name not in LONG} == {}


def test_a_function_fits_on_a_screen() -> None:
    lines = {
        f"{name_of(file)}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in FILES
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: number for name, number in lines.items() if number > LONGEST_FUNCTION and name not in LONG} == {}


def test_public_functions_and_classes_have_docstrings() -> None:
    silent = [
        f"{name_of(file)}.{node.name}"
        for file in FILES
        for node in tree(file).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node)
    ]
    assert silent == []
    assert [name_of(file) for file in FILES if not ast.get_docstring(tree(file))] == []


# The tools.


def test_ruff_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "minipar", "tests"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


def test_types_are_right() -> None:
    """As pyproject.toml has it: strict, but for what torch does not say."""
    assert "\nstrict = true\n" in (ROOT / "pyproject.toml").read_text()
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


# What a newcomer reads.


def test_the_commands_of_the_readme_are_those_that_ci_runs() -> None:
    told = re.findall(r"^```\n(.*\.venv/bin/pip install.*)\n```$", readme(), re.MULTILINE)
    run = re.findall(r"^time \((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert (
        told
        == run
        == [
            "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/minipar train",
            ".venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest",
        ]
    )


def test_links_and_pictures_of_the_readme_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", readme()) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)


def test_the_readme_names_every_command_and_no_other() -> None:
    from minipar.cli import build_parser

    commands = next(action.choices for action in build_parser()._actions if action.dest == "name")
    assert commands is not None
    assert set(re.findall(r"^\| `minipar (\w+)`", readme(), re.MULTILINE)) == set(commands)


def test_conda_installs_what_pip_installs() -> None:
    lines = [line.strip() for line in (ROOT / "environment.yml").read_text().splitlines()]
    project = (ROOT / "pyproject.toml").read_text()
    name, python = (re.search(rf'^{key} = "(.*)"$', project, re.MULTILINE) for key in ("name", "requires-python"))
    assert name and python
    assert f"name: {name[1]}" in lines
    assert f"- python{python[1]}" in lines
    tables = re.findall(
        r"^dependencies = \[(.*?)^\]|^\[project.optional-dependencies\]\n(.*?)^\[project", project, re.M | re.S
    )
    needed = {need for pair in tables for need in re.findall(r'"([^"]+)"', "".join(pair))}
    listed = [line.removeprefix("- ").strip('"') for line in lines[lines.index("- pip:") + 1 :]]
    assert listed[-1] == "-e ."
    assert set(listed[:-1]) == {need for need in needed if not need.startswith("minipar[")}
    assert len(listed[:-1]) == len(set(listed[:-1]))


def test_torch_is_bounded_above() -> None:
    """A minor version of torch may change what a course shows, so each is tried before it is allowed."""
    assert re.search(r'^    "torch>=2\.\d+,<2\.14",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_top_level_holds_only_what_is_allowed() -> None:
    allowed = {"lessons", "minipar", "tests", "exercises", "environment.yml", "README.md", "LICENSE", "pyproject.toml"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.suffix != ".egg-info"}
    assert found <= allowed
    assert allowed - {"lessons", "exercises"} <= found
