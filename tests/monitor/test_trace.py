"""--rl-trace: which spans are recorded, and the names in them."""

import argparse
import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.config.run_flags import Traced
from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.monitor.stage_clock import StageClock
from mindspeed_rl_plugin.monitor.trace import Trace


def names_of(path):
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event}


def run(tmp_path, asked, ranks=(0,), rank=0, last=4):
    """Iterations of two stages with a multiplication each; the files that were written."""
    clock = StageClock(tmp_path, rank, trace=Trace.of(asked, ranks, rank, tmp_path))
    for iteration in range(1, last + 1):
        clock.begin(iteration)
        for name in ("generate", "update"):
            with clock.stage(name):
                torch.ones(4, 4) @ torch.ones(4, 4)
    clock.close()
    return sorted(path.name for path in (tmp_path / "trace").glob("*"))


def test_iterations_are_one_file_with_their_stages(tmp_path):
    assert run(tmp_path, "2-3") == ["rank0-2-3.json"]
    names = names_of(tmp_path / "trace" / "rank0-2-3.json")
    assert {"generate, iteration 2", "update, iteration 3", "aten::matmul"} <= names
    assert not {"update, iteration 1", "generate, iteration 4"} & names


def test_a_stage_alone(tmp_path):
    assert run(tmp_path, "2-3:update") == ["rank0-2-update.json", "rank0-3-update.json"]
    names = names_of(tmp_path / "trace" / "rank0-3-update.json")
    assert "update, iteration 3" in names and not any("generate" in name for name in names)


def test_a_run_that_ends_within_them_and_another_rank(tmp_path):
    assert run(tmp_path, "4-9") == ["rank0-4-4.json"]
    assert run(tmp_path / "other", "1", rank=1) == []
    assert run(tmp_path / "third", "1", (1, 3), rank=3) == ["rank3-1-1.json"]


class NpuProfiler:
    """As torch_npu's: it raises no error, and its export changes the start method."""

    def __init__(self, writes):
        self.writes = writes

    def start(self):
        pass

    stop = start

    def export_chrome_trace(self, path):
        multiprocessing.set_start_method("fork", force=True)
        if self.writes:
            Path(path).write_text("{}")


@pytest.mark.parametrize("writes", [True, False])
def test_a_trace_is_written_only_if_its_file_is_there(tmp_path, monkeypatch, capsys, writes):
    monkeypatch.setattr(Device, "profiler", lambda self: NpuProfiler(writes))
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank0-1-1.json").write_text("of an earlier run")
    run(tmp_path, "1", last=1)
    said = capsys.readouterr().out
    assert ("trace written: " in said, "is not there" in said) == (writes, not writes)
    assert multiprocessing.get_start_method(allow_none=True) is None


@pytest.mark.parametrize("text", ["", "0", "3-2", "a-b", "1:", "1-2:a,", "1-2-3"])
def test_another_form_is_refused_with_the_form(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"FIRST\[-LAST\]\[:STAGE,...\]"):
        Traced.parse(text)
