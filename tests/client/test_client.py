"""The client, against a real dock with the stages of a job and published weights; the job's ranks are threads here."""

import json
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from commands import until
from dock_help import SMALL, make_members, together
from publish_help import chunks_of
from reshard_reference import megatron_weights, random_weights
from tensordict import TensorDict

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.client import Client
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import ColumnSpec, Gone, Ragged, Rows, SampleId, VersionBound, from_tensordict
from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.gate import Opening
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.generators.description import JOB, TRAINER_WEIGHTS, Description
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.rows import GenerateRequest, Sampling
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.invitation import SECRET_BYTES, write_secret
from mindspeed_rl_plugin.service.job_service import JobService, called
from mindspeed_rl_plugin.stages.generate import completion_rows
from mindspeed_rl_plugin.stages.prompts import prompt_rows
from mindspeed_rl_plugin.stages.response_validator import READS, STATE, ResponseValidator
from mindspeed_rl_plugin.stages.stage import columns_of, states_of
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.weights.publish import Publisher, TrainerWeights
from mindspeed_rl_plugin.weights.published_memory import publish_memory

GROUPS, MEMBERS, LONGEST, END = 2, 2, 4, 9
SHAPE = ModelShape("qwen3", 2, 32, 4, 2, 8, 48, 60, 64)
DESCRIPTION = Description(
    VllmOptions({"model_type": "qwen3"}, 16, eos_token_ids=(END,)), Sampling(max_tokens=LONGEST), 7, "keep", False, 60.0
)


class Trainers:
    """Two ranks on one machine, or on two: what a job's ranks do in a loop, call by call."""

    def __init__(self, folder: Path, nodes: list[str], description: Description) -> None:
        table = stage_table(resolve(AlgorithmConfig(algorithm="grpo")), 1, by_group=False)
        self.members = make_members(columns_of(table), states_of(table), nodes, limits=replace(SMALL, max_tokens=99))
        self.docks = [m.dock(deadline=20) for m in self.members]
        self.validator = ResponseValidator(SHAPE.vocab, LONGEST)
        self.services = [JobService(dock) for dock in self.docks]
        for service in self.services:
            service.guard({STATE: Opening(self.validator.check, READS)})
        self.canonical, parallel = random_weights(SHAPE), Parallel(2, tp=2)
        stored = {r: chunks_of(megatron_weights(SHAPE, parallel, r, self.canonical)) for r in range(2)}
        gather = [m.peers.gather for m in self.members]
        made = together(2, lambda r: TrainerWeights.of(SHAPE, parallel, r, stored[r], torch.float32, gather[r]))
        self.publishers = [
            Publisher(made[r], r, partial(publish_memory, self.docks[r]), gather=gather[r]) for r in range(2)
        ]
        self.chunks, self.secret = stored, folder / "secret"
        about = json.dumps({JOB: description.to_json(), TRAINER_WEIGHTS: made[0].text()})
        self.address = together(2, lambda r: self.services[r].invite(self.secret, "127.0.0.1", about))[0]

    def publish(self, version: int) -> None:
        self.validator.published.add(version)
        together(2, lambda r: self.publishers[r].publish(self.chunks[r], version))
        self.services[0].announce(version)

    def admit(self, epoch: int, oldest: int, newest: int = -1) -> None:
        """Prompt g of two groups has g + 1 tokens."""
        prompts = [
            SimpleNamespace(tokens=[5] * (g + 1), text="", answer="", row=g, record={}, messages=None) for g in (0, 1)
        ]
        for dock in self.docks:
            dock.open(epoch, GROUPS, MEMBERS, VersionBound(oldest, newest))
        self.docks[0].put(prompt_rows(epoch, prompts))

    def close(self) -> None:
        for member in self.members:
            member.close()


MACHINES = pytest.mark.parametrize("trainers", ["one machine", "two machines"], indirect=True)


@pytest.fixture
def trainers(request, tmp_path):
    other = "elsewhere" if getattr(request, "param", None) == "two machines" else machine()
    made = Trainers(tmp_path, [machine(), other], DESCRIPTION)
    yield made
    made.close()


@pytest.fixture
def job(trainers):
    with Client(trainers.address, trainers.secret) as client:
        yield client


def nested(rows: list[list], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def answers(prompts: TensorDict, by: int, **changed) -> TensorDict:
    """Right rows: responses of two tokens, the last of them the end."""
    count = len(prompts)
    columns = {
        "response": nested([[7, END]] * count, torch.int64),
        "logps": nested([[-0.5, -0.25]] * count, torch.float32),
        "version": torch.full((count,), by),
    }
    columns = {name: column for name, column in (columns | changed).items() if column is not None}
    return TensorDict({"ids": prompts["ids"], **columns}, batch_size=[count])


@MACHINES
def test_rows_go_from_prompts_to_what_an_observer_reads(trainers, job) -> None:
    trainers.publish(0)
    trainers.admit(0, 0)
    prompts = job.take(3, deadline=20)
    assert prompts["ids"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert [row.tolist() for row in prompts["prompt"].unbind()] == [[5], [5], [5, 5]]
    assert prompts["oldest"].tolist() == [0] * 3 and prompts["newest"].tolist() == [-1] * 3
    assert not prompts["greedy"].any() and len(set(prompts["seed"].tolist())) == 3
    job.give(answers(prompts[:2], 0))
    job.release()
    assert job.finished("generate").tolist() == [[0, 0, 0], [0, 0, 1]] and len(job.finished()) == 0
    rest = job.take(9, deadline=20)
    assert rest["ids"].tolist() == [[0, 1, 0], [0, 1, 1]], "what was released comes again"
    trainers.publish(2)
    segments = nested([[[0, 0], [1, 2]], [[0, 2]]], torch.int64)
    job.give(answers(rest, 0, version=None, segments=segments, finish=torch.tensor([0, 1])))
    wanted = ("tokens", "loss_mask", "logp_rollout", "version", "segments", "finish", "response_length")
    rows = from_tensordict(job.read(job.finished("generate"), wanted))
    assert [row.tolist() for row in rows["tokens"].rows()] == [[5, 7, END]] * 2 + [[5, 5, 7, END]] * 2
    assert [row.tolist() for row in rows["loss_mask"].rows()][1:3] == [[0, 1, 1], [0, 0, 1, 1]]
    assert rows["logp_rollout"].row(3).tolist() == [0, 0, -0.5, -0.25]
    assert rows["version"].tolist() == [0, 0, 0, 2] and rows["finish"].tolist() == [0, 0, 0, 1]
    assert [row.tolist() for row in rows["segments"].rows()] == [[[1, 0]], [[1, 0]], [[2, 0], [3, 2]], [[2, 2]]]
    assert len(job.read(job.finished("generate"), ["reward"])) == 0, "not graded yet"
    assert len(job.read([], ["tokens"])) == 0
    ids = job.finished("generate")
    for dock in trainers.docks:
        dock.clear(0, [0])
    assert job.read(ids, ["tokens"])["ids"].tolist() == [[0, 1, 0], [0, 1, 1]], "what is cleared is left out"
    with pytest.raises(ValueError, match=r"read: undeclared columns \['nothing'\]"):
        job.read(ids, ["nothing"])
    with pytest.raises(ValueError, match="finished: no stage 'rewards'; this job has .*generate"):
        job.finished("rewards")


def ints(row: list) -> torch.Tensor:
    return nested([row] * 2, torch.int64)


def floats(row: list) -> torch.Tensor:
    return nested([row] * 2, torch.float32)


NINE = torch.full((2, 2), 9)
REFUSED = {  # what is said of it -> columns of two right rows, changed
    "row (0, 0, 0): token 2: 60 is not in 0..59": dict(response=ints([7, 60])),
    "5 tokens is longer than --rl-max-response-length 4": dict(response=ints([7] * 5), logps=floats([-1.0] * 5)),
    "tokens has 1 entries, and the prompt 1": dict(response=ints([]), logps=floats([])),
    "logp_rollout is nan": dict(logps=floats([-0.5, float("nan")])),
    "logp_rollout is 0.5": dict(logps=floats([0.5, 0.25])),
    "version 3 of the weights is not published": dict(version=torch.tensor([3, 3])),
    "only versions 1 to the newest may": dict(version=torch.tensor([0, 0])),
    "finish is 2": dict(finish=torch.tensor([2, 2])),
    "segments [[1, 1], [1, 2]]": dict(version=None, segments=ints([[0, 1], [0, 2]])),
    "segments [[1, 1], [3, 2]]": dict(version=None, segments=ints([[0, 1], [2, 2]])),
    # where rows cannot be made of it
    "needed are response, logps, and version or segments": dict(logps=None),
    "response and logps differ in length": dict(logps=floats([-1.0])),
    "'response' has several entries per row": dict(response=NINE),
    "'response' has entries of shape [], torch.float32": dict(response=floats([7.0, 9.5])),
    "token 4294967296 has more than 32 bits": dict(response=ints([7, 1 << 32])),
    "'logps' has entries of shape [], torch.int64": dict(logps=ints([-1, -1])),
    "'logps' has entries of shape [1]": dict(logps=floats([[-1.0], [-1.0]])),
    "'segments' has entries of shape []": dict(version=None, segments=ints([0, 1])),
    "'segments' has entries of shape [2], torch.float32": dict(version=None, segments=floats([[0.0, 0.0]])),
    "'version' has entries of shape [], torch.float32": dict(version=torch.tensor([0.5, 0.5])),
    "'version' has one number per row": dict(version=ints([0, 0])),
    "'version' has entries of shape [2]": dict(version=NINE),
    "column 'finish' is a": dict(finish=["stop", "stop"]),
    "finish 9": dict(finish=NINE[0]),
    "'ids' is [2, 2]": dict(ids=NINE),
    "'ids' is [2, 3], torch.float32": dict(ids=torch.zeros(2, 3)),
}


def test_a_job_that_replays_routes_needs_those_of_each_token() -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    config |= dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=60, intermediate_size=8)
    engine = replace(DESCRIPTION.engine, config=config | {"moe_intermediate_size": 8}, record_routes=True)
    client, ids = object.__new__(Client), (SampleId(0, 0, 0),)
    client._job = replace(DESCRIPTION, engine=engine)
    request = GenerateRequest(ids[0], (5,), Sampling(4), 1)
    client._taken, column = {ids[0]: (None, request)}, ColumnSpec("routes", torch.uint8, "token", True, (1, 2))
    client.dock, validator = SimpleNamespace(columns={"routes": column}), ResponseValidator(60, 4, experts=8)
    validator.published.add(0)
    two = {"response": Ragged.from_rows([torch.tensor([7, END])]), "logps": Ragged.from_rows([torch.zeros(2)])}
    routes = torch.tensor([[[0, 0]], [[1, 2]], [[7, 3]]])

    def given(rows: torch.Tensor | None) -> Rows:
        more = {} if rows is None else {"routes": Ragged.from_rows([rows])}
        return Rows(ids, {**two, "version": torch.tensor([0]), **more})

    def taken(rows: torch.Tensor | None) -> Ragged:
        """The column as the job gets it, after its checks."""
        client._check(given(rows))
        got = completion_rows([request], [client._completion(given(rows), 0)])
        column.check(got["routes"])
        validator.check(got.with_columns(prompt=Ragged.from_rows([torch.tensor([5])])), VersionBound(0))
        return got["routes"]

    assert taken(routes).row(0).tolist() == routes.tolist()
    wrong = {"routes are needed": None, "shape [1, 2], got [1, 1]": routes[..., :1], "2 entries for 3 to": routes[1:]}
    wrong |= {"token 2 are 4 to 8; give ids of 8": routes + routes.bool(), "token 0 are 3 to 7": routes.flip(0)}
    wrong |= {"no torch.uint8": routes + 256 * routes.bool(), "are no torch.uint8": routes - routes.bool() * 9}
    for text, rows in wrong.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            taken(rows)
    client._job = DESCRIPTION
    with pytest.raises(ValueError, match="routes are not allowed in this job"):
        client._check(given(routes))


def test_rows_that_the_job_cannot_take_are_refused_there_and_it_goes_on(trainers, job) -> None:
    for version in (0, 1, 2):
        trainers.publish(version)
    trainers.admit(0, 1)
    prompts = job.take(2, deadline=20)
    for text, changed in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            job.give(answers(prompts, 1, **changed))
        assert len(job.finished("generate")) == 0
    good = answers(prompts, 1, finish=torch.tensor([False, True]))
    with pytest.raises(ValueError, match="2 rows were not taken"):
        job.give(good.clone().update({"ids": torch.tensor([[0, 1, 0], [0, 1, 1]])}))
    job.give(good)
    assert len(job.finished("generate")) == 2
    with pytest.raises(ValueError, match="2 rows were not taken"):
        job.give(good)
    with pytest.raises(ValueError, match="give at least 1"):
        job.take(0, deadline=0.0)


def ragged(row: list, dtype: torch.dtype) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=dtype)])


def test_columns_that_disagree_are_refused_where_they_arrive(trainers) -> None:
    """As a program could send them that builds its columns itself."""
    trainers.publish(0)
    trainers.admit(0, 0)
    outside = GuestDock.join(trainers.address, trainers.secret)
    lease = outside.lease(STATE, max_rows=1, deadline=20)
    good = {
        "tokens": ragged([5, 7], torch.int32),
        "loss_mask": ragged([0, 1], torch.uint8),
        "logp_rollout": ragged([0.0, -1.0], torch.float32),
        "length": torch.tensor([2]),
        "response_length": torch.tensor([1]),
        "finish": torch.tensor([0], dtype=torch.int8),
        "version": torch.tensor([0]),
        "weights_digest": torch.tensor([0]),
        "segments": ragged([[1, 0]], torch.int64),
    }
    bad = [
        ("tokens", ragged([6, 7], torch.int32), "begin with the prompt"),
        ("loss_mask", ragged([0, 1, 1], torch.uint8), "loss_mask has 3 entries for 2 tokens"),
        ("logp_rollout", ragged([0.0], torch.float32), "logp_rollout has 1 entries for 2 tokens"),
        ("loss_mask", ragged([1, 1], torch.uint8), "give 1 on what the model sampled, else 0"),
        ("logp_rollout", ragged([-1.0, -1.0], torch.float32), "give 0 outside of what the model sampled"),
        ("length", torch.tensor([3]), "length is 3, not 2"),
        ("response_length", torch.tensor([2]), "response_length is 2, not 1"),
        ("version", torch.tensor([1]), "version is 1, but the oldest version of the segments is 0"),
    ]
    for name, column, text in bad:
        with pytest.raises(ValueError, match=text):
            outside.commit(lease, Rows(lease.rows.ids, good | {name: column}))
    with pytest.raises(ValueError, match="put: state 'generate' writes .* each once; got"):
        outside.commit(lease, Rows(lease.rows.ids, {"tokens": good["tokens"]}))
    with pytest.raises(ValueError, match="state 'generate' must write column"):
        outside.commit(lease)
    with pytest.raises(ValueError, match="state 'update' is not open to processes outside of the job"):
        outside.lease("update", deadline=0)
    with pytest.raises(ValueError, match="put: state None is not open"):
        outside.put(Rows(lease.rows.ids, {"reward": torch.tensor([1.0])}))
    empty = m.Put(7, m.Shape(1, 1), [], False, 5.0, state=STATE, rows=np.empty(0, np.int32))
    with pytest.raises(ValueError, match="put: epoch 7 is not open"):  # which no such message opens
        outside.calls.ask_warehouse(0, empty)
    shape = m.Shape(GROUPS, MEMBERS, VersionBound(0))
    with pytest.raises(ValueError, match="epoch 0 is given .*oldest=-1.*, it has .*oldest=0"):  # versions that it chose
        outside.calls.ask_warehouse(0, msgspec.structs.replace(empty, epoch=0, shape=m.Shape(GROUPS, MEMBERS)))
    with pytest.raises(ValueError, match="put: epoch 0 has rows 0 to .*, not 900 to 900"):
        put = msgspec.structs.replace(empty, epoch=0, shape=shape, rows=np.array([900], np.int32))
        outside.calls.ask_warehouse(0, put)
    outside.commit(lease, Rows(lease.rows.ids, good))
    got = trainers.docks[0].read([SampleId(0, 0, 0)], ["tokens", "logp_rollout"])
    assert got["tokens"].values.tolist() == [5, 7] and got["logp_rollout"].values.tolist() == [0.0, -1.0]
    outside.close()


def test_a_commit_of_too_many_bytes_is_refused_and_the_connection_goes_on(trainers) -> None:
    for member in trainers.members:
        member.core.gate.most_bytes = 1000
    trainers.publish(0)
    trainers.admit(0, 0)
    with Client(trainers.address, trainers.secret) as job:
        prompts = job.take(2, deadline=20)
        many = nested([[7] * 200] * 2, torch.int64), nested([[-1.0] * 200] * 2, torch.float32)
        with pytest.raises(ValueError, match=r"put: \d+ bytes of cells at once, the limit is 1000; give fewer rows"):
            job.give(answers(prompts, 0, response=many[0], logps=many[1]))
        job.give(answers(prompts, 0))


def test_rows_of_too_many_bytes_for_one_message_go_in_several(trainers, job) -> None:
    """Each row here has about a hundred; on the way each column takes whole lines of 64."""
    job.dock.piece_bytes = 125
    for member in trainers.members:
        member.core.gate.most_bytes = 600
    trainers.publish(0)
    trainers.admit(0, 0)
    prompts = job.take(4, deadline=20)
    job.give(answers(prompts, 0, version=None, segments=nested([[[0, 0], [1, 0]]] * 4, torch.int64)))
    assert len(job.finished("generate")) == 4


def test_a_program_that_takes_rows_counts_as_an_engine_until_it_leaves_and_an_observer_does_not(trainers, job) -> None:
    reports = trainers.services[0].reports
    job.metrics()
    assert reports() == {}
    assert len(job.take(1, deadline=0)) == 0
    ((name, counts),) = reports().items()
    assert called(name) == f"client, process {os.getpid()} on {socket.gethostname()}" and counts == {}
    job.report({"seconds": 2.0})
    job.take(1, deadline=0)
    assert reports() == {name: {"seconds": 2.0}}
    job.close()
    until(lambda: reports() == {}, 20)


@MACHINES
def test_weights_come_whole_by_hugging_face_names(trainers, job) -> None:
    """Of trainers that have them in two parts each."""
    assert job.newest() == -1 and job.versions() == []
    threading.Timer(0.3, trainers.publish, (0,)).start()
    assert job.newest(after=-1, deadline=20) == 0
    version, weights = job.weights()
    assert version == 0 and job.names == {name: tuple(t.shape) for name, t in trainers.canonical.items()}
    assert weights.keys() == trainers.canonical.keys()
    assert all(torch.equal(weights[name], t) for name, t in trainers.canonical.items())
    for later in (1, 3):
        trainers.publish(later)
    assert job.newest() == 3 and job.versions() == [1, 3]
    one = job.weights(1, ["model.norm.weight"])
    assert one[0] == 1 and list(one[1]) == ["model.norm.weight"]
    assert job.weights(1, []) == (1, {}), "none, where none is named"
    with pytest.raises(Gone, match="version 0 of the weights was overwritten; the newest is 3"):
        job.weights(0)
    with pytest.raises(ValueError, match=r"the model has no tensors \['lm_tail'\]"):
        job.weights(1, ["lm_tail"])
    with pytest.raises(TimeoutError, match="has not published version 9"):
        job.weights(9, deadline=0.3)


def test_metrics_are_followed_each_once(trainers, job) -> None:
    record = trainers.services[0].record
    assert job.metrics() == []
    record('{"iteration": 1}')
    record('{"iteration": 2}')
    assert job.metrics() == [{"iteration": 1}, {"iteration": 2}]
    threading.Timer(0.3, record, ('{"iteration": 3}',)).start()
    assert job.metrics(deadline=20) == [{"iteration": 3}] and job.metrics() == []
    for number in range(4, 1100):
        record(json.dumps({"iteration": number}))
    assert [line["iteration"] for line in job.metrics()] == [*range(100, 1100)], "of many the last thousand"


def test_a_source_offers_rows_to_the_first_rank_and_hears_what_it_says(trainers, job) -> None:
    with pytest.raises(ValueError, match="this job takes no prompts from processes outside of it"):
        job.offer([{"prompt": "a"}])
    heard = []

    def add(rows: list[str], seconds: float, ended: Callable[[], bool]) -> list[int]:
        if seconds:
            raise TimeoutError("no room")
        heard.extend(map(json.loads, rows))
        return [-1 - len(heard)] * len(rows)

    for service in trainers.services:
        service.take_prompts(add)
    rows = [{"prompt": "ä", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}], "level": [1.5, None]}]
    assert job.offer(iter(rows)) == [-3, -3] and heard == rows
    with pytest.raises(TimeoutError, match="no room"):
        job.offer(rows, deadline=0.1)
    with pytest.raises(ValueError, match="offer: row 1: Object of type Tensor is not JSON .* give strings, numbers"):
        job.offer([{"prompt": "a"}, {"prompt": torch.zeros(1)}])
    assert heard == rows


def test_an_evaluation_asks_for_a_greedy_response_of_one_version(trainers, job) -> None:
    trainers.publish(0)
    trainers.publish(1)
    trainers.admit(-1, 0, 0)
    prompts = job.take(2, deadline=20)
    assert prompts["greedy"].tolist() == [True, False] and prompts["newest"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="version 1 may not sample this row, only versions 0 to 0 may"):
        job.give(answers(prompts, 1))
    job.give(answers(prompts, 0))


@MACHINES
def test_the_end_of_a_job_is_no_error(trainers) -> None:
    with Client(trainers.address, trainers.secret) as job:
        trainers.publish(0)
        trainers.close()
        assert len(job.take(1, deadline=20)) == 0 and job.ended
        assert job.metrics() == []
        job.weights()
    with pytest.raises(ConnectionError):
        Client(trainers.address, trainers.secret)


def test_a_wrong_secret_another_version_and_jobs_that_give_no_rows_are_refused(tmp_path) -> None:
    playing = Trainers(tmp_path, [machine()] * 2, replace(DESCRIPTION, environments={"flags": {}}))
    with Client(playing.address, playing.secret) as job, pytest.raises(ValueError, match="add an engine with"):
        job.take(1, deadline=0)
    playing.close()
    strict = Trainers(tmp_path, [machine()] * 2, replace(DESCRIPTION, strict=True))
    with Client(strict.address, strict.secret) as job:
        with pytest.raises(ValueError, match="only the launcher's engines get rows with"):
            job.take(1, deadline=0)
        with pytest.raises(ValueError, match="give --rl-async-order free"):
            job.offer([{"prompt": "a"}])
    wrong = tmp_path / "of another job"
    write_secret(wrong, bytes(SECRET_BYTES))
    with pytest.raises(PermissionError, match=rf"its secret is wrong \(file {wrong}\); give the address that the job"):
        Client(strict.address, wrong)
    strict.close()
    other = Trainers(tmp_path, [machine()] * 2, replace(DESCRIPTION, version="0.0.1"))
    with pytest.raises(ValueError, match=r"the job runs mindspeed_rl_plugin 0\.0\.1, this process"):
        Client(other.address, other.secret)
    other.close()
