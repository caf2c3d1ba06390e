"""Imports everything that the project runs on and says what is missing. Exits 1 when something is."""

import importlib
import sys
import warnings
from types import ModuleType

# What the package and its tests import. Not mindspeed, torch_npu, vllm_ascend: they come with an Ascend machine.
MODULES = (
    "torch", "numpy", "transformers", "tokenizers", "datasets", "math_verify", "sympy", "pyarrow", "tensordict", "ray",
    "vllm", "safetensors", "tensorboard", "wandb", "tqdm", "triton", "einops", "packaging", "pybind11",
    "typing_extensions",
    "mindspeed_rl_plugin", "megatron.core", "megatron.training", "pytest", "pytest_timeout", "xdist", "hypothesis",
    "psutil", "ruff", "huggingface_hub", "msgspec", "jinja2", "websockets", "starlette", "uvicorn", "peft",
)  # fmt: skip


def main(modules: tuple[str, ...] = MODULES) -> int:
    warnings.simplefilter("ignore")  # megatron-core says on import that TransformerEngine is absent, which is meant
    missing = []
    for name in modules:
        try:
            module = imported(name)
        except (ImportError, OSError) as error:  # OSError: a shared library of a wrong build
            missing.append(f"  {name}: {type(error).__name__}: {error}")
            continue
        print(f"setup: {name} {getattr(module, '__version__', '')}".rstrip())
    if missing:
        print("setup: these do not import:", *missing, "remove .venv and run setup.sh again", sep="\n", file=sys.stderr)
    return bool(missing)


def imported(name: str) -> ModuleType:
    if name.startswith("megatron."):  # megatron.training asks for CUDA and for Python 3.12
        importlib.import_module("mindspeed_rl_plugin.host").activate_if_needed(announce=False)
    return importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
