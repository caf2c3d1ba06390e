"""The description of a job for the engines that work for it, as JSON in the dock's directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mindspeed_rl_plugin
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.prompts.tokenizer import vocabulary_digest
from mindspeed_rl_plugin.rows import Sampling
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.weights.publish import TrainerWeights

JOB, TRAINER_WEIGHTS = "job", "weights"  # keys in the dock's directory


@dataclass(frozen=True)
class Description:
    """All that an engine must know of the job."""

    engine: VllmOptions  # options of an engine by the job's flags
    sampling: Sampling  # of a rollout's responses
    seed: int  # base of their seeds
    inflight: str  # what new weights do to unfinished responses: keep, recompute or drain
    strict: bool  # whether each rollout is sampled by one version, in equal parts
    deadline: float  # seconds of any wait
    vocabulary: str = ""  # `vocabulary_digest` of the tokenizer, "" where engines need none
    run: str = ""  # directory of the run
    tokenizer: str | None = None  # directory of the tokenizer by which engines render answers to the model
    environments: Mapping[str, Any] | None = None  # that answer the model, see `ResponseKind.described`
    version: str = mindspeed_rl_plugin.__version__  # of the package

    def check_tokenizer(self, path: str | None) -> None:
        """Raise ValueError where engines need a tokenizer and this one differs from the job's. path: its directory
        here."""
        if not self.vocabulary:
            return
        try:
            mine = vocabulary_digest(path or "", self.engine.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{error}; give --tokenizer a copy of the job's") from error
        if mine != self.vocabulary:
            raise ValueError(
                f"the tokenizer in {path} has other tokens (digest {mine}) than the job's (digest {self.vocabulary}), "
                "with which --rl-stop ends responses and tools answer; give --tokenizer a copy of the job's"
            )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Inverse of `to_json`. Raises ValueError for another version of the package, or none."""
        if not text:
            raise ValueError("this job takes no engines: start it with --rl-schedule async")
        fields = json.loads(text)
        if (theirs := fields.get("version")) != (ours := mindspeed_rl_plugin.__version__):
            raise ValueError(f"the job runs mindspeed_rl_plugin {theirs}, here is {ours}; install the job's")
        fields["engine"] = VllmOptions(**_tuples(fields["engine"]))
        fields["sampling"] = Sampling(**_tuples(fields["sampling"]))
        return cls(**fields)


def job_of(dock: GuestDock, strict: bool = False) -> Description:
    """The job's description for an engine. strict: whether the engine has a share of a strict order. Raises ValueError
    where it cannot join."""
    job = Description.from_json(json.loads(dock.about or "{}").get(JOB, ""))
    if job.strict and not strict:
        raise ValueError("--rl-async-order strict deals rollouts to the engines of its start: none can join later")
    return job


def welcome(dock: GuestDock, job: Description, address: str) -> str:
    """The line of an engine that has joined."""
    version = dock.news(0, 0.0).version
    weights = f"its newest weights are version {version}" if version >= 0 else "waiting for its first weights"
    return f"joined the job at {address} (run {job.run}); {weights}"


def weights_of(dock: GuestDock) -> TrainerWeights:
    """How the trainers store the weights that they publish."""
    return TrainerWeights.parse(json.loads(dock.about)[TRAINER_WEIGHTS])


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Make tuples of JSON's lists; the config, a dict, keeps its lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
