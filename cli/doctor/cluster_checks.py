"""Checks of the cluster as a whole: members, versions, pairs, transports, protection, pools, dashboards."""

from collections import defaultdict
from collections.abc import Iterator

from kvrelay.cli.doctor.finding import Examined, Finding, Severity, size
from kvrelay.internal.v1.describe_pb2 import Description, PairState
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
)
from kvrelay.internal.v1.worker_pb2 import CONTEXT_LIMIT_OPTION, CONTEXT_LIMIT_POOL
from kvrelay.rpc.compatibility import unpaired
from kvrelay.rpc.identity import state_name

CLOCK_SECONDS = 1.0
"""Clocks that are further apart make logs of several machines hard to read together."""
FULL_SHARE = 0.95
"""Held share of a KV pool from which on requests wait for it."""
ALIKE = ("kvrelay", "torch", "ray", "protobuf", "grpcio", "nccl", "python")
"""Packages of which all members should have the same version."""
FAST_TRANSPORTS = ("nccl", "nixl")
"""Transports that carry GPU memory without the CPU."""


def members(cluster: Examined) -> Iterator[Finding]:
    """Checks that every expected member is present and ready."""
    state = cluster.state
    if state.missing:
        advice = "`kvrelay down` and `kvrelay up` bring it back; nothing else does"
        yield Finding("warning", state.missing, "ended; requests are served without it", advice)
    if state.trouble:
        yield Finding("error", "cluster", f"is being started anew: {state.trouble}", "`kvrelay status` says when")
        return
    if cluster.status is None:
        # Ray starts a supervisor again that has ended; a frozen one is ended by `kvrelay up`, if that runs.
        mends = "Ray starts it again" + (", unless it is frozen: then end its process" if state.pid is None else "")
        yield Finding(
            "error",
            "supervisor",
            "does not answer: lost members are not replaced, and no other member can be examined",
            f"`kvrelay logs supervisor` says why; {mends}",
        )
        return
    ready = cluster.status.ready
    yield Finding(
        "ok" if ready else "error",
        "cluster",
        "requests can be served" if ready else "no request can be served: a role has no worker that is ready",
        "" if ready else "see the members below, and `kvrelay logs --level warning`",
    )
    for entry in cluster.status.members:
        member = entry.member
        if member.state == MEMBER_STATE_READY:
            if entry.restored:
                yield Finding("warning", member.name, "has sent no heartbeat to the supervisor since its restart")
            continue
        severity: Severity = "error" if member.state == MEMBER_STATE_DEAD else "warning"
        yield Finding(severity, member.name, f"is {state_name(member.state)}", f"`kvrelay logs {member.name}` says why")
    described = cluster.described
    for each in () if described is None else described.members:
        if not each.HasField("description"):
            yield Finding(
                "warning", each.name, "did not describe itself in time", "it hangs, or is of an older version"
            )


def versions(cluster: Examined) -> Iterator[Finding]:
    """Checks that all members run the same versions."""
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, description in cluster.descriptions.items():
        for package, version in description.versions.items():
            seen[package][version].append(name)
    for package in ALIKE:
        found = seen.get(package, {})
        if len(found) > 1:
            which = "; ".join(f"{version}: {', '.join(sorted(who))}" for version, who in sorted(found.items()))
            yield Finding("warning", package, f"differs: {which}", "use one image or environment for all members")
        elif found:
            yield Finding("ok", package, f"{next(iter(found))} everywhere")


def pairs(cluster: Examined) -> Iterator[Finding]:
    """Checks that all workers can be paired for hand-offs."""
    sentences = unpaired(cluster.members.values())
    for sentence in sentences:
        yield Finding("error", "digest", sentence, "give all workers one version, model and transfer section")
    workers = [member for member in cluster.members.values() if member.role != ROLE_ROUTER]
    if workers and not sentences:
        yield Finding("ok", "digest", f"all {len(workers)} workers fit together")


def formats(cluster: Examined) -> Iterator[Finding]:
    """Checks the data types of weights and KV: workers may differ, which is often meant and sometimes a slip."""
    for name, member in sorted(cluster.members.items()):
        if member.kv_dtype:
            yield Finding("note", name, f"weights are {member.weights}, KV is {member.kv_dtype}")


def clocks(cluster: Examined) -> Iterator[Finding]:
    """Checks how far the clocks of the members and the supervisor are apart."""
    found = {"supervisor": (0.0, 0.0)}
    for each in () if cluster.described is None else cluster.described.members:
        if not each.HasField("description"):
            continue
        told = each.description
        ahead = ((told.heard_unix - each.asked_unix) + (told.told_unix - each.answered_unix)) / 2
        way = (each.answered_unix - each.asked_unix) - (told.told_unix - told.heard_unix)
        found[each.name] = ahead, max(0.0, way / 2)
    if len(found) == 1:
        return
    first, last = (choose(found, key=lambda name: found[name][0]) for choose in (max, min))
    apart = found[first][0] - found[last][0]
    error = found[first][1] + found[last][1]
    text = f"at most {apart:.3f} s apart (±{error:.3f} s): {first}'s is the furthest ahead, {last}'s behind"
    if apart - error > CLOCK_SECONDS:
        advice = "run an NTP client on every node; hand-offs don't depend on clocks, but logs do"
        yield Finding("warning", "clocks", text, advice)
    else:
        yield Finding("ok", "clocks", text)


def transports(cluster: Examined) -> Iterator[Finding]:
    """Tells the transport over which each pair sends KV, and why no better one is used."""
    members, descriptions = cluster.members, cluster.descriptions
    for name, description in descriptions.items():
        member = members.get(name)
        if member is None or member.role != ROLE_PREFILL:
            continue
        for pair in description.pairs:
            yield _pair(name, description, pair, descriptions.get(pair.peer))
    for name, description in descriptions.items():
        member = members.get(name)
        if member is not None and member.role in (ROLE_PREFILL, ROLE_DECODE):
            missing = [f"{each.name}: {each.missing}" for each in description.transports if each.missing]
            usable = [each.name for each in description.transports if not each.missing]
            text = f"can use {', '.join(usable) or 'none'}"
            yield Finding("note", name, text + (f"; not {'; not '.join(missing)}" if missing else ""))


def _pair(name: str, here: Description, pair: PairState, there: Description | None) -> Finding:
    subject = f"{name} -> {pair.peer}"
    if not pair.transport:
        return Finding("error", subject, f"no transport: {pair.missing}", "set transfer.transport to auto on both")
    link = f"a link is open (epoch {pair.epoch})" if pair.epoch else "no link is open yet"
    text = f"{pair.transport}, the first that both list; {link}"
    gpus = here.device == "cuda" and there is not None and there.device == "cuda"
    if gpus and pair.transport not in FAST_TRANSPORTS:
        better = "; ".join(f"{each.name}: {each.missing}" for each in here.transports if each.missing)
        return Finding("warning", subject, f"{text}; KV of GPUs goes through host memory", better)
    return Finding("ok", subject, text)


def protection(cluster: Examined) -> Iterator[Finding]:
    """Checks the checksums and the encryption of KV, and the TLS of internal calls."""
    workers = {name: each for name, each in cluster.descriptions.items() if each.device}
    off = sorted(name for name, each in workers.items() if not each.checksum and each.encrypt == "none")
    if off:
        text = "frames carry no checksum: damaged KV would become wrong tokens"
        yield Finding("error", ", ".join(off), text, "set transfer.checksum: true")
    elif workers:
        kinds = sorted({each.encrypt for each in workers.values()})
        yield Finding("ok", "frames", f"are verified; transfer.encrypt is {', '.join(kinds)}")
    hosts = {each.host for each in workers.values()}
    open_ = sorted(name for name, each in workers.items() if each.tls == "off")
    if len(hosts) > 1 and open_:
        text = "internal calls between machines are not encrypted"
        yield Finding("note", ", ".join(open_), text, "security.tls: mutual, unless the network is trusted")


def pools(cluster: Examined) -> Iterator[Finding]:
    """Checks the KV pools, and how long a context may be."""
    loads = {} if cluster.status is None else {entry.member.name: entry.load for entry in cluster.status.members}
    contexts: dict[int, list[str]] = defaultdict(list)
    for name, description in sorted(cluster.descriptions.items()):
        if not description.device:
            continue
        blocks, model = loads[name].blocks if name in loads else None, description.max_context
        contexts[model].append(name)
        text = f"{size(description.kv_bytes)} on {description.device}"
        if blocks is not None and blocks.total:
            held = blocks.held / blocks.total
            text += f", {blocks.total * blocks.size} tokens in {blocks.total} blocks, {held:.0%} held"
            if held >= FULL_SHARE:
                advice = "add workers of this role, or give engine.kv_memory_bytes more"
                yield Finding("warning", name, f"{text}: requests wait for blocks", advice)
                continue
        if description.context_limit == CONTEXT_LIMIT_POOL:
            advice = "a larger engine.kv_memory_bytes allows longer contexts"
            yield Finding("warning", name, f"{text}; it limits contexts to {model} tokens", advice)
        else:
            why = "engine.max_context" if description.context_limit == CONTEXT_LIMIT_OPTION else "the model"
            yield Finding("ok", name, f"{text}; contexts up to {model} tokens, by {why}")
    if len(contexts) > 1:
        which = "; ".join(f"{tokens}: {', '.join(names)}" for tokens, names in sorted(contexts.items()))
        advice = "the shortest one counts for all requests; give the workers equal pools"
        yield Finding("warning", "context", f"differs between workers: {which}", advice)


def reachable(cluster: Examined) -> Iterator[Finding]:
    """Checks that routers and dashboards can be reached from this machine."""
    for each in cluster.reached:
        if each.error:
            yield Finding("warning", each.name, f"does not answer from here: {each.error}")
        else:
            yield Finding("ok", each.name, "answers")
