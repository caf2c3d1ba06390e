"""How a model is divided over ranks: by Megatron (`Parallel`) and by vLLM (`EngineParallel`). Also the flags of
Megatron, MindSpeed and MindSpeed-LLM that place layers on pipeline stages, and experts on ranks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

from mindspeed_rl_plugin.config.flag import spelt

# Flags that place layers on pipeline stages, and are refused with `--schedules-method dualpipev`.
_PLACING = (
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "num_layer_list"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
_GIVEN_BY = {"virtual_pipeline_model_parallel_size": "--num-layers-per-virtual-pipeline-stage"}  # argument -> flag


class Coordinates(NamedTuple):
    """Index of a rank on each parallel axis. Experts have other axes than the rest: `etp`, `ep`, `edp`."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Parallel:
    """Sizes of the parallel axes. Data parallel sizes are computed from the world.

    Raises ValueError if they do not divide the world, and for several virtual stages with a single pipeline stage.
    Source: RankGenerator of megatron/core/parallel_state.py, the same in core 0.12.1, 0.16.1 and 0.19.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks per rank; 1: no interleaving
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # tensor parallel size of experts; None: tp
    order: str = "tp-cp-ep-dp-pp"  # Megatron's rank order, fastest axis first
    first_layers: int | None = None  # number of layers of the first stage, if it differs from the others
    last_layers: int | None = None  # number of layers of the last stage, if it differs from the others
    embedding_counts: bool = False  # the embedding takes the place of one layer
    loss_counts: bool = False  # the loss takes the place of one layer
    chunk_layers: tuple[int, ...] | None = None  # number of layers of each chunk in execution order, if a flag lists it
    noop: tuple[int, ...] = ()  # numbers of MindSpeed's no-op layers; stages count them, `ModelShape.layers` does not
    tp_in_ep: bool = False  # `ep` counts tensor parallel ranks too (MindSpeed's --moe-tp-extend-ep)
    # MindSpeed's --schedules-method dualpipev: a stage has two chunks (`vpp` is 2). Execution goes from the first stage
    # to the last and back, so the first stage has chunks 0 and 2 x pp - 1.
    folded: bool = False

    def __post_init__(self) -> None:
        experts = self.expert_tp * self.ep * self.pp
        for what, size in (("tp x pp x cp", self.tp * self.pp * self.cp), ("etp x ep x pp", experts)):
            if self.world % size:
                raise ValueError(f"{what} = {size} does not divide the world of {self.world} ranks")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"{self.vpp} virtual stages need more than one pipeline stage")
        assert self.vpp == 2 or not self.folded, f"{self.vpp} chunks of a folded pipeline"

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def in_megatron(self, ep: int) -> int:
        """The size or rank in Megatron's own expert parallel groups for a size or rank `ep` of this class."""
        return ep // self.tp if self.tp_in_ep else ep

    @property
    def dp(self) -> int:
        """Data parallel size of all parameters except those of experts."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data parallel size of the experts."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world} ranks")
        dense = self._unravel(rank, {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})
        expert = self._unravel(rank, {"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp})
        return Coordinates(dense["tp"], dense["cp"], dense["dp"], dense["pp"], expert["tp"], expert["ep"], expert["dp"])

    def _unravel(self, rank: int, sizes: dict[str, int]) -> dict[str, int]:
        place = {}
        for axis in self.order.split("-"):
            rank, place[axis] = divmod(rank, sizes[axis])
        return place

    @property
    def last_stage(self) -> int:
        """The stage that holds the end of the model."""
        return 0 if self.folded else self.pp - 1

    def _chunks(self, pp_rank: int) -> Sequence[int]:
        if self.folded:
            return pp_rank, 2 * self.pp - 1 - pp_rank
        return range(pp_rank, self.pp * self.vpp, self.pp)

    def chunk_sizes(self, layers: int) -> tuple[int, ...]:
        """Number of layers of each chunk in execution order, no-op layers included. layers: `ModelShape.layers`.

        Raises ValueError when the layers do not divide. Source: get_num_layers_to_build of
        megatron/core/transformer/transformer_block.py.
        """
        layers += len(self.noop)
        sizes = self.chunk_layers or self._derived_sizes(layers)
        if len(sizes) != self.pp * self.vpp or sum(sizes) != layers or min(sizes) < 0:
            raise ValueError(f"{layers} layers do not fit pp={self.pp} vpp={self.vpp} as chunks of {list(sizes)}")
        return tuple(sizes)

    def _derived_sizes(self, layers: int) -> list[int]:
        if self.pp == 1:
            return [layers]
        total = layers + self.embedding_counts + self.loss_counts
        given = {0: self.first_layers, self.pp - 1: self.last_layers}
        given = {stage: count for stage, count in given.items() if count is not None}
        left, stages = total - sum(given.values()), self.pp - len(given)
        if stages and left % stages:
            raise ValueError(f"{left} layers do not divide over {stages} pipeline stages")
        counts = [given[p] if p in given else left // stages for p in range(self.pp)]
        if any(count % self.vpp for count in counts):
            raise ValueError(f"layers per pipeline stage {counts} do not divide into {self.vpp} virtual stages")
        sizes = [counts[p] // self.vpp for _ in range(self.vpp) for p in range(self.pp)]
        sizes[0] -= self.embedding_counts
        sizes[-1] -= self.loss_counts
        return sizes

    def stage_layers(self, layers: int, pp_rank: int) -> tuple[dict[int, int], ...]:
        """For each chunk of a pipeline stage: global number of a layer -> its number within the chunk. Only the number
        within the chunk counts no-op layers. layers: `ModelShape.layers`."""
        sizes, numbers = self.chunk_sizes(layers), count()
        model = [None if i in self.noop else next(numbers) for i in range(sum(sizes))]
        ends = list(accumulate(sizes))
        chunks = (model[ends[i] - sizes[i] : ends[i]] for i in self._chunks(pp_rank))
        return tuple({layer: at for at, layer in enumerate(chunk) if layer is not None} for chunk in chunks)

    @classmethod
    def from_megatron_args(cls, args: argparse.Namespace) -> Parallel:
        """The layout that Megatron's validated arguments describe. Raises ValueError for one that is not supported."""
        folded = folds(args)
        layout = getattr(args, "pipeline_model_parallel_layout", None)
        listed = getattr(args, "num_layer_list", None)
        spread = spread_experts(args)
        return cls(
            world=args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vpp=2 if folded else getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size * spread,
            etp=1 if spread > 1 else args.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            first_layers=args.decoder_first_pipeline_num_layers,
            last_layers=args.decoder_last_pipeline_num_layers,
            embedding_counts=args.account_for_embedding_in_pipeline_split,
            loss_counts=args.account_for_loss_in_pipeline_split,
            chunk_layers=listed_layers(listed, args) if listed else count_layers(str(layout)) if layout else None,
            noop=noop_layers(args),
            tp_in_ep=spread > 1,
            folded=folded,
        )


@dataclass(frozen=True)
class EngineParallel:
    """One engine of vLLM: `ranks` consecutive ranks. Its data parallel size is `ranks / tp`.

    The boolean fields say how this version of vLLM, on this platform, stores parameters. Raises ValueError for sizes
    that vLLM cannot combine.
    """

    tp: int = 1  # tensor parallel size of all parameters except those of experts
    ep: int = 1  # number of ranks over which complete experts are spread; 1: each rank stores a part of every expert
    nested: bool = True  # expert parameters are in a module `routed_experts` (vLLM from 0.20 on)
    fused_down: bool = True  # latent attention has one down projection parameter (vLLM from 0.10 on)
    transposed: bool = False  # experts are stored transposed (vllm-ascend)
    # each rank stores the complete shared experts: vLLM on CUDA and CPU if 1 < tp < ep, because the ranks of an engine
    # then have different tokens (`use_sequence_parallel_moe`)
    whole_shared: bool = False
    own_head: bool = False  # a head is stored although embeddings are tied

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1:
            raise ValueError(f"engine sizes must be at least 1, got tp={self.tp} ep={self.ep}")
        if self.ep > 1 and self.ep % self.tp:
            raise ValueError(
                f"engine with tp={self.tp} cannot spread experts over ep={self.ep} ranks: vLLM spreads them over all "
                "tensor and data parallel ranks of an engine; choose a multiple of tp"
            )

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep)

    def experts(self, total: int, rank: int) -> range:
        """Experts that a rank stores, complete or in part. Source: determine_expert_map of vllm fused_moe (linear)."""
        each, more = divmod(total, self.ep)
        at = rank if self.ep > 1 else 0
        return range(at * each + min(at, more), (at + 1) * each + min(at + 1, more))


def chunk_prefix(chunk: int, chunks: int) -> str:
    """Prefix of parameter names in one of a rank's model chunks; "" if the rank has only one chunk."""
    return f"chunk{chunk}." if chunks > 1 else ""


def folds(args: argparse.Namespace) -> bool:
    """Whether MindSpeed's `--schedules-method dualpipev` places the layers.

    Raises ValueError for another method, for a single pipeline stage, and for other flags that place layers, even if
    MindSpeed accepts or ignores these. Source: dualpipev_feature.py and core/pipeline_parallel/dualpipev of 26.1.0.
    """
    given = getattr(args, "schedules_method", None)
    if given is None:
        return False
    if given != "dualpipev":
        raise ValueError(f"--schedules-method {given} places layers in an unknown way; give dualpipev, or remove it")
    if others := [name for name in _PLACING if getattr(args, name, None)]:
        shown = " and ".join(_GIVEN_BY.get(name) or spelt(name) for name in others)
        raise ValueError(f"--schedules-method dualpipev gives every chunk the same number of layers; remove {shown}")
    if args.pipeline_model_parallel_size == 1:
        raise ValueError(
            "--schedules-method dualpipev needs at least 2 pipeline stages; raise --pipeline-model-parallel-size, or "
            "remove --schedules-method"
        )
    return True


def noop_layers(args: argparse.Namespace) -> tuple[int, ...]:
    """Numbers of MindSpeed's `--noop-layers`, which is a text such as "61,62", and a set after MindSpeed's validation.

    Raises ValueError if it is no list of numbers of layers.
    """
    given = getattr(args, "noop_layers", None) or ()
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, Collection) else (given,)
    layers = sorted({int(word) if str(word).isdigit() else -1 for word in words})
    if layers and not 0 <= layers[0] <= layers[-1] < args.num_layers:
        shown = ",".join(map(str, words))
        raise ValueError(f"--noop-layers {shown}: give numbers from 0 to {args.num_layers - 1}, as in 61,62")
    return tuple(layers)


def expert_layers(args: argparse.Namespace) -> tuple[int, ...]:
    """Megatron's numbers of the layers with experts, from 1; they count no-op layers. None without experts.

    Source: get_gpt_decoder_block_spec; `--first-k-dense-replace` of MindSpeed-LLM. Raises ValueError for a
    --moe-layer-freq of another number of layers.
    """
    if not getattr(args, "num_experts", None):
        return ()
    every, layers = getattr(args, "moe_layer_freq", None) or 1, args.num_layers
    pattern = every if isinstance(every, list | tuple) else [int(i % every == 0) for i in range(layers)]
    if len(pattern) != layers:
        raise ValueError(f"--moe-layer-freq describes {len(pattern)} layers, the model has {layers}")
    first, noop = getattr(args, "first_k_dense_replace", None) or 0, noop_layers(args)
    return tuple(i + 1 for i in range(first, layers) if pattern[i] and i not in noop)


def spread_experts(args: argparse.Namespace) -> int:
    """The number of tensor parallel ranks over which MindSpeed's `--moe-tp-extend-ep` spreads experts; 1 without it.

    Tensor parallel rank t of expert parallel rank e has part e x tp + t of the experts. Tokens are sent within the
    experts' tensor and expert parallel group, which must therefore have tp x ep ranks. Raises ValueError for another
    expert tensor parallel size than tp, and for a dispatcher that does not support the flag. Source:
    features_manager/moe/tp_extend_ep.py and moe_feature/tp_extend_ep of MindSpeed 2.3.0.
    """
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if not getattr(args, "moe_tp_extend_ep", False) or tp == 1:
        return 1
    if etp not in (None, tp):
        raise ValueError(
            f"--moe-tp-extend-ep with --expert-tensor-parallel-size {etp}: experts would be spread over {tp} tensor"
            " parallel ranks, but tokens would not be sent to all of them; drop --expert-tensor-parallel-size, or give"
            f" --expert-tensor-parallel-size 1 --expert-model-parallel-size {tp * args.expert_model_parallel_size}"
            " without --moe-tp-extend-ep"
        )
    dispatcher = getattr(args, "moe_token_dispatcher_type", "alltoall_seq")
    if dispatcher != "alltoall_seq":
        raise ValueError(
            f"--moe-tp-extend-ep with --moe-token-dispatcher-type {dispatcher}: MindSpeed supports this with only one "
            "dispatcher; give --moe-token-dispatcher-type alltoall_seq, or remove --moe-tp-extend-ep"
        )
    return tp


def count_layers(layout: str) -> tuple[int, ...]:
    """Number of layers of each chunk in `--pipeline-model-parallel-layout`; "Et*3|(tt|)*2tL" gives (3, 2, 2, 1)."""
    flat = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    flat = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), flat)
    if not re.fullmatch(r"E[t|]*L", flat):
        raise ValueError(f"pipeline layout {layout!r} may hold only layers t between the embedding E and the loss L")
    return tuple(stage.count("t") for stage in flat.split("|"))


def listed_layers(listed: str | Sequence[int], args: argparse.Namespace) -> tuple[int, ...]:
    """Number of layers of every stage in MindSpeed-LLM's `--num-layer-list` such as "7,7,8".

    Raises ValueError if MindSpeed-LLM refuses the list, or if it would build other dense layers than
    `--first-k-dense-replace` says, because it numbers layers as if all stages had the same number of layers. Source:
    features_manager/pipeline_parallel/num_layer_list.py, core/transformer/transformer_block.py of 2.3.0.
    """
    words = listed.split(",") if isinstance(listed, str) else [str(n) for n in listed]
    if not all(word.strip().isdigit() for word in words):
        raise ValueError(f"--num-layer-list {listed}: it needs a number for every pipeline stage, as in 7,7,8")
    sizes, stages = tuple(map(int, words)), args.pipeline_model_parallel_size
    if len(sizes) != stages or stages == 1 or sum(sizes) != args.num_layers:
        raise ValueError(
            f"--num-layer-list {listed}: {len(sizes)} stages with {sum(sizes)} layers do not fit "
            f"--pipeline-model-parallel-size {stages} (at least 2) and --num-layers {args.num_layers}"
        )
    if getattr(args, "virtual_pipeline_model_parallel_size", None):
        raise ValueError(f"--num-layer-list {listed}: MindSpeed-LLM has no virtual pipeline stages with this flag")
    dense = getattr(args, "first_k_dense_replace", None) or 0
    every = getattr(args, "moe_layer_freq", None) if dense else 1
    every = every if isinstance(every, int) and every > 0 else 1
    for stage in range(stages):
        start, counted = sum(sizes[:stage]), stage * (args.num_layers // stages)
        moe = [[i >= dense and i % every == 0 for i in range(at, at + sizes[stage])] for at in (start, counted)]
        if dense and moe[0] != moe[1]:
            raise ValueError(
                f"--num-layer-list {listed}: MindSpeed-LLM takes layer {start} for layer {counted}, because it counts "
                "as if all stages had the same number of layers; so it builds other dense layers than "
                f"--first-k-dense-replace {dense} says; choose a list with which these are the same"
            )
    return sizes
