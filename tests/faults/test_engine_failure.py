"""An engine that fails ends its worker's process soon, and costs no client a token."""

from pathlib import Path

from support.faults import scene, until

ENDED_SECONDS = 5.0
REQUESTS = 12


def test_a_decode_engine_that_raises_while_offers_wait_ends_its_process(tmp_path: Path) -> None:
    """Reservations that wait for the engine thread fail with it: nothing keeps the process alive."""
    rules = ["decode.after_commit,request=trigger,attempt=1:raise"]
    with scene(tmp_path, rules, losses=True, engine={"kv_memory_bytes": 2**20}) as it:
        names = [*(f"beside {number}" for number in range(REQUESTS)), "trigger"]
        it.ask_all(names, at_once=len(names))
        assert until(it.ended, "the worker whose engine has failed is gone", ENDED_SECONDS) < ENDED_SECONDS
        (dead,) = it.ended()
        assert dead in it.decodes
        it.settle(3, but=[dead])
        it.replace(dead)


def test_a_prefill_engine_that_raises_ends_its_process(tmp_path: Path) -> None:
    rules = ["prefill.after_chunk,chunk=1,request=trigger,attempt=1:raise"]
    with scene(tmp_path, rules, losses=True) as it:
        names = [*(f"beside {number}" for number in range(REQUESTS)), "trigger"]
        it.ask_all(names, at_once=len(names))
        assert until(it.ended, "the worker whose engine has failed is gone", ENDED_SECONDS) < ENDED_SECONDS
        (dead,) = it.ended()
        assert dead in it.prefills
        it.settle(3, but=[dead])
