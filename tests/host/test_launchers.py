"""Launch scripts that a rehearsal, or a plan, cannot take down: the message names what happened."""

import re

import pytest

from mindspeed_rl_plugin.tools.plan import dock_volume as plan
from mindspeed_rl_plugin.tools.rehearse.capture import capture
from mindspeed_rl_plugin.tools.rehearse.launchers import check_launchers


@pytest.mark.parametrize(
    "text, path",
    [
        ("/opt/bin/torchrun a.py", "/opt/bin/torchrun"),
        ('cd x && "$ROOT/bin/torchrun" \\\n --nnodes 1 a.py', "$ROOT/bin/torchrun"),
        ("A=1 B=2 nohup ./torchrun a.py &", "./torchrun"),
        ("if true; then numactl --cpunodebind=0 /opt/torchrun a.py; fi", "/opt/torchrun"),
        ("/usr/bin/python3.11 -m torch.distributed.launch a.py", "/usr/bin/python3.11"),
        ("export RUN=/opt/torchrun\n$RUN a.py", "/opt/torchrun"),
        ('"${TORCHRUN:-.venv/bin/torchrun}" a.py', ".venv/bin/torchrun"),
    ],
)
def test_a_launcher_by_its_path_is_refused_before_it_runs(text, path, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\ntouch {tmp_path}/ran\n{text}\n")
    with pytest.raises(ValueError, match=r"train.sh line [34]: " + re.escape(path) + " is called by its path"):
        capture(script, tmp_path / "scratch", 60)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "#!/usr/bin/env torchrun\n# /opt/torchrun a.py",
        "torchrun --log-dir /logs/torchrun a.py",
        "if [ -x /opt/torchrun ]; then nohup torchrun --log-dir /logs/torchrun a.py; fi",
        "ssh a 'cd /x && /opt/torchrun a.py'",
        "/usr/bin/python tool.py; /usr/bin/python -m json.tool x",
        "LOG=/logs/torchrun\ntorchrun a.py",
        '"${TORCHRUN:-.venv/bin/torchrun}" a.py',
    ],
)
def test_other_paths_are_not(text, tmp_path):
    (tmp_path / "train.sh").write_text(text)
    check_launchers(tmp_path / "train.sh", {"TORCHRUN": "torchrun"})


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "train.sh: no such file; give a launch script"),
        ("for h in a b; do ssh $h 'bash run.sh'; done; exit 1", "leaves its launch to ssh (ssh a 'bash run.sh')"),
        ("torchrun --nproc_per_node $N --nnodes 2 a.py --x 1", "expected one argument; they begin with '--nproc"),
        ("torchrun --nproc_per_node '' a.py", "--nproc-per-node has no value"),
        ("torchrun --nnodes '' a.py", "--nnodes is ''"),
        ("torchrun --master_addr $ADDR a.py 4", "the entry script would be '4', which is no *.py"),
        ("torchrun a.py --num-layers $N --hidden-size 4", "train.sh: --num-layers has no value; is a variable of the"),
        ("torchrun a.py x", "train.sh: the training arguments begin with 'x'"),
    ],
)
def test_what_happened_is_named(text, message, tmp_path, capsys):
    if text is not None:
        (tmp_path / "train.sh").write_text(text)
    assert plan.main([str(tmp_path / "train.sh")]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
