"""JSON log lines on stderr. Fields come from `extra=`; a prompt, token or completion is never logged."""

import json
import logging
import os
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, the process's fields, message, the record's extra fields."""

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
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(**fields: str) -> None:
    """Writes this process's `kvrelay` logs to stderr as JSON, with `fields` (e.g. part, name) in each line."""
    # gRPC's core writes lines that are not JSON; its errors also come as statuses.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields))
    root = logging.getLogger("kvrelay")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def include(library: str) -> None:
    """Writes a library's warnings as this process's own log lines are written."""
    logger = logging.getLogger(library)
    logger.handlers[:] = logging.getLogger("kvrelay").handlers
    logger.propagate = False
