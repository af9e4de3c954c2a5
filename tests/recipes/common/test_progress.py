"""Progress: a bar on a terminal, lines elsewhere, nothing when not visible."""

from __future__ import annotations

import io

from recipes.common.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_comes_every_so_often_and_at_the_end() -> None:
    stream = io.StringIO()
    with Progress(4, stream=stream, seconds=0) as progress:
        for step in range(4):
            progress.advance(loss=f"{4 - step}.00")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("train 1/4, ")
    assert " left, loss 4.00" in lines[0]
    assert lines[-1].startswith("train 4/4, ")
    assert "left" not in lines[-1]
    assert "\r" not in stream.getvalue()


def test_lines_do_not_come_more_often_than_asked() -> None:
    stream = io.StringIO()
    with Progress(100, stream=stream, seconds=3600, done=90, label="resumed") as progress:
        for _ in range(10):
            progress.advance()
        progress.note("checkpoint written")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "checkpoint written"
    assert lines[1].startswith("resumed 100/100, ")
    assert len(lines) == 2


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with Progress(3, stream=stream) as progress:
        progress.advance(2, loss="1.50")
        progress.note("a remark")
        progress.advance()
    text = stream.getvalue()
    assert "\r" in text
    assert "3/3" in text
    assert "loss=1.50" in text
    assert "a remark\n" in text


def test_other_ranks_and_quiet_runs_show_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(2, stream=stream, seconds=0, visible=False) as progress:
            progress.advance(2, loss="1")
            progress.note("unheard")
        assert stream.getvalue() == ""
