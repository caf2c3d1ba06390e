"""Which call a worker of the pool takes next, on workers that have no process."""

from dataclasses import replace

from mindspeed_rl_plugin.workers.pool_worker import PoolWorker, Session, WorkerCall


class Bare(PoolWorker):
    """Its calls are in the making until a test says otherwise."""

    def _start(self) -> None:
        self._program = self.until = None

    def call(self, message, seconds, grace=0.0) -> None: ...


def calls(kinds: str, most: int = 3) -> list[WorkerCall]:
    """One for each letter: c a coroutine's, s another one."""
    return [WorkerCall((), 1.0, kind == "c", most, number=number) for number, kind in enumerate(kinds)]


def begun(worker: PoolWorker, waiting: list[WorkerCall]) -> list[int]:
    """Numbers of the calls that it takes of those that wait, in their order."""
    numbers = []
    while call := worker.next_of(waiting):
        waiting.remove(call)
        worker.begin(call)
        numbers.append(call.number)
    return numbers


def test_coroutines_are_made_together_and_any_other_call_alone():
    worker, waiting = Bare(None, None, ""), calls("ccccsc")
    assert begun(worker, waiting) == [0, 1, 2], "three at most"
    worker.calls.clear()
    assert begun(worker, waiting) == [3, 5]
    worker.calls.clear()
    assert begun(worker, waiting) == [4]


def test_a_call_that_must_be_made_alone_is_not_overtaken_for_ever():
    worker, waiting = Bare(None, None, ""), calls("cscccccc")
    assert begun(worker, waiting) == [0, 2, 3]
    for number, after in ((0, []), (2, []), (3, [1])):
        del worker.calls[number]
        assert begun(worker, waiting) == after
    worker.calls.clear()
    assert begun(worker, waiting) == [4, 5, 6]


def test_the_strictest_of_the_calls_that_are_made_together_says_how_many():
    worker, waiting = Bare(None, None, ""), calls("cccc")
    waiting[0] = replace(waiting[0], most=2)
    assert begun(worker, waiting) == [0, 1]


def test_a_session_stays_with_its_worker_until_the_process_ends():
    one, other, session = Bare(None, None, ""), Bare(None, None, ""), Session()
    (call,) = waiting = [replace(call, session=session) for call in calls("s")]
    assert begun(one, waiting) == [0]
    one.calls.clear()
    assert begun(other, [call]) == [] and begun(one, [call]) == [0]
    one.calls.clear()
    one.end(session)
    assert one.closing == [session.key] and begun(other, [call]) == [0]
