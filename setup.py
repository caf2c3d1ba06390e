"""Package of mindspeed_rl_plugin. The CPU environment comes from requirements/cpu.lock (see setup.sh)."""

from setuptools import find_packages, setup

MATH = "math-verify[antlr4_13_2]"  # --rl-reward math

setup(
    name="mindspeed-rl-plugin",
    version="0.1.0",
    description="Reinforcement learning for an existing Megatron-LM / MindSpeed pretraining script, by flags",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["mindspeed_rl_plugin", "mindspeed_rl_plugin.*"]),
    package_data={
        "mindspeed_rl_plugin.tools.report": ["*.html", "*.js", "*.css", "*.in"],
        "mindspeed_rl_plugin.tools.rehearse": ["*.sh"],
    },
    python_requires=">=3.10",
    install_requires=[
        *("torch", "tensordict", "transformers", "datasets", "pyarrow", "safetensors", "msgspec", "tqdm"),
        *("jinja2", "websockets", "starlette", "uvicorn"),
    ],
    extras_require={
        "math": [MATH],
        "cuda": ["vllm>=0.9.1", "ray", MATH],
        # No exact versions: a pair goes with the CANN of the machine, and is there already where MindSpeed trains.
        "npu": ["torch-npu", "vllm-ascend>=0.9.1", "ray", MATH],
        "test": ["pytest", "pytest-timeout", "hypothesis", "ruff"],
    },
)
