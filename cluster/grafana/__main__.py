"""Writes the dashboards to a folder: `python -m kvrelay.cluster.grafana FOLDER [--prefix ray_]`."""

import argparse
from pathlib import Path

from kvrelay.cluster.grafana.dashboards import RAY_PREFIX, write

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes kvrelay's dashboards for Grafana.")
    parser.add_argument("folder", type=Path, help="where each becomes a JSON file")
    parser.add_argument("--prefix", default="", help=f"of the metrics' names, {RAY_PREFIX} for those of Ray's agents")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.prefix)
