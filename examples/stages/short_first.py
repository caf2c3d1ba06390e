"""A stage of one's own; docs/stages.md says what it may read and write.

    --rl-stage FILE:ShortFirst

FILE is the path of this file. Among the right responses of a group the shortest keep their reward, longer ones lose a
tenth; a response that was cut at the limit is trained nowhere.
"""

import torch
from tensordict import TensorDict

from mindspeed_rl_plugin.dock import ColumnSpec

CUT = 1  # in the column finish: the response reached --rl-max-response-length


class ShortFirst:
    """Reads columns of the dock by name; writes the reward again, `valid`, and a column of its own."""

    reads = ("reward", "response_length", "finish")
    writes = ("reward", "valid", ColumnSpec("is_shortest", torch.int8, "sample", ragged=False))
    unit = "group"  # all responses of a prompt come together; "row" where each stands alone

    def compute(self, rows: TensorDict) -> TensorDict:
        """rows: batch size [B]; `ids` [B, 3] is (rollout, group, member)."""
        groups, lengths = rows["ids"][:, 1], rows["response_length"]
        right = rows["reward"] >= 1
        is_shortest = torch.zeros_like(right)
        for group in groups.unique():
            mine = right & (groups == group)
            if mine.any():
                is_shortest |= mine & (lengths == lengths[mine].min())
        reward = torch.where(right & ~is_shortest, rows["reward"] - 0.1, rows["reward"])
        columns = {"reward": reward, "valid": rows["finish"] != CUT, "is_shortest": is_shortest}
        return TensorDict(columns, batch_size=rows.batch_size)
