"""Where requests go, and what it is worth: the policies of placement under public traces.

    python benchmarks/routing.py simulated --traces DIR --calibration DIR [--workers 8 8] [--rows ...] [--out FILE]
    python benchmarks/routing.py decision [--out FILE]
    python benchmarks/routing.py picture RESULTS --out docs/images/routing.svg

`simulated` runs fleets of Llama-3.1-8B, one H100 each, in simulated time (`simulated/`): router, scheduler and block
pools are the product's own, steps take what measured kernels take (`simulated/kernels.py`), hand-offs what a link of
400 Gbit/s does. `decision` measures the time of a decision (`routing_decision.py`).

Folders: `--traces` has Mooncake's `mooncake/conversation_trace.jsonl`, `--calibration` the measurements that
`simulated/kernels.py` names. Both are public; neither is part of the project.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from simulated.clock import run
from simulated.cluster import END, Cluster, Place, Question
from simulated.fleet import (
    CAPACITY,
    PATIENCE_SECONDS,
    Background,
    Talk,
    Targets,
    cancel_all,
    converse,
    highest_rate,
    refused_again,
    replay,
    ttft_of,
)
from simulated.kernels import LLAMA_3_1_8B, Kernels, checked
from simulated.traces import Arrival, at_rate, begun_later, oracle_hits, read
from simulated.worker import Machine
from turns import earlier, end_on_signal, own_setting, save

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.router.config import BATCH, DEFAULT_CLASS, INTERACTIVE, ServiceClass

TARGETS = Targets(ttft=3.0, ttft_token=0.1e-3, tpot=0.05)
LINK_BYTES = 50e9 * 0.8
"""Bytes a second between two workers: 400 Gbit/s, at 80 %."""
HANDOFF_SECONDS = 2e-3
"""Seconds of any hand-off behind its last byte: announcing, verifying. Stated, not measured."""
KV_TOKENS = 400_000
"""Tokens in an H100's pool: 80 GB, less 16 GB of weights and 10 GB for the rest, in 16 bits."""
MAX_CONTEXT = 131_072
POLICIES = ("round_robin", "random", "least_work", "predicted")
COLOCATED = ("colocated least_work", "colocated predicted")
"""The policies on as many co-located workers."""
SLOW, SLOW_LINK = 2.0, 10.0
OVERLOAD = 1.5
TALK_SECONDS = 120.0
SMALL_BLOCKS = 16
"""Tokens of a block with which conversations are tried as well."""
SEEDS = 8
RETRIED = 2
"""One of so many refused requests comes again until it is taken."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Machines, model and traffic of all rows."""

    machine: Machine
    traces: Mapping[int, Sequence[Arrival]]
    """The trace by seed, of which each lets it begin elsewhere; a rate is the mean of runs of all."""
    prefills: int
    decodes: int
    seconds: float

    @property
    def fleet(self) -> list[Place]:
        return [Place("prefill", self.machine)] * self.prefills + [Place("decode", self.machine)] * self.decodes

    @property
    def colocated(self) -> list[Place]:
        """As many workers, each of which computes its requests from beginning to end."""
        return [Place("colocated", self.machine)] * (self.prefills + self.decodes)

    def arrivals(self, rate: float, seed: int | None = None) -> list[Arrival]:
        """The arrivals of a seed, or of the first one."""
        return at_rate(self.traces[next(iter(self.traces)) if seed is None else seed], rate, self.seconds)


def apart(wanted: Sequence[str]) -> list[str]:
    """The policies among `wanted` that are tried with prefill and decode workers."""
    return [each for each in wanted if each not in COLOCATED]


def options(policy: str, **others: object) -> dict[str, object]:
    """The router's options for a policy."""
    return {"placement": policy, **others}


class Rates:
    """The highest rates of the policies, each looked for once, and the figures of the runs that led there, which are
    kept with the results: what was run before with the same arrivals is not run again."""

    def __init__(
        self, setup: Setup, found: dict[str, Any], start: float, keep: Callable[[], None], given: float | None = None
    ) -> None:
        """
        Args:
            found: has the figures of earlier runs by policy, and gets those of each run.
            start: a rate, of any fleet, to begin the search with.
            keep: called after each run.
            given: stands for each policy's highest rate, in place of a search.
        """
        self._setup, self._found, self.start, self._keep, self._given = setup, found, start, keep, given
        self._highest: dict[str, float] = {}

    def runs(self, policy: str) -> list[dict[str, float]]:
        """The figures of a policy at the rates at which all seeds have run: means over the seeds, by their requests."""
        by_rate: dict[float, list[dict[str, float]]] = {}
        for each in self._found.get(policy, []):
            if each["seconds"] == self._setup.seconds and each["seed"] in self._setup.traces:
                by_rate.setdefault(each["rate"], []).append(each)
        return [mean_row(rows) for _, rows in sorted(by_rate.items()) if len(rows) == len(self._setup.traces)]

    def run(self, policy: str, rate: float) -> dict[str, float]:
        """The figures at a rate; `colocated POLICY` is the fleet of co-located workers. Hits are relative to those of
        one endless cache, and to those of one cache as large as all pools together (`oracle_hits`)."""
        return mean_row([self._run(policy, round(rate, 3), seed) for seed in self._setup.traces])

    def _run(self, policy: str, rate: float, seed: int) -> dict[str, float]:
        setup = self._setup
        for each in self._found.get(policy, []):
            if (each["rate"], each["seed"], each["seconds"]) == (rate, seed, setup.seconds):
                return each
        began = time.monotonic()
        places = setup.colocated if policy.startswith("colocated") else setup.fleet
        arrivals = setup.arrivals(rate, seed)
        done = replay(places, arrivals, setup.seconds, options(policy.removeprefix("colocated ")))
        row = {
            "rate": rate,
            "seed": seed,
            "seconds": setup.seconds,
            "requests": len(done.counted()),
            "met": done.met(TARGETS),
            "goodput": done.goodput(TARGETS),
            "mean_ttft": done.mean_ttft(),
            "ttft_p50": done.ttft(0.5),
            "ttft_p99": done.ttft(0.99),
            "mean_tpot": done.mean_tpot(),
            "hits": done.hits(oracle_hits(arrivals)),
            "hits_of_one_cache": done.hits(oracle_hits(arrivals, len(places) * setup.machine.kv_tokens)),
            **busy(done.busy),
            "wall_seconds": time.monotonic() - began,
        }
        row = {name: round(value, 4) for name, value in row.items()}
        self._found.setdefault(policy, []).append(row)
        self._keep()
        print(json.dumps({"policy": policy, **row}), flush=True)
        return row

    def kept(self, name: str, make: Callable[[], dict[str, Any]], *, all_seeds: bool = False) -> dict[str, Any]:
        """The figures of another run, which `make` makes unless they were kept; `name` has all that they depend on.

        Args:
            all_seeds: whether they are of all seeds, and not of the first one.
        """
        parts, seeds = self._found.setdefault("others", {}), list(self._setup.traces)
        of = f"seeds {' '.join(map(str, seeds))}" if all_seeds else f"seed {seeds[0]}"
        name = f"{name}, {self._setup.seconds:g} s, {of}"
        if name not in parts:
            parts[name] = make()
            self._keep()
            print(json.dumps({"run": name, **parts[name]}), flush=True)
        return parts[name]

    def highest(self, policy: str) -> float:
        """The highest rate at which enough requests meet both targets."""
        if self._given is not None:
            return self._given
        if policy not in self._highest:

            def met(rate: float) -> float:
                return self.run(policy, rate)["met"]

            low = self.start
            while met(low) < CAPACITY and low > 0.05 * self.start:
                low /= 1.25
            self._highest[policy] = highest_rate(met, low, 1.25 * low)
        return self._highest[policy]


def mean_row(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The means of several runs' figures, by the number of their requests."""
    counts = [row["requests"] for row in rows]
    names = [name for name in rows[0] if name != "seed"]
    return {name: round(statistics.fmean([row[name] for row in rows], counts), 4) for name in names}


def busy(found: Mapping[str, float]) -> dict[str, float]:
    """Mean share of the time in which workers computed, by role. A worker that decodes anything is busy."""
    roles = sorted({name.partition("-")[0] for name in found})
    shares = {role: [share for name, share in found.items() if name.startswith(role)] for role in roles}
    return {f"busy_{role}": round(statistics.fmean(each), 3) for role, each in shares.items()}


def row_rate(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """The highest rates; at that of `least_work`, mean TTFT and hits in prefix caches; and `bounds`."""
    base = rates.highest("least_work")
    found: dict[str, Any] = {}
    for policy in dict.fromkeys(("least_work", *wanted)):
        done, highest = rates.run(policy, base), rates.highest(policy)
        found[policy] = {
            "highest_rate": round(highest, 3),
            "to_least_work": round(highest / base, 3),
            "at_rate": round(base, 3),
            "mean_ttft": done["mean_ttft"],
            "hits_of_oracle": done["hits"],
            "hits_of_one_cache": done["hits_of_one_cache"],
        }
    least = found["least_work"]["mean_ttft"]
    for each in found.values():
        each["mean_ttft_to_least_work"] = round(each["mean_ttft"] / least, 3)
    return found | {"bounds": bounds(setup, base)}


def bounds(setup: Setup, rate: float) -> dict[str, float]:
    """Rates, in requests a second, that no placement can take for long: every worker computes all the time, prefix hits
    are those of one endless cache, and as many sequences decode together as memory allows.

    `pairs`: prompts are computed by prefill workers only. `any`: any worker computes anything, and tokens are decoded
    in steps with chunks of prompts, so that they take only what they add to such a step.
    """
    machine, arrivals = setup.machine, setup.arrivals(rate)
    oracle, size, seconds = oracle_hits(arrivals), machine.engine.max_batch_tokens, machine.seconds
    prefill = statistics.fmean(
        sum(
            seconds([(start, min(size, each.prompt_tokens - start))], [])
            for start in range(oracle[each.number], each.prompt_tokens, size)
        )
        for each in arrivals
    )
    answer = statistics.fmean(each.answer_tokens for each in arrivals)
    context = round(statistics.fmean(each.prompt_tokens + each.answer_tokens / 2 for each in arrivals))
    most = max(1, min(machine.engine.max_sequences, machine.kv_tokens // context))
    contexts = [context] * most
    apart = answer * seconds([], contexts) / most
    beside = answer * (seconds([(0, size)], contexts) - seconds([(0, size)], [])) / most
    return {
        "prefill_seconds": round(prefill, 4),
        "decode_seconds": round(apart, 4),
        "decode_seconds_beside_prompts": round(beside, 4),
        "pairs": round(min(setup.prefills / prefill, setup.decodes / apart), 3),
        "any": round((setup.prefills + setup.decodes) / (prefill + beside), 3),
    }


def row_slow(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """TTFT p99 with one worker at half speed, and with one slow link, at 85 % of the policy's highest rate, relative to
    that of the same fleet without it; rates are less by the fault's share of capacity."""
    found: dict[str, Any] = {}
    for policy in apart(wanted)[-1:]:
        rate = 0.85 * rates.highest(policy)
        first, *others, last = setup.fleet
        slow_link = {f"decode-{setup.prefills}": SLOW_LINK}
        faults: dict[str, tuple[list[Place], float]] = {
            "without": (setup.fleet, 1.0),
            "half_speed_prefill": ([replace(first, slowdown=SLOW), *others, last], 1 - 0.5 / setup.prefills),
            "half_speed_decode": ([first, *others, replace(last, slowdown=SLOW)], 1 - 0.5 / setup.decodes),
            "slow_link": ([replace(first, slow_links=slow_link), *others, last], 1.0),
        }
        p99 = {}
        for name, (places, share) in faults.items():
            run_with = partial(first_tokens, setup, places, share * rate, policy)
            p99[name] = rates.kept(f"{policy} {name} at {share * rate:.3f}", run_with, all_seeds=True)["ttft_p99"]
        found[policy] = {"rate": round(rate, 3), "ttft_p99": p99.pop("without")}
        found[policy] |= {name: round(each / found[policy]["ttft_p99"], 3) for name, each in p99.items()}
    return found


def first_tokens(
    setup: Setup,
    places: list[Place],
    rate: float,
    policy: str,
    *,
    background: Background | None = None,
    service_class: str = "",
) -> dict[str, Any]:
    """TTFT over the requests of all seeds, and how busy the workers were."""
    runs = [
        replay(
            places,
            setup.arrivals(rate, seed),
            setup.seconds,
            options(policy),
            background=background,
            service_class=service_class,
        )
        for seed in setup.traces
    ]
    counts = [len(each.counted()) for each in runs]
    shares = mean_row([{"requests": count, **busy(each.busy)} for count, each in zip(counts, runs, strict=True)])
    ttft = {"ttft_p50": round(ttft_of(runs, 0.5), 4), "ttft_p99": round(ttft_of(runs, 0.99), 4)}
    return {**shares, "requests": sum(counts), **ttft}


def row_answers(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """Tokens of earlier answers that are computed again, from the second to the tenth turn."""
    found: dict[str, Any] = {}
    talk = Talk(users=48 * setup.prefills)
    for policy, size in product(apart(wanted)[-2:], (setup.machine.engine.block_size, SMALL_BLOCKS)):
        engine = replace(setup.machine.engine, block_size=size)
        fleet = [replace(each, machine=replace(each.machine, engine=engine)) for each in setup.fleet]

        def talked(policy: str = policy, fleet: list[Place] = fleet) -> dict[str, Any]:
            done = converse(fleet, talk, TALK_SECONDS, options(policy))
            return {
                "turns": done.turns,
                "answers_again": round(done.again / max(1, done.answers), 4),
                "by_another_worker": round(done.elsewhere / max(1, done.answers), 4),
                "mean_ttft": round(statistics.fmean(done.ttft), 4),
                **busy(done.busy),
            }

        found[f"{policy}, blocks of {size}"] = rates.kept(f"{policy} conversations, blocks of {size}", talked)
    return found


def row_admission(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """At 1.5 times the highest rate, with each kind of admission: goodput relative to its peak, and how well the delay
    of a refusal says when the request would be taken."""
    found: dict[str, Any] = {}
    classes = {DEFAULT_CLASS: ServiceClass(ttft_target_seconds=TARGETS.ttft, tpot_target_seconds=TARGETS.tpot)}
    for policy in apart(wanted)[-1:]:
        highest = rates.highest(policy)
        peak = max(each["goodput"] for each in rates.runs(policy))
        for admission in ("none", "room", "predicted"):
            given = options(policy, admission=admission, classes=classes)
            rate = OVERLOAD * highest

            def overloaded(given: dict[str, object] = given, rate: float = rate) -> dict[str, Any]:
                done = replay(setup.fleet, setup.arrivals(rate), setup.seconds, given)
                refused = sum(each.retry_seconds is not None for each in done.counted())
                share = round(refused / len(done.counted()), 3)
                return {"rate": round(rate, 3), "goodput": round(done.goodput(TARGETS), 4), "refused": share}

            def retried(given: dict[str, object] = given, rate: float = rate) -> dict[str, Any]:
                told = _told(setup, rate, given)
                error = round(statistics.median(told), 3) if told else None
                return {"retry_after_error": error, "retries_measured": len(told)}

            found[admission] = {
                "policy": policy,
                **rates.kept(f"{policy} admission {admission} {rate:.3f}", overloaded),
            }
            found[admission]["goodput_to_peak"] = round(found[admission]["goodput"] / peak, 3)
            if admission == "predicted":
                found[admission] |= rates.kept(f"{policy} retries {rate:.3f}", retried)
    return found


def _told(setup: Setup, rate: float, given: dict[str, object]) -> list[float]:
    """Relative errors of the delays that refusals name, of one in RETRIED: such a request comes again and again until
    it is taken."""
    errors: list[float] = []

    async def main() -> None:
        cluster = Cluster(setup.fleet, given)
        await cluster.start()
        began = cluster.now

        async def ask(arrival: Arrival) -> None:
            question = Question(f"q-{arrival.number}", arrival.prompt(), arrival.answer_tokens, 2048)
            outcome = await cluster.ask(question)
            if outcome.retry_seconds is not None and not arrival.number % RETRIED:
                after = await refused_again(cluster, outcome, max(0.1, 0.1 * outcome.retry_seconds))
                if after is not None:
                    errors.append(abs(outcome.retry_seconds - after) / after)

        tasks = []
        for each in setup.arrivals(rate):
            await asyncio.sleep(began + each.at - cluster.now)
            tasks.append(asyncio.create_task(ask(each)))
        await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
        await cancel_all(tasks)

    run(main())
    return errors


def row_batch(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """TTFT p99 of interactive requests at half of the highest rate, with and without batch that takes what is left."""
    found: dict[str, Any] = {}
    lengths = list(next(iter(setup.traces.values())))

    async def batch(cluster: Cluster) -> None:
        async def one(number: int) -> None:
            rng = random.Random(number)
            while True:
                number += 10**6
                like = rng.choice(lengths)
                prompt = replace(like, number=number, blocks=()).prompt()
                await cluster.ask(Question(f"b-{number}", prompt, like.answer_tokens, 2048, BATCH, caller="batch"))

        async with asyncio.TaskGroup() as group:
            for number in range(24 * (setup.prefills + setup.decodes)):
                group.create_task(one(number + 10**6))

    for policy in apart(wanted)[-1:]:
        rate = 0.5 * rates.highest(policy)

        run_with = partial(first_tokens, setup, setup.fleet, rate, policy, service_class=INTERACTIVE)
        alone = rates.kept(f"{policy} interactive alone at {rate:.3f}", run_with, all_seeds=True)
        with_batch = partial(run_with, background=batch)
        both = rates.kept(f"{policy} interactive with batch at {rate:.3f}", with_batch, all_seeds=True)
        found[policy] = {
            "rate": round(rate, 3),
            "ttft_p99": alone["ttft_p99"],
            "with_batch": round(both["ttft_p99"] / alone["ttft_p99"], 3),
            **{name: value for name, value in both.items() if name.startswith("busy")},
        }
    return found


def row_start(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """The figures at the rate at which a search would begin (`--start`)."""
    return {policy: rates.run(policy, rates.start) for policy in wanted}


def row_curve(setup: Setup, rates: Rates, wanted: Sequence[str]) -> dict[str, Any]:
    """Goodput against rate, of each policy and of as many co-located workers: runs of `rate`, and lower rates."""
    highest = rates.highest(apart(wanted)[-1])
    found: dict[str, Any] = {}
    for policy in wanted:
        for share in (0.5, 0.75, 1.0):
            rates.run(policy, share * highest)
        found[policy] = [[each["rate"], each["goodput"]] for each in rates.runs(policy)]
    return found


ROWS: dict[str, Callable[[Setup, Rates, Sequence[str]], dict[str, Any]]] = {
    "rate": row_rate,
    "slow": row_slow,
    "answers": row_answers,
    "admission": row_admission,
    "batch": row_batch,
    "curve": row_curve,
    "start": row_start,
}


@lru_cache(1)
def h100(calibration: Path) -> Machine:
    """A worker of Llama-3.1-8B on one H100."""
    spec = ModelSpec("LlamaForCausalLM", 256, MAX_CONTEXT, (END,), "bfloat16", "0" * 64)
    engine = EngineConfig(
        block_size=64, max_batch_tokens=8192, max_sequences=256, kv_memory_bytes=1, step_seconds=TARGETS.tpot
    )
    kernels = Kernels(calibration, LLAMA_3_1_8B)
    return Machine(kernels.seconds, spec, engine, KV_TOKENS, LLAMA_3_1_8B.kv_bytes, 1 / LINK_BYTES, HANDOFF_SECONDS)


def simulate(args: argparse.Namespace) -> None:
    machine = h100(args.calibration)
    traces = {seed: begun_later(read(args.traces, seed), seed / SEEDS) for seed in args.seeds}
    setup = Setup(machine, traces, *args.workers, args.seconds)
    wanted: list[str] = list(args.policies)
    result = earlier(args.out)
    found = result.setdefault(f"conversation {args.workers[0]}+{args.workers[1]}", {})
    result["setting"] = {**own_setting(), "link_bytes_per_second": LINK_BYTES, "kv_tokens": KV_TOKENS}
    result["kernels"] = checked(machine.seconds, machine.engine.max_batch_tokens)

    def keep() -> None:
        if args.out is not None:
            save(args.out, result)

    rates = Rates(setup, found.setdefault("runs", {}), args.start or 2.5 * args.workers[0], keep, args.highest)
    for row in args.rows:
        began = time.monotonic()
        found[row] = ROWS[row](setup, rates, wanted)
        print(json.dumps({"row": row, "wall_seconds": round(time.monotonic() - began, 1), **found[row]}), flush=True)
        keep()


def measure_decisions(args: argparse.Namespace) -> None:
    """Time of a decision."""
    from routing_decision import measure

    result = earlier(args.out)
    result["decision"] = {
        "setting": own_setting("numpy", "xxhash"),
        "rows": list(measure(args.prefixes, args.decisions)),
    }
    if args.out is not None:
        save(args.out, result)


COLORS = ("#94a3b8", "#7c3aed", "#2563eb", "#d97706", "#059669", "#dc2626")
WIDTH, HEIGHT, LEFT, TOP = 560, 300, 60, 40


def draw(args: argparse.Namespace) -> None:
    """Goodput against the rate of arrivals: a line for each policy, and for as many co-located workers."""
    curves: dict[str, list[tuple[float, float]]] = json.loads(args.results.read_text())[args.fleet]["curve"]
    most = max(rate for curve in curves.values() for rate, _ in curve)
    scale = WIDTH / most, HEIGHT / most

    def at(rate: float, goodput: float) -> str:
        return f"{LEFT + scale[0] * rate:.1f},{TOP + HEIGHT - scale[1] * goodput:.1f}"

    bottom, right = TOP + HEIGHT, LEFT + WIDTH
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 180} {bottom + 50}" font-family="sans-serif" '
        'font-size="12" fill="#475569">',
        f'<rect width="{right + 180}" height="{bottom + 50}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">requests a second within both targets ({args.fleet})</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#cbd5e1"/>',
        f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{TOP}" stroke="#cbd5e1" stroke-dasharray="4"/>',
        f'<text x="{LEFT + WIDTH / 2}" y="{bottom + 40}" text-anchor="middle">requests a second that come</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = f"{share * most:.0f}"
        lines.append(f'<text x="{LEFT + share * WIDTH}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
        lines.append(f'<text x="{LEFT - 6}" y="{bottom - share * HEIGHT + 4}" text-anchor="end">{label}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        color, height = COLORS[number % len(COLORS)], TOP + 14 + 20 * number
        points = " ".join(at(rate, goodput) for rate, goodput in curve)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines.append(f'<text x="{right + 12}" y="{height}" fill="{color}">{name.replace("_", " ")}</text>')
    args.out.write_text("\n".join([*lines, "</svg>", ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    simulated = commands.add_parser("simulated", help="fleets of H100s in simulated time")
    simulated.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    simulated.add_argument("--calibration", type=Path, required=True, help="folder of the measured kernels")
    simulated.add_argument("--workers", type=int, nargs=2, default=(8, 8), metavar=("PREFILL", "DECODE"))
    simulated.add_argument("--policies", nargs="+", choices=(*POLICIES, *COLOCATED), default=(*POLICIES, *COLOCATED))
    simulated.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS)[:-1])
    simulated.add_argument("--seconds", type=float, default=60.0, help="simulated seconds of arrivals of each run")
    simulated.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        choices=range(SEEDS),
        default=[0],
        help="in eighths of the trace: where it begins; the rows `rate`, `curve` and `start` are means over them, "
        "`slow` and `batch` take the requests of all together, the others have the first one",
    )
    simulated.add_argument("--start", type=float, help="requests a second at which the search for the highest begins")
    simulated.add_argument(
        "--highest", type=float, help="requests a second that stand for each policy's highest rate: no search is made"
    )
    simulated.add_argument(
        "--out",
        type=Path,
        help="file for the results, which keeps those of other rows, and of runs that are not repeated",
    )
    simulated.set_defaults(do=simulate)
    timed = commands.add_parser("decision", help="time of a decision")
    timed.add_argument("--prefixes", type=int, default=10_000, help="prompts that are in caches")
    timed.add_argument("--decisions", type=int, default=1000, help="decisions of each policy")
    timed.add_argument("--out", type=Path, help="file for the results, which keeps what is there")
    timed.set_defaults(do=measure_decisions)
    drawn = commands.add_parser("picture", help="goodput against rate, of the results of `simulated`")
    drawn.add_argument("results", type=Path)
    drawn.add_argument("--fleet", default="conversation 8+8", help="key of the results")
    drawn.add_argument("--out", type=Path, required=True, help="file for the SVG")
    drawn.set_defaults(do=draw)
    args = parser.parse_args()
    end_on_signal()
    args.do(args)


if __name__ == "__main__":
    main()
