"""`generate --join`: what is wrong with the address or the secret is said at once, before torch is imported."""

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.generators import engine_loop, join, launcher_ranks, serving
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.invitation import SECRET_BYTES, read_secret, write_secret

SECRET = "ab" * SECRET_BYTES
SAYS = {
    "no file": ("machine:1", None, 0o600, "secret file FILE: there is no such file. A job writes it (SAVE/rl/secret)"),
    "another file": ("machine:1", "no secret", 0o600, "FILE holds no secret: it has 9 characters, but a secret is 64 "),
    "cut": ("machine:1", SECRET[2:], 0o600, "FILE holds no secret: it has 62 characters"),
    "open to others": ("machine:1", SECRET, 0o640, "FILE has mode 640: others can read it; chmod 600 FILE"),
    "no port": ("machine", SECRET, 0o600, "address 'machine' of a job is neither HOST:PORT"),
    "no such port": ("machine:65536", SECRET, 0o600, "'machine:65536' of a job is neither HOST:PORT (port 1 to"),
    "no tokenizer": ("127.0.0.1:1", SECRET, 0o600, "--tokenizer /nowhere: no such directory; give a copy"),
}


def secret_file(folder: Path, text: str | None, mode: int) -> Path:
    file = folder / "secret"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    return file


@pytest.mark.parametrize("case", SAYS)
def test_what_is_wrong_is_said_with_its_mend(tmp_path, capsys, case: str) -> None:
    address, text, mode, says = SAYS[case]
    file = secret_file(tmp_path, text, mode)
    tokenizer = ["--tokenizer", "/nowhere"] if case == "no tokenizer" else []
    assert join.main(["--join", address, "--secret-file", str(file), *tokenizer]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[rl] generate: ") and says.replace("FILE", str(file)) in line


def test_what_a_server_takes_no_notice_of_is_refused_by_name(capsys) -> None:
    arguments = ["--join", "machine:1", "--secret-file", "f", "--engine-url", "http://b:8000", "--max-running", "4"]
    with pytest.raises(SystemExit):
        join.main([*arguments, "--kv-cache-gb", "1", "--device-memory-utilization", "1"])
    assert "error: --kv-cache-gb, --device-memory-utilization: the server at" in capsys.readouterr().err


def test_it_is_said_before_torch_is_imported(tmp_path) -> None:
    arguments = ["--join", "machine:1", "--secret-file", str(secret_file(tmp_path, "no secret", 0o600))]
    program = f"import sys\nfrom mindspeed_rl_plugin.generators import join\njoin.main({arguments})\n"
    program += "print(sorted({'torch', 'numpy', 'vllm'} & {*sys.modules}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n" and "holds no secret" in ended.stderr


def test_a_bridge_to_a_server_touches_no_device(monkeypatch) -> None:
    taken, made = [], []
    device = SimpleNamespace(kind="cuda", api=SimpleNamespace(set_device=taken.append))
    monkeypatch.setattr(launcher_ranks, "get_device", lambda: device)
    monkeypatch.setattr(launcher_ranks.dist, "init_process_group", lambda backend, **named: made.append(backend))
    monkeypatch.setattr(serving, "serve", lambda *given, **more: None)
    monkeypatch.setattr(join.signal, "signal", lambda *given: None)
    argv = ["--join", "machine:1", "--secret-file", "f"]
    join._generate(join._options([*argv, "--engine-url", "http://b:1"]), threading.Event())
    assert (taken, made) == ([], ["gloo"])


def test_ranks_of_an_engine_wait_as_long_as_the_job(monkeypatch) -> None:
    groups = []
    monkeypatch.setattr(engine_loop.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(engine_loop.dist, "new_group", lambda **given: groups.append(given))
    monkeypatch.setattr(engine_loop.GroupPeers, "__init__", lambda self, group: None)
    engine_loop.Team(7200.0)
    assert groups == [{"backend": "gloo", "timeout": timedelta(hours=2)}]


def test_a_secret_comes_back_and_an_address_where_nobody_listens_is_named(tmp_path) -> None:
    write_secret(tmp_path / "secret", bytes(range(SECRET_BYTES)))
    assert read_secret(tmp_path / "secret") == bytes(range(SECRET_BYTES))
    with pytest.raises(ConnectionError, match=r"no job answers at 127\.0\.0\.1:1: .*refused; give the address"):
        GuestDock.join("127.0.0.1:1", tmp_path / "secret")
