"""The functions of Megatron and MindSpeed-LLM that the plugin wraps: one row per patch, as data."""

from __future__ import annotations

from mindspeed_rl_plugin.launch import hooks
from mindspeed_rl_plugin.launch.patching import Patch

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.training.arguments.add_megatron_arguments",
        hook=hooks.add_megatron_arguments,
        leading=("parser",),
        why="adds the --rl-* flags to the parser that every entry script uses",
        versions="0.12.1 arguments.py:34, 0.16.1 :48, 0.18.0 :57, 0.19.0 :45",
        remove_when="entry scripts discover extra_args_provider from installed packages",
    ),
    Patch(
        target="megatron.training.arguments.validate_args",
        hook=hooks.validate_args,
        leading=("args",),
        why="refuses arguments that cannot work, before process groups, model or data are built",
        versions="0.12.1 arguments.py:276, 0.16.1 :293, 0.18.0 :399, 0.19.0 :388",
        remove_when="Megatron offers a validation hook",
    ),
    Patch(
        target="megatron.training.training.setup_model_and_optimizer",
        hook=hooks.under_rl("setup_model_and_optimizer"),
        leading=(),
        why="decides where training starts: it is the only caller of load_checkpoint before the first step, "
        "and the only function that gets the model provider (core <= 0.18) or the model config (0.19)",
        versions="0.12.1 training.py:1105, 0.16.1 :1438, 0.18.0 :1938, 0.19.0 :2017",
        remove_when="pretrain() takes a callback between initialisation and model building",
    ),
    Patch(
        target="megatron.training.training.load_checkpoint",
        hook=hooks.under_rl("load_checkpoint"),
        leading=("ddp_model", "optimizer", "opt_param_scheduler"),
        why="loads the reference's weights into the built model before the actor's",
        versions="0.12.1 checkpointing.py:1167, 0.16.1 :1479, 0.18.0 :1613, 0.19.0 :2066",
        remove_when="Megatron loads a second model's weights by itself",
    ),
    Patch(
        target="megatron.training.checkpointing.save_checkpoint",
        hook=hooks.under_rl("save_checkpoint"),
        leading=("iteration", "model", "optimizer", "opt_param_scheduler"),
        why="puts the RL state into the checkpoint before the tracker file names this checkpoint",
        versions="0.12.1 checkpointing.py:306, 0.16.1 :471, 0.18.0 :495, 0.19.0 :552",
        remove_when="save_checkpoint takes extra state",
    ),
    Patch(
        target="megatron.training.training.build_train_valid_test_data_iterators",
        hook=hooks.under_rl("build_train_valid_test_data_iterators"),
        leading=("build_train_valid_test_datasets_provider",),
        why="opens no pretraining data: train_step supplies the rows of a step",
        versions="0.12.1 training.py:2405, 0.16.1 :3422, 0.18.0 :4256, 0.19.0 :4601",
        remove_when="pretrain() accepts ready iterators (dataloader_type external covers only some scripts)",
    ),
    Patch(
        target="megatron.training.training.train_step",
        hook=hooks.under_rl("train_step"),
        leading=("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
        why="runs rollout, rewards and log-probs if they are due, then the original with our forward step and iterator",
        versions="0.12.1 training.py:1213, 0.16.1 :1603, 0.18.0 :2162, 0.19.0 :2336",
        remove_when="Megatron calls a user function before each step",
    ),
)
# Functions of MindSpeed-LLM; patched if their module is imported.
OF_MINDSPEED_LLM: tuple[Patch, ...] = (
    Patch(
        target="mindspeed_llm.training.initialize._convert_weights_if_needed",
        hook=hooks.under_rl("convert_weights"),
        leading=("args", "shared"),
        why="a resume needs no weights of --load, but they would be converted again; conversion errors name no flag",
        versions="MindSpeed-LLM 2.3.0 training/checkpointing.py:310, 26.1.0 :421",
        remove_when="it converts only weights that are not converted yet",
    ),
)
