"""The weights that trainers have published, and the evaluations of them."""

from __future__ import annotations

from collections.abc import Collection

from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.schedule import Job
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.trainer import Trainer


class Publications:
    """Versions of the weights by the numbers that `Admission` counts.

    trainer: of this rank, which publishes its weights.
    kept: newest versions that it keeps.
    readable: versions that rows may carry, for who checks them on this rank.
    versions: that this process has published and the trainer keeps, the newest last.
    nbytes: that this rank published last.
    """

    def __init__(self, trainer: Trainer, admission: Admission, kept: int, readable: set[int]) -> None:
        self.trainer, self.admission, self.kept, self.readable = trainer, admission, kept, readable
        self.versions: list[int] = []
        self.nbytes = 0
        self._numbers: dict[int, int] = {}  # version -> publication, of rows that are still to come

    def add(self, version: int, number: int, evaluated: Collection[int]) -> None:
        """The trainer's weights, of `version`, are publication `number`. evaluated: versions under evaluation, whose
        rows are still to come. Collective."""
        self.readable.add(version)  # before any rank has published it
        self.nbytes = self.trainer.publish(version).nbytes
        self.admission.publish(version, number)
        self.versions = [*self.versions[1 - self.kept :], version]
        of_rows = {**self._numbers, version: number}.items()
        oldest = number - self.admission.staleness
        self._numbers = {v: n for v, n in of_rows if n >= oldest or v in self.versions}
        self.readable.intersection_update([*self._numbers, *evaluated])

    def outlast_next(self, versions: Collection[int]) -> bool:
        """Whether the trainer still has these after the next publication."""
        return {*versions} <= {*self.versions[1 - self.kept :]}


class Evaluations:
    """Evaluations of published weights beside training, one at a time. Called by all ranks.

    apart: asks engines for one, and logs it.
    wait: until its rows are graded.
    overdue: whether one waits for the next publication.
    """

    def __init__(self, job: Job, apart: EvaluateApart, wait: GradeWait) -> None:
        self.job, self.apart, self.wait = job, apart, wait
        self.overdue = False
        self._begun = -1  # the last version of which one began

    @property
    def versions(self) -> list[int]:
        """The version under evaluation, if there is one."""
        return [self.apart.version] if self.apart.version >= 0 else []

    def postpone(self, version: int) -> None:
        """The next publication is evaluated, where this version was not."""
        self.overdue = version != self._begun

    def begin_where_due(self, version: int) -> None:
        """Begin the evaluation of a version that is published, where one is due."""
        if self.job.due(version) or (self.overdue and self.apart.prompts):
            self.finish()
            self.apart.begin(version)
            self.overdue, self._begun = False, version

    def log_graded(self) -> None:
        """Log one whose responses are all graded by now."""
        if not self.versions:
            return
        if self.job.ranks.broadcast(self.job.topology.leader and not self.wait.ungraded(self.apart.ids)):
            self.apart.finish()

    def finish(self) -> None:
        """Wait until the last response is graded, and log it. Training stands still meanwhile."""
        if self.versions:
            with self.job.monitor.stage("evaluate"):
                self.wait.until_graded(self.apart.ids)
                self.apart.finish()
