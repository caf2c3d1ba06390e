"""How old the tokens of a rollout are, counted over a real dock; and what is older than the bound ends the run."""

import pytest
import torch

from mindspeed_rl_plugin.dock import make_docks
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.lags import lags
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages import generate, prompts
from mindspeed_rl_plugin.stages.stage import columns_of, states_of

TABLE = [prompts.SPEC, generate.SPEC]
# Of responses behind prompts of two tokens: length of the row, and (first token, version) of each part.
PARTS = [(6, [(2, 4)]), (8, [(2, 2), (5, 4)]), (5, [(2, 0), (3, 2), (4, 4)])]


def test_lags_count_publications_and_no_response_may_exceed_the_bound():
    (dock,) = make_docks(columns_of(TABLE), states_of(TABLE), [(0, 1)])
    dock.open(0, 1, 3)
    ids = [SampleId(0, 0, member) for member in range(3)]
    columns = {
        "version": torch.tensor([parts[0][1] for _, parts in PARTS]),
        "length": torch.tensor([length for length, _ in PARTS]),
        "segments": Ragged.from_rows([torch.tensor(parts) for _, parts in PARTS]),
    }
    dock.put(Rows(tuple(ids), columns))
    # Two optimizer steps a publication; the newest one has the weights after four.
    admission = Admission(1, 2, 9, published=2, versions={0: 0, 1: 2, 2: 4})
    got = lags(dock, ids, admission.lag, 2)
    # By token: 4 of lag 0; 3 of lag 1, 3 of lag 0; one each of lag 2, 1 and 0.
    assert got == pytest.approx({"lag/mean": 1.0, "lag/max": 2.0, "lag/token_mean": 6 / 13, "segments/mean": 2.0})
    with pytest.raises(RuntimeError, match="a response is 2 publications old, --rl-max-staleness is 1"):
        lags(dock, ids, admission.lag, 1)
    assert lags(dock, ids[:2], admission.lag, 1)["lag/max"] == 1.0
