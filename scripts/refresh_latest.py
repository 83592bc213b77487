"""Moves constraints/latest.txt and the extra `tested` of pyproject.toml to the newest releases, and tests them.

    python scripts/refresh_latest.py [--dry-run]      once a week; then read the diff, mend what broke, commit

1. Ask the package index for the newest torch, accelerate, transformers, trl, deepspeed and peft (releases only).
2. Resolve the rest around them. Where a release asks for a package that the index does not serve, it is set down as it
   is and the rest is resolved without its requirements, which is said.
3. Say what changed against the file; with --dry-run, stop here.
4. Write both files and run `scripts/test.sh --latest`, whose exit code is this script's.

Needs pip >= 24 and nothing else. torch is resolved, not downloaded, until step 4. A `PIP_CONSTRAINT` holds here as
anywhere: it is how to stay with an older torch.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LATEST, PROJECT = ROOT / "constraints" / "latest.txt", ROOT / "pyproject.toml"
STACK = ("torch", "accelerate", "transformers", "trl", "deepspeed")
# What the extras `deepspeed`, `trl` and `test` name, as pyproject.toml has them.
MORE = ("peft", "pytest", "matplotlib", "rich", "pyyaml")
# Comes with the build of torch that scripts/environment.sh chooses.
OF_TORCH = re.compile(r"(nvidia|cuda)-|triton$")


def resolve(*arguments):
    """What pip would install into an empty environment: name -> its metadata, or `None` where it finds no way."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", "-", "-qq"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode:
        print("\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR: No matching")))
        return None
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {metadata["name"]: metadata for metadata in found}


def newest():
    """Pins of the newest of everything, name -> version."""
    alone = resolve("--no-deps", *STACK, *MORE)
    if alone is None:
        sys.exit("The package index does not answer.")
    pins = {name: metadata["version"] for name, metadata in alone.items()}
    pinned = [f"{name}=={version}" for name, version in pins.items()]
    whole = resolve(*pinned)
    if whole is None:
        whole = _around_those_that_do_not_resolve(alone)
    return {name: metadata["version"] for name, metadata in whole.items()} | pins


def _around_those_that_do_not_resolve(alone):
    """Resolve every package by itself; of one that does not, each requirement by itself, those not served left out."""
    wanted = []
    for name, metadata in alone.items():
        pin = f"{name}=={metadata['version']}"
        if resolve(pin) is not None:
            wanted.append(pin)
            continue
        for line in metadata.get("requires_dist", []):
            requirement = line.partition(";")
            if "extra ==" in requirement[2]:
                continue
            if resolve("--no-deps", line) is None:
                print(f"{pin} is tested without {requirement[0].strip()}, which the index does not serve.")
            else:
                wanted.append(line)
    whole = resolve(*wanted)
    if whole is None:
        sys.exit("These do not go together, whatever is left out:\n  " + "\n  ".join(wanted))
    return whole


def read():
    lines = LATEST.read_text().splitlines()
    return [line for line in lines if line.startswith("#")], dict(line.split("==") for line in lines if "==" in line)


def write(head, pins):
    LATEST.write_text("\n".join(head + [f"{name}=={pins[name]}" for name in sorted(pins, key=str.lower)]) + "\n")
    project = PROJECT.read_text()
    for name in STACK:
        project, count = re.subn(rf'"{name}<=[^"]*"', f'"{name}<={pins[name]}"', project)
        assert count == 1, f"pyproject.toml: one {name}<= in the extra `tested`, found {count}"
    PROJECT.write_text(project)


def main():
    head, old = read()
    new = {name: version.partition("+")[0] for name, version in newest().items() if not OF_TORCH.match(name)}
    changes = [f"  {n}: {old.get(n, '-')} -> {new.get(n, '-')}" for n in sorted(old | new) if old.get(n) != new.get(n)]
    print("\n".join(["Changed:", *changes]) if changes else "Nothing is newer.")
    if not changes or "--dry-run" in sys.argv[1:]:
        return
    write(head, new)
    sys.exit(subprocess.run(["bash", ROOT / "scripts" / "test.sh", "--latest"]).returncode)


if __name__ == "__main__":
    main()
