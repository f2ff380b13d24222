"""The command line as a whole: answered at once, help for every command, errors that explain."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import public, startup
from hf_specdec._version import __version__
from hf_specdec.cli.app import PANELS, CommandLine, app

GROUP = typer.main.get_group(app)
COMMANDS = sorted(GROUP.commands)
# Lines of one command's help on a terminal of 100 columns, besides one for each option.
MOST_OTHER_HELP_LINES = 36
HEAVY = {"torch", "triton", "transformers", "numpy", "accelerate", "datasets", "fastapi"}


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m hf_specdec`, with the heavy modules that it imported as the last line."""
    script = (
        "import runpy, sys, atexit\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & sys.modules.keys())))\n"
        # What the interpreter itself does for -m; orig_argv says how the process was started.
        f"sys.orig_argv = ['python', '-m', 'hf_specdec']\nsys.argv = {['-m', *arguments]!r}\n"
        "runpy.run_module('hf_specdec', run_name='__main__', alter_sys=True)"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"], ["nonsense"]])
def test_help_and_wrong_commands_import_nothing_heavy(arguments: list[str]) -> None:
    result = run_module(*arguments)
    assert result.returncode == (2 if arguments == ["nonsense"] else 0), result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_no_command_imports_anything_heavy_before_it_runs() -> None:
    for command in COMMANDS:
        result = run_module(command, "--help")
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "[]", command


def test_python_m_starts_the_command_line() -> None:
    """The real thing, in which the interpreter says itself how it was started."""
    result = subprocess.run(
        [sys.executable, "-Ximporttime", "-m", "hf_specdec", "--version"],
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == f"hf-specdec {__version__}"
    assert "torch" not in result.stderr


@pytest.mark.parametrize(
    ("orig_argv", "expected"),
    [
        (["python", "-m", "hf_specdec", "demo"], True),
        (["python", "-u", "-m", "hf_specdec"], True),
        (["python", "/venv/bin/hf-specdec", "demo"], True),
        (["python", "C:\\venv\\Scripts\\hf-specdec.exe".replace("\\", "/")], True),
        (["python", "-m", "pytest", "hf-specdec"], False),
        (["python", "-m", "hf_specdec_plugin"], False),
        (["python", "-c", "import hf_specdec", "-m", "hf_specdec"], False),
        # A worker of the command line: it unpickles what needs the package.
        (["python", "-c", "from multiprocessing.spawn import spawn_main", "hf-specdec"], False),
        (["python", "train.py", "-m", "hf_specdec"], False),
        (["python"], False),
        (["python", "-m"], False),
    ],
)
def test_only_the_command_line_waits(
    monkeypatch: pytest.MonkeyPatch, orig_argv: list[str], expected: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert startup.is_command_line() is expected


@pytest.mark.parametrize(
    "script",
    [
        "from transformers import AutoConfig; import hf_specdec",
        "import hf_specdec.options.config; from transformers import AutoConfig",
        # In the command line's process, once a command runs.
        "import sys; sys.orig_argv = ['python', '-m', 'hf_specdec']; import hf_specdec;"
        "assert 'torch' not in sys.modules; from hf_specdec.startup import complete_package;"
        "complete_package(); from transformers import AutoConfig",
        # ... or whoever asks for a public name.
        "import sys; sys.orig_argv = ['python', '-m', 'hf_specdec']; import hf_specdec;"
        "hf_specdec.SpeculationStats; from transformers import AutoConfig",
    ],
)
def test_import_registers_and_opens_the_seams_in_any_order(script: str) -> None:
    check = (
        "\nfrom transformers.generation import GenerationMixin"
        "\nassert AutoConfig.for_model('mlp_speculator').model_type == 'mlp_speculator'"
        "\nassert GenerationMixin.generate.__module__ == 'transformers.generation.utils'"
        "\nassert hasattr(GenerationMixin.generate, '__wrapped__')"
        "\nimport hf_specdec; assert callable(hf_specdec.attach), hf_specdec.attach"
    )
    result = subprocess.run([sys.executable, "-c", script + check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_public_names_are_listed_once() -> None:
    assert sorted([*public.__all__, "__version__"]) == sorted(hf_specdec.__all__)
    assert all(getattr(hf_specdec, name) is getattr(public, name) for name in public.__all__)


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.strip() == f"hf-specdec {__version__}"


def test_help_lists_every_command_under_a_heading() -> None:
    output = help_of()
    filed = {name for names in PANELS.values() for name in names}
    assert set(COMMANDS) <= filed, "file the new command in PANELS"
    assert all(f" {name} " in output for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_has_an_example(command: str) -> None:
    output = help_of(command)
    lines = [line for line in output.splitlines() if "Usage:" not in line]
    examples = [line for line in lines if f"hf-specdec {command}" in line]
    assert examples, f"add an example to the help of {command}"
    parameters: list[Any] = GROUP.commands[command].params  # type: ignore[attr-defined]
    assert len(output.splitlines()) <= len(parameters) + MOST_OTHER_HELP_LINES
    # A description for every option.
    assert all(parameter.help for parameter in parameters)


@pytest.mark.parametrize("error", [ValueError("k=9 must be 1"), OSError("no such model")])
def test_errors_that_explain_end_a_command_without_a_traceback(error: Exception) -> None:
    line = CommandLine()

    @line.command()
    def broken() -> None:
        raise error

    result = CliRunner().invoke(line, [])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output == f"hf-specdec broken: {error}\n"


def test_other_errors_keep_their_traceback() -> None:
    line = CommandLine()

    @line.command()
    def broken() -> None:
        raise RuntimeError("a bug")

    assert isinstance(CliRunner().invoke(line, []).exception, RuntimeError)


def test_the_installed_command_is_the_apps_main() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'{startup.COMMAND} = "hf_specdec.cli.app:main"' in text
