"""W3C trace context: what callers send is taken as the standard says, whatever it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.rpc.tracing import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_callers_context_is_taken() -> None:
    context = TraceContext.read(f"00-{TRACE}-{SPAN}-01", "a=1,b=2")
    assert (context.trace_id, context.span_id, context.sampled, context.state) == (TRACE, SPAN, True, "a=1,b=2")
    assert not TraceContext.read(f"00-{TRACE}-{SPAN}-00").sampled
    assert TraceContext.read(f"01-{TRACE}-{SPAN}-01-more").trace_id == TRACE, "a later version may have more fields"
    for state in ("a=" + "x" * 600, "a=\n", "a=ü"):
        assert TraceContext.read(f"00-{TRACE}-{SPAN}-01", state).state == "", "it is no header"


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_anything_else_begins_a_trace(parent: str | None) -> None:
    context = TraceContext.read(parent, "a=1")
    assert context.trace_id != TRACE
    assert int(context.trace_id, 16) > 0
    assert (len(context.trace_id), context.span_id, context.state) == (32, "", "")


@given(st.text(), st.text())
def test_no_header_raises(parent: str, state: str) -> None:
    assert len(TraceContext.read(parent, state).trace_id) == 32


MEMBERS = st.text("ab01=@ \t-_*/,;\"'<>?~\u00fc\n", max_size=30) | st.sampled_from(["a=1", "1@b=2", "a=", "=1", "a=1 "])


@given(st.lists(MEMBERS, max_size=40).map(",".join))
def test_no_state_is_written_into_the_log(state: str) -> None:
    """OpenTelemetry logs the parts of a state that it can't take; a client might have put a prompt there."""
    span = pytest.importorskip("opentelemetry.trace.span")
    context = TraceContext.read(f"00-{TRACE}-{SPAN}-01", state)
    with pytest.MonkeyPatch.context() as patch:
        logged: list[object] = []
        patch.setattr(span._logger, "warning", lambda *args: logged.append(args))
        span.TraceState.from_header([context.state])
    assert logged == []
