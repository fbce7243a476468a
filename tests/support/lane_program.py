"""A program of lanes that does what its messages say; `python -m support.lane_program DESCRIPTOR OPTIONS`."""

import os
import sys
import time

from kvrelay.machine.forks import Fork, Message, control_of, serve


def work(message: Message, data: bytes) -> tuple[Message, bytes]:
    match message["do"]:
        case "echo":
            return {"pid": os.getpid(), "nice": os.nice(0)}, data
        case "end":
            os._exit(1)
        case "compute":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "allocate":
            bytearray(2**40)
        case "wait":
            while not os.path.exists(message["file"]):
                time.sleep(0.001)
    return {}, b""


if __name__ == "__main__":
    control, _ = control_of(sys.argv[1:])
    serve(control, lambda asked: Fork(3, 2**28, work))
