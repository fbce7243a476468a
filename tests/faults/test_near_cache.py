"""A repeated prompt is found in the cache of its worker; without prefill workers, decode computes prompts itself."""

import signal

from kvrelay.client import Client, Completion
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.faults import Scene, oracle, prompt_of
from support.processes import wait_until

LONG = 1500
OUT = 4
ANSWER = 96


def ask(
    it: Scene, prompt: list[int], client: Client | None = None, max_tokens: int = OUT, **options: str
) -> Completion:
    completion = (client or it.client).complete(
        prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=60, **options
    )
    assert list(completion.token_ids) == oracle(prompt, max_tokens)
    return completion


def test_from_the_second_time_on_a_long_prompt_hits(it: Scene) -> None:
    for number in range(3):
        prompt = prompt_of(f"long {number}", LONG)
        answers = [ask(it, prompt) for _ in range(4)]
        hits = [answer.usage.cached_tokens for answer in answers]
        assert hits[0] == 0
        assert min(hits[1:]) > LONG - 64, hits
        sent = [answer.timeline.transfer_bytes for answer in answers]
        assert max(sent[1:]) < sent[0] / 20
        longer = ask(it, [*prompt, *answers[0].token_ids, *prompt_of("next turn", 50)])
        assert longer.usage.cached_tokens > LONG - 64
    it.cluster.wait_idle(5)


def test_a_router_knows_the_prompts_that_others_have_placed(it: Scene) -> None:
    """Only the prompt itself leads the second request to the worker that has it: its session differs."""
    here, there = (Client(address) for address in it.cluster.router.split(","))
    with here, there:
        prompts = [prompt_of(f"told {number}", LONG) for number in range(5)]
        for number, prompt in enumerate(prompts):
            assert ask(it, prompt, here, session=f"first {number}").usage.cached_tokens == 0
        it.cluster.wait_idle(5)
        for number, prompt in enumerate(prompts):
            assert ask(it, prompt, there, session=f"second {number}").usage.cached_tokens > LONG - 64


def test_decode_computes_prompts_itself_when_no_prefill_worker_is_left(it: Scene) -> None:
    handed = {}
    for number in range(3):
        prompt = prompt_of(f"first turn {number}", LONG)
        handed[number] = prompt, ask(it, prompt, max_tokens=ANSWER)
    for name in it.prefills:
        it.signal(name, signal.SIGKILL)
    dead = dict.fromkeys(it.prefills, MEMBER_STATE_DEAD)
    wait_until(lambda: {name: it.cluster.member(name).member.state for name in dead} == dead, "they are known as dead")
    for number in range(4):
        timeline = ask(it, prompt_of(f"alone {number}", LONG)).timeline
        assert timeline.prefill_worker == timeline.decode_worker
        assert timeline.prefill_worker.startswith("decode")
    for number, (prompt, answer) in handed.items():
        # The worker that generated an answer computes none of its tokens again; of the last one, it had no KV.
        turn = [*prompt, *answer.token_ids, *prompt_of(f"second turn {number}", 50)]
        again = ask(it, turn)
        assert again.timeline.prefill_worker == answer.timeline.decode_worker
        assert again.usage.cached_tokens == LONG + ANSWER - 1
    it.cluster.replace(*it.prefills)
    assert ask(it, prompt_of("handed over", LONG)).timeline.prefill_worker.startswith("prefill")
