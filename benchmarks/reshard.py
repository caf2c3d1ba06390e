"""Resharding: seconds, memory and bytes of naive, allgather and stream on real processes, and plans of large models.

    python benchmarks/reshard.py --json OUT.json [--model-gb 1.0] [--repeats 3] [--cases ...] [--no-plan]

Processes on this machine hold a bfloat16 model of Qwen2's or Qwen3-MoE's shape and move its weights over gloo; what
each holds follows from the layout tables. `peak_bytes` are tensors: both sides' weights and what the transfer takes
besides. The plan's rows are analytic: what the executors' own layouts say of the paper's models. Rows of arm `target`
say what was to be reached and whether it was.

Left out: Megatron, vLLM, activations, the KV cache, and an accelerator's links. On one machine all ranks share the
memory's bandwidth and the cores: seconds compare arms, not machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "benchmarks" / "resharding" / "rank.py"
sys.path[:0] = [str(ROOT), str(WORKER.parent)]

# ranks, family, trainer, engines
CASES = {
    "dense tp2 -> tp1": (2, "dense", "tp2", "tp1"),
    "dense pp2 -> tp2": (2, "dense", "pp2", "tp2"),
    "dense tp4 -> tp2": (4, "dense", "tp4", "tp2"),
    "dense tp2,pp2 -> tp2": (4, "dense", "tp2,pp2", "tp2"),
    "moe tp4,ep4,etp1 -> tp2,ep4": (4, "moe", "tp4,ep4,etp1", "tp2,ep4"),
}
# name -> model, trainer, world, engines, times fewer bytes than allgather that are to be reached
PLANS = {
    "qwen2.5-32b tp8,dp2 -> tp4,dp4": ("qwen2.5-32b", "tp8,dp2", None, "tp4,dp4", 3),
    "qwen3-30b-a3b tp4,ep8 -> tp1,ep8": ("qwen3-30b-a3b", "tp4,ep8,etp1", 8, "tp1,ep8", 20),
    "qwen3-30b-a3b tp4,ep4 -> tp2,ep4": ("qwen3-30b-a3b", "tp4,ep4,etp1", 4, "tp2,ep4", 20),
    "deepseek-r1 tp4,pp6,ep16 -> tp2,ep64": ("deepseek-r1", "tp4,pp6,ep16,etp1,first11", 384, "tp2,ep64", 20),
}
OVER_LEAST = 1.05  # bytes received in stream, of the analytic minimum


def model_config(family: str, gigabytes: float) -> dict:
    """config.json of a model with at least so many GB of bfloat16 weights (1e9 bytes), and little more."""
    config = {
        "model_type": "qwen2" if family == "dense" else "qwen3_moe",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 4096,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    attention = 1024 * 64 * (16 + 4 + 4 + 16)
    layer = attention + 3 * 1024 * 4096
    if family == "moe":
        config |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
        layer = attention + 16 * 3 * 1024 * 1024
    layers = max(2, math.ceil((gigabytes * 1e9 / 2 - 2 * 32000 * 1024) / layer))
    return config | {"num_hidden_layers": layers + (layers % 2 if family == "dense" else 0)}  # for two pipeline stages


def run_case(name: str, options: argparse.Namespace, scratch: Path) -> list[dict]:
    """Rows of one case, measured by processes of its own."""
    ranks, family, train, generate = CASES[name]
    out = scratch / "rows.json"
    job = {
        "case": f"{name}, {options.model_gb:g} GB",
        "model": model_config(family, options.model_gb),
        "train": train,
        "generate": generate,
        "bucket_mb": options.bucket_mb,
        "repeats": options.repeats,
        "out": str(out),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(WORKER), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=3600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(out.read_text())


def plan_rows() -> list[dict]:
    """Bytes and memory of every mode for the paper's models."""
    import published

    from mindspeed_rl_plugin.tools.layout_args import engine_layout_of, model_shape, train_layout
    from mindspeed_rl_plugin.tools.plan.estimate import PlannedRun, estimate, weights_by_layer

    rows = []
    for case, (model, train, world, generate, _) in PLANS.items():
        parallel = train_layout(train, world)
        engine, engines = engine_layout_of(generate, parallel.world)
        shape = model_shape(model, parallel.tp)
        planned = estimate(PlannedRun(shape, parallel, far=0.3e9, host=50e9), engine, engines)
        for mode, flow in planned.flows.items():
            values = {
                "received_bytes": (float(flow.received.max()), "B"),
                "received_bytes_all_ranks": (float(flow.received.sum()), "B"),
                "received_far_bytes": (float(flow.received_far.max()), "B"),
                "peak_bytes": (float(planned.peak(mode)), "B"),
                "generate_bytes": (float(planned.generate), "B"),
                "seconds": (max(planned.seconds(mode)), "s"),
            }
            rows += [
                {"arm": f"plan {mode}", "case": case, "metric": metric, "value": value, "unit": unit}
                for metric, (value, unit) in values.items()
            ]
        rows.append({"arm": "plan", "case": case, "metric": "eq3_bytes", "value": planned.redundant, "unit": "B"})
        with contextlib.suppress(ValueError):  # a pair that MindSpeed-RL refuses
            moved = published.received(weights_by_layer(shape, 2), shape, parallel, engine, range(parallel.world))
            theirs = {"received_bytes": moved.max(), "received_bytes_all_ranks": moved.sum()}
            rows += [
                {"arm": "plan MindSpeed-RL", "case": case, "metric": metric, "value": float(value), "unit": "B"}
                for metric, value in theirs.items()
            ]
    return rows


def targets(rows: list[dict]) -> list[dict]:
    """Each target of the measured and the planned cases: its ratio, and whether it is reached."""
    value = {(r["arm"], r["case"], r["metric"]): r["value"] for r in rows}
    out = []

    def judge(case: str, metric: str, ratio: float, reached: bool) -> None:
        row = {"arm": "target", "case": case}
        out.append(row | {"metric": metric, "value": ratio, "unit": "ratio"})
        out.append(row | {"metric": f"{metric}: reached", "value": "yes" if reached else "no", "unit": ""})

    for case in dict.fromkeys(r["case"] for r in rows if r["arm"] == "analytic"):
        moved = value["stream", case, "received_bytes_all_ranks"]
        least = value["analytic", case, "least_bytes_all_ranks"]
        ratio = moved / least if least else 1.0 + moved  # where nothing need travel, any byte is too much
        judge(case, f"stream bytes / least, at most {OVER_LEAST}", ratio, moved <= OVER_LEAST * least)
        time = value["stream/allgather", case, "seconds"]
        judge(case, "stream seconds / allgather seconds, at most 1", time, time <= 1)
        bound = value["stream", case, "peak_bytes"] / value["allgather", case, "peak_bytes"]
        judge(case, "stream peak / allgather peak, at most 1", bound, bound <= 1)
    for case, (*_, fewer) in PLANS.items():
        key = "received_bytes_all_ranks"
        if ("plan stream", case, key) in value:
            ratio = value["plan allgather", case, key] / value["plan stream", case, key]
            judge(case, f"allgather bytes / stream bytes, at least {fewer}", ratio, ratio >= fewer)
        if ("plan MindSpeed-RL", case, key) in value:
            ratio = value["plan MindSpeed-RL", case, key] / value["plan stream", case, key]
            judge(case, "MindSpeed-RL's bytes / stream bytes, above 1", ratio, ratio > 1)
    return out


def show(rows: list[dict]) -> None:
    for case in dict.fromkeys(r["case"] for r in rows):
        print(case)
        for r in (r for r in rows if r["case"] == case):
            value = r["value"] / 1e9 if r["unit"] == "B" else r["value"]
            number = value if isinstance(value, str) else f"{value:.3f}"
            print(f"  {r['arm']:18s} {r['metric']:60s} {number:>12s} {r['unit'].replace('B', 'GB')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--model-gb", type=float, default=1.0, help="bfloat16 weights of a model, 1e9 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--no-plan", action="store_true", help="leave the analytic table out")
    options = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="reshard-") as scratch:
        for name in options.cases:
            measured = run_case(name, options, Path(scratch))
            show(measured)
            rows += measured
            save(rows, options.json)
    if not options.no_plan:
        planned = plan_rows()
        show(planned)
        rows += planned
    judged = targets(rows)
    show(judged)
    save(rows + judged, options.json)


def save(rows: list[dict], path: str | None) -> None:
    """Write the rows so far: a run that is cut short keeps its finished cases."""
    if path:
        keys = ("arm", "case", "metric", "value", "unit")
        Path(path).write_text(json.dumps([{k: row[k] for k in keys} for row in rows], indent=1))


if __name__ == "__main__":
    main()
