"""Run by test_adapters.py under torchrun: gradients of adapters in real Megatron against transformers' model of the
same weights, of which each matrix is W + scale x B A.

Arguments: a folder for files, JSON `{case: {"family": name, "layout": fields of `Parallel`, "flags": Megatron's, maybe
"targets": names, "layers": number, "peft": whether its modules give the gradients}}`. All is float64. Prints `CASE
WORST NAME NUMBER`: the largest difference of the loss and of a gradient, as a share of the gradient, and the number of
factors.
"""

import inspect
import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

sys.path.append(str(Path(__file__).parents[1] / "weights"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_configs import CONFIGS  # noqa: E402
from family_models import HOST, SIZES, fill  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron_models import built, parsed  # noqa: E402
from peft import LoraConfig as PeftConfig  # noqa: E402
from peft import get_peft_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from mindspeed_rl_plugin.adapters.adapted_chunks import BaseModel, adapters_of, attaching  # noqa: E402
from mindspeed_rl_plugin.adapters.targets import matrices  # noqa: E402
from mindspeed_rl_plugin.config.run_flags import LoraConfig  # noqa: E402
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel, megatron_layout  # noqa: E402
from mindspeed_rl_plugin.tools.convert.arguments import megatron_arguments  # noqa: E402
from mindspeed_rl_plugin.weights.live import stored_parameters, trainer_storage  # noqa: E402

VOCAB, ROWS, LENGTH, RANK, SCALE = 128, 2, 12, 4, 2.0


def stay_in_float64():
    """Norms and routers of both sides compute in float32, which alone would make differences of 1e-7."""
    softmax, own = torch.softmax, {name: getattr(torch.Tensor, name) for name in ("to", "type", "float")}

    def wide(values, *more, dtype=None, _stacklevel=None, **named):
        return softmax(values, *more, dtype=torch.float64 if values.dtype == torch.float64 else dtype, **named)

    def kept(name):
        def cast(values, *more, **named):
            narrower = torch.float32 in (*more, *named.values()) or name == "float"
            return values if values.dtype == torch.float64 and narrower else own[name](values, *more, **named)

        return cast

    torch.softmax = torch.nn.functional.softmax = wide
    for name in own:
        setattr(torch.Tensor, name, kept(name))


def random_of(name, *size):
    made = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(name)))
    return torch.randn(size, dtype=torch.float64, generator=made)


def factors_of(shape, targets):
    """Canonical name -> A and B, the same on every rank."""
    return {
        name: (random_of(name + "A", RANK, columns) / columns**0.5, 0.05 * random_of(name + "B", rows, RANK))
        for name, (rows, columns) in matrices(shape, targets)
    }


def theirs(model, factors, tokens):
    """Loss and gradients of the factors, and the loss without adapters."""
    factors = {name: [t.clone().requires_grad_() for t in pair] for name, pair in factors.items()}
    weights = {name: t.detach() for name, t in model.named_parameters()}
    given = dict(weights)
    for name, (a, b) in factors.items():
        delta = SCALE * b @ a
        if f"{name}.weight" in weights:
            given[f"{name}.weight"] = weights[f"{name}.weight"] + delta
            continue
        block, _, rest = name.partition(".experts.")  # transformers stacks experts, and gate above up
        expert, kind = rest.split(".")
        stacked = f"{block}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
        low = len(delta) if kind == "up_proj" else 0
        whole = torch.zeros_like(weights[stacked])
        at = torch.nn.functional.pad(delta, (0, 0, low, whole.shape[1] - low - len(delta)))
        given[stacked] = given[stacked] + torch.stack([at if e == int(expert) else whole[e] for e in range(len(whole))])
    loss = loss_of(torch.func.functional_call(model, given, (tokens,)).logits, tokens)
    loss.backward()
    return (
        loss.item(),
        {name: [t.grad for t in pair] for name, pair in factors.items()},
        loss_of(model(tokens).logits, tokens).item(),
    )


def of_peft(model, factors, tokens):
    """Gradients of the factors in peft's own modules."""
    kinds = sorted({name.rpartition(".")[2] for name in factors})
    made = get_peft_model(model, PeftConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=kinds)).double()
    named, found = dict(made.named_parameters()), {}
    for name, pair in factors.items():
        found[name] = [named[f"base_model.model.{name}.lora_{x}.default.weight"] for x in "AB"]
        for weight, values in zip(found[name], pair, strict=True):
            weight.data.copy_(values)
    loss_of(made(tokens).logits, tokens).backward()
    return {name: [weight.grad for weight in pair] for name, pair in found.items()}


def loss_of(logits, tokens):
    logps = logits[:, :-1, :VOCAB].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (logps * random_of("weights", *logps.shape)).sum()


def chunks_of(args, parallel, change):
    config = core_transformer_config_from_args(args)
    size, rank = parallel.pp, parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(parallel.vpp):
        if parallel.vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        stage = dict(pre_process=chunk == rank == 0, post_process=(chunk, rank) == (parallel.vpp - 1, size - 1))
        stage |= {"vp_stage": chunk} if parallel.vpp > 1 else {}
        chunks.append(built(args, config, **stage).double().train())
        for module in chunks[-1].modules():
            if getattr(module, "inv_freq", None) is not None:
                module.inv_freq = module.inv_freq.double()
    return chunks if change is None else [change(chunk) for chunk in chunks]


def ours(chunks, tokens, forward_only=False):
    """The loss, on the last stage, by a schedule of Megatron's: a micro-batch for each row."""
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

    def forward_step(rows, model):
        row = next(rows)
        logits = model(row, torch.arange(LENGTH)[None], mask)

        def loss(logits):
            if parallel_state.get_tensor_model_parallel_world_size() > 1:
                logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
            logps = logits[:, :-1, :VOCAB].log_softmax(-1).gather(-1, row[:, 1:, None])[..., 0]
            weights = random_of("weights", ROWS, LENGTH - 1)[[i for i in range(ROWS) if tokens[i].equal(row[0])]]
            total = (logps * weights).sum()
            return total * ROWS, {"loss": total.detach()}

        return logits, loss

    done = schedules.get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(tokens[:, None]) for _ in chunks], model=chunks,
        num_microbatches=ROWS, seq_length=LENGTH, micro_batch_size=1, forward_only=forward_only,
    )  # fmt: skip
    return sum(float(one["loss"]) for one in done) if done else None


def norm_difference(held, gradients, parallel):
    """Of all gradients: each factor is counted once by Megatron's filters and groups."""
    total, expert_tp = 0.0, parallel_state.get_expert_tensor_parallel_group()
    named = {"expert_tp_group": expert_tp, "tp_group": parallel_state.get_tensor_model_parallel_group()}
    known = inspect.signature(param_is_not_tensor_parallel_duplicate).parameters
    named = {name: group for name, group in named.items() if name in known}
    for experts in (False, True):
        mine = [f for m, f, _ in held if bool(m.experts) == experts]
        if experts and parallel.expert_tp == parallel.tp:
            assert all(f.allreduce == (parallel.ep == 1) for f in mine)
        elif experts:
            assert not any(f.allreduce for f in mine), "they are summed over other ranks than the rest"
        counted = [
            f for f in mine if not getattr(f, "shared", False) and param_is_not_tensor_parallel_duplicate(f, **named)
        ]
        squares = torch.tensor(sum(float(f.grad.square().sum()) for f in counted), dtype=torch.float64)
        own = experts and (parallel.ep > 1 or (parallel.expert_tp != parallel.tp))
        group = "expert_tensor_model_pipeline_parallel" if own else "model_parallel"
        dist.all_reduce(squares, group=getattr(parallel_state, f"get_{group}_group")())
        total += float(squares)
    want = sum(float(grad.square().sum()) for pair in gradients.values() for grad in pair) * parallel.dp**2
    return abs(total / want - 1)


def check(case, folder):
    """Largest relative difference."""
    torch.manual_seed(0)
    sizes = SIZES | CONFIGS[case["family"]] | {"num_hidden_layers": case.get("layers", 2)}
    config = AutoConfig.for_model(case["family"], vocab_size=VOCAB, **sizes)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).double()
    rank, shape = dist.get_rank(), None
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(0)
    layout = case.get("layout", {})
    parallel = Parallel(dist.get_world_size(), **layout)
    published = json.loads((folder / "config.json").read_text())
    shape = ModelShape.from_hf_config(published)
    args = parsed(megatron_arguments(shape, parallel, published), [*HOST.split(), *case.get("flags", "").split()])
    args.params_dtype = torch.float64
    shape = ModelShape.from_megatron_args(args, VOCAB)
    sizes = {
        n: getattr(args, n)
        for n in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "virtual_pipeline_model_parallel_size",
        )
    }
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    lora = LoraConfig(RANK, RANK * SCALE, tuple(case.get("targets", ())))
    chunks = chunks_of(args, parallel, attaching(lora, args, VOCAB))
    adapters = adapters_of(chunks)
    for one in adapters:
        one.enabled = False
    live = stored_parameters(chunks)
    fill(live, megatron_layout(shape, parallel, rank, *trainer_storage(shape, parallel, rank, live)), folder)
    factors = factors_of(shape, lora.lora_targets)
    held = [
        (m, f, i)
        for one in adapters
        for x in one.modules_of
        for m, *pair in x._pairs(x.factors)
        for i, f in enumerate(pair)
    ]

    def part(matrix, values, i):
        low = slice(matrix.start, matrix.start + matrix.size)
        mine = torch.stack([values[name][i] for name in matrix.canonical])
        return (mine[..., low] if i == 0 else mine[:, low]) if matrix.axis == 1 - i else mine

    for matrix, factor, i in held:
        factor.data.copy_(part(matrix, factors, i))
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    expected, gradients, plain = theirs(model.train(), factors, tokens)
    assert abs(expected - plain) > 1e-3
    if case.get("peft"):
        gradients = of_peft(model, factors, tokens)
    worst = []
    with torch.no_grad(), BaseModel().swapped_into(chunks):
        found = ours(chunks, tokens, forward_only=True)
        worst += [(abs(found / plain - 1), "the loss without adapters")] if found is not None else []
    for one in adapters:
        one.enabled = True
    found = ours(chunks, tokens)
    worst += [(abs(found / expected - 1), "the loss")] if found is not None else []
    for matrix, factor, i in held:
        grad = factor.grad
        if getattr(factor, "sequence_parallel", False) and args.sequence_parallel:
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        want = part(matrix, gradients, i)
        if matrix.experts and parallel.edp > 1 or not matrix.experts and parallel.dp > 1:
            grad = grad.clone()
            group = "expert_data" if matrix.experts else "data"
            dist.all_reduce(grad, group=getattr(parallel_state, f"get_{group}_parallel_group")())
            factor.grad = grad
        copies = parallel.dp  # each has the same rows
        worst.append(
            (
                float((grad - copies * want).abs().max() / (copies * want).abs().max().clamp_min(1e-300)),
                f"{matrix.name} {'AB'[i]}",
            )
        )
    worst.append((norm_difference(held, gradients, parallel), "the norm by Megatron's filters"))
    parallel_state.destroy_model_parallel()
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, max(worst))
    return max(each), len(held)


if __name__ == "__main__":
    scratch, cases = Path(sys.argv[1]), json.loads(sys.argv[2])  # Megatron's parser gets another sys.argv
    dist.init_process_group("gloo")
    stay_in_float64()
    for name, case in cases.items():
        (largest, what), count = check(case, scratch / name.replace(" ", "-"))
        if dist.get_rank() == 0:
            print(f"{name}\t{largest:.2e}\t{what}\t{count}", flush=True)
    dist.destroy_process_group()
