"""`kvrelay model`: reports how a model will run."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvrelay.cluster.errors import UsageError

if TYPE_CHECKING:
    from kvrelay.engine.report import ModelReport


@click.command()
@click.argument("name")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option("--path", type=click.Choice(["auto", "fast", "general"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def model(name: str, dtype: str, path: str, as_json: bool) -> None:
    """Say what the model NAME runs as on this machine's CPUs, and what it keeps of a sequence.

    NAME is a folder, hf:ORG/NAME, or the name of a bundled model. A model that transformers' code runs is loaded, and
    its logits are checked.
    """
    from kvrelay.engine.config import EngineConfig
    from kvrelay.engine.report import report_on
    from kvrelay.models import resolve

    try:
        report = report_on(resolve(name), dtype, EngineConfig(model_path=path))  # type: ignore[arg-type]  # of a choice
    except ValueError as error:
        raise UsageError(f"model: {error}") from None
    if as_json:
        sizes = {"token_bytes": report.token_bytes, "state_bytes": report.state_bytes}
        click.echo(json.dumps({**asdict(report), **sizes}))
    else:
        click.echo("\n".join(_lines(report)))


def _lines(report: "ModelReport") -> list[str]:
    way = f", {report.way}" if report.way else ""
    lines = [f"{report.architecture} in {report.dtype}: the {report.path} path{way}"]
    lines += [f"  not {name}: {why}" for name, why in report.slower_because]
    lines.append(f"native kernels compute: {', '.join(report.native) or 'nothing'}")
    for kind, window, size in report.groups:
        what = f"window of {window} tokens" if window else kind
        lines.append(f"keeps {what}: {size} bytes a {'sequence' if kind == 'state' else 'token'}")
    lines.append(f"in all {report.token_bytes} bytes a token, and {report.state_bytes} a sequence")
    lines.append(f"speculation: {', '.join(report.speculation) or 'off only'}")
    degrees, stages = ", ".join(map(str, report.tensor_parallel)), report.pipeline_parallel
    lines.append(
        f"ranks of a worker: tensor_parallel {degrees}; pipeline_parallel {f'1 to {stages}' if stages > 1 else 1}"
    )
    return lines + [f"without {name}: {why}" for name, why in report.unavailable]
