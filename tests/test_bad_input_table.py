"""docs/bad_input.md, the table of everything that is refused, names the tests that there are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import ROOT, named_in, normalised, of_output, refusing_functions, refusing_tests

PAGE = ROOT / "docs" / "bad_input.md"


def test_the_table_is_up_to_date() -> None:
    there, wanted = named_in(PAGE.read_text(encoding="utf-8")), refusing_tests()
    assert there == wanted, (
        f"run `make bad-input`: {sorted(wanted - there)[:5]} aren't in the table, "
        f"{sorted(there - wanted)[:5]} aren't among the tests"
    )


def test_most_of_them_have_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("\n| `") > 1000
    assert "/tmp/" not in page and str(ROOT) not in page


def test_tests_are_found_by_what_they_call(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        "def refuse(): pytest.raises(ValueError)\n"
        "def through(refuse): pass\n"
        "def test_a(): pytest.raises(ValueError)\n"
        "def test_b(): refuse()\n"
        "def test_c(through): pass\n"
        "def test_d(): assert run().exit_code == 1\n"
        "def test_e(): assert 1\n"
        "class TestF:\n"
        "    def test_g(self): self._check()\n"
        "    def _check(self): pytest.raises(ValueError)\n"
        "    def test_h(self): pass\n"
    )
    tests = {name for name in refusing_functions(file) if "test_" in name}
    assert tests == {"test_a", "test_b", "test_c", "test_d", "TestF::test_g"}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("x '/tmp/pytest-of-me/pytest-3/test_a0/b/c.bin' y", "x '<folder>/b/c.bin' y"),
        ("<object at 0x7f0a5df0>", "<object at 0x...>"),
        (f"{ROOT}/hf_specdec", "<repository>/hf_specdec"),
        ("one\n   two", "one two"),
        ("at 127.0.0.1:40123", "at 127.0.0.1:PORT"),
        ("--host 127.0.0.1 --port 40123: taken", "--host 127.0.0.1 --port PORT: taken"),
        (
            "(process 12 on vm, since 2026-12-01T09:22:46+00:00). Wait",
            "(process PID on HOST, since TIME). Wait",
        ),
    ],
)
def test_what_differs_from_run_to_run_is_left_out(message: str, shown: str, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    assert normalised(message) == shown


def test_of_a_command_the_message_is_taken() -> None:
    output = "Usage: x\n\n╭─ Error ─╮\n│ Invalid value │\n│ for '--k'      │\n╰────╯\n"
    assert of_output(output) == "Invalid value for '--k'"
    bar = "Loading: 0%|  | 0/39 [00:00<?]\rLoading: 100%|██| 39/39 [00:00<00:00, 9.1it/s]\n"
    assert of_output(f"{bar}hf-specdec x: no\nmore\n") == "hf-specdec x: no more"
    assert of_output(f"{bar}text\nhf-specdec x: no\n{bar}") == "hf-specdec x: no"
    assert of_output(f"{bar}text\n") == "text"


def test_the_option_writes_a_table(tmp_path: Path) -> None:
    """Of a file whose tests are over at once."""
    file, path = "tests/engine/test_speculative_config.py", tmp_path / "table.md"
    arguments = ["-q", "-p", "no:cacheprovider", f"--bad-input-table={path}", file]
    subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    functions = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    assert len(rows) > 10 and all("ValueError" in row for row in rows)
    assert len(functions) > 5 and not list(tmp_path.glob("*.jsonl"))
