"""Shared memory that killed jobs leave: an engine removes its own kind when it starts, and nothing else."""

import mmap
import os

from mindspeed_rl_plugin.host import vllm_live


def test_old_segments_that_nobody_maps_are_removed(tmp_path):
    names = ("old_0", "mapped_0", "new_0", "dock-folder", "other")
    old, mapped, new, folder, other = (tmp_path / (vllm_live.PREFIX + name) for name in names)
    other = other.with_name("somebody-else")
    folder.mkdir()  # a killed job's dock
    for path in (old, mapped, new, other):
        path.write_bytes(b"x" * mmap.PAGESIZE)
    for path in (old, mapped, folder, other):
        os.utime(path, (1, 1))
    with open(mapped, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert vllm_live.remove_leftovers(tmp_path) == [old.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in (mapped, new, folder, other))
