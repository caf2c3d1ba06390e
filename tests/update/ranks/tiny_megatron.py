"""A tiny Qwen2-shaped model inside real Megatron, in any layout: for scripts that tests run under torchrun.

Every layout holds the same canonical model, cut by tests/weights/reshard_reference.py. `Job` sets Megatron up with its
own argument parser and takes it down again, so one process can run several layouts.
"""

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

from gathered_attention import gathered_attention  # noqa: E402
from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.training import arguments as megatron_arguments  # noqa: E402
from megatron.training import get_args, global_vars, training  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "weights"))
from reshard_reference import collected, megatron_weights, random_weights  # noqa: E402

from mindspeed_rl_plugin.critic.value_head import give_value_head  # noqa: E402
from mindspeed_rl_plugin.forward import plan_batches  # noqa: E402
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel  # noqa: E402
from mindspeed_rl_plugin.rows import Rows  # noqa: E402
from mindspeed_rl_plugin.weights.live import stored_parameters  # noqa: E402

VOCAB = 250  # padded to 256 by Megatron
BASE = """
--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --transformer-impl local --no-persist-layer-norm --no-rope-fusion
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
--attention-softmax-in-fp32 --use-cpu-initialization --distributed-backend gloo --tokenizer-type NullTokenizer
--vocab-size 249 --train-iters 10 --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --weight-decay 0
--clip-grad 1e6 --eval-iters 0 --eval-interval 1000 --mock-data
"""


class Job:
    """Megatron with one layout: `with Job("--tensor-model-parallel-size 2 ...") as job`."""

    def __init__(self, flags: str, *, tied: bool = False, critic: bool = False):
        self.flags, self.tied, self.critic = flags, tied, critic
        self.base = BASE.replace("--untie-embeddings-and-output-weights", "") if tied else BASE

    def __enter__(self):
        self.attention = gathered_attention()
        self.attention.__enter__()
        _initialize((self.base + self.flags).split())
        self.args = get_args()
        provider = _critic_provider if self.critic else _provider
        self.model = training.get_model(provider, ModelType.encoder_or_decoder)
        self.parallel = Parallel.from_megatron_args(self.args)
        self.shape = ModelShape("qwen2", 4, 64, 4, 2, 16, 96, VOCAB, self.args.padded_vocab_size, self.tied)
        weights = random_weights(self.shape)
        self.weights = {name: t * (6 if t.dim() > 1 else 2) + ("norm" in name) for name, t in weights.items()}
        if self.critic:
            self.weights["lm_head.weight"] = self.weights["lm_head.weight"][:1]
        live = dict(stored_parameters(self.model))
        for name, value in self.stored(dist.get_rank(), self.weights).items():
            live.pop(name).copy_(value)
        assert not live, f"without weights: {live.keys()}"
        self.optimizer = _optimizer(self.args, self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # the weights stay as they are
        self.samples = 0
        self.args.iteration = self.args.curr_iteration = 0
        # What setup_model_and_optimizer and train would have set.
        self.config = training.get_model_config(self.model[0])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = training.finalize_model_grads
        if len(self.model) > 1:
            # gloo sends in the background, and the interleaved schedule before core 0.17 frees under the send.
            self.config.deallocate_pipeline_outputs = False
        if self.args.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            start = [chunk.start_grad_sync for chunk in self.model]
            self.config.no_sync_func = no_sync[0] if len(self.model) == 1 else no_sync
            if self.args.align_grad_reduce:
                self.config.grad_sync_func = start[0] if len(self.model) == 1 else start
        return self

    def __exit__(self, *failure):
        self.attention.__exit__(None, None, None)
        parallel_state.destroy_model_parallel()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        rerun_state_machine.destroy_rerun_state_machine()
        global_vars.destroy_global_vars()

    def train_step(self, update):
        """Megatron's own train_step. Returns its loss dict and grad norm."""
        more = {}
        if "forward_backward_func" in inspect.signature(training.train_step).parameters:
            more = {"forward_backward_func": training.get_forward_backward_func(), "iteration": 0}
        scheduler = SimpleNamespace(step=self._count)
        given = (self.model, self.optimizer, scheduler, self.config)
        outputs = update.run(training.train_step, given, more)
        assert outputs[1] == 0, "Megatron skipped the step"
        return outputs[0], float(outputs[5])

    def _count(self, increment):
        self.samples += increment

    def stored(self, rank, weights):
        """What a rank stores of a canonical model; a critic's has the value head, which is whole, as its `lm_head`."""
        out = megatron_weights(self.shape, self.parallel, rank, weights)
        if self.critic:
            out |= {name: weights["lm_head.weight"] for name in out if name.endswith("output_layer.weight")}
        return out

    def gradients(self):
        """Canonical name -> full gradient. Call it after a step, on every rank."""
        if self.args.use_distributed_optimizer:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            for chunk in self.model:
                for buffer in chunk.buffers:
                    for bucket in buffer.buckets:
                        mine = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
                        parts = list(bucket.grad_data.chunk(dist.get_world_size(group)))
                        dist.all_gather(parts, mine, group=group)
        main = {p.data_ptr(): p.main_grad for chunk in self.model for p in chunk.parameters()}
        mine = {name: main[t.data_ptr()] for name, t in stored_parameters(self.model).items()}
        return collected(mine, self.stored, self.weights)


def _initialize(flags: list[str]) -> None:
    sys.argv = [sys.argv[0], *flags]
    if hasattr(megatron_arguments, "parse_and_validate_args"):
        megatron_arguments.parse_and_validate_args()
    initialize_megatron()


def _provider(pre_process=True, post_process=True, vp_stage=None, **ignored):
    args = get_args()
    config = core_transformer_config_from_args(args)
    stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        **stage,
    )


def _critic_provider(**named):
    return give_value_head(_provider(**named))


def _optimizer(args, model):
    fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(OptimizerConfig) if hasattr(args, f.name)}
    return get_megatron_optimizer(OptimizerConfig(**fields), model)


def only_step(job: Job, rows: Rows):
    """The plan of the one optimizer step that these rows make."""
    dp_size = parallel_state.get_data_parallel_world_size()
    sizes = dict(global_batch_size=len(rows), micro_batch_size=job.args.micro_batch_size, dp_size=dp_size)
    (step,) = plan_batches(rows.ids, **sizes)
    return step


def agreed(metrics: dict) -> dict:
    """Metrics of this rank, which are those of every rank."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, metrics)
    assert all(m == metrics for m in everywhere), f"ranks disagree on the metrics: {everywhere}"
    return metrics


def refuses(update, given, message: str) -> None:
    """What a caller can get wrong is named before anything runs."""
    try:
        update.prepare(given)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"accepted, should have said: {message}")


def run(steps, rows: Rows) -> None:
    """For each case of the folder that is the argument, save what `steps(job, rows, case)` returns on rank 0 in a job
    of the case's flags. Leaves the process group in order."""
    folder = Path(sys.argv[1])
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        flags = f"{case['flags']} --global-batch-size {len(rows)}"
        with Job(flags, tied=case.get("tied", False), critic=case.get("critic", False)) as job:
            results = steps(job, rows, case)
            if dist.get_rank() == 0:
                torch.save(results, folder / f"{name}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
