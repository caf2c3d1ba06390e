"""Real Megatron ranks publish while they train; this process, outside of their job, pulls by shared memory and TCP."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.dock import Dock, Gone, joining
from mindspeed_rl_plugin.reshard.layout import EngineParallel
from mindspeed_rl_plugin.reshard.pull import Puller
from mindspeed_rl_plugin.reshard.shares import TrainerWeights

sys.path.insert(0, str(Path(__file__).parent))
from reshard_reference import E_BIAS, engine_weights  # noqa: E402

WORKER = Path(__file__).parent / "publish_ranks.py"
VERSIONS = 3  # more than are kept
DENSE = [EngineParallel(1), EngineParallel(2)]
MOE = [EngineParallel(1), EngineParallel(2), EngineParallel(1, 2), EngineParallel(2, 2)]
CASES = [
    (dict(name="tp2", family="qwen3", tp=2, engine_dtype="bfloat16"), DENSE),
    (dict(name="dp2-overlap", family="llama", distributed=True, overlap=True), DENSE),
    (dict(name="pp2", family="qwen3", pp=2, distributed=True), DENSE),
    (dict(name="ep2", family="qwen3_moe", ep=2, distributed=True), MOE),
    (dict(name="tp2-ep2-etp1", family="deepseek_v3", tp=2, ep=2, etp=1, engine_dtype="bfloat16"), MOE),
]


def awaited(path: Path, job) -> Path:
    until = time.monotonic() + 300
    while not path.exists():
        assert not job.done(), job.result()
        assert time.monotonic() < until, f"no {path.name}"
        time.sleep(0.05)
    return path


class Engines:
    """Ranks of an engine that is not there: their parameters, and what pulls into them, once a machine."""

    def __init__(self, weights, sizes, dock, canonical) -> None:
        self.weights, self.sizes = weights, sizes
        self.live = [{n: torch.zeros_like(t) for n, t in each.items()} for each in self.expected(canonical)]
        more = dict(ranks=range(sizes.ranks), deadline=60, sharing=dock.exchange.once_a_machine)
        self.pullers = [
            Puller(weights, sizes, live, dock.exchange.sources(), rank=r, **more) for r, live in enumerate(self.live)
        ]

    def expected(self, canonical):
        kept = {n: t if n.endswith(E_BIAS) else t.to(self.weights.engine_dtype) for n, t in canonical.items()}
        return [engine_weights(self.weights.shape, self.sizes, r, kept) for r in range(self.sizes.ranks)]

    def check(self, version, canonical) -> set[str]:
        """The digests, once all parameters are those of the version."""
        digests, read = set(), 0
        for puller, live, expected in zip(self.pullers, self.live, self.expected(canonical), strict=True):
            pulled = puller.pull(version)
            assert pulled.version == version
            read += pulled.nbytes
            digests.add(puller.apply(live).digest)
            for name, tensor in expected.items():
                assert torch.equal(live[name], tensor), (self.sizes, name)
        assert read == self.pullers[0].staging.nbytes
        return digests


def read_case(folder: Path, case: dict, engines, job) -> None:
    """What a generator does, once on the trainers' machine and once as if on another one."""
    name = case["name"]
    about = json.loads(awaited(folder / f"{name}.json", job).read_text())
    weights = TrainerWeights.parse(about["weights"])
    docks = [Dock(*joining.join(about["address"], folder / "secret", 60.0, n), leader=False) for n in ("", "elsewhere")]
    made = []
    for version in range(VERSIONS):
        canonical = torch.load(awaited(folder / f"{name}-{version}.pt", job))
        made = made or [Engines(weights, sizes, dock, canonical) for sizes in engines for dock in docks]
        digests = set.union(*(each.check(version, canonical) for each in made))
        assert len(digests) == 1, digests
        if version == VERSIONS - 1:
            with pytest.raises(Gone):
                made[0].pullers[0].pull(0)
        (folder / f"{name}-{version}.ok").touch()
    for puller in (puller for each in made for puller in each.pullers):
        puller.close()
    for dock in docks:
        dock.close()


@pytest.mark.slow
def test_engines_pull_what_trainers_publish(torchrun, tmp_path: Path) -> None:
    argument = json.dumps(dict(folder=str(tmp_path), cases=[case for case, _ in CASES], versions=VERSIONS))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(torchrun, WORKER, argument)
        for case, engines in CASES:
            read_case(tmp_path, case, engines, job)
        passed = [line.split()[1] for line in job.result().stdout.splitlines() if line.startswith("passed")]
    assert passed == [case["name"] for case, _ in CASES]
