"""Imports everything that the project runs on and says what is missing. Exits 1 when something is."""

import importlib
import sys
import warnings

MODULES = (
    "torch", "transformers", "datasets", "math_verify", "pyarrow", "tensordict", "ray", "vllm", "tensorboard",
    "megatron.core", "mindspeed_rl_plugin", "pytest", "hypothesis", "ruff",
)  # fmt: skip


def main() -> int:
    warnings.simplefilter(
        "ignore"
    )  # megatron-core says on import that TransformerEngine is absent, which is meant here
    missing = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a shared library of a wrong build
            missing.append(f"  {name}: {type(error).__name__}: {error}")
            continue
        print(f"setup: {name} {getattr(module, '__version__', '')}".rstrip())
    if missing:
        print("setup: these do not import:", *missing, "remove .venv and run setup.sh again", sep="\n", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
