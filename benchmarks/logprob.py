"""Log-probs and entropy, forward and backward, from hidden states: time and peak memory of four ways.

    python benchmarks/logprob.py [--json OUT.json] [--cases T/V/H ...] [--repeats 3] [--chunk-tokens 0] [--threads 1]

Arms, all starting from the same hidden states `[T, H]` and output weight `[V, H]`, with gradients to both:
  plain     torch's log_softmax over fp32 logits, gather, and the entropy from it
  megatron  Megatron's vocab_parallel_cross_entropy over the logits (log-prob only, it has no entropy)
  logits    this project's head over all logits (--rl-logprob-chunk-tokens 0)
  chunked   this project's head without the logits (its own choice of chunk, or --chunk-tokens)

Every run is a process of its own, arms in turn, so peaks are those of the operating system: resident bytes beyond what
was resident before. Times are of one forward and backward after a short one; figures are medians of the repeats.
`chunked/X` rows are medians of ratios within one round. With one thread, seconds of the processor are the same on a
busy machine. Left out: tensor parallel, the model around the head.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "training"))

from shared_rows import clear_peak, peak_resident, resident  # noqa: E402

ARMS = ("plain", "megatron", "logits", "chunked")
CASES = ("2048/32000/256", "8192/32000/256", "2048/152064/256", "1024/152064/1024", "4096/152064/1024")
# (case, ratio, metric) -> the most that issue 5 allows
TARGETS = {
    ("4096/152064/1024", "chunked/plain", "peak_bytes"): 0.2,
    ("4096/152064/1024", "chunked/megatron", "seconds"): 1.35,
}


def measure(arm: str, case: str, chunk_tokens: int, dtype: str) -> dict[str, float]:
    """One arm in this process: seconds of forward and backward, and peak bytes beyond the inputs."""
    import torch

    tokens, vocab, width = map(int, case.split("/"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) / width**0.5).to(hidden.dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    few = hidden[:32].detach().requires_grad_(), weight, labels[:32]
    first, run = (ways(torch, *given, vocab, chunk_tokens)[arm] for given in (few, (hidden, weight, labels)))
    # Before the short run: what it frees stays with the process and would hide the same bytes later.
    before = resident()
    clear_peak()
    torch.autograd.grad(first(), few[:2])
    start = time.perf_counter(), time.process_time()
    torch.autograd.grad(run(), (hidden, weight))
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    return {"seconds": wall, "cpu_seconds": cpu, "peak_bytes": peak_resident() - before}


def ways(torch, hidden, weight, labels, vocab, chunk_tokens):
    """arm -> function from nothing to a scalar whose gradient is that of a policy loss with an entropy bonus."""
    sys.path.insert(0, str(ROOT))
    from mindspeed_rl_plugin.forward.chunked import chunked_token_logps
    from mindspeed_rl_plugin.forward.head import token_logps
    from mindspeed_rl_plugin.forward.settings import default_chunk_tokens

    chunk = chunk_tokens or default_chunk_tokens(vocab, len(labels))

    def plain():
        logps = (hidden @ weight.t()).float().log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return logps.gather(-1, labels[:, None]).sum() + 0.01 * entropy.sum()

    def megatron():
        return -cross_entropy((hidden @ weight.t())[:, None], labels[:, None]).sum()

    def logits():
        logp, entropy = token_logps(hidden @ weight.t(), labels, vocab_size=vocab, entropy_grad=True)
        return logp.sum() + 0.01 * entropy.sum()

    def chunked():
        settings = {"vocab_size": vocab, "chunk_tokens": chunk, "entropy_grad": True}
        logp, entropy = chunked_token_logps(hidden, weight, labels, **settings)
        return logp.sum() + 0.01 * entropy.sum()

    cross_entropy = megatron_cross_entropy()
    return {"plain": plain, "megatron": megatron, "logits": logits, "chunked": chunked}


def megatron_cross_entropy():
    """Megatron's own function, over a group of one rank; imported in every arm, so that all start from one memory."""
    import torch.distributed as dist

    from mindspeed_rl_plugin.host import activate_if_needed

    activate_if_needed()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return vocab_parallel_cross_entropy


def rounds(cases: list[str], arms: list[str], repeats: int, more: list[str], threads: int) -> list[dict]:
    """Rows of the result: medians of each arm, and of the ratios to `chunked` within a round."""
    rows = []
    for case in cases:
        runs = [{arm: in_process(arm, case, more, threads) for arm in arms} for _ in range(repeats)]
        for metric, unit in (("seconds", "s"), ("cpu_seconds", "s"), ("peak_bytes", "B")):
            for arm in arms:
                value = statistics.median(run[arm][metric] for run in runs)
                rows.append({"arm": arm, "case": case, "metric": metric, "value": value, "unit": unit})
            for arm in (a for a in arms if a != "chunked" and "chunked" in arms):
                value = statistics.median(run["chunked"][metric] / run[arm][metric] for run in runs)
                rows.append({"arm": f"chunked/{arm}", "case": case, "metric": metric, "value": value, "unit": "ratio"})
        show(rows, case)
    return rows + targets(rows)


def targets(rows: list[dict]) -> list[dict]:
    """Of each target whose ratio is among the rows: the same row with `target` and `reached`."""
    compared = []
    for row in rows:
        most = TARGETS.get((row["case"], row["arm"], row["metric"]))
        if most is not None:
            compared.append({**row, "target": f"<= {most}", "reached": row["value"] <= most})
            result = f"{row['value']:.3f}, asked <= {most}: {'reached' if compared[-1]['reached'] else 'NOT reached'}"
            print(f"target {row['arm']} {row['metric']} at {row['case']}: {result}")
    return compared


def in_process(arm: str, case: str, more: list[str], threads: int) -> dict[str, float]:
    # Set from outside: what libraries start on import follows torch's own setting only in part.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--measure", arm, "--cases", case, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
    if done.returncode:
        sys.exit(f"{arm} {case} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show(rows: list[dict], case: str) -> None:
    """Table of one case."""
    print(f"T/V/H {case}")
    for arm in dict.fromkeys(row["arm"] for row in rows if row["case"] == case):
        wall, cpu, peak = (row for row in rows if (row["case"], row["arm"]) == (case, arm))
        if wall["unit"] == "ratio":
            print(f"  {arm:18s} {wall['value']:8.2f} x {cpu['value']:8.2f} x     {peak['value']:8.2f} x", flush=True)
        else:
            print(f"  {arm:18s} {wall['value']:8.2f} s {cpu['value']:8.2f} cpu s {peak['value'] / 2**20:8.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="tokens/vocabulary/hidden size")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk-tokens", type=int, default=0, help="0: what a job would choose")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.cases[0], args.chunk_tokens, args.dtype)))
        return
    more = ["--chunk-tokens", str(args.chunk_tokens), "--dtype", args.dtype]
    rows = rounds(args.cases, args.arms, args.repeats, more, args.threads)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
