"""What a benchmark found, as numbers, tables and a picture."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from hf_specdec.agreement import Difference
from hf_specdec.benchmarking import Report, Row, Spread
from hf_specdec.benchmarking.clock import Sections
from hf_specdec.benchmarking.environment import describe_environment, processor_name
from hf_specdec.benchmarking.plot import COLOURS, MARKERS, draw, save_plot
from hf_specdec.benchmarking.results import Disagreement, RowRecord
from hf_specdec.benchmarking.tables import disagreement_lines, markdown, slowest_lines, tables
from hf_specdec.options.schedule import AUTO

NEAR_TIE = Disagreement.of(3, Difference(17, 0.125, 0.1, near_tie=True))
WRONG = Disagreement.of(5, Difference(4, 9.5, 0.1, near_tie=False))
ROW = Row(
    prompt_set="code",
    batch=1,
    k=2,
    plain_tokens_per_second=40.0,
    speculative_tokens_per_second=60.0,
    speedup=Spread(1.5, 1.25, 1.75),
    num_drafts=50,
    acceptance_rate=0.4,
    per_position=[0.6, 0.2],
    mean_acceptance_length=1.8,
    plain_first_token=0.0307,
    speculative_first_token=0.0411,
    target_share=0.9,
    drafter_share=0.07,
    loop_share=0.03,
    target_step=20.0,
    drafter_step=1.5,
    loop_step=0.75,
    plain_peak=500_000_000,
    speculative_peak=None,
    texts=8,
    disagreements=[NEAR_TIE],
)


def report(*rows: Row) -> Report:
    return Report({"dtype": "float32", "device": "cpu"}, {"target": "tiny"}, list(rows))


def rendered(*printables: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for printable in printables:
        console.print(printable)
    return cast(io.StringIO, console.file).getvalue()


def cells(text: str, first: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip().startswith(first)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3, 3, 3)), ([4.0, 1.0], (2.5, 1, 4)), ([9.0, 1.0, 2.0], (2, 1, 9))],
)
def test_spread(values: list[float], expected: tuple[float, float, float]) -> None:
    spread = Spread.of(values)
    assert (spread.median, spread.min, spread.max) == expected


def test_speedup_is_of_pairs_not_of_medians() -> None:
    record = RowRecord("code", 1, 2, plain_seconds=[1.0, 4.0], speculative_seconds=[0.5, 4.0])
    record.plain_first, record.speculative_first = [1.0], [2.0]
    record.sections = Sections(total=2.0, prompt=0.4, verification=1.0, drafter=0.4, steps=10)
    record.plain_peaks, record.speculative_peaks = [5, 7, None], [None]
    row = record.finish()
    assert (row.speedup.median, row.speedup.min, row.speedup.max) == (1.5, 1.0, 2.0)
    assert row.plain_tokens_per_second == pytest.approx(1 / 2.5)
    assert (row.plain_peak, row.speculative_peak) == (7, None)
    assert (row.target_share, row.drafter_share, row.loop_share) == pytest.approx((0.7, 0.2, 0.1))
    assert (row.target_step, row.drafter_step, row.loop_step) == pytest.approx((100, 40, 20))


def test_texts_are_counted_by_how_they_part() -> None:
    row = replace(ROW, disagreements=[NEAR_TIE, WRONG, WRONG])
    assert (row.identical, row.near_ties, row.wrong) == (5, 1, 2)
    assert report(row, ROW).wrong == 2


def test_json_has_every_number(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    report(ROW).write(path)
    content = json.loads(path.read_text())
    assert content["environment"] == {"dtype": "float32", "device": "cpu"}
    assert content["settings"] == {"target": "tiny"}
    (row,) = content["rows"]
    assert row["speedup"] == {"median": 1.5, "min": 1.25, "max": 1.75}
    assert (row["identical"], row["near_ties"], row["wrong"]) == (7, 1, 0)
    assert row["disagreements"][0] == {
        "prompt": 3,
        "position": 17,
        "gap": 0.125,
        "rounding": 0.1,
        "near_tie": True,
    }


def test_tables_have_the_numbers_and_fit_a_terminal() -> None:
    text = rendered(*tables([ROW]))
    assert cells(text, "code") == [
        ["code", "1", "2", "40.0", "60.0", "1.50x", "1.25-1.75", "1.80", "7/1/0"],
        ["code", "1", "2", "50", "0.40", "0.60", "0.20"],
        ["code", "1", "2", "30.7/41.1", "90.0/7.0/3.0", "20.00/1.50/0.75", "500/?"],
    ]
    assert "…" not in text


def test_brackets_in_a_files_name_are_not_markup() -> None:
    assert "[bold].txt" in rendered(*tables([replace(ROW, prompt_set="[bold].txt")]), width=120)


def test_first_place_of_a_disagreement_is_the_worst_ones() -> None:
    assert disagreement_lines([replace(ROW, disagreements=[])]) == []
    (line,) = disagreement_lines([ROW])
    assert "1 of 8 texts part; prompt 3 behind 17 equal tokens" in line
    assert "a near-tie" in line
    (line,) = disagreement_lines([replace(ROW, disagreements=[NEAR_TIE, WRONG])])
    assert "2 of 8 texts part; prompt 5 behind 4 equal tokens" in line
    assert "NOT a near-tie" in line


def test_markdown_has_a_line_for_each_place_and_a_column_for_each_k() -> None:
    rows = [replace(ROW, k=1, disagreements=[]), ROW, replace(ROW, batch=8, k=1)]
    rows.append(replace(ROW, batch=8, mean_acceptance_length=1.75))
    lines = markdown(report(*rows)).splitlines()
    assert lines[0].split(" | ")[3:5] == ["K = 1", "K = 2"]
    assert lines[2] == (
        "| code | 1 | 40 tok/s | 60 tok/s, 1.50x (1.25-1.75) | 60 tok/s, 1.50x (1.25-1.75) "
        "| 1.80, 1.80 | 15 / 1 / 0 |"
    )
    assert lines[3].startswith("| code | 8 |")
    assert {line.count("|") for line in lines[:4]} == {8}
    assert lines[-1] == "dtype float32, device cpu, target tiny"
    assert lines[-3].startswith("least speed-up: 1.50x (code, batch 1, K=1)")
    assert "NOT a near-tie" in markdown(report(replace(ROW, disagreements=[WRONG])))


def test_the_least_speed_up_is_of_medians() -> None:
    rows = [
        replace(ROW, speedup=Spread(1.2, 0.5, 1.9)),
        replace(ROW, prompt_set="maths", batch=8, k=AUTO, speedup=Spread(0.968, 0.9, 1.0)),
        replace(ROW, speedup=Spread(1.0, 0.97, 1.1)),
    ]
    expected = "least speed-up: 0.97x (maths, batch 8, K=auto), of 3 rows"
    assert slowest_lines(rows) == [expected]
    # Of a single one it would say nothing new.
    assert slowest_lines(rows[:1]) == []


def test_picture_has_a_panel_for_each_batch_and_one_for_acceptance() -> None:
    rows = [
        replace(ROW, prompt_set=name, batch=batch, k=k, per_position=[0.5] * k)
        for batch in (1, 8)
        for name in ("code", "maths")
        for k in (1, 3)
    ]
    figure: Any = draw(report(*rows))
    speed, speed_of_8, acceptance = figure.axes
    assert [axis.get_title() for axis in figure.axes] == [
        "batch 1",
        "batch 8",
        "acceptance, K = 3, batch 1",
    ]
    assert speed.get_ylim() == speed_of_8.get_ylim()
    assert [tick.get_text() for tick in speed.get_xticklabels()] == ["code", "maths"]
    assert [text.get_text() for text in speed.get_legend().get_texts()] == ["K = 1", "K = 3"]
    points = [container[0] for container in speed.containers]
    assert [list(point.get_ydata()) for point in points] == [[1.5, 1.5], [1.5, 1.5]]
    # Side by side, and told apart by colour and by shape.
    assert points[0].get_xdata()[0] < points[1].get_xdata()[0]
    assert points[0].get_color() != points[1].get_color()
    assert points[0].get_marker() != points[1].get_marker()
    # From the smallest to the largest.
    ((start, end), _) = speed.containers[0][2][0].get_segments()
    assert (start[1], end[1]) == (1.25, 1.75)
    assert [list(line.get_ydata()) for line in acceptance.get_lines()] == [[0.5] * 3] * 2
    assert [text.get_text() for text in acceptance.get_legend().get_texts()] == [
        "code (1.80)",
        "maths (1.80)",
    ]


def test_series_are_told_apart() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == len(MARKERS) == len(set(MARKERS))


@pytest.mark.parametrize(
    ("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.PDF", b"%PDF")]
)
def test_picture_is_written_in_the_format_of_its_name(
    tmp_path: Path, name: str, start: bytes
) -> None:
    # Also without any draft: K = 0.
    save_plot(report(replace(ROW, k=0, per_position=[])), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_environment_says_what_ran_where(target) -> None:
    described = describe_environment(target, "resident")
    assert described["dtype"] == "float32"
    assert described["device"] == "cpu"
    assert described["threads"] == torch.get_num_threads()
    assert described["torch"] == torch.__version__
    assert described["processor"] == processor_name() != ""
    assert "gpu" not in described
