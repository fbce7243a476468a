"""The HTML report of a benchmark: one file without scripts, fonts or links to other places."""

from collections.abc import Sequence
from html import escape

from kvrelay.cli.bench import charts
from kvrelay.cli.bench.charts import Bar, Series
from kvrelay.cli.bench.figures import LATENCIES, in_flight, values
from kvrelay.cli.bench.load import Request
from kvrelay.cli.bench.output import TITLES, errors, name_of, summary
from kvrelay.cli.bench.result import Result, Run

STYLE = """
:root { color-scheme: light dark; --bg: #fcfcfb; --fg: #1b1c1e; --soft: #6a6d73; --line: #e3e3e0; --card: #ffffff;
  --c0: #2a6fb0; --c1: #c4621d; --c2: #2f8a57; --c3: #8e4aa8; --c4: #b8860b; --c5: #b53a4a; --late: #d9b44a;
  --wait: #9fb8d1; --flow: #2a6fb0; --bad: #b53a4a; }
@media (prefers-color-scheme: dark) { :root { --bg: #16181b; --fg: #e8e8e6; --soft: #9b9fa6; --line: #2e3237;
  --card: #1d2024; --c0: #6aa9e6; --c1: #e89055; --c2: #62bd8a; --c3: #c48ade; --c4: #d9b44a; --c5: #ea7380;
  --late: #b8902c; --wait: #47617c; --flow: #6aa9e6; --bad: #ea7380; } }
body { margin: 0 auto; padding: 24px; max-width: 1120px; background: var(--bg); color: var(--fg);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 28px 0 8px; }
p, .soft { color: var(--soft); margin: 4px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 10px; margin: 12px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
.card b { display: block; font-size: 15px; font-weight: 600; } .card span { color: var(--soft); font-size: 12px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 12px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px; }
figure.wide { margin-top: 12px; } figcaption { font-weight: 600; font-size: 13px; } svg { width: 100%; height: auto; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; } .bin { fill: var(--c0); }
.mark { stroke: var(--c1); stroke-dasharray: 3 3; } text { font: 11px system-ui, sans-serif; fill: var(--soft); }
text.mark { stroke: none; fill: var(--c1); } text.name { font-size: 11px; }
rect.late { fill: var(--late); } rect.wait { fill: var(--wait); } rect.flow { fill: var(--flow); }
rect.bad { fill: var(--bad); } .keys { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
i.late { background: var(--late); } i.wait { background: var(--wait); } i.flow { background: var(--flow); }
table { border-collapse: collapse; width: 100%; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
pre { overflow: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px; }
.failed { color: var(--bad); }
"""
STAGES = ("route", "queue", "prefill", "handoff", "decode_queue", "decode")


def page(result: Result) -> str:
    """The whole document."""
    machine, model = result.machine, result.model
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    server = f"{model.get('name') or 'the model'} at {result.target} over {result.face}"
    serves = f", kvrelay {model['version']}" if model.get("version") else ""
    parts = [
        f"<h1>Benchmark of {escape(server)}{escape(serves)}</h1>",
        f"<p>{escape(result.started)} from {escape(machine.processor)}, {machine.cores} cores, {machine.memory_gib:g} "
        f"GiB, {escape(machine.system)}, Python {escape(machine.python)}; {escape(versions)}</p>",
    ]
    if len(result.runs) > 1:
        parts.append(_sweep(result))
    parts += [_run(result, run) for run in result.runs]
    parts.append(f"<h2>Options</h2><pre>{escape(_options(result))}</pre>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>kvrelay bench</title><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _sweep(result: Result) -> str:
    """The charts of how the figures change from run to run."""
    by_rate = all(run.request_rate is not None for run in result.runs)
    x = [run.request_rate or 0.0 if by_rate else float(run.concurrency) for run in result.runs]
    name = "requests/s due" if by_rate else "most requests in flight"

    def line(title: str, figure: str) -> Series:
        return Series(title, x, [run.figures[figure] for run in result.runs], dots=True)

    rates = [line("completed", "request_throughput")]
    if "request_goodput" in result.runs[0].figures:
        rates.append(line("good", "request_goodput"))
    if by_rate:
        rates.append(Series("due", x, x))
    last = max((key for key in result.runs[0].figures if key.endswith("_ttft_ms") and key.startswith("p")), key=_rank)
    tail = last.removesuffix("_ttft_ms")
    figures = [
        charts.lines("Requests per second", rates, name, "requests/s"),
        *(
            charts.lines(
                f"{TITLES[each]}, ms",
                [line("median", f"median_{each}_ms"), line(tail, f"{tail}_{each}_ms")],
                name,
                "ms",
            )
            for each in ("ttft_scheduled", "tpot", "e2el_scheduled")
        ),
    ]
    return f'<h2>Sweep</h2><div class="figures">{"".join(figures)}</div>'


def _rank(figure: str) -> float:
    return float(figure[1:].partition("_")[0])


def _run(result: Result, run: Run) -> str:
    goodput = result.options.get("goodput") or {}
    cards = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in summary(run, goodput)
    )
    failures = "".join(f'<p class="failed">{escape(line)}</p>' for line in errors(run))
    done = [request for request in run.requests if request.ok]
    found = {name: [1e3 * each for each in seconds] for name, seconds in values(run.requests).items()}
    first = [("from sending", found["ttft"]), ("from its arrival", found["ttft_scheduled"])]
    times, counts = zip((0.0, 0), *in_flight(run.requests), strict=True)
    figures = [
        charts.histogram("Time to first token", found["ttft"], "ms"),
        charts.histogram("Time per output token", found["tpot"], "ms"),
        charts.histogram("Between two messages", found["itl"], "ms"),
        charts.cdf("First token: share of requests", first, "ms"),
        charts.lines("Requests in flight", [Series("in flight", times, counts, steps=True)], "seconds", "requests"),
        _tokens_per_second(done),
    ]
    return (
        f"<h2>{escape(name_of(run))}</h2>{failures}<div class='cards'>{cards}</div>{_table(result, run)}"
        f'{_stages(done)}<div class="figures">{"".join(figures)}</div>'
        f"{charts.timeline('Every request', [_bar(at, request) for at, request in enumerate(run.requests)])}"
    )


def _table(result: Result, run: Run) -> str:
    columns = ["mean", "std", *(f"p{percentile:g}" for percentile in result.options["percentiles"])]
    head = "".join(f"<th>{column}</th>" for column in ("milliseconds", *columns))
    rows = "".join(
        f"<tr><td>{TITLES[name]}</td>"
        + "".join(f"<td>{run.figures[f'{column}_{name}_ms']:.2f}</td>" for column in columns)
        + "</tr>"
        for name in LATENCIES
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _stages(done: Sequence[Request]) -> str:
    """Mean time of each stage of the server's timelines; empty if the server reports none."""
    known = [request.stages for request in done if request.stages]
    if not known:
        return ""
    cells = "".join(
        f"<td>{1e3 * sum(stages[f'{stage}_seconds'] for stages in known) / len(known):.2f}</td>" for stage in STAGES
    )
    head = "".join(f"<th>{stage.replace('_', ' ').replace('handoff', 'hand-off')}</th>" for stage in STAGES)
    return f"<table><tr><th>mean ms in the server</th>{head}</tr><tr><td>per request</td>{cells}</tr></table>"


def _tokens_per_second(done: Sequence[Request]) -> str:
    """Messages of all requests in each of up to 60 equal parts of the time, in tokens."""
    moments: list[tuple[float, float]] = []
    for request in done:
        at = request.sent + (request.ttft or 0.0)
        tokens = request.output_tokens / (len(request.itls) + 1)
        moments.append((at, tokens))
        for gap in request.itls:
            at += gap
            moments.append((at, tokens))
    if not moments:
        return ""
    end = max(at for at, _ in moments)
    width = max(end / 60, 0.1)
    totals = [0.0] * (int(end / width) + 1)
    for at, tokens in moments:
        totals[int(at / width)] += tokens / width
    x = [at * width for at in range(len(totals))]
    return charts.lines("Output tokens per second", [Series("tokens/s", x, totals, steps=True)], "seconds", "tokens/s")


def _bar(index: int, request: Request) -> Bar:
    first = request.sent + (request.ttft or 0.0)
    last = request.sent + (request.latency or 0.0)
    text = f"request {index}: {request.prompt_tokens} tokens in, {request.output_tokens} out"
    if request.ttft is not None and request.latency is not None:
        text += f", first token {1e3 * request.ttft:.1f} ms, all {1e3 * request.latency:.1f} ms"
    return Bar(
        request.scheduled, request.sent, first, last, request.ok, text + (request.error and f"; {request.error}")
    )


def _options(result: Result) -> str:
    lines = []
    for name, value in result.options.items():
        if isinstance(value, dict):
            lines += [f"{name}.{key}: {each}" for key, each in value.items()]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)
