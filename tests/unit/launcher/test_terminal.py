"""People read lines with the process in front, and see progress; machines get what was said."""

from __future__ import annotations

import io

from services.launcher.terminal import CLEAR, Terminal


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_pipe_lines_are_untouched_and_progress_is_left_out() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, for_people=False, width=9)
    terminal.line("compute-0", '{"event": "started"}')
    terminal.line("compute-0", "\rloading weights: 1 of 9")
    terminal.write('{"event": "from the launcher"}\n')
    assert stream.getvalue() == '{"event": "started"}\n{"event": "from the launcher"}\n'


def test_on_a_terminal_each_line_says_whose_it_is_and_warnings_are_coloured() -> None:
    stream = Screen()
    terminal = Terminal(stream, for_people=True, width=9)
    terminal.line("router-0", "12:00:00 started")
    terminal.write("12:00:01 [warning] killed\n")
    plain, coloured = stream.getvalue().splitlines()
    assert plain == "\x1b[2mrouter-0  | \x1b[0m12:00:00 started"
    assert coloured.endswith("12:00:01 \x1b[33m[warning]\x1b[0m killed")


def test_progress_is_one_line_that_the_next_one_replaces() -> None:
    stream = Screen()
    terminal = Terminal(stream, for_people=True, width=9)
    terminal.line("compute-0", "\rloading weights: 1 of 9")
    terminal.line("compute-0", "\rloading weights: 2 of 9")
    terminal.line("compute-0", "12:00:00 model loaded")
    shown = stream.getvalue()
    assert shown.startswith(f"{CLEAR}compute-0: loading weights: 1 of 9{CLEAR}compute-0: loading")
    assert shown.count("\n") == 1
    assert f"2 of 9{CLEAR}\x1b[2mcompute-0" in shown


def test_progress_goes_when_it_is_over() -> None:
    stream = Screen()
    terminal = Terminal(stream, for_people=True, width=9)
    terminal.line("compute-0", "\rloading weights: 9 of 9")
    terminal.clear()
    terminal.clear()
    assert stream.getvalue().endswith(f"9 of 9{CLEAR}")
    assert stream.getvalue().count(CLEAR) == 2


def test_progress_never_wraps() -> None:
    stream = Screen()
    Terminal(stream, for_people=True, width=9).line("compute-0", "\r" + "x" * 500)
    assert len(stream.getvalue().removeprefix(CLEAR)) < 80


def test_what_kept_a_process_from_starting_is_kept_to_be_said_last() -> None:
    terminal = Terminal(io.StringIO(), for_people=False, width=9)
    terminal.line("compute-0", "slipstream compute: [compute] x: no such setting")
    terminal.line("compute-0", '{"event": "stopped"}')
    assert terminal.complaints == {"compute-0": "[compute] x: no such setting"}
