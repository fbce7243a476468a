"""The readers of all requests; and the program of the processes that read large requests.

python -m kvrelay.router.faces.readers DESCRIPTOR OPTIONS     as `machine/forks.py` says
"""

import asyncio
import os
import sys
import traceback
from pathlib import Path

from kvrelay.machine.forks import Fork, Message, control_of, serve
from kvrelay.router.faces import grpc_face
from kvrelay.router.faces.http import readers as bodies
from kvrelay.router.faces.http.chat import Chats
from kvrelay.router.request.lanes import DEFECT, Lanes
from kvrelay.router.request.reading import Asking, Reading
from kvrelay.router.request.sampling import read_defaults
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.text.tools.formats import ReasoningParserName, ToolParserName, reasons, tool_format

NICE = 5
"""Niceness of the processes beside that of the router, whose event loop goes first where cores are few."""
MORE_BYTES = 2**30
"""Memory that a process may take for one request, in bytes."""
BYTES_PER_BYTE = 256
"""Memory that each byte of a request may take beside, in bytes."""


def chats_of(tokenizer: Tokenizer, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName) -> Chats:
    """The reader of the model's chats, by the router's options of these names."""
    source = tokenizer.template_source
    return Chats(tokenizer, tool_format(tool_parser, source), reasons=reasons(reasoning_parser, source))


def reading(folder: Path, tokenizer: Tokenizer, chats: Chats, lanes: Lanes | None) -> Reading:
    """The readers of requests for the model in `folder`.

    Args:
        lanes: for what is large; None in a lane itself.

    Raises:
        ValueError: a file of the model can't be used.
    """
    readers = {**bodies.readers(tokenizer, chats), **grpc_face.readers(tokenizer)}
    return Reading(tokenizer, read_defaults(folder), readers, lanes)


def run() -> None:
    """The template of the lanes: reads the model's files, then forks."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would be missing in a fork
    control, options = control_of(sys.argv[1:])
    folder, template = Path(options["folder"]), options["chat_template"]
    tokenizer = Tokenizer(folder, Path(template) if template else None, threads=False)
    chats = chats_of(tokenizer, options["tool_parser"], options["reasoning_parser"])
    lane = reading(folder, tokenizer, chats, None)
    loop: asyncio.AbstractEventLoop | None = None

    def work(message: Message, data: bytes) -> tuple[Message, bytes]:
        nonlocal loop
        loop = loop or asyncio.new_event_loop()
        try:
            return loop.run_until_complete(lane.read_all(data, Asking.of(message)))
        except Exception:  # noqa: BLE001  # for the log of the router
            return {DEFECT: traceback.format_exc()}, b""

    fork = Fork(NICE, MORE_BYTES + BYTES_PER_BYTE * options["max_message_bytes"], work)
    serve(control, lambda asked: fork)


if __name__ == "__main__":
    run()
