"""Run by test_tree.py under torchrun: a step of real Megatron on rows that share prefixes, as trees and otherwise.

Argument: JSON `{case: {"kind": of the model, "config": Megatron's, "layout": sizes, "chunks": of the pipeline, and
maybe "dtype", else float64, "routes": whether experts are given}}`. Without trees each row runs alone, under Megatron's
own attention and mask. If the router has a loss, which is that of a micro-batch, or in another dtype, rows are packed.
Prints `CASE WORST NAME`: the largest difference of the loss, log-probs, gradients and counts, as a share of what it is
a difference of; with given experts also of gradients of routers and finite differences of the loss.
"""

import functools
import inspect
import json
import sys

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

from mindspeed_rl_plugin.forward import ForwardSettings, collate, router_replay  # noqa: E402
from mindspeed_rl_plugin.forward.pipeline import compute_logps, data_iterators, head_of, run_model  # noqa: E402
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId  # noqa: E402

VOCAB, HIDDEN, LAYERS = 64, 32, 4
SOFTMAX, FLOAT = torch.softmax, torch.Tensor.float
PLAIN = dict(
    num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=False,
    gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
    masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
    gradient_accumulation_fusion=False, persist_layer_norm=False, variable_seq_lengths=True,
    moe_token_dispatcher_type="alltoall",
)  # fmt: skip
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8, num_query_groups=4,
    multi_latent_attention=True, mscale=0.7, mscale_all_dim=1.0, rotary_scaling_factor=4.0,
    original_max_position_embeddings=8, max_position_embeddings=8,
)  # fmt: skip
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.0,
    moe_router_load_balancing_type="aux_loss",
)  # fmt: skip


def in_float64(values, *more, dtype=None, **named):
    """Routers compute in float32, which alone would make differences of 1e-8."""
    return SOFTMAX(values, *more, dtype=torch.float64 if values.dtype == torch.float64 else dtype, **named)


def micro_batches():
    """Two of a group, and one of episodes: prefixes of several depths, copies, a row that begins another, one alone."""
    made = torch.Generator().manual_seed(3 + parallel_state.get_data_parallel_rank())
    more = lambda n: torch.randint(0, VOCAB, (n,), generator=made, dtype=torch.int32)  # noqa: E731
    prompt, a, b, c = more(9), more(5), more(4), more(3)
    join = torch.cat
    group = [join([prompt, more(n)]) for n in (3, 7, 1, 2)]
    deep = [join([prompt, a, b, more(4)]), join([prompt, a, b, more(2)]), join([prompt, a, more(3)])]
    deep += [join([prompt, a, b]), join([prompt, c]), join([prompt, c]), join([prompt, c, more(2)]), more(5)]
    batches = []
    for rows in (group, deep):
        weights = [(torch.arange(len(row)) >= 6) * torch.rand(len(row), generator=made) for row in rows]
        columns = {"tokens": rows, "weight": weights, "loss_mask": [(w > 0).to(torch.uint8) for w in weights]}
        columns = {name: Ragged.from_rows(column) for name, column in columns.items()}
        batches.append(Rows(tuple(SampleId(0, 0, i) for i in range(len(rows))), columns))
    return batches


def with_routes(rows):
    """Two of the four experts for each token but the last, in each layer: by the tokens up to it. Without rows that
    begin others: their last token has routes in the others, but chooses itself where they run alone."""
    texts = [row.tolist() for row in rows["tokens"].rows()]
    begins = [any(i != j and other[: len(one)] == one for j, other in enumerate(texts)) for i, one in enumerate(texts)]
    rows, routes = rows.take([i for i, one in enumerate(begins) if not one]), []
    for row in rows["tokens"].rows():
        seeds = [list(row[: t + 1].numpy()) for t in range(len(row) - 1)]
        chosen = [[np.random.default_rng([i, *s]).permutation(4)[:2] for i in range(LAYERS)] for s in seeds]
        chosen = torch.tensor(np.array(chosen), dtype=torch.uint8).reshape(-1, LAYERS, 2)
        routes.append(torch.cat([torch.zeros(1, LAYERS, 2, dtype=torch.uint8), chosen]))
    return rows.with_columns(routes=Ragged.from_rows(routes))


def gate_difference(model, batches, settings, step_size=1e-5):
    """Of the slope of the loss along random changes of the routers, by its gradient and by finite differences."""
    gates = {n: p for n, p in model[0].named_parameters() if n.endswith("router.weight")}
    along = {
        n: torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(8)) for n, p in gates.items()
    }
    found = step(model, batches, settings)
    slope, losses = sum((found[f"0 {n}"] * along[n]).sum() for n in gates), []
    for sign in (1, -2):
        for name, weight in gates.items():
            weight.data += sign * step_size * along[name]
        losses.append(step(model, batches, settings)["loss"])
    for name, weight in gates.items():
        weight.data += step_size * along[name]
    return float(((losses[0] - losses[1]) / (2 * step_size) - slope).abs() / slope.abs())


def model_of(case):
    """This rank's chunks, with the weights of the whole model by their names."""
    kind, chunks = case["kind"], case.get("chunks", 1)
    latent, experts = "latent" in kind, "experts" in kind
    given = PLAIN | (LATENT | {"rope_type": kind.split()[1]} if latent else {}) | (EXPERTS if experts else {})
    dtype = getattr(torch, case.get("dtype", "float64"))
    given |= {"params_dtype": dtype, "pipeline_dtype": dtype, **case.get("config", {})}
    given |= {name: size for name, size in case.get("layout", {}).items() if name.endswith("parallel_size")}
    if chunks > 1:
        given["virtual_pipeline_model_parallel_size"] = chunks
    cls = MLATransformerConfig if latent else TransformerConfig
    config = cls(**{name: value for name, value in given.items() if name in inspect.signature(cls).parameters})
    parts = dict(num_experts=4 if experts else None, moe_grouped_gemm=False, multi_latent_attention=latent)
    spec = get_gpt_layer_local_spec(**parts, normalization="RMSNorm")
    size, rank = (getattr(parallel_state, f"get_pipeline_model_parallel_{x}")() for x in ("world_size", "rank"))
    model = []
    for chunk in range(chunks):
        ends = dict(pre_process=chunk == rank == 0, post_process=(chunk, rank) == (chunks - 1, size - 1))
        stage = {"vp_stage": chunk} if "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        tokens = dict(vocab_size=VOCAB, max_sequence_length=128, share_embeddings_and_output_weights=False)
        built = GPTModel(config, spec, position_embedding_type="rope", **tokens, **ends, **stage).to(dtype).train()
        for name, weight in sorted(built.named_parameters()):
            random = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * rank + 100 * chunk)
            noise = torch.randn(weight.shape, generator=random, dtype=torch.float64)
            noise = weight.data + 0.1 * noise if weight.dim() == 1 else noise * 1.5 / weight.shape[-1] ** 0.5
            weight.data = noise.to(dtype)
            weight.main_grad = None
        model.append(built)
    return model


def step(model, batches, settings):
    """Gradients and counts, and on the last stage the loss and log-probs, of a schedule of Megatron's."""
    for weight in (p for chunk in model for p in chunk.parameters()):
        weight.grad = None
    given = [collate(rows, settings, index=i, columns=["weight"]) for i, rows in enumerate(batches)]

    def forward_step(iterator, chunk):
        batch = next(iterator)

        def loss(output):
            logp, entropy = head_of(output, batch, settings, entropy_grad=True)
            each = batch.columns["weight"].double() * (logp + 0.3 * logp.exp() - 0.2 * entropy)
            total = each.sum() * len(given)  # Megatron averages over micro-batches
            return total, {"loss": total.detach() / len(given), "logp": logp[batch.mask].detach()}

        return run_model(chunk, batch, settings, entropy_grad=True), loss

    done = schedules.get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data_iterators(given, len(model)), model=model,
        num_microbatches=len(given), seq_length=128, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    found = {"loss": sum(one["loss"] for one in done), "logp": torch.cat([one["logp"] for one in done])} if done else {}
    for i, chunk in enumerate(model):
        for name, weight in chunk.named_parameters():
            grad = weight.grad
            if getattr(weight, "sequence_parallel", False) and model[0].config.sequence_parallel:
                dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
            found[f"{i} {name}"] = grad.clone()
        for name, count in chunk.named_buffers():
            if name.endswith("local_tokens_per_expert"):
                found[f"{i} {name}"] = count.clone()
                count.zero_()
    return found


def check(case):
    """Largest relative difference of a tree."""
    layout = case.get("layout", {})
    parallel_state.initialize_model_parallel(**layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    sizes = dict(temperature=0.8, chunk_tokens=7, max_tokens=200, multiple=layout.get("tensor_model_parallel_size", 1))
    sizes |= dict(routed=(1, 2, 3, 4), experts=4)
    settings = functools.partial(ForwardSettings, 1, 128, VOCAB - 3, **sizes)
    model, batches = model_of(case), micro_batches()
    batches = [with_routes(rows) for rows in batches] if "routes" in case else batches
    packed = "dtype" in case or model[0].config.moe_aux_loss_coeff
    alone = [rows.select([one]) for rows in batches for one in rows.ids]
    want = step(model, batches, settings(packed=True)) if packed else step(model, alone, settings())
    tree = step(model, batches, settings(packed=True, shared=True))
    before = compute_logps(model, batches, settings(packed=True, shared=True))
    if before is not None:
        before = torch.cat([c.values[rows["loss_mask"].values.bool()] for c, rows in zip(before, batches, strict=True)])
        assert torch.equal(before, tree["logp"]), "log-probs before the update are those of the update, bit for bit"
    assert want.keys() == tree.keys()
    assert all(value.isfinite().all() for value in (*want.values(), *tree.values()))
    worst = {n: float((tree[n] - one).abs().max() / one.abs().max().clamp_min(1e-300)) for n, one in want.items()}
    if "routes" in case:
        assert sorted(router_replay.tallies) == sorted({*range(LAYERS)} & router_replay.tallies.keys()) != []
        router_replay.tallies.clear()
        if dist.get_world_size() == 1:
            chosen = [Rows(rows.ids, {n: c for n, c in rows.columns.items() if n != "routes"}) for rows in batches]
            alone = step(model, [rows.select([one]) for rows in chosen for one in rows.ids], settings())
            assert (alone["logp"] - want["logp"]).abs().max() > 1e-3, "given experts are others"
            if not model[0].config.moe_aux_loss_coeff:  # whose gradient is not of the loss
                assert gate_difference(model, batches, settings(packed=True, shared=True)) < 1e-6
    parallel_state.destroy_model_parallel()
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, max((value, name) for name, value in worst.items()))
    return max(each)


dist.init_process_group("gloo")
torch.softmax, torch.Tensor.float = in_float64, lambda t: t if t.dtype == torch.float64 else FLOAT(t)
for case_name, one_case in json.loads(sys.argv[1]).items():
    largest = check(one_case)
    if dist.get_rank() == 0:
        print(f"{case_name}\t{largest[0]:.2e}\t{largest[1]}", flush=True)
dist.destroy_process_group()
