"""Which versions are refused, warned of, and tested: pyproject.toml says it, constraints/ pin it, the door reads it."""

import importlib.metadata
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hf_ulysses import door

ROOT = Path(__file__).parents[2]
STACK = ("torch", "accelerate", "transformers", "trl", "deepspeed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRES = [
    "torch>=2.6",
    "accelerate!=1.14.0,>=1.12",
    'trl>=0.18; extra == "trl"',
    'pytest>=99; extra == "test"',
    'accelerate<=1.16.0; extra == "tested"',
    'trl<=1.16.0; extra == "tested"',
]


def pins(name):
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def requirements(*lists):
    return {requirement.name: requirement for requirement in map(Requirement, sum(lists, []))}


@pytest.fixture
def installed(monkeypatch):
    """`installed(accelerate="1.13", ...)`: what is installed beside `REQUIRES`; the rest is missing."""
    monkeypatch.delenv("RANK", raising=False)
    door._warn_once.cache_clear()

    def install(**versions):
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
        monkeypatch.setattr(door, "_installed", {"torch": "2.14.1+cpu", **versions}.get)

    yield install
    door._warn_once.cache_clear()


def test_the_tested_versions_are_those_that_are_pinned():
    extras = PROJECT["optional-dependencies"]
    tested, needed = requirements(extras["tested"]), requirements(PROJECT["dependencies"], extras["deepspeed"], extras["trl"])
    assert tuple(tested) == STACK
    floor, test, latest = pins("floor"), pins("test"), pins("latest")
    for name in STACK:
        assert str(tested[name].specifier) == f"<={latest[name]}"
        assert Version(floor[name]) <= Version(test[name]) <= Version(latest[name])
        assert all(versions[name] in needed[name].specifier for versions in (floor, test, latest))


def test_the_door_reads_them_from_the_installed_package():
    """Fails where the installed package is another one than this: make the environment again."""
    found = requirements([str(requirement) for requirement in door._requirements() if door._belongs_to(requirement, "tested")])
    wanted = requirements(PROJECT["optional-dependencies"]["tested"])
    assert {name: r.specifier for name, r in found.items()} == {name: r.specifier for name, r in wanted.items()}


@pytest.mark.parametrize(
    "versions,said",
    [
        (dict(accelerate="1.11.9"), "accelerate.*>=1.12.*, but 1.11.9 is installed"),
        (dict(accelerate="1.14.0"), "accelerate!=1.14.0.*, but 1.14.0 is installed"),
        (dict(accelerate="1.15.0", trl="0.17.0"), "trl>=0.18, but 0.17.0 is installed"),
        (dict(), "needs accelerate.*pip install -U accelerate"),
    ],
)
def test_old_broken_and_missing_ones_are_refused_by_name(installed, versions, said):
    installed(**versions)
    with pytest.raises(ImportError, match=said):
        door.enable()


def test_tested_ones_are_not_mentioned(installed):
    installed(accelerate="1.16.0", trl="1.16.0", pytest="8")
    with warnings.catch_warnings(action="error"):
        door.check_versions()


def test_newer_ones_are_warned_of_once(installed):
    installed(accelerate="1.17.0.dev0", trl="1.16.1")
    with pytest.warns(UserWarning, match="accelerate 1.17.0.dev0 .*<=1.16.0.*trl 1.16.1 .*<=1.16.0"):
        door.check_versions()
    with warnings.catch_warnings(action="error"):
        door.check_versions()


def test_other_ranks_are_silent(installed, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    installed(accelerate="1.17.0")
    with warnings.catch_warnings(action="error"):
        door.check_versions()


def test_a_folder_that_is_not_installed_says_so(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    door._warn_once.cache_clear()
    monkeypatch.setattr(importlib.metadata, "requires", missing)
    with pytest.warns(UserWarning, match="not installed"):
        door.check_versions()
