"""The description of a job for its engines, as JSON in the field `about` of the message `dock.messages.Directory`."""

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

JOB, TRAINER_WEIGHTS = "job", "weights"  # keys of the JSON object in `about`


@dataclass(frozen=True)
class Description:
    """All that an engine must know of the job."""

    engine: VllmOptions  # options of an engine, from the job's flags
    sampling: Sampling  # of a rollout's responses
    seed: int  # base of the responses' seeds
    inflight: str  # what new weights do to unfinished responses: keep, recompute or drain
    strict: bool  # whether one version samples each rollout, and each engine samples an equal part of it
    deadline: float  # most seconds of a wait
    vocabulary: str = ""  # `vocabulary_digest` of the tokenizer; "": engines need no tokenizer
    run: str = ""  # directory of the run
    tokenizer: str | None = None  # directory of the tokenizer that encodes replies of tools and environments
    environments: Mapping[str, Any] | None = None  # tools and environments, see `ResponseKind.described`
    version: str = mindspeed_rl_plugin.__version__  # of the package

    def check_tokenizer(self, path: str | None) -> None:
        """Raise ValueError if engines need a tokenizer, and the tokenizer in directory `path` has other tokens than the
        job's."""
        if not self.vocabulary:
            return
        try:
            mine = vocabulary_digest(path or "", self.engine.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{error}; give --tokenizer a copy of the job's tokenizer") from error
        if mine != self.vocabulary:
            raise ValueError(
                f"the tokenizer in {path} has other tokens (digest {mine}) than the job's (digest {self.vocabulary}); "
                "--rl-stop and tools need the same: give --tokenizer a copy of the job's tokenizer"
            )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Inverse of `to_json`. Raises ValueError if the text is empty, or of another version of the package."""
        if not text:
            raise ValueError("this job takes no engines: start it with --rl-schedule async")
        fields = json.loads(text)
        if (theirs := fields.get("version")) != (ours := mindspeed_rl_plugin.__version__):
            raise ValueError(f"the job runs mindspeed_rl_plugin {theirs}, this process {ours}; install the job's one")
        fields["engine"] = VllmOptions(**_tuples(fields["engine"]))
        fields["sampling"] = Sampling(**_tuples(fields["sampling"]))
        return cls(**fields)


def job_of(dock: GuestDock, strict: bool = False) -> Description:
    """The job's description for a process that joins. strict: whether the process may join a job with a strict order.
    Raises ValueError if it may not join."""
    job = Description.from_json(json.loads(dock.about or "{}").get(JOB, ""))
    if job.strict and not strict:
        raise ValueError("--rl-async-order strict divides rollouts among the job's first engines: none can join later")
    return job


def welcome(dock: GuestDock, job: Description, address: str) -> str:
    """The line that an engine prints when it has joined."""
    version = dock.news(0, 0.0).version
    weights = f"its newest weights are version {version}" if version >= 0 else "waiting for its first weights"
    return f"joined the job at {address} (run {job.run}); {weights}"


def weights_of(dock: GuestDock) -> TrainerWeights:
    """How the trainers store the weights that they publish."""
    return TrainerWeights.parse(json.loads(dock.about)[TRAINER_WEIGHTS])


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Make tuples of JSON's lists, but not of lists inside a dict (the model's config.json)."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
