"""The runner: help, errors, sub-commands, and a script that sees exactly what `python script` would show it."""

import json
import os
import subprocess
import sys
import types

import pytest

from mindspeed_rl_plugin import __main__ as runner


def test_help_lists_the_commands(capsys):
    assert runner.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "-m mindspeed_rl_plugin SCRIPT.py" in text
    for command in runner.SUBCOMMANDS:
        assert f"  {command} " in text


def test_nothing_at_all_and_a_missing_script_are_errors(capsys):
    assert runner.main([]) == 2
    assert "usage:" in capsys.readouterr().out
    assert runner.main(["nowhere.py", "--flag"]) == 2
    error = capsys.readouterr().err
    assert "'nowhere.py' is neither a file nor a command (algorithms, " in error


def test_a_missing_megatron_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.modules['megatron'] = None\nimport megatron.training\n")
    command = [sys.executable, "-m", "mindspeed_rl_plugin", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "script.py imports megatron" in done.stderr and "put your Megatron-LM checkout on PYTHONPATH" in done.stderr


def test_a_command_gets_its_arguments_and_gives_the_status(monkeypatch):
    seen = []
    module = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 3)
    monkeypatch.setitem(sys.modules, "mindspeed_rl_plugin.fake_command", module)
    monkeypatch.setitem(runner.SUBCOMMANDS, "fake", ("fake_command", ""))
    assert runner.main(["fake", "a", "--b"]) == 3
    assert seen == [["a", "--b"]]


def test_a_command_whose_output_nobody_reads_ends_quietly():
    """As behind `| head`; --help too, which is written only when the process ends, and text that is not buffered."""
    for words, unbuffered in (("algorithms", "1"), ("flags --help", "")):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "mindspeed_rl_plugin", *words.split()]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=120)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_an_error(monkeypatch, capsys):
    def broken(argv):
        raise BrokenPipeError("a worker's")

    module = types.SimpleNamespace(main=broken)
    monkeypatch.setitem(sys.modules, "mindspeed_rl_plugin.fake_command", module)
    monkeypatch.setitem(runner.SUBCOMMANDS, "fake", ("fake_command", ""))
    with capsys.disabled(), pytest.raises(BrokenPipeError, match="a worker's"):
        runner.main(["fake"])


SCRIPT = """
import json, sys
import helper_beside_the_script
print("SEEN " + json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "main": sys.modules["__main__"].__file__,
    "attached": "mindspeed_rl_plugin.adaptor" in sys.modules, "megatron": "megatron.training" in sys.modules,
}))
import mindspeed_rl_plugin.adaptor
sys.exit(7)
"""


def test_a_script_runs_as_it_would_alone_and_attaching_imports_no_megatron(tmp_path):
    """MindSpeed must come first; so importing Megatron is left to the script."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(SCRIPT)
    (tmp_path / "inner" / "helper_beside_the_script.py").write_text("")
    command = [sys.executable, "-m", "mindspeed_rl_plugin", "inner/script.py", "--x", "1", "patch"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 7, done.stderr
    values = json.loads(done.stdout.rpartition("SEEN ")[2])
    assert values["name"] == "__main__"
    assert values["argv"] == ["inner/script.py", "--x", "1", "patch"]
    assert values["file"] == values["main"] == "inner/script.py"
    assert os.path.realpath(values["path"]) == os.path.realpath(tmp_path / "inner")
    assert values["attached"] and not values["megatron"]
