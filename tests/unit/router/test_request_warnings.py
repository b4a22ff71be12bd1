"""Warnings: once each in the log, all of a request in its header, within bounds."""

from __future__ import annotations

from structlog.testing import capture_logs

from services.router.request_warnings import WarningLog, Warnings


def test_a_request_without_warnings_has_no_header() -> None:
    assert Warnings().header() == ""


def test_every_warning_of_a_request_is_in_its_header_once() -> None:
    warnings = Warnings()
    for field in ("a", "b", "a"):
        warnings.add(field, "is ignored")
    assert warnings.header() == '299 - "a: is ignored", 299 - "b: is ignored"'


def test_one_kind_of_warning_is_logged_once_for_all_requests() -> None:
    log = WarningLog()
    with capture_logs() as logs:
        for number in range(3):
            Warnings(log).add(f"tools[{number}]", "is left out")
    assert [(each["log_level"], each["field"]) for each in logs] == [("warning", "tools[0]")]


def test_what_is_logged_is_bounded_for_each_request_and_for_all() -> None:
    log = WarningLog()
    with capture_logs() as logs:
        for number in range(1000):
            Warnings(log).add("field", f"kind {number}")
        assert len(logs) == 256
        one = Warnings()
        for number in range(1000):
            one.add("field", f"kind {number}")
    assert len(logs) == 256 + 8


def test_unknown_fields_of_a_request_are_one_line_with_the_first_names() -> None:
    log = WarningLog()
    warnings = Warnings(log)
    with capture_logs() as logs:
        warnings.add_unknown([f"{at}" + "x" * 1000 for at in range(300)])
        Warnings(log).add_unknown([f"{at}" + "x" * 1000 for at in range(8)])
    (line,) = logs
    assert (line["log_level"], line["more"]) == ("warning", 292)
    assert line["fields"] == [f"{at}" + "x" * 63 for at in range(8)]
    header = warnings.header()
    assert header.endswith('299 - "and 292 more"') and len(header) < 2048


def test_a_header_is_bounded_and_says_how_many_warnings_it_lacks() -> None:
    warnings = Warnings()
    for number in range(1000):
        warnings.add(f"field{number}", "x" * 1000)
    header = warnings.header()
    assert header.endswith('299 - "and 992 more"')
    assert len(header) < 2048


def test_no_text_of_a_client_ends_a_header_or_a_quoted_string() -> None:
    warnings = Warnings()
    warnings.add('a"\r\nSet-Cookie: b\x7f', "\N{SNOWMAN} \\ is ignored")
    quoted = r'''"a\"\r\nSet-Cookie: b\u007f: \u2603 \\ is ignored"'''
    assert warnings.header() == f"299 - {quoted}"
