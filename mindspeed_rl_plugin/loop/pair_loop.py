"""The loop of DPO: pairs in, one optimizer step of Megatron's an iteration. Called as `iteration.Loop` is."""

from __future__ import annotations

import argparse
import atexit
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin import ranks
from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.engine import hf_config
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.loop import megatron_globals as megatron
from mindspeed_rl_plugin.loop.context import host_memory_budget, make_monitor
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor import rollout_metrics as metrics
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.prompts import Pair, PairStream, check_vocabulary, load_tokenizer, tokenizer_path
from mindspeed_rl_plugin.reshard.offload import HostWeights
from mindspeed_rl_plugin.stages import pair_reference as reference
from mindspeed_rl_plugin.stages.pair_rows import batches_of_step, pair_rows
from mindspeed_rl_plugin.update.pairs import PairUpdate

GRAD_NORM = 5  # place in what Megatron's train_step returns


@dataclass(frozen=True)
class Inputs:
    """What is read and checked before the model. held_out: pairs of the evaluation, None without."""

    args: argparse.Namespace
    config: RLConfig
    algorithm: Algorithm
    forward: ForwardSettings
    pairs: PairStream
    held_out: PairStream | None

    @classmethod
    def read(cls, args: argparse.Namespace, config: RLConfig) -> Inputs:
        """Raises ValueError for whatever is missing or does not fit, on every rank alike."""
        tokenizer = load_tokenizer(tokenizer_path(args))
        check_vocabulary(args, len(tokenizer))
        hf_model = config.rollout.hf_model
        given = hf_config.load_reference(hf_model) if hf_model else None
        forward = ForwardSettings.from_args(
            args,
            vocab_size=hf_config.model_vocab_size(len(tokenizer), args.padded_vocab_size, given),
            temperature=config.rollout.temperature,
            chunk_tokens=config.forward.logprob_chunk_tokens,
        )
        data, limit = config.data, config.rollout.max_response_length

        def stream(paths: Sequence[str], seed: int) -> PairStream:
            found = PairStream(
                paths,
                tokenizer,
                prompt_key=data.prompt_key,
                chosen_key=data.chosen_key,
                rejected_key=data.rejected_key,
                chat_template=data.apply_chat_template,
                max_length=data.max_prompt_length,
                max_response=limit,
                seed=seed,
            )
            if launch_env()["rank"] == 0:
                why = "too long (--rl-max-prompt-length, --rl-max-response-length) or with equal answers"
                print(f"[rl] {len(found)} pairs from {' '.join(paths)}; left out {found.dropped} {why}", flush=True)
            return found

        pairs = stream(data.prompt_data, args.seed if data.data_seed is None else data.data_seed)
        held_out = stream(config.monitor.eval_data, 0) if config.monitor.eval_data else None
        return cls(args, config, resolve(config.algorithm), forward, pairs, held_out)


class PairLoop:
    """DPO behind Megatron's `train_step`."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self.monitor: Monitor | None = None
        self._weights: HostWeights | None = None  # of the reference, while its log-probs are not there
        self._key = ""
        self._restored: Mapping[str, Any] | None = None

    # what startup calls, in this order

    def before_model(self, args: argparse.Namespace) -> None:
        """Read and check tokenizer and pairs before Megatron builds anything."""
        self.inputs = Inputs.read(args, RLConfig.from_args(args))
        atexit.register(self.close)

    def on_reference_loaded(self, model: Any) -> None:
        """The model holds the reference right now: look for its log-probs on disk, else keep a copy of it."""
        i = self.inputs
        held_out = i.held_out.fingerprint if i.held_out else ""
        weights = ranks.weights_digest((n, p) for chunk in model for n, p in chunk.named_parameters())
        self._key = reference.cache_key(weights, i.pairs.fingerprint + held_out, i.forward, i.args.params_dtype)
        self._logps = ranks.on_rank_0(lambda: reference.read_cache(self._folder, self._key, self._count))
        if self._logps is None:
            self._weights = HostWeights.capture(model, budget=host_memory_budget(i.config))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the RL state of a checkpoint."""
        self._restored = state

    def on_checkpoint_loaded(self, model: Any, optimizer: Any, start: Start) -> None:
        """Build what trains around the loaded model, and take the reference's log-probs where they are not there."""
        i = self.inputs
        timeout = datetime.timedelta(seconds=i.config.monitor.wait_timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.model, self.topology = model, Topology.from_megatron(1)
        self.update = PairUpdate(i.algorithm, i.forward, model)
        self.monitor = make_monitor(i.args, i.config, self.topology, start)
        if self._restored is not None:
            i.pairs.load_state(self._restored["cursor"])
        if self._weights is not None:
            with self._weights.swapped_into(model):
                self._logps = self._score(list(range(self._count)), "reference")
            self._weights = None
            if self.topology.leader:
                path = reference.write_cache(self._folder, self._key, self._logps)
                print(f"[rl] log-probs of the reference are kept in {path}", flush=True)
        elif self.topology.leader:
            path = reference.cache_file(self._folder, self._key)
            print(f"[rl] log-probs of the reference are read from {path}", flush=True)
        self._place_of = {row: place for place, row in enumerate(i.pairs.rows)}

    def close(self) -> None:
        """Close the files of the run."""
        if self.monitor is not None:
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """RL state of a checkpoint: the cursor into the pairs."""
        return {"cursor": self.inputs.pairs.state()}

    def train_iterator(self) -> Any:
        """What stands in for the pretraining iterator: nothing, for `train_step` brings the rows of its step."""
        return None

    # one Megatron iteration

    def train_step(self, original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """One optimizer step on the next pairs; returns what Megatron's step returns."""
        i, done = self.inputs, self.inputs.args.curr_iteration
        self.monitor.begin(done + 1)
        if self._evaluation_due(done):
            self._evaluate(done)
        with self.monitor.stage("prompts"):
            count = i.args.global_batch_size // 2
            pairs = i.pairs.next(count)
            rows = pair_rows(pairs, self._logps[[self._place_of[pair.row] for pair in pairs]])
        with self.monitor.stage("update"):
            place = self.topology.dp_rank, self.topology.dp_size
            self.update.prepare(batches_of_step(rows, i.forward.micro_batch_size, *place), count)
            found: dict[str, Any] = {"lr": megatron.learning_rate(args[3])}  # the step ends with the rate of the next
            result = self.update.run(original, args[2:], kwargs)
            found |= {f"dpo/{k}" if k != "loss" else k: v for k, v in self.update.metrics().items()}
        if result[GRAD_NORM] is not None:
            found["grad_norm"] = float(result[GRAD_NORM])
        stages = metrics.largest(self._gather(self.monitor.stage_metrics()))
        tokens, seconds = int(rows["tokens"].offsets[-1]), stages["seconds/iteration"]
        found |= metrics.throughput(tokens, devices=self.topology.world, seconds=seconds)
        self.monitor.log(done + 1, metrics.merge(found, stages))
        if done + 1 == i.args.train_iters and self._evaluation_due(done + 1):
            self._evaluate(done + 1)
        return result

    # inside

    @property
    def _folder(self) -> str:
        """Where log-probs of references are kept."""
        i = self.inputs
        return i.config.algorithm.dpo_reference_cache or str(Path(i.args.save) / "rl" / "reference")

    @property
    def _count(self) -> int:
        """Pairs to train on and held out."""
        return len(self.inputs.pairs) + (len(self.inputs.held_out) if self.inputs.held_out else 0)

    def _pairs_at(self, places: Sequence[int]) -> list[Pair]:
        """Pairs by place: those of the data, then the held-out ones."""
        i, first = self.inputs, len(self.inputs.pairs)
        return [i.pairs.at(p) if p < first else i.held_out.at(p - first) for p in places]

    def _score(self, places: Sequence[int], what: str) -> Tensor:
        """`[len(places), 2]` log-probs of pairs under the weights in the model. Collective."""
        with self.monitor.progress(-(-len(places) // self.topology.dp_size), what) as bar:
            return reference.score_pairs(
                self.model,
                lambda at: self._pairs_at([places[a] for a in at]),
                len(places),
                self.inputs.forward,
                self.topology,
                self._gather,
                bar.set,
            )

    def _evaluation_due(self, done: int) -> bool:
        i = self.inputs
        return i.held_out is not None and (done % i.config.monitor.eval_every == 0 or done == i.args.train_iters)

    def _evaluate(self, done: int) -> None:
        """Margin and accuracy on the held-out pairs. Collective."""
        i, first = self.inputs, len(self.inputs.pairs)
        places = list(range(first, self._count))[: i.config.monitor.eval_prompts or None]
        with self.monitor.stage("evaluate"):
            gain = self._score(places, "evaluate") - self._logps[places]
        if i.algorithm.pairs.length_norm:
            pairs = self._pairs_at(places)
            gain = gain / torch.tensor([[len(p.chosen), len(p.rejected)] for p in pairs])
        margin = i.algorithm.pairs.beta * (gain[:, 0] - gain[:, 1])
        found = {"dpo_margin": float(margin.mean()), "dpo_accuracy": float((margin > 0).double().mean())}
        self.monitor.log_eval(done, found)

    def _gather(self, value: Any) -> list[Any]:
        box = [None] * self.topology.world
        dist.all_gather_object(box, value, group=self._group)
        return box
