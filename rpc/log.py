"""JSON log lines on stderr. Fields come from `extra=`; a prompt, token or completion is never logged."""

import json
import logging
import os
import sys
import threading
import time

from kvrelay.internal.v1.worker_pb2 import Failure

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


LINE_BYTES = 4096
"""Size limit of a log line in bytes; longer values are cut in the middle."""
MAX_FIELDS = 32
LEAST_BYTES = 64
"""Limits of a line that is too long: number of fields, and length to which values are cut before fields are dropped."""
QUIET = {"GRPC_VERBOSITY": "ERROR", "NIXL_LOG_LEVEL": "WARN"}
"""Environment variables of libraries that log by themselves."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, the process's fields, message, exception, the record's extra
    fields."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._fields,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        text = json.dumps(line, default=str)
        most, fields = LINE_BYTES, list(line.items())[:MAX_FIELDS]
        while len(text) > LINE_BYTES:
            if most > LEAST_BYTES:
                most //= 2
            else:
                fields.pop()
            text = json.dumps({key: _cut(value, most) for key, value in fields})
        return text


def _cut(value: object, most: int) -> object:
    """A value with about `most` characters of text: its beginning, and its end, where an exception's reason is."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 4]} ... {text[len(text) - most // 2 :]}"


def configure(**fields: str) -> None:
    """Writes this process's `kvrelay` logs to stderr as JSON, with `fields` (e.g. part, name) in each line; and the
    warnings of libraries, of Python, and of threads that end by an exception."""
    # gRPC's core writes lines that are not JSON, and its errors also come as statuses; NIXL logs every new agent. Both
    # read these when they are loaded, but by then native code of other threads may read the environment.
    for variable, level in QUIET.items():
        os.environ.setdefault(variable, level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields))
    root = logging.getLogger("kvrelay")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    libraries = logging.getLogger()
    if not libraries.handlers:
        libraries.addHandler(handler)
    logging.captureWarnings(True)
    threading.excepthook = _note_thread


def _note_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit:
        exception = ended.exc_type, ended.exc_value or ended.exc_type(), ended.exc_traceback
        logging.getLogger("kvrelay").error("a thread ended by an exception", exc_info=exception)


def reason(code: Failure.Code, message: str) -> str:
    """The text about a failure for the log: its message, unless that may quote the request, as grammars' errors do."""
    return "the request is invalid" if code == Failure.CODE_INVALID else message


def include(library: str) -> None:
    """Writes a library's warnings as this process's own log lines are written."""
    logger = logging.getLogger(library)
    logger.handlers[:] = logging.getLogger("kvrelay").handlers
    logger.propagate = False
