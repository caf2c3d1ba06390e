"""Sizes of an engine on the ranks that it has."""

from dataclasses import replace

import pytest

from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.generators.engine import sized

OPTIONS = VllmOptions({}, 24)


@pytest.mark.parametrize(
    ("job", "ranks", "engine"),
    [((1, 1), 1, (1, 1)), ((1, 1), 2, (2, 1)), ((2, 2), 4, (4, 4)), ((4, 4), 1, (1, 1)), ((2, 4), 4, (2, 4))],
)
def test_an_engine_of_other_sizes_than_the_jobs(job, ranks, engine):
    options = sized(replace(OPTIONS, tensor_parallel=job[0], expert_parallel=job[1]), ranks)
    assert (options.tensor_parallel, options.expert_parallel) == engine


def test_engines_that_share_experts_are_as_many_as_the_job_says():
    with pytest.raises(ValueError, match=r"over 4 ranks \(--rl-generate-ep\), here are 2: .* --nproc-per-node 4"):
        sized(replace(OPTIONS, tensor_parallel=1, expert_parallel=4), 2)
