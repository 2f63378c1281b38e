"""The source tree, and copies of it that a test changes and builds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FROM_SOURCE = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


def run(*command, cwd=ROOT, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORCE_")}
    return subprocess.run(command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True)


def copy(tree):
    """The sources alone, without what was built in place."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "torch_*_*", "*.so", "*.egg-info", "_build.py", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)


def install(source, site, **environment):
    """Builds a tree, an sdist or a wheel and installs it into a folder for PYTHONPATH."""
    options = ("--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--target", str(site))
    result = run(sys.executable, "-m", "pip", "install", *options, str(source), cwd=Path(site).parent, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
