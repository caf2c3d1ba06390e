"""Run by test_steps.py: one rollout through one optimizer step of policy, critic or pairs, in several layouts.

Argument: a folder with `cases.json`, {case: {"flags": Megatron's, "variants": {variant: fields of
AlgorithmConfig}, and where they differ "critic", "tied": of the model, "chunk", "budget" (tokens of a micro-batch),
"packed", "shared", "bounded" (attention takes packed rows by their boundaries), "rows": what `changed` makes of the
rollout, "mode": a fault that the test must catch, or another way}}. Writes `CASE.pt`: {variant: what `step_of`
returns}. Weights stay as they are (learning rate 0), so the variants of a case share one model.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from loops import TEMPERATURE, step_by_loops
from tiny_megatron import VOCAB, agreed, only_step, parallel_state, refuses, rerun_state_machine, run

from mindspeed_rl_plugin.algorithms import Totals, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.forward import ForwardSettings, plan_tokens
from mindspeed_rl_plugin.forward.context_parallel import positions
from mindspeed_rl_plugin.forward.pipeline import ends_here
from mindspeed_rl_plugin.host.npu_ops import npu_fusion_attention
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.update.pair_step import PairStep
from mindspeed_rl_plugin.update.step import PolicyStep
from mindspeed_rl_plugin.update.value_step import ValueStep

TIMES = torch.tensor([2, 0, 0, 1, 0, 2, 2, 1], dtype=torch.int32)  # rows of each group, sampled four times


def step_of(job, rows, case, chosen):
    """Metrics, gradient norm and gradients of one step, and what else the tests look at."""
    algorithm = resolve(AlgorithmConfig(**chosen))
    if algorithm.from_pairs:
        rows = as_pairs(rows)
    elif algorithm.per_token and not case.get("critic"):
        rows = rows.with_columns(advantages=uneven(rows["advantages"]))
    if case.get("mode") == "loops":
        return step_by_loops(job, rows, chosen)
    settings = ForwardSettings.from_args(
        job.args,
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
        max_tokens=case.get("budget"),
        packed=case.get("packed", False),
        shared=case.get("shared", False),
        chunk_tokens=case.get("chunk"),
    )
    step, found = planned(job, rows, settings, whole=algorithm.from_pairs), {}
    if case.get("critic"):
        update = ValueStep(algorithm, settings, job.model)
        found["values"], rows = with_values(job, rows, step, settings)
    elif algorithm.from_pairs:
        update = PairStep(algorithm, settings, job.model, len(rows) // 2)
    else:
        update = PolicyStep(algorithm, settings, job.model, norm_length=20)
    rows = changed(rows, "filtered" if chosen["algorithm"] == "pf-ppo" else case.get("rows"))
    batches = [rows.select(ids) for ids in step.of_rank(parallel_state.get_data_parallel_rank())]
    refuses_bad_input(update, batches)
    update.prepare(batches)
    BOUNDARIES.clear()
    job.samples = 0
    with MODES.get(case.get("mode"), lambda update: contextlib.nullcontext())(update):
        losses, grad_norm = job.train_step(update)
    assert job.samples == len(rows), "the schedules of learning rate and samples see the configured batch"
    metrics = update.metrics()
    if case.get("mode") != "mean of ranks":
        agreed(metrics)
    if algorithm.from_pairs and ends_here(job.model) and parallel_state.get_data_parallel_world_size() == 1:
        assert abs(float(losses["loss"]) / metrics["loss"] - 1) < 1e-4, "Megatron's line of the loss"
    found |= {"sizes": [len(batch) for batch in batches], "boundaries": list(BOUNDARIES)}
    return {"grad_norm": grad_norm, "metrics": metrics, "gradients": job.gradients(), **found}


def planned(job, rows, settings, whole=False):
    step = only_step(job, rows)
    if settings.budget is None:
        return step
    lengths = dict(zip(rows.ids, rows["tokens"].lengths.tolist(), strict=True))
    return plan_tokens([step], lengths, replace(settings.budget, whole=whole))[0]


# what the rows are

# Two groups of four: a one-token response, a fully masked row, and one row longer than the rest together. Prompts begin
# alike.
RESPONSES = (3, 1, 20, 0, 2, 2, 1, 9)
HOLES = {2: ((4, 9), (15, 16)), 7: ((3, 6),)}  # row -> what the model sees between its turns, in response tokens


def make_rollout() -> Rows:
    """Rows as the update reads them, with log-probs far enough from the model's for the clip to bite."""
    g = torch.Generator().manual_seed(0)
    columns: dict[str, list[torch.Tensor]] = {}
    for i, response in enumerate(RESPONSES):
        prompt = 2 + i % 4
        mask = torch.zeros(prompt + max(response, 1), dtype=torch.uint8)
        mask[prompt : prompt + response] = 1
        for first, end in HOLES.get(i, ()):
            mask[prompt + first : prompt + end] = 0
        old = -5.0 + 0.7 * torch.randn(len(mask), generator=g)
        tokens = torch.randint(0, VOCAB, (len(mask),), generator=g, dtype=torch.int32)
        tokens[:prompt] = torch.arange(20, 20 + prompt)
        row = {
            "tokens": tokens,
            "loss_mask": mask,
            "logp_old": old * mask,
            "logp_ref": (old + 0.3 * torch.randn(len(mask), generator=g)) * mask,
            "logp_rollout": (old + 0.01 * torch.randn(len(mask), generator=g)) * mask,
            "advantages": torch.randn(1, generator=g) * mask,
        }
        for name, column in row.items():
            columns.setdefault(name, []).append(column)
    ids = tuple(SampleId(0, i // 4, i % 4) for i in range(len(RESPONSES)))
    return Rows(ids, {name: Ragged.from_rows(rows) for name, rows in columns.items()})


def uneven(column):
    """Advantages that differ between the tokens of a response, as REINFORCE++ has them."""
    ramp = torch.cat([torch.linspace(0.5, 1.5, len(row)) for row in column.rows()])
    return Ragged(column.values * ramp, column.offsets)


def as_pairs(rows):
    """Two rows beside each other are chosen and rejected; their references lie around the model's own log-probs."""
    ids = tuple(SampleId(0, i // 2, i % 2) for i in range(len(rows)))
    reference = torch.stack([row.sum() for row in rows["logp_old"].rows()]).double()
    return Rows(ids, {"tokens": rows["tokens"], "loss_mask": rows["loss_mask"], "reference": reference})


def with_values(job, rows, step, settings):
    """The critic's values before the step, and the rows with some values far from these, so that the clip bites."""
    mine = [rows.select(ids) for ids in step.of_rank(parallel_state.get_data_parallel_rank())]
    before = Critic(job.model, job.optimizer, None, job.config).values(mine, settings)
    assert (before is not None) == ends_here(job.model)
    of_rows = None
    if before is not None:
        ids = [i for part in mine for i in part.ids]
        of_rows = dict(zip(ids, [row for part in before for row in part.rows()], strict=True))
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, of_rows)
    every = {i: row for part in ranks if part is not None for i, row in part.items()}
    values = Ragged.from_rows([every[i] for i in rows.ids])
    moved = rows["logp_ref"].values - rows["logp_old"].values
    columns = {"values": Ragged(values.values + moved, values.offsets), "returns": rows["logp_old"]}
    return values.values, rows.with_columns(**columns)


def changed(rows, how):
    """Rows of which one is trained nowhere, "masked" by its loss mask or "dropped" by the columns of a sample; or some
    count several times and others never: "filtered" says so in a column, "repeated" puts copies there."""
    if how == "masked":
        masks = [row.clone() for row in rows["loss_mask"].rows()]
        masks[2].zero_()
        return rows.with_columns(loss_mask=Ragged.from_rows(masks))
    if how == "dropped":
        advantage = torch.stack([row[row.abs().argmax()] for row in rows["advantages"].rows()])
        columns = {name: column for name, column in rows.columns.items() if name != "advantages"}
        kept = (torch.arange(len(rows)) != 2).to(torch.int8)
        return Rows(rows.ids, {**columns, "advantage": advantage, "valid": kept})
    if how == "filtered":
        return rows.with_columns(multiplicity=TIMES)
    if how == "repeated":
        return Rows(rows.ids, rows.take(torch.arange(len(rows)).repeat_interleave(TIMES).tolist()).columns)
    return rows


def refuses_bad_input(update, mine):
    """What a caller can get wrong is named before anything runs."""
    if update.settings.max_tokens is None:
        few = f"{len(mine) - 1} micro-batches prepared, but Megatron's step runs {len(mine)}"
        refuses(update, mine[:-1], few)
        if ends_here(update.model):
            bare = [Rows(part.ids, {name: part[name] for name in ("tokens", "loss_mask")}) for part in mine]
            refuses(update, bare, f"the update lacks columns {update._needed(bare[0])}")
    if isinstance(update, PairStep):
        one, two = mine[0].ids[:2]
        refuses(update, [mine[0].select((two, one, *mine[0].ids[2:])), *mine[1:]], "a micro-batch cuts a pair")


# how the step runs


@contextlib.contextmanager
def mean_of_means(update):
    """The fault that the test must catch: every micro-batch averages over its own tokens."""
    across = len(update._batches) * parallel_state.get_data_parallel_world_size()
    for i, batch in enumerate(update._batches):
        counts = batch.mask.sum(-1)
        own = Totals(int(counts.sum()), int((counts > 0).sum()), update.norm_length)
        update.weights[i] = (update.algorithm.weights(counts, own) / across).float()
    yield


@contextlib.contextmanager
def mean_of_ranks(update):
    """The same of context parallelism: every rank averages over the tokens at its own positions."""
    cp_size = parallel_state.get_context_parallel_world_size()
    for i, batch in enumerate(update._batches):
        here = batch.mask.index_select(1, positions(batch.mask.shape[1]))
        update.weights[i] *= float(batch.mask.sum() / (cp_size * here.sum()))
    yield


def forgotten_ranks(update):
    """A loss that does not reckon with the number of data parallel ranks."""
    object.__setattr__(update._scaling, "dp_size", 1)
    return contextlib.nullcontext()


@contextlib.contextmanager
def contiguous_split(update):
    """One piece of a row for each rank, where MindSpeed puts its ulysses' own (core/context_parallel, v2.3.0)."""

    def piece(tensor, axis, *_):
        size = parallel_state.get_context_parallel_world_size()
        return tensor.chunk(size, axis)[parallel_state.get_context_parallel_rank()]

    def split(batch):
        return {name: piece(tensor, 1) for name, tensor in batch.items()}

    rotary = "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank"
    host = mock.patch("megatron.training.utils.get_batch_on_this_cp_rank", split, create=True)
    with host, mock.patch(rotary, piece):
        yield


@contextlib.contextmanager
def replayed(update):
    """The rerun state machine runs the step a second time, as it does to validate a result."""
    forward_step, machine, states = update.forward_step, rerun_state_machine.get_rerun_state_machine(), set()

    def asking(data_iterator, model):
        states.add(machine.state.name)
        machine.rerun_requested = machine.state.name == "INITIAL_RUN"
        machine.continue_requested = machine.state.name == "RERUNNING_IN_PLACE"
        return forward_step(data_iterator, model)

    update.forward_step = asking
    yield
    assert len(states) == 2


MODES = {
    "mean of means": mean_of_means,
    "mean of ranks": mean_of_ranks,
    "forgotten ranks": forgotten_ranks,
    "contiguous": contiguous_split,
    "replay": replayed,
}

ATTENTION = "megatron.core.transformer.dot_product_attention.DotProductAttention"
BOUNDARIES = []  # what the attention was handed


def by_boundaries(self, query, key, value, attention_mask, packed_seq_params=None, **_):
    """In the place of Megatron's own attention, like TransformerEngine's and MindSpeed's; query `[T, heads, D]`."""
    assert attention_mask is None and packed_seq_params.qkv_format == "thd" and query.dim() == 3
    ends = packed_seq_params.cu_seqlens_q.tolist()
    assert packed_seq_params.max_seqlen_q == max(b - a for a, b in zip(ends, ends[1:], strict=False))
    BOUNDARIES.append((ends, len(query)))
    given = {"scale": query.shape[-1] ** -0.5, "atten_mask": torch.ones(2048, 2048).triu(1).bool(), "sparse_mode": 2}
    lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": packed_seq_params.cu_seqlens_kv.tolist()}
    return npu_fusion_attention(query, key, value, 0, "TND", **given, **lengths)[0]


def steps_of(job, rows, case):
    with contextlib.ExitStack() as stack:
        if case.get("bounded"):  # the attention takes boundaries, and refuses masks
            stack.enter_context(mock.patch.object(job.args, "transformer_impl", "transformer_engine"))
            stack.enter_context(mock.patch(f"{ATTENTION}.forward", by_boundaries))
        return {name: step_of(job, rows, case, chosen) for name, chosen in case["variants"].items()}


run(steps_of, make_rollout())
