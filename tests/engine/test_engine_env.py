"""What is set for vLLM, what a user's environment may say, and what is refused."""

import os
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.host.engine_env import prepare_engine_env

NAMES = [
    *engine_env.REQUIRED,
    *engine_env.REQUIRED_NPU,
    *engine_env.DEFAULTS_CPU,
    *engine_env.DEFAULTS_CUDA,
    *engine_env.DEFAULTS,
    "VLLM_USE_V1",
    "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "kind, name, own, expected",
    [
        ("cpu", "VLLM_ENABLE_V1_MULTIPROCESSING", None, "0"),
        ("cpu", "VLLM_LOGGING_LEVEL", None, "ERROR"),
        ("cpu", "VLLM_LOGGING_LEVEL", "DEBUG", "DEBUG"),  # the user's defaults win
        ("cpu", "VLLM_ASCEND_ENABLE_NZ", None, None),
        ("npu", "VLLM_ASCEND_ENABLE_NZ", None, "0"),
        ("npu", "VLLM_LOGGING_LEVEL", None, "WARNING"),
        ("cuda", "VLLM_ALLREDUCE_USE_SYMM_MEM", None, "0"),
        ("cuda", "VLLM_ALLREDUCE_USE_SYMM_MEM", "1", "1"),
    ],
)
def test_what_is_set(monkeypatch, kind, name, own, expected) -> None:
    if own:
        monkeypatch.setenv(name, own)
    for _ in range(2):
        prepare_engine_env(kind, sleep_mode=True)
    assert os.environ.get(name) == expected


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("cpu", "VLLM_ENABLE_V1_MULTIPROCESSING", "1"),
        ("npu", "VLLM_ASCEND_ENABLE_NZ", "1"),
        ("npu", "VLLM_ASCEND_ENABLE_FUSED_MC2", "1"),
        ("npu", "VLLM_ASCEND_ENABLE_MLAPO", "1"),
        ("npu", "PYTORCH_NPU_ALLOC_CONF", "page_size:1g, expandable_segments: True"),
    ],
)
def test_refused(monkeypatch, kind, name, value) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        prepare_engine_env(kind, sleep_mode=True)


@pytest.mark.parametrize(("version", "refused"), [((0, 18), True), ((0, 23), False)])
def test_expandable_segments_on_cuda(monkeypatch, version, refused) -> None:
    monkeypatch.setattr(engine_env, "vllm_version", lambda: version)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    prepare_engine_env("cuda", sleep_mode=False)
    if refused:
        with pytest.raises(ValueError, match="expandable_segments:True"):
            prepare_engine_env("cuda", sleep_mode=True)
    else:
        prepare_engine_env("cuda", sleep_mode=True)


@pytest.mark.parametrize(("version", "expected"), [((0, 9), "1"), ((0, 11), None)])
def test_v1_switch(monkeypatch, version, expected) -> None:
    monkeypatch.setattr(engine_env, "vllm_version", lambda: version)
    prepare_engine_env("npu", sleep_mode=True)
    assert os.environ.get("VLLM_USE_V1") == expected


def test_version_of_the_installed_vllm() -> None:
    assert engine_env.vllm_version() >= (0, 9)


@pytest.mark.parametrize("source, able", [("self.external_launcher_dp = True", True), ("", False), (None, False)])
def test_whether_engines_can_share_experts_is_read_off_vllms_source(tmp_path, monkeypatch, source, able) -> None:
    module = tmp_path / "vllm" / "v1" / "engine" / "llm_engine.py"
    module.parent.mkdir(parents=True)
    if source is not None:
        module.write_text(source)
    spec = SimpleNamespace(origin=str(tmp_path / "vllm" / "__init__.py"))
    monkeypatch.setattr(engine_env.importlib.util, "find_spec", lambda name: spec)
    assert engine_env.engines_share_experts() == able


def test_a_rank_within_its_group(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "6")
    with pytest.raises(KeyError), engine_env.in_group(4):
        assert os.environ["RANK"] == "2"
        raise KeyError
    assert os.environ["RANK"] == "6"
