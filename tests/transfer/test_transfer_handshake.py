"""Compatibility of workers for hand-offs: the digest in the membership says what the hand-shake will say."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker

layouts = st.builds(
    KVLayout,
    layers=st.sampled_from((2, 4)),
    kv_heads=st.sampled_from((2, 4)),
    head_dim=st.sampled_from((8, 16)),
    block_size=st.sampled_from((16, 32)),
    dtype=st.sampled_from(("float32", "bfloat16", "int8")),
    order=st.sampled_from(("NHD", "HND")),
)
workers = st.builds(LocalWorker, st.just(WorkerId("w", "1")), layouts, st.sampled_from(("model", "other")))
configs = st.builds(TransferConfig, checksum=st.booleans(), convert_dtype=st.just(True))


@given(workers, workers, configs, configs)
def test_digests_are_equal_exactly_where_neither_side_objects(
    one: LocalWorker, other: LocalWorker, config: TransferConfig, others: TransferConfig
) -> None:
    objection = one.objection(other.hello(one.id, others), config)
    assert (one.digest(config) == other.digest(others)) == (objection is None), objection


def test_without_conversion_the_dtype_is_part_of_the_digest() -> None:
    strict = TransferConfig(convert_dtype=False)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    one = LocalWorker(WorkerId("w", "1"), layout, "model")
    other = replace(one, layout=replace(layout, dtype="bfloat16"))
    assert one.digest(strict) != other.digest(strict)
    assert one.digest(TransferConfig()) == other.digest(TransferConfig())
