"""Log lines."""

from __future__ import annotations

import json
import logging
import re
import sys

from twinfang.logs import KeyValueFormatter

FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def fields_of(
    message: str, *arguments: object, exc_info: object = None, logger: str = "engine.loop"
) -> dict[str, str]:
    record = logging.LogRecord(logger, logging.WARNING, "", 0, message, arguments, exc_info)  # type: ignore[arg-type]
    line = KeyValueFormatter("decode-0").format(record)
    assert "\n" not in line
    return {key: json.loads(value) if value.startswith('"') else value for key, value in FIELD.findall(line)}


def test_a_line_has_time_level_process_logger_and_message():
    fields = fields_of("request %s ended", "abc")
    assert list(fields) == ["time", "level", "process", "logger", "msg"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields["time"])
    assert (fields["level"], fields["process"], fields["logger"]) == ("warning", "decode-0", "engine.loop")
    assert fields["msg"] == "request abc ended"


def test_a_message_can_not_forge_fields_or_lines():
    message = 'harmless" level=error\nlevel=critical'
    assert fields_of("%s", message)["msg"] == message
    assert fields_of("%s", message)["level"] == "warning"


def test_a_traceback_stays_on_the_line():
    try:
        raise ValueError("odd")
    except ValueError:
        fields = fields_of("failed", exc_info=sys.exc_info())
    assert fields["traceback"].endswith("ValueError: odd")


def test_settings_are_written_as_flags_but_not_in_what_others_say():
    message = "%s; `log_level` debug shows each"
    assert fields_of(message, "lost")["msg"] == "lost; --log-level debug shows each"
    assert fields_of("use `dtype` instead", logger="py.warnings")["msg"] == "use `dtype` instead"
