"""What is refused, and in which words: docs/bad_input.md, written by the tests that refuse it.

    make bad-input                                # that table, from all tests of refusals
    pytest --bad-input-table PATH tests/hostile   # one of some

With the option only tests that expect a refusal are run, and what they are told is noted: errors
that ``pytest.raises`` caught, what commands said before they ended with another status than 0, and
answers of the server other than 2xx. Without it this file does nothing.
"""

import ast
import functools
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
# Fixtures and helpers of several test files.
_SHARED = tuple(sorted(TESTS.glob("*.py")))
_PROJECT = (str(ROOT / "hf_specdec"), str(ROOT / "modeling"))
# Refusals; whatever else a test expects was thrown by the test itself, or is a bug on purpose.
_REFUSALS = (ValueError, TypeError, OSError, RuntimeError, ImportError)
_LONGEST = 420


@dataclass(frozen=True)
class Refusal:
    """One of them.

    Attributes:
        test: ``file::function``, without parameters.
        case: the parameters.
        error: exception, exit status or HTTP status.
        message: normalised.
    """

    test: str
    case: str
    error: str
    message: str


def normalised(message: str) -> str:
    """A message without what differs from run to run: folders, addresses, processes."""
    message = re.sub(r"\x1b\[[0-9;]*m", "", message)
    own = rf"{re.escape(tempfile.gettempdir())}/(pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?)?"
    message = re.sub(rf"{own}[^/\s'\",;:)\]]+", "<folder>", message)
    message = message.replace(str(ROOT), "<repository>")
    message = re.sub(r"0x[0-9a-f]{6,}", "0x...", message)
    message = re.sub(r"127\.0\.0\.1(:| --port )\d+", r"127.0.0.1\1PORT", message)
    holder = r"process \d+ on \S+, since [\dT:+-]+"
    message = re.sub(holder, "process PID on HOST, since TIME", message)
    message = re.sub(r"\d+(\.\d+)? (MiB|GiB|MB|GB) free", "... free", message)
    message = " ".join(message.split())
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST].rstrip()} ..."


def of_output(output: str) -> str:
    """What a command said: the text in rich's box, or from its own name on, or the last lines."""
    lines = [line for line in output.splitlines() if not re.search(r"\d+%\|", line)]
    boxed = [line.strip("│ ") for line in lines if line.startswith("│")]
    if boxed:
        return " ".join(boxed)
    own = [number for number, line in enumerate(lines) if line.startswith("hf-specdec ")]
    return " ".join(lines[own[-1] :] if own else lines[-4:])


@functools.cache
def refusing_functions(file: Path) -> frozenset[str]:
    """Names of a file's functions that expect a refusal, by themselves or by what they call.

    Tests are named as in their ids: ``Class::function``.
    """
    shared: frozenset[str] = frozenset()
    if file not in _SHARED:
        shared = frozenset(n for f in _SHARED for n in refusing_functions(f))
    bodies: dict[str, set[str]] = {}
    for name, node in _functions(ast.parse(file.read_text(encoding="utf-8"))):
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        used |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        used |= {argument.arg for argument in node.args.args}
        bodies[name] = used
    found = {name for name, used in bodies.items() if used & ({"raises", "exit_code"} | shared)}
    while True:
        called = {name.rpartition("::")[2] for name in found}
        more = {name for name, used in bodies.items() if used & called} - found
        if not more:
            return frozenset(found)
        found |= more


def refusing_tests() -> set[str]:
    """``file::function`` of every test that expects a refusal."""
    return {
        f"{file.relative_to(ROOT).as_posix()}::{name}"
        for file in sorted(TESTS.rglob("test_*.py"))
        for name in refusing_functions(file)
        if name.rpartition("::")[2].startswith("test_")
    }


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield f"{node.name}::{part.name}", part


class _Noted:
    """What ``pytest.raises`` returns, noting what it caught."""

    def __init__(self, inner: Any, recorder: "Recorder"):
        self._inner, self._recorder = inner, recorder

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        caught = self._inner.__exit__(kind, error, traceback)
        if caught and error is not None:
            self._recorder.note_error(error)
        return caught


class Recorder:
    """Notes refusals while tests run, and writes the table at the end.

    Args:
        path: of the table.
        worker: of pytest-xdist, ``None`` in the process that writes.
    """

    def __init__(self, path: Path, worker: str | None):
        self._path, self._worker = path, worker
        self._test, self._case = "", ""
        self._notes = path.with_name(f"{path.name}.{worker or 'main'}.jsonl")

    def note(self, error: str, message: str) -> None:
        """Keep a refusal of the test that runs."""
        entry = Refusal(self._test, self._case, error, normalised(message))
        with open(self._notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def note_error(self, error: BaseException) -> None:
        """Keep an exception, if this project raised it."""
        frames, at = [], error.__traceback__
        while at is not None:
            frames.append(at.tb_frame.f_code.co_filename)
            at = at.tb_next
        # transformers and torch may have the last word, about what this project handed on.
        ours = any(frame.startswith(_PROJECT) for frame in frames)
        if ours and isinstance(error, _REFUSALS) and str(error):
            self.note(type(error).__name__, str(error))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Know whose refusals follow."""
        name, _, case = item.nodeid.partition("[")
        self._test, self._case = name, case.removesuffix("]")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Run tests of refusals alone."""
        wanted = refusing_tests()
        kept = [item for item in items if item.nodeid.partition("[")[0] in wanted]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    def pytest_sessionfinish(self) -> None:
        """Write the table of what all processes noted."""
        if self._worker is not None:
            return
        refusals = set()
        for file in sorted(self._path.parent.glob(f"{self._path.name}.*.jsonl")):
            lines = file.read_text(encoding="utf-8").splitlines()
            refusals |= {Refusal(**json.loads(line)) for line in lines}
            file.unlink()
        self._path.write_text(table(refusals, refusing_tests()), encoding="utf-8")

    def install(self) -> None:
        """Listen to everything that refuses."""
        raises = pytest.raises

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = raises(*args, **kwargs)
            return _Noted(found, self) if len(args) < 2 else found

        pytest.raises = noted  # type: ignore[assignment]
        self._listen_to_commands()
        self._listen_to_the_server()

    def _listen_to_commands(self) -> None:
        from typer.testing import CliRunner

        invoke = CliRunner.invoke

        def noted(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = invoke(runner, *args, **kwargs)
            if result.exit_code and isinstance(result.exception, SystemExit):
                self.note(f"exit status {result.exit_code}", of_output(result.output))
            return result

        CliRunner.invoke = noted  # type: ignore[assignment,method-assign]

    def _listen_to_the_server(self) -> None:
        from hf_specdec.serving.api_errors import ApiError

        response = ApiError.response

        def noted(error: Any) -> Any:
            if error.status != 500:
                self.note(f"HTTP {error.status}", error.message)
            return response(error)

        ApiError.response = noted  # type: ignore[assignment,method-assign]


def table(refusals: set[Refusal], tests: set[str]) -> str:
    """The page.

    Args:
        refusals: what was noted.
        tests: all that expect one; those without a row are named at the end.
    """
    lines = [
        "# Bad input",
        "",
        "What is refused, and in which words. `make bad-input` writes this page from the tests: "
        "each row is what a test was told. `<folder>` is a folder of the test's.",
    ]
    by_file: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for r in sorted(refusals, key=lambda r: (r.test, r.error, r.message, r.case)):
        file, _, function = r.test.partition("::")
        by_file.setdefault(file, {}).setdefault((function, r.error, r.message), []).append(r.case)
    for file, rows in by_file.items():
        lines += ["", f"## {_title(ROOT / file)}", "", f"`{file}`", ""]
        lines += ["| input | error | message |", "|---|---|---|"]
        for (function, error, message), cases in rows.items():
            lines.append(f"| {_input(function, cases)} | {error} | {_cell(message)} |")
    silent = sorted(tests - {r.test for r in refusals})
    lines += ["", "<!-- No refusal of this project's in:", *silent, "-->", ""]
    return "\n".join(lines)


def named_in(page: str) -> set[str]:
    """The tests that a page has rows or a mention of, as `refusing_tests` names them."""
    tests, file = set(), ""
    for line in page.splitlines():
        if match := re.fullmatch(r"`(tests/\S+\.py)`", line):
            file = match[1]
        elif match := re.match(r"\| `([\w:]+)`", line):
            tests.add(f"{file}::{match[1]}")
        elif line.startswith("tests/"):
            tests.add(line)
    return tests


def _title(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem
    return text.partition("\n")[0].rstrip(".")


def _input(function: str, cases: list[str]) -> str:
    some = ", ".join(_cell(case[:40]) for case in cases[:4] if case)
    more = f" and {len(cases) - 4} more" if len(cases) > 4 else ""
    return f"`{function}`" + (f": {some}{more}" if some else "")


def _cell(text: str) -> str:
    for character in "\\`*_<>[]":
        text = text.replace(character, f"\\{character}")
    return text.replace("|", "&#124;")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption(
        "--bad-input-table", type=Path, metavar="PATH", help="write the table of refusals there"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Listen, if asked to."""
    path = config.getoption("--bad-input-table")
    if path is None:
        return
    worker = getattr(config, "workerinput", {}).get("workerid")
    recorder = Recorder(path.absolute(), worker)
    config.pluginmanager.register(recorder, "bad-input-table")
    # With workers the first process runs no test.
    if worker is not None or not getattr(config.option, "numprocesses", None):
        recorder.install()
