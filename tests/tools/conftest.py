"""What the tests of `import` and `export` share: random models of every family, and both commands."""

import json
import re
import signal
from pathlib import Path
from shutil import rmtree

import pytest
import torch
import torch.distributed.checkpoint as dcp
from family_configs import CONFIGS
from safetensors.torch import load_file, save_file

from mindspeed_rl_plugin.layout.families import FAMILIES
from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.tools.convert import to_hf, to_megatron
from mindspeed_rl_plugin.tools.convert.checkpoint import MODEL_FILE

SIZES = dict(vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=10000.0)
SIZES |= dict(num_key_value_heads=2)
LATENT = dict(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
KIMI = dict(rope_type="yarn", factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
OWN = {
    "llama": dict(rope_scaling=dict(rope_type="llama3", **LLAMA3)),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False),
    "qwen3_moe": dict(mlp_only_layers=[1], head_dim=8),
    "qwen2_moe": dict(mlp_only_layers=[1]),
    "deepseek_v2": dict(q_lora_rank=None),
    "kimi_k2": dict(rope_parameters=None, rope_scaling=KIMI | dict(original_max_position_embeddings=4096)),
}


def config_of(family: str) -> dict[str, object]:
    """Fields of a small model's config.json."""
    own = (LATENT if "kv_lora_rank" in CONFIGS[family] else {}) | OWN.get(family, {})
    return {"model_type": FAMILIES[family].model_type or family} | SIZES | CONFIGS[family] | own


class Convert:
    """Both commands in one folder: from `hf` to `ckpt`, from there to `back`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.hf, self.ckpt, self.back = (folder / name for name in ("hf", "ckpt", "back"))
        self._capsys = capsys

    def make(self, family: str, dtype=torch.bfloat16, **changes) -> dict[str, torch.Tensor]:
        """A random model of a family in two files; returns its tensors."""
        self.hf.mkdir(exist_ok=True)
        config = config_of(family) | changes
        self.config(**config)
        tensors = canonical_tensors(ModelShape.from_hf_config(config))
        weights = {n: torch.randn(t.shape).to(torch.float32 if t.wide else dtype) for n, t in tensors.items()}
        for i in range(2):
            names = sorted(weights)[i::2]
            save_file({n: weights[n] for n in names}, self.hf / f"model-0000{i + 1}-of-00002.safetensors")
        return weights

    def config(self, **changes) -> None:
        """Change fields of config.json."""
        path = self.hf / "config.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))

    def imported(self, train: str, *more: object, refused: str = "") -> str:
        """Import; where it must be refused, with this in its message. Returns what was printed."""
        return self._run(to_megatron.main, self.hf, self.ckpt, refused, "--train", train, *more)

    def exported(self, *more: object, refused: str = "") -> dict[str, torch.Tensor]:
        """Export; returns the tensors, and what was printed in `said`."""
        self.said = self._run(to_hf.main, self.ckpt, self.back, refused, *more)
        return {name: t for file in self.back.glob("*.safetensors") for name, t in load_file(file).items()}

    def _run(self, main, load: Path, out: Path, refused: str, *more: object) -> str:
        self._capsys.readouterr()
        status = main(["--load", str(load), "--out", str(out), *map(str, more)])
        printed = self._capsys.readouterr()
        assert status == bool(refused), printed.err
        assert refused in printed.err
        return printed.out + printed.err

    def distributed(self, numbered: bool) -> Path:
        """Make the imported checkpoint, of one rank and TransformerEngine's names, one of torch_dist: experts stacked,
        and layers too unless they are numbered, as Megatron numbers them where they are not all alike. Returns its
        folder."""
        (file,) = self.ckpt.glob(f"release/*/{MODEL_FILE}")
        state = torch.load(file, weights_only=False)
        entries = {name: tensor for name, tensor in state.pop("model").items()}
        for what, axis in ((r"(?<=mlp\.experts\.)local_experts\.(\d+)", "experts"), (r"(?<=layers)\.(\d+)", "")):
            if axis or not numbered:
                entries = _stacked(entries, what, axis)
        rmtree(file.parent)
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(file.parents[1]), no_dist=True)
        torch.save(state, file.parents[1] / "common.pt")
        return file.parents[1]

    def change(self, folder: str, edit) -> None:
        """Edit one file of the checkpoint."""
        path = self.ckpt / "release" / folder / MODEL_FILE
        state = torch.load(path, weights_only=False)
        edit(state)
        torch.save(state, path)


def _stacked(entries: dict[str, torch.Tensor], pattern: str, name: str) -> dict[str, torch.Tensor]:
    """Entries whose names differ only in a number that follows a pattern, as one entry."""
    groups: dict[str, list[torch.Tensor]] = {}
    for old in sorted(entries, key=lambda n: [int(number) for number in re.findall(pattern, n)]):
        groups.setdefault(re.sub(pattern, name, old), []).append(entries[old])
    return {new: torch.stack(g) if re.search(pattern, new) or len(g) > 1 else g[0] for new, g in groups.items()}


@pytest.fixture(autouse=True)
def no_handlers_stay():
    """Commands that run in the process of the tests handle signals, and later children of it would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def convert(tmp_path, capsys) -> Convert:
    return Convert(tmp_path, capsys)
