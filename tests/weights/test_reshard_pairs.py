"""Each side of a reshard alone, by families: real Megatron and real vLLM store what the tables say, and compute what
the makers of a family publish. Both together, in pairs of layouts: tests/loop/test_agreement.py.
"""

import secrets
from pathlib import Path

import pytest
from family_models import FAMILIES

from mindspeed_rl_plugin.host.vllm_live import SEGMENT_PREFIX

HERE = Path(__file__).parent
AGREEMENT = 2e-5  # nats, fp32


def test_vllm_stores_what_the_table_says(torchrun, tmp_path):
    """All families with experts, cut and spread, fewer key heads than ranks; and Seed-OSS by the code of Llama."""
    # vLLM names its shared memory by what its own worker, which is not built here, would set. Later jobs remove this.
    own = {"VLLM_DIST_IDENT": f"{SEGMENT_PREFIX}{secrets.token_hex(8)}"}
    assert torchrun(HERE / "live_engine_ranks.py", tmp_path, **own).stdout.count("tensors agree") == 2


@pytest.mark.parametrize(
    "whose, families",
    [("megatron", [*FAMILIES]), *(pytest.param("vllm", [name], marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_models_compute_what_the_makers_of_a_family_publish(torchrun, tmp_path, whose, families):
    """Megatron's from the files: imported flags, Megatron's own parser and model, log-probs. vLLM's as it samples."""
    done = torchrun(HERE / "family_ranks.py", tmp_path, whose, *families, ranks=1)
    worst = dict(line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in FAMILIES)
    assert [*worst] == families and max(map(float, worst.values())) < AGREEMENT, worst
