"""This project's passes of one optimizer step on given rows, in one process: used by shared_prompts.py.

    python benchmarks/training/one_step.py CASE ARM,ARM... REPEATS

Prints JSON, {arm: [{metric: value} of each repeat]}; arms take turns. The model, the passes and the step are those of a
job: Megatron's `train_step` with its DDP and its optimizer, whose learning rate is 0.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import shared_rows  # noqa: E402
import torch  # noqa: E402

from mindspeed_rl_plugin.host import activate_if_needed  # noqa: E402

activate_if_needed()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.training import arguments, get_args, training  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402

from mindspeed_rl_plugin.algorithms import resolve  # noqa: E402
from mindspeed_rl_plugin.config import AlgorithmConfig  # noqa: E402
from mindspeed_rl_plugin.forward import ForwardSettings, plan_batches, plan_tokens  # noqa: E402
from mindspeed_rl_plugin.forward.pipeline import compute_logps  # noqa: E402
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId  # noqa: E402
from mindspeed_rl_plugin.update.pair_step import PairStep  # noqa: E402
from mindspeed_rl_plugin.update.step import PolicyStep  # noqa: E402

FLAGS = """
--group-query-attention --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--add-qkv-bias --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --transformer-impl local
--no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--no-gradient-accumulation-fusion --use-cpu-initialization --distributed-backend gloo --tokenizer-type NullTokenizer
--train-iters 10 --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --weight-decay 0 --clip-grad 1
--eval-iters 0 --eval-interval 1000 --mock-data
"""
# Arms -> whether rows are packed, whether their prefixes are shared, and whether a micro-batch has all rows or one.
ARMS = {
    "rows": (False, False, True),
    "one-by-one": (False, False, False),
    "packed": (True, False, True),
    "tree": (True, True, True),
}


def model_of(rows: Sequence[Sequence[int]]) -> tuple[list[torch.nn.Module], Any, Callable[[Any], None]]:
    """The model, Megatron's arguments, and a function that runs a prepared update."""
    sizes, longest = shared_rows.SIZES, max(map(len, rows))
    given = f"--num-layers {sizes.layers} --hidden-size {sizes.hidden} --ffn-hidden-size {sizes.ffn} "
    given += f"--num-attention-heads {sizes.heads} --num-query-groups {sizes.groups} --seq-length {longest} "
    given += f"--max-position-embeddings {longest} --vocab-size {sizes.vocabulary - 1} "
    given += f"--micro-batch-size {len(rows)} --global-batch-size {len(rows)}"
    sys.argv = [sys.argv[0], *FLAGS.split(), *given.split()]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", str(shared_rows.free_port()))
    if hasattr(arguments, "parse_and_validate_args"):
        arguments.parse_and_validate_args()
    initialize_megatron()
    args = get_args()
    model = training.get_model(_provider, ModelType.encoder_or_decoder)
    config = training.get_model_config(model[0])
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0), model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    args.iteration = args.curr_iteration = 0
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = training.finalize_model_grads
    more = {}
    if "forward_backward_func" in inspect.signature(training.train_step).parameters:
        more = {"forward_backward_func": training.get_forward_backward_func(), "iteration": 0}
    scheduler = SimpleNamespace(step=lambda increment: None)
    return model, args, lambda update: update.run(training.train_step, (model, optimizer, scheduler, config), more)


def _provider(pre_process: bool = True, post_process: bool = True, **_: Any) -> GPTModel:
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def columns_of(case: shared_rows.Case) -> Rows:
    """The rows with all that the loss reads. `logp_old` comes later."""
    tokens = case.rows()
    masks = [[0] * case.prompt + [1] * (len(row) - case.prompt) for row in tokens]
    ids = tuple(SampleId(0, 0, member) for member in range(len(tokens)))
    columns: dict[str, Any] = {
        "tokens": Ragged.from_rows([torch.tensor(row, dtype=torch.int32) for row in tokens]),
        "loss_mask": Ragged.from_rows([torch.tensor(row, dtype=torch.uint8) for row in masks]),
    }
    if case.pair:
        columns["reference"] = torch.tensor([-900.0, -905.0], dtype=torch.float64)
    else:
        columns["advantage"] = torch.linspace(-1.0, 1.0, len(tokens))
    return Rows(ids, columns)


def measure(case: shared_rows.Case, arms: Sequence[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """The results. Raises RuntimeError where arms compute different log-probs."""
    rows = columns_of(case)
    lengths = dict(zip(rows.ids, rows["tokens"].lengths.tolist(), strict=True))
    model, args, train = model_of(case.rows())
    chosen = {"algorithm": "dpo"} if case.pair else {"algorithm": "grpo", "kl_loss_coef": 0.0}
    algorithm = resolve(AlgorithmConfig(**chosen))
    updates, parts, seen = {}, {}, {}
    for arm in arms:
        packed, shared, whole = ARMS[arm]
        settings = ForwardSettings.from_args(
            args,
            vocab_size=shared_rows.SIZES.vocabulary,
            temperature=1.0,
            max_tokens=sum(lengths.values()) if whole else (2 if case.pair else 1) * max(lengths.values()),
            packed=packed,
            shared=shared,
        )
        (step,) = plan_batches(rows.ids, global_batch_size=len(rows), micro_batch_size=len(rows), dp_size=1)
        (step,) = plan_tokens([step], lengths, settings.budget)
        parts[arm] = step.of_rank(0)
        pairs = (len(rows) // 2,) if case.pair else ()
        updates[arm] = (PairStep if case.pair else PolicyStep)(algorithm, settings, model, *pairs)

    def turn(arm: str) -> dict[str, float]:
        update, batches = updates[arm], [rows.select(ids) for ids in parts[arm]]
        start = time.perf_counter(), time.process_time()
        logps = compute_logps(model, batches, update.settings)
        middle = time.perf_counter(), time.process_time()
        if not case.pair:
            batches = [
                part.with_columns(logp_old=logp, logp_rollout=logp) for part, logp in zip(batches, logps, strict=True)
            ]
        update.prepare(batches)
        train(update)
        end = time.perf_counter(), time.process_time()
        ids = [i for part in batches for i in part.ids]
        every = dict(zip(ids, [row for column in logps for row in column.rows()], strict=True))
        seen[arm] = torch.cat([every[i] for i in rows.ids])
        return shared_rows.seconds(start, middle, end)

    before = shared_rows.resident()
    shared_rows.clear_peak()
    for arm in arms:
        turn(arm)  # the first one of a process is slower
    result: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in (*arms[repeat % len(arms) :], *arms[: repeat % len(arms)]):
            result[arm].append(turn(arm))
    for arm in arms:
        drift = float((seen[arm] - seen[arms[0]]).abs().max())
        if not drift < shared_rows.DRIFT:
            raise RuntimeError(f"log-probs of {arm} are {drift} from those of {arms[0]}, limit {shared_rows.DRIFT}")
        result[arm][-1]["peak_bytes"] = shared_rows.peak_resident() - before
    return result


if __name__ == "__main__":
    _, name, chosen, count = sys.argv
    print(json.dumps(measure(shared_rows.CASES[name], chosen.split(","), int(count))))
