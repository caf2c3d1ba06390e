"""Shared memory that killed jobs leave: an engine removes its own kind when it starts, and nothing else."""

import os

from mindspeed_rl_plugin.host import vllm_live


def test_old_segments_are_removed(tmp_path):
    ours = (vllm_live.SEGMENT_PREFIX + name for name in ("old_0", "new_0"))
    old, new, other = (tmp_path / name for name in (*ours, "others"))
    for path in (old, new, other):
        path.write_bytes(b"x")
    for path in (old, other):
        os.utime(path, (1, 1))
    vllm_live.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == [new, other]
