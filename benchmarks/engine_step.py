"""What a decode step of the engine costs: the model, and what vLLM and this project do beside it.

    python benchmarks/engine_step.py --json OUT.json [--batches 1,4,16,32,64] [--steps 100]

One process, one thread, the model and the sampling of end_to_end.py. Each part is a function of vLLM that is timed
where it is called; medians over the steps of a batch size, and a straight line through these: milliseconds a step, and
more for each sequence. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "training")]

import workload  # noqa: E402

# Part -> (who has it, its functions). "model" is the accelerator's work, "sampling" too but for its last copy to the
# host; the others are Python on the host, which vLLM's asynchronous scheduling does while the accelerator computes.
PARTS = {
    "schedule": ("scheduler", ("schedule",)),
    "inputs": ("runner", ("_update_states", "_prepare_inputs")),
    "model": ("runner", ("_model_forward",)),
    "logits": ("model", ("compute_logits",)),
    "sampling": ("runner", ("_sample",)),
    "bookkeeping": ("runner", ("_bookkeeping_sync",)),
    "outputs": ("scheduler", ("update_from_output",)),
    "detokenizing": ("processor", ("process_outputs",)),
}
ON_DEVICE = ("model", "logits", "sampling")


class Meter:
    """Seconds of each part since `take`."""

    def __init__(self, engine: Any) -> None:
        core = engine._engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        owners = {"scheduler": core.scheduler, "runner": runner, "model": runner.model}
        owners["processor"] = engine._engine.output_processor
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for part, (owner, names) in PARTS.items():
            for name in names:
                self._time(part, owners[owner], name)
        self._time("vllm", engine._engine, "step")

    def take(self) -> dict[str, float]:
        """What was counted."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _time(self, part: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **named)
            finally:
                self.seconds[part] += time.perf_counter() - begin

        setattr(owner, name, timed)


def measure(folder: Path, batches: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Median milliseconds of each part of a step, by batch size."""
    import torch.distributed as dist

    from mindspeed_rl_plugin.engine.options import VllmOptions
    from mindspeed_rl_plugin.engine.rollout_engine import response_seed
    from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
    from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = json.loads((folder / "model" / "config.json").read_text())
    longest = workload.PROMPT_TOKENS + steps + 20
    engine = VllmEngine(VllmOptions(config, longest, max_running=max(batches), kv_cache_bytes=1 << 28))
    engine.update_weights(0)
    meter, rows = Meter(engine), []
    sampling = replace(Sampling(max_tokens=steps + 10), ignore_eos=True)
    prompts = np.random.default_rng(0).integers(10, config["vocab_size"], (max(batches), workload.PROMPT_TOKENS))
    for turn, batch in enumerate((batches[0], *batches)):  # the first one warms up
        requests = [
            GenerateRequest(SampleId(turn, i, 0), tuple(prompts[i].tolist()), sampling, response_seed(0, turn, i, 0))
            for i in range(batch)
        ]
        engine.submit(requests)
        seen: defaultdict[str, list[float]] = defaultdict(list)
        for step in range(steps + 5):
            meter.take()
            begin = time.perf_counter()
            engine.poll(0.0)
            whole, parts = time.perf_counter() - begin, meter.take()
            if step >= 5:  # prompts are computed by then
                parts["this project"] = whole - parts["vllm"]
                parts["other of vLLM"] = parts.pop("vllm") - sum(parts.get(part, 0.0) for part in PARTS)
                for part, seconds in {**parts, "step": whole}.items():
                    seen[part].append(1e3 * seconds)
        engine.abort()
        if turn:
            rows += [{"batch": batch, "part": p, "milliseconds": statistics.median(v)} for p, v in seen.items()]
    engine.shutdown()
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Part -> milliseconds a step, and more for each sequence: least squares over the batch sizes."""
    result = []
    for part in ("step", *PARTS, "other of vLLM", "this project"):
        of_part = [(r["batch"], r["milliseconds"]) for r in rows if r["part"] == part]
        if of_part:
            slope, fixed = np.polyfit(*zip(*of_part, strict=True), 1) if len(of_part) > 1 else (0.0, of_part[0][1])
            result.append({"part": part, "a_step": float(fixed), "a_sequence": float(slope)})
    return result


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the rows {batch, part, milliseconds}")
    parser.add_argument("--batches", default="1,4,16,32,64", help="sequences at once, default %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="decode steps of each batch size, default %(default)s")
    args = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    batches = [int(batch) for batch in args.batches.split(",")]
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="engine-step-") as directory:
        folder = Path(directory) / "long-tailed"
        workload.write(folder, workload.CASES["long-tailed"])
        rows = measure(folder, batches, args.steps)
    fitted = lines(rows)
    args.json.write_text(json.dumps(rows + fitted, indent=1) + "\n")
    value = {(r["part"], r["batch"]): r["milliseconds"] for r in rows}
    print(f"| part | {' | '.join(map(str, batches))} | a step | a sequence |\n|---|{'---|' * (len(batches) + 2)}")
    for row in fitted:
        cells = " | ".join(f"{value[row['part'], batch]:.2f}" for batch in batches)
        print(f"| {row['part']} | {cells} | {row['a_step']:.2f} | {row['a_sequence']:.3f} |")
    last = {r["part"]: value[r["part"], batches[-1]] for r in fitted}
    host = last["step"] - sum(last.get(part, 0.0) for part in ON_DEVICE)
    print(
        f"milliseconds; at {batches[-1]} sequences {host:.2f} of {last['step']:.2f} are the host's, which vLLM's "
        f"asynchronous scheduling hides behind a device step of more than that\n"
        f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
