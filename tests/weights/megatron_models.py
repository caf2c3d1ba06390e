"""Megatron's own model of a shape, by its flags and its parser, as pretrain_gpt.py builds it. Imported by ranks."""

import inspect
import sys

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training.arguments import parse_args, validate_args

from mindspeed_rl_plugin.tools.convert.arguments import flags, megatron_arguments

RUN = "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-4 --distributed-backend gloo"


def described(shape, parallel):
    """Megatron's arguments of a shape in a layout; of experts, two answer."""
    fields = dict(model_type=shape.family, max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=10000.0)
    experts = dict(num_experts_per_tok=2, norm_topk_prob=True) if shape.table.experts else {}
    return megatron_arguments(shape, parallel, fields | experts)


def parsed(described, more):
    """What Megatron's parser makes of such arguments and of further flags."""
    sys.argv = ["pretrain_gpt.py", *flags(described), *RUN.split(), *more]
    args = parse_args()
    validate_args(args)
    args.padded_vocab_size = described.padded_vocab_size
    return args


def built(args, config, **stage):
    """stage: whether it has the embedding and the head, and the number of the chunk, which core 0.12 does not take."""
    known = inspect.signature(GPTModel.__init__).parameters
    stage = {name: value for name, value in stage.items() if name in known}
    given = dict(normalization=args.normalization, vp_stage=stage.get("vp_stage"))
    known = inspect.signature(get_gpt_decoder_block_spec).parameters
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, False, **{name: value for name, value in given.items() if name in known}),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **stage,
    )
