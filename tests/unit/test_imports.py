"""The core is torch only, and importing the package does nothing but define names."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_ulysses

PACKAGE = Path(hf_ulysses.__file__).parent
LIBRARIES = {"accelerate", "transformers", "trl", "deepspeed", "peft", "datasets"}
# The adapters are loaded by the door; config.py too, when its names are asked for.
MAY_IMPORT_LIBRARIES = {"adapters", "planner", "cli.py", "__main__.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_at_module_level(tree):
    """Top packages that importing this module imports; what functions import later does not count."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += list(ast.iter_child_nodes(node))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_which_files_import_the_libraries(file):
    found = LIBRARIES & set(imported_at_module_level(ast.parse(file.read_text())))
    assert not found or file.relative_to(PACKAGE).parts[0] in MAY_IMPORT_LIBRARIES


def test_this_check_sees_imports():
    source = "import torch\nif True:\n  from accelerate.utils import x\nclass A:\n  import trl\ndef f():\n  import peft"
    assert set(imported_at_module_level(ast.parse(source))) == {"torch", "accelerate", "trl"}


PROBE = """
import json, os, sys, threading, warnings, signal
import torch, torch.distributed
def state():
    return {
        "environment": dict(os.environ), "modules": sorted(m for m in sys.modules if "." not in m),
        "threads": threading.active_count(), "default dtype": str(torch.get_default_dtype()),
        "torch threads": torch.get_num_threads(), "filters": [str(f) for f in warnings.filters],
        "excepthook": repr(sys.excepthook), "signals": [str(signal.getsignal(s)) for s in signal.valid_signals()],
        "path": sys.path, "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
before = state(); import hf_ulysses; after = state()
print(json.dumps([before, after]))
"""


def test_importing_has_no_side_effect():
    command = [sys.executable, "-c", PROBE]
    # A fresh environment: this process has imported the package, and would hand on what that may have written.
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True, env=environment)
    before, after = json.loads(done.stdout)
    new = set(after.pop("modules")) - set(before.pop("modules"))
    assert after == before
    assert done.stderr == ""
    assert not new & LIBRARIES and "hf_ulysses" in new


def test_the_door_offers_what_it_names():
    assert all(hasattr(hf_ulysses, name) for name in hf_ulysses.__all__)
    assert callable(hf_ulysses.attach)
