"""Runs one router in the foreground: `python -m kvrelay.router --config FILE`."""

import sys

from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from kvrelay.rpc.serve import main

if __name__ == "__main__":
    sys.exit(main(RouterConfig, RouterServer, "The router: takes requests over gRPC and places them on workers."))
