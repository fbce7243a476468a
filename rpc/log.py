"""JSON log lines on stderr. Fields beside the message come from `extra=`; never a prompt, a token or a completion."""

import json
import logging
import os
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, the process's own fields, message, the record's extra fields."""

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
    """Sends this process's `kvrelay` logs to stderr as JSON, each line with `fields` (e.g. part, name)."""
    # gRPC's core writes lines of its own, not JSON; what it has to say comes as statuses, too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields))
    root = logging.getLogger("kvrelay")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
