"""`kvrelay bench`: measures a server under a load."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.cli.common import connection, console
from kvrelay.cluster.errors import RunError, UsageError

if TYPE_CHECKING:
    from kvrelay.cli.bench.faces import Target
    from kvrelay.cli.bench.options import BenchOptions

DEFAULT_GRPC = "127.0.0.1:50051"
DEFAULT_HTTP = "http://127.0.0.1:8000"


@click.command()
@click.option("--face", type=click.Choice(["grpc", "http"]), default="grpc", show_default=True)
@click.option(
    "--target", metavar="TARGET", help="host:port for grpc, URL for http; default: the running cluster's, else local."
)
@click.option("--model", metavar="NAME", default="", help="Name in requests over http; default: the served one.")
@connection
@click.option("--num-prompts", type=int, default=100, show_default=True, metavar="N", help="Requests to measure.")
@click.option("--request-rate", type=float, default=math.inf, metavar="R", help="Per second; default inf, all at once.")
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "gamma", "constant", "trace"]),
    default="poisson",
    show_default=True,
    help="Pattern of the arrivals at --request-rate, or the times of --trace.",
)
@click.option("--burstiness", type=float, default=1.0, metavar="B", help="With gamma: below 1 comes in bursts.")
@click.option("--concurrency", type=int, default=0, metavar="N", help="Most in flight; without a rate: a closed loop.")
@click.option("--input-tokens", default="512", show_default=True, metavar="D", help="N, uniform:A-B, lognormal:MEAN,S.")
@click.option("--output-tokens", default="128", show_default=True, metavar="D", help="As --input-tokens.")
@click.option("--shared-prefix", type=int, default=0, metavar="N", help="Tokens that all prompts begin with.")
@click.option("--trace", type=click.Path(path_type=Path), help="JSON lines of timestamp, input_length, output_length.")
@click.option("--trace-speed", type=float, default=1.0, metavar="F", help="Play the trace's times so much faster.")
@click.option("--length-scale", type=float, default=1.0, metavar="F", help="Multiply the trace's lengths.")
@click.option("--dataset", type=click.Path(path_type=Path), help="Text file of prompts, or JSON in ShareGPT's form.")
@click.option("--goodput", multiple=True, metavar="NAME:MS", help="Limits of a good request: ttft, tpot, e2el.")
@click.option("--percentiles", default="50,90,99", show_default=True, metavar="P,...")
@click.option("--warmup", type=int, default=1, show_default=True, metavar="N", help="Requests that aren't measured.")
@click.option("--sweep", metavar="rate=A,B,...", help="One run for each value of rate, or of concurrency.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal prompts and arrivals.")
@click.option("--temperature", type=float, default=0.0, show_default=True, metavar="T")
@click.option("--warm-cache", is_flag=True, help="Let prompts be found in prefix caches from an earlier run.")
@click.option("--obey-eos", is_flag=True, help="Let the model end completions before their length.")
@click.option("--timeout", type=float, default=600.0, metavar="S", help="After which a request has failed.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures and all requests to a file.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a report with pictures to a file.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of --json, and end.")
def bench(schema: bool, json_path: Path | None, html_path: Path | None, **flags: Any) -> None:
    """Measures a server under a load: TTFT, TPOT, ITL, goodput.

    The figures are defined as those of `vllm bench serve`. With --face http, any server with OpenAI's completions can
    be measured. Ctrl-C ends it with the figures of the requests that are done.
    """
    import asyncio

    from kvrelay.cli.bench import output, report, result
    from kvrelay.cli.bench.faces import GrpcFace, HttpFace
    from kvrelay.cli.bench.options import check, parse_sweep
    from kvrelay.cli.bench.run import Bench, measure

    if schema:
        click.echo(json.dumps(result.schema(), indent=2))
        return
    options = _options(flags)
    check(options)
    sweep = parse_sweep(flags["sweep"]) if flags["sweep"] else None
    if sweep is not None and options.arrival.arrivals == "trace":
        raise UsageError("--sweep is given; allowed: without --arrivals trace, which has its own times")
    documents = ("--json", json_path, result.text), ("--html", html_path, report.page)
    for option, path, _ in documents:
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no such folder")
    target = _target(flags)
    face = HttpFace(target) if flags["face"] == "http" else GrpcFace(target)
    out = console()
    with output.Bars(out) as bars:
        found = asyncio.run(measure(Bench(options, sweep, flags["face"], target.address), face, bars.watch))
    try:
        # Written first, because the reader of the output may close it before its end.
        for option, path, document in documents:
            if path is not None:
                try:
                    path.write_text(document(found), encoding="utf-8")
                except OSError as error:
                    raise UsageError(f"{option} {path}: {error.strerror}") from None
    finally:
        output.show(found, options.percentiles, out)
    if found.runs[-1].interrupted:
        raise click.Abort
    if not any(run.figures["completed"] for run in found.runs):
        raise RunError("no request was completed")


def _options(flags: dict[str, Any]) -> "BenchOptions":
    from kvrelay.cli.bench import options

    given = flags | {
        "input_tokens": options.Lengths.parse(flags["input_tokens"], "--input-tokens"),
        "output_tokens": options.Lengths.parse(flags["output_tokens"], "--output-tokens"),
        "ignore_eos": not flags["obey_eos"],
        "speed": flags["trace_speed"],
        "goodput": options.parse_goodput(flags["goodput"]),
        "percentiles": _percentiles(flags["percentiles"]),
    }
    workload = options.WorkloadOptions(**{each.name: given[each.name] for each in fields(options.WorkloadOptions)})
    arrival = options.ArrivalOptions(**{each.name: given[each.name] for each in fields(options.ArrivalOptions)})
    named = {name: given[name] for name in ("goodput", "percentiles", "warmup", "seed", "timeout")}
    return options.BenchOptions(workload, arrival, **named)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--percentiles is {text!r}; allowed: numbers from 0 to 100 with commas between") from None


def _target(flags: dict[str, Any]) -> "Target":
    from kvrelay.cli.bench.faces import Target
    from kvrelay.client import Tls
    from kvrelay.cluster import state

    address, tls, http = flags["target"], flags["tls"] or flags["ca"] is not None, flags["face"] == "http"
    if address is None:
        current = state.current()
        if current is not None and (current.http if http else current.router):
            tls = tls or current.router_tls
            address = current.http.partition(",")[0] if http else current.router
        else:
            address = DEFAULT_HTTP if http else DEFAULT_GRPC
    if http and "://" not in address:
        address = f"{'https' if tls else 'http'}://{address}"
    return Target(address, flags["model"], Tls(flags["ca"]) if tls else None, flags["api_key"], flags["timeout"])
