"""The supervisor's record: whole or absent, written in order, and never in the way of the service."""

import asyncio
import errno
import gc
import json
import os
import threading
from pathlib import Path

import pytest

from kvrelay.cluster.supervisor import record as record_module
from kvrelay.cluster.supervisor.record import FileStore, Recorder
from kvrelay.cluster.supervisor.supervisor import SupervisorConfig, SupervisorServer
from kvrelay.internal.v1.supervisor_pb2 import Member, MembershipRecord, NameRecord, SupervisorRecord


def record(generation: int) -> SupervisorRecord:
    name = NameRecord(name="decode-0", generation=generation, member=Member(name="decode-0"), fenced=["old"])
    return SupervisorRecord(membership=MembershipRecord(generation=generation, names=[name]), address="127.0.0.1:5")


def test_a_file_keeps_what_was_saved_last(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "record.json")
    assert store.load() is None
    for generation in (1, 2**63):
        store.save(record(generation))
        assert FileStore(tmp_path / "record.json").load() == record(generation)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_write_that_was_cut_off_leaves_the_last_record(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "record.json")
    store.save(record(1))
    (tmp_path / "record.json.new").write_text('{"membership": {"gen')
    assert store.load() == record(1)
    store.save(record(2))
    assert store.load() == record(2)


def test_a_newer_supervisors_record_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    FileStore(path).save(record(3))
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert FileStore(path).load() == record(3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"membership": 5}', "\x00"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"record\.json isn't a supervisor's record"):
        SupervisorServer(SupervisorConfig(state_path=str(path)))
    assert path.read_text() == text


def test_a_folder_that_does_not_exist_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its folder doesn't exist"):
        SupervisorServer(SupervisorConfig(state_path=str(tmp_path / "no" / "record.json")))


class BadStore:
    """A store that fails or hangs as it is told."""

    def __init__(self, error: OSError | None = None) -> None:
        self.saved: list[SupervisorRecord] = []
        self.error = error
        self.free = threading.Event()
        self.free.set()

    def load(self) -> SupervisorRecord | None:
        return None

    def save(self, record: SupervisorRecord) -> None:
        self.free.wait(30)
        if self.error is not None:
            raise self.error
        self.saved.append(record)

    @property
    def generations(self) -> list[int]:
        return [each.membership.generation for each in self.saved]


def test_a_disk_that_stays_full_is_one_error_and_leaves_no_exception_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def save() -> list[dict[str, object]]:
        unretrieved: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
        recorder = Recorder(BadStore(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        for generation in range(20):
            assert not await recorder.save(record(generation))
        recorder.close()
        gc.collect()
        return unretrieved

    assert asyncio.run(save()) == []
    assert [each.message for each in caplog.records] == ["the supervisor's record can't be saved"]


async def test_a_store_that_fails_or_hangs_is_waited_for_briefly_and_writes_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang(*, hangs: bool = True) -> None:
        """The store writes nothing more, for which the recorder waits briefly; or it writes again."""
        monkeypatch.setattr(record_module, "SAVE_SECONDS", 0.2 if hangs else 30.0)
        (store.free.clear if hangs else store.free.set)()

    store = BadStore()
    hang(hangs=False)
    recorder = Recorder(store)
    assert await recorder.save(record(1))
    assert await recorder.save(record(1))
    assert store.generations == [1], "equal ones are written once"
    store.error = OSError(28, "No space left on device")
    assert not await recorder.save(record(2))
    store.error = None
    hang()
    for _ in range(3):
        assert not await recorder.save(record(3))
    hang(hangs=False)
    assert await recorder.save(record(4))
    assert store.generations in ([1, 3, 4], [1, 4])
    hang()
    assert not await recorder.save(record(5))
    hang(hangs=False)
    assert await recorder.save(record(4))
    assert store.generations[-2:] == [5, 4], "one that was given up doesn't stay in the place of the record before it"
    recorder.close()
