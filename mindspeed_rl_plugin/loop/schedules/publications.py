"""The weights that trainers have published, and the evaluations of them."""

from __future__ import annotations

from collections.abc import Collection

from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.schedule import Job
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.trainer import Trainer


class Publications:
    """Published versions of the weights, with their numbers in `Admission`.

    trainer: this rank's trainer, which publishes its weights.
    kept: how many of the newest versions the trainer keeps.
    readable: versions that may have sampled a response; this rank refuses a response that names another one.
    versions: that this process has published and the trainer keeps, the newest last.
    nbytes: size of this rank's last publication.
    """

    def __init__(self, trainer: Trainer, admission: Admission, kept: int, readable: set[int]) -> None:
        self.trainer, self.admission, self.kept, self.readable = trainer, admission, kept, readable
        self.versions: list[int] = []
        self.nbytes = 0
        self._numbers: dict[int, int] = {}  # version -> number of its publication, if rows may still name it

    def add(self, version: int, number: int, evaluated: Collection[int]) -> None:
        """Publish the trainer's weights of `version` as publication `number`. evaluated: versions under evaluation,
        whose rows may still come. Collective."""
        self.readable.add(version)  # before `publish`: engines may use it as soon as one rank has published it
        self.nbytes = self.trainer.publish(version).nbytes
        self.admission.publish(version, number)
        self.versions = [*self.versions[1 - self.kept :], version]
        of_rows = {**self._numbers, version: number}.items()
        oldest = number - self.admission.staleness
        self._numbers = {v: n for v, n in of_rows if n >= oldest or v in self.versions}
        self.readable.intersection_update([*self._numbers, *evaluated])

    def outlast_next(self, versions: Collection[int]) -> bool:
        """Whether the trainer still has these versions after the next publication."""
        return {*versions} <= {*self.versions[1 - self.kept :]}


class Evaluations:
    """Evaluations of published weights during training, one at a time. Called by all ranks.

    apart: begins an evaluation, and logs it.
    wait: waits until the rows of an evaluation are graded.
    overdue: whether an evaluation waits for the next publication.
    """

    def __init__(self, job: Job, apart: EvaluateApart, wait: GradeWait) -> None:
        self.job, self.apart, self.wait = job, apart, wait
        self.overdue = False
        self._begun = -1  # version of the last evaluation

    @property
    def versions(self) -> list[int]:
        """The version under evaluation, if there is one."""
        return [self.apart.version] if self.apart.version >= 0 else []

    def postpone(self, version: int) -> None:
        """Let the next publication be evaluated, if this version was not evaluated."""
        self.overdue = version != self._begun

    def begin_where_due(self, version: int) -> None:
        """Begin an evaluation of a published version, if one is due."""
        if self.job.due(version) or (self.overdue and self.apart.prompts):
            self.finish()
            self.apart.begin(version)
            self.overdue, self._begun = False, version

    def log_graded(self) -> None:
        """Log the evaluation if all its responses are graded."""
        if not self.versions:
            return
        if self.job.ranks.broadcast(self.job.topology.leader and not self.wait.ungraded(self.apart.ids)):
            self.apart.finish()

    def finish(self) -> None:
        """Wait until all responses are graded, and log the evaluation. Training stops for this time."""
        if self.versions:
            with self.job.monitor.stage("evaluate"):
                self.wait.until_graded(self.apart.ids)
                self.apart.finish()
