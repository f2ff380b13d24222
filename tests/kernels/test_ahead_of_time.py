"""Every variant of every kernel is compiled for A100 and H100, where no GPU is.

The interpreter accepts what the compiler refuses (a variable that changes its shape in a loop), and
says nothing of registers. Compiled is in a process of its own, in which nothing is interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specdec.kernels import runtime

TOOL = Path(__file__).parents[2] / "benchmarks" / "kernel_resources.py"
# 128 registers leave room for 512 threads on a multiprocessor, enough to keep memory busy.
MOST_REGISTERS = 128
# A program may take half of what an A100 has; an H100 has more.
MOST_SHARED = 82 * 1024


@pytest.fixture(scope="module")
def compiled() -> dict:
    """What the tool reports: modules, and for each variant and architecture its resources."""
    if not runtime.installed():
        pytest.skip("triton isn't installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(TOOL), "--json"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    if reason := report.get("skipped"):
        pytest.skip(reason)
    return report


def test_every_file_with_kernels_says_how_they_are_launched(compiled: dict) -> None:
    folder = Path(runtime.__file__).parent
    with_kernels = {
        file.stem
        for file in folder.glob("*.py")
        if "tl.program_id" in file.read_text(encoding="utf-8")
    }
    assert with_kernels
    assert with_kernels <= {module.rsplit(".", 1)[1] for module in compiled["modules"]}


def test_every_kernel_of_a_file_is_compiled(compiled: dict) -> None:
    """A kernel without a variant would never be compiled before it meets a GPU."""
    assert compiled["kernels_without_variant"] == []


def test_names_tell_variants_apart(compiled: dict) -> None:
    names = [(row["variant"], row["architecture"]) for row in compiled["rows"]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("architecture", [80, 90])
def test_every_variant_compiles_and_fits(compiled: dict, architecture: int) -> None:
    rows = [row for row in compiled["rows"] if row["architecture"] == architecture]
    assert rows
    bad = [
        row
        for row in rows
        if row["error"]
        or row["spilled"]
        or row["stack"]
        or not 0 < row["registers"] <= MOST_REGISTERS
        or row["shared"] > MOST_SHARED
    ]
    assert not bad, "\n".join(map(str, bad))


def test_spills_would_be_seen(tmp_path: Path) -> None:
    """The check itself: with 32 registers the head's kernel doesn't fit."""
    if not runtime.installed():
        pytest.skip("triton isn't installed")
    code = """
from hf_specdec.kernels import ahead_of_time, head_argmax
if reason := ahead_of_time.missing_tools():
    print("skipped", reason)
else:
    variant = next(v for v in head_argmax.variants() if "one state" in v.name)
    print("spilled", ahead_of_time.compile_variant(variant, 90, maxnreg=32).spilled)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    word, rest = result.stdout.split(maxsplit=1)
    if word == "skipped":
        pytest.skip(rest)
    assert int(rest) > 0
