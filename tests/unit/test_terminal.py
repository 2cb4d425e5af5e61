"""Tables, the progress line with a hand-moved clock, durations and sizes, marked changes."""

import io
import subprocess
import sys

import pytest

from t2t.terminal import Progress, colours, human_bytes, human_count, human_seconds, is_terminal, mark_changes, table

CLEAR = "\x1b[K"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that moves when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_table_golden():
    rows = [["copy", 0.70211, 12, "–"], ["before", 0.5, 7968768, "1:15"], ["după", 0.91, 3, "12:00"]]
    golden = """\
system   words      count   time
──────  ──────  ─────────  ─────
copy    0.7021         12      –
before  0.5000  7,968,768   1:15
după    0.9100          3  12:00"""
    assert table(rows, header=["system", "words", "count", "time"]) == golden


def test_table_column_with_text_is_left_aligned_and_lines_have_no_trailing_space():
    assert table([["device", "cpu"], ["size", 12], ["none", None]]) == "device  cpu\nsize    12\nnone"


def test_table_aligns_by_columns_not_code_points():
    # A combining comma takes no column, a wide character two, a colour none.
    lines = table([["s\u0326i", "x"], ["日", "x"], ["\x1b[32mab\x1b[0m", "x"]]).splitlines()
    assert lines == ["s\u0326i  x", "日  x", "\x1b[32mab\x1b[0m  x"]


def test_table_without_rows():
    assert table([], header=["a", "bcd"]) == "a  bcd\n─  ───"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.1234"), (5123.4, "5,123"), (123.45, "123.5"), (3e-5, "3.00e-05"), (0.0, "0.0000"), (-0.5, "-0.5000")],
)
def test_figures(value, text):
    assert table([[value]]) == text
    assert table([["long header"], [value]]).splitlines()[1] == text  # a column with text goes left


@pytest.mark.parametrize("text", ["nan", "-inf", "93%", "1.5x", "15.2 MiB", "8.0M", "1:01:15", "3.00e-05", "-"])
def test_written_figures_go_right(text):
    assert table([[text, "|"], ["1,000,000,000", "|"]]).splitlines()[0] == f"{text:>13}  |"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0K"),
        (999_949, "999.9K"),
        (999_950, "1.0M"),
        (11e9, "11.0B"),
        (5e15, "5000.0T"),
    ],
)
def test_human_count(count, text):
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 - 1, "1.0 MiB"), (139 * 2**30, "139.0 GiB")],
)
def test_human_bytes(size, text):
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (75, "1:15"), (3600, "1:00:00"), (86399, "23:59:59"), (86400, "1d 0:00:00")],
)
def test_human_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_live_line_is_redrawn_in_place():
    stream, clock = Terminal(), Clock()
    with Progress(100, "train", stream=stream, clock=clock) as progress:
        clock.now = 1.0
        progress.update(10, loss=0.1234, tokens_per_s=5123.4)
        clock.now = 10.0
        progress.update(100, loss=0.1)
    first, last = stream.getvalue().split("\r")[1:]
    assert first.endswith(f"  10/100  loss 0.1234  tokens/s 5,123  0:01, 0:09 left{CLEAR}")
    assert first.count("━") == (first.count("━") + first.count("─")) // 10
    # Figures that were not given again stay; at the end nothing is left.
    assert last.endswith(f"  100/100  loss 0.1000  tokens/s 5,123  0:10{CLEAR}\n")
    assert "─" not in last


def test_live_line_is_redrawn_at_most_ten_times_a_second():
    stream, clock = Terminal(), Clock()
    progress = Progress(10_000, stream=stream, clock=clock)
    for step in range(1, 1001):
        clock.now = step / 1000
        progress.update(step)
    assert 9 <= stream.getvalue().count("\r") <= 10
    progress.close()
    assert "1,000/10,000" in stream.getvalue().split("\r")[-1]  # the state held back is shown at the end


@pytest.mark.parametrize("columns", [5, 20, 50, 60, 80, 200])
def test_live_line_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    Progress(100, "train 日本", stream=stream, clock=Clock()).update(10, loss=0.1234, tokens_per_s=5123.4)
    drawn = stream.getvalue().removeprefix("\r").removesuffix(CLEAR)
    assert len(drawn) + drawn.count("日") + drawn.count("本") <= columns - 1
    assert ("─" in drawn) == (columns > 60)  # the bar goes first


def test_line_above_the_live_line():
    stream = Terminal()
    progress = Progress(100, stream=stream, clock=Clock())
    progress.line("before")
    progress.update(1)
    live = stream.getvalue().removeprefix("before\n")
    progress.line("saved")
    progress.close()
    progress.line("after")
    assert stream.getvalue() == f"before\n{live}\r{CLEAR}saved\n{live}\nafter\n"


def test_live_line_is_left_when_the_loop_fails():
    stream = Terminal()
    with pytest.raises(KeyError), Progress(100, stream=stream, clock=Clock()) as progress:
        progress.update(1)
        raise KeyError
    assert stream.getvalue().endswith(f"{CLEAR}\n")


def test_unused_progress_prints_nothing():
    for stream in (Terminal(), io.StringIO()):
        Progress(100, stream=stream, clock=Clock()).close()
        assert stream.getvalue() == ""


def test_plain_lines_first_last_and_every_ten_seconds():
    stream, clock = io.StringIO(), Clock()
    with Progress(40, "train", stream=stream, clock=clock) as progress:
        for step in range(1, 41):
            clock.now = float(step)
            progress.update(step, loss=1 / step)
    assert stream.getvalue().splitlines() == [
        "train  1/40  loss 1.0000  0:01, 0:39 left",
        "train  11/40  loss 0.0909  0:11, 0:29 left",
        "train  21/40  loss 0.0476  0:21, 0:19 left",
        "train  31/40  loss 0.0323  0:31, 0:09 left",
        "train  40/40  loss 0.0250  0:40",
    ]


def test_last_step_is_shown_at_once():
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(2, stream=stream, clock=Clock())
        progress.update(1)
        progress.update(2)  # no time has passed, and nobody closed the line: an evaluation may follow
        assert "2/2" in stream.getvalue()


def test_plain_last_line_of_a_run_that_ends_early():
    stream, clock = io.StringIO(), Clock()
    with Progress(40, stream=stream, clock=clock) as progress:
        progress.update(1)
        progress.update(2)
        progress.line("stopped")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["1/40", "stopped", "2/40"]
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_time_left_counts_only_steps_since_the_resume():
    stream, clock = io.StringIO(), Clock()
    clock.now = 1000.0
    progress = Progress(100, start=90, stream=stream, clock=clock)
    clock.now = 1004.0
    progress.update(92)
    assert stream.getvalue() == "92/100  0:04, 0:16 left\n"


def test_time_left_follows_the_recent_speed():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(1000, stream=stream, clock=clock)
    clock.now = 60.0
    progress.update(1)  # a slow first step: compilation
    for step in range(2, 202):
        clock.now += 1.0
        progress.update(step)
    # The mean over all steps would say 1,033 seconds; the first step has faded.
    assert stream.getvalue().splitlines()[-1] == "201/1,000  4:20, 13:19 left"


def test_time_left_by_hand():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, clock=clock)
    clock.now = 10.0
    progress.update(1)
    clock.now = 20.5
    progress.update(3)
    # Sums fade by 0.95 a step: (10 · 0.9025 + 10.5) s over (1 · 0.9025 + 2) steps, 97 steps to go.
    assert human_seconds(97 * (9.025 + 10.5) / 2.9025) == "10:53"
    assert stream.getvalue().splitlines()[-1] == "3/100  0:20, 10:53 left"


def test_progress_writes_to_standard_error_by_default(capsys):
    Progress(2).update(1)
    captured = capsys.readouterr()
    assert captured.err.startswith("1/2") and captured.out == ""


def test_bar_in_ascii_where_the_stream_has_no_more():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    stream.isatty = lambda: True  # type: ignore[method-assign]
    Progress(100, stream=stream, clock=Clock()).update(50)
    assert b"#" * 15 + b"-" * 15 in raw.getvalue()


def test_dumb_terminal_and_no_color(monkeypatch):
    assert is_terminal(Terminal()) and colours(Terminal())
    assert not is_terminal(io.StringIO()) and not colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_terminal(Terminal()) and not colours(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal()) and not colours(Terminal())


@pytest.mark.parametrize(
    ("source", "prediction", "reference", "marked"),
    [
        ("o fata si", "o fată și", "o fată și", "o *fată* *și*"),  # right changes
        ("o fata si", "o față si", "o fată și", "o ~față~(fată) ~si~(și)"),  # a wrong change, and one missed
        ("ana are", "ană are", "ana are", "~ană~(ana) are"),  # changed what was right
        ("a b c", "a x b c", "a b c", "a ~x~() b c"),  # a word too many
        ("a b c d", "a b d", "a b c d", "a b ~~(c) d"),  # a word too few
        ("a b c", "a B C x", "a B c", "a *B* ~C~(c) ~x~()"),
        ("x a b", "a b x", "x a b", "~a~(x) ~b~(a) ~x~(b)"),  # as many words: by position
        ("a", "", "a", "~~(a)"),
        ("", "", "", ""),
    ],
)
def test_mark_changes(source, prediction, reference, marked):
    assert mark_changes(source, prediction, reference, colour=False) == marked


def test_mark_changes_in_colour():
    green, red, plain = "\x1b[32m", "\x1b[31m", "\x1b[0m"
    assert mark_changes("o fata si", "o față și", "o fată și", colour=True) == (
        f"o {red}[-față-]{plain}{green}{{+fată+}}{plain} {green}și{plain}"
    )
    assert mark_changes("a b c", "a x b c", "a b c", colour=True) == f"a {red}[-x-]{plain} b c"
    assert mark_changes("a b c", "a c", "a b c", colour=True) == f"a {green}{{+b+}}{plain} c"


def test_needs_no_torch_and_no_rich():
    code = "import sys, t2t.terminal; print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
