"""Pretrain a GPT with Megatron core 0.19: the plainest entry point that trains on real data.

It knows nothing of reinforcement learning and nothing of the plugin. Model, optimizer and
parallelism come from Megatron's own flags; the data from `--data-path` or `--mock-data`. Left out on
purpose: packed sequences, context parallelism, fill-in-the-middle, distillation.

    torchrun --nproc-per-node 2 -m mindspeed_rl_plugin examples/pretrain_gpt.py --num-layers 2 ...
"""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

FIELDS = ("tokens", "position_ids", "labels", "loss_mask")


def datasets(train_valid_test_samples, vp_stage=None):
    """Train, validation and test set. Every rank builds them, so no batch needs to be broadcast."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, train_valid_test_samples, lambda: True, config).build()


datasets.is_distributed = True


def loss_func(loss_mask, losses):
    """Sum of the token losses `[B, S]`, the number of tokens it covers, and both for the log."""
    mask = loss_mask.flatten().float()
    loss = (losses.flatten().float() * mask).sum()
    tokens = mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(data_iterator, model):
    """One micro-batch. Only the first and the last pipeline stage read what the dataset gives."""
    batch = dict.fromkeys(FIELDS)
    if get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process"):
        row = next(data_iterator)
        batch = {name: row[name].cuda(non_blocking=True) for name in FIELDS}
    losses = model(batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
