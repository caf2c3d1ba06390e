"""What is set for vLLM, what a user's environment may say, and what is refused."""

import os
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.host.engine_env import prepare_engine_env

pytestmark = pytest.mark.quick
SET = (engine_env.REQUIRED, engine_env.REQUIRED_NPU, engine_env.DEFAULTS, engine_env.DEFAULTS_CPU)
NAMES = [name for table in (*SET, engine_env.DEFAULTS_CUDA) for name in table]
NAMES += ["VLLM_USE_V1", *engine_env.ALLOCATOR_SETTINGS["npu"], *engine_env.ALLOCATOR_SETTINGS["cuda"]]
EXPANDABLE = "page_size:1g, expandable_segments: True"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("kind", "version", "name", "own", "expected"),
    [
        ("cpu", 32, "VLLM_ENABLE_V1_MULTIPROCESSING", None, "0"),
        ("cpu", 32, "VLLM_LOGGING_LEVEL", None, "ERROR"),
        ("cpu", 32, "VLLM_LOGGING_LEVEL", "DEBUG", "DEBUG"),  # the user's defaults win
        ("cpu", 32, "VLLM_ASCEND_ENABLE_NZ", None, None),
        ("npu", 32, "VLLM_ASCEND_ENABLE_NZ", None, "0"),
        ("npu", 32, "VLLM_LOGGING_LEVEL", None, "WARNING"),
        ("npu", 9, "VLLM_USE_V1", None, "1"),
        ("npu", 11, "VLLM_USE_V1", None, None),
        ("cuda", 32, "VLLM_ALLREDUCE_USE_SYMM_MEM", None, "0"),
        ("cuda", 32, "VLLM_ALLREDUCE_USE_SYMM_MEM", "1", "1"),
        ("cuda", 23, "PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE, EXPANDABLE),
        ("cuda", 18, "PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE, ValueError),
        ("npu", 23, "PYTORCH_NPU_ALLOC_CONF", EXPANDABLE, ValueError),
        ("cpu", 32, "VLLM_ENABLE_V1_MULTIPROCESSING", "1", ValueError),
        ("npu", 32, "VLLM_ASCEND_ENABLE_NZ", "1", ValueError),
        ("npu", 32, "VLLM_ASCEND_ENABLE_FUSED_MC2", "1", ValueError),
        ("npu", 32, "VLLM_ASCEND_ENABLE_MLAPO", "1", ValueError),
    ],
)
def test_what_is_set_and_refused(monkeypatch, kind, version, name, own, expected) -> None:
    monkeypatch.setattr(engine_env, "vllm_version", lambda: (0, version))
    if own:
        monkeypatch.setenv(name, own)
    if expected is ValueError:
        with pytest.raises(ValueError, match=name):
            prepare_engine_env(kind, sleep_mode=True)
        return
    for _ in range(2):
        prepare_engine_env(kind, sleep_mode=True)
    assert os.environ.get(name) == expected


def test_without_sleep_mode_segments_may_expand(monkeypatch) -> None:
    monkeypatch.setattr(engine_env, "vllm_version", lambda: (0, 18))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    prepare_engine_env("cuda", sleep_mode=False)


def test_version_of_the_installed_vllm() -> None:
    assert engine_env.vllm_version() >= (0, 9)


@pytest.mark.parametrize(("source", "able"), [("self.external_launcher_dp = True", True), ("", False), (None, False)])
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
