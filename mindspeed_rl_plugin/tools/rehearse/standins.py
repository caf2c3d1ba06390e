"""Stand-ins for commands while a launch script runs: what would train, delete, kill, log in or install is taken down.

They lie in a folder that comes first on PATH, and bash functions of their names come before a PATH that the script
changes and before bash's own `kill`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")
# Run where every path that they name is in the script's own scratch folder; else only taken down.
_FILES = ("rm", "rmdir", "mkdir", "touch", "cp", "mv")
_NEVER = (
    *("ln", "install", "dd", "truncate", "shred", "unlink", "chmod", "chown", "chgrp", "rsync"),
    *("kill", "pkill", "killall", "fuser", "ray", "tensorboard", "wandb", "mlflow"),
    *("ssh", "scp", "sftp", "pdsh", "pscp", "clush", "wget", "curl", "hf", "huggingface-cli", "modelscope"),
    *("aws", "obsutil", "gsutil", "hdfs", "hadoop"),
    *("sudo", "su", "docker", "podman", "nerdctl", "kubectl", "systemctl", "service", "crontab"),
    *("reboot", "shutdown", "mount", "umount", "modprobe", "sysctl"),
    *("npu-smi", "hccn_tool", "msnpureport", "pip", "pip3", "conda", "apt", "apt-get", "yum", "dnf"),
    *("mpirun", "srun", "sbatch", "deepspeed", "accelerate", "msrun"),
)
_PYTHONS = ("torchrun", "python", "python3")

_LAUNCH = """#!{python} -IS
import json, os, sys
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
if name != "torchrun" and not (argv[:1] == ["-m"] and argv[1:2] and argv[1] in {launchers!r}):
    os.execv({python!r}, [{python!r}, *argv])
argv = argv if name == "torchrun" else argv[2:]
with open({record!r}, "a") as handle:
    handle.write(json.dumps({{"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}}) + "\\n")
"""
# Only options that take no value: `cp -t FOLDER` names a path that is no operand.
_TAKE_DOWN = """#!{python} -IS
import os, re, shlex, sys
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
paths = [a for a in argv if not a.startswith("-")]
plain = all(re.fullmatch("-[rRfpva]+|--", a) for a in argv if a.startswith("-"))
if name in {files!r} and paths and plain and all(os.path.realpath(p).startswith({own!r} + os.sep) for p in paths):
    os.environ["PATH"] = {path!r}
    os.execvp(name, [name, *argv])
with open({skipped!r}, "a") as handle:
    handle.write(shlex.join([name, *argv]).replace("\\n", " ") + "\\n")
"""
_TEE = "#!/bin/sh\nexec cat\n"
# A simple command as bash prints it, words first, redirections last: its words, where output goes to a file.
_WORDS = """#!{python} -IS
import re, sys
text, depth, quote, at = sys.argv[1], 0, "", 0
while at < len(text):
    c = text[at]
    if c == "\\\\" and quote != "'":
        at += 1
    elif quote:
        quote = "" if c == quote else quote
    elif c in "'\\"`":
        quote = c
    elif c in "({{":
        depth += 1
    elif c in ")}}":
        depth -= 1
    elif not depth and (found := re.match(r" (\\d*|&)[<>]", text[at:])):
        break
    at += 1
if re.search(r"[ \\d&]>[>|]? ?(?!&|\\S*/dev/)", text[at:]):
    print(text[:at])
"""
# bash reads this file before the script; a function comes before the builtin and the command of its name.
_PRELUDE = """
source() {{
    if [ -e "$1" ] || command -v -- "$1" > /dev/null; then builtin source "$@"; else echo "$1" >> {missing}; fi
}}
cd() {{
    if [ $# -ne 1 ] || [ "$1" = - ] || [ -d "$1" ]; then builtin cd "$@"; return; fi
    echo "$1" >> {missing} && builtin cd "$(mktemp -d {own}/cd.XXXXXX)"
}}
for REPLY in {names}; do eval "$REPLY() {{ '{shims}/$REPLY' \\"\\$@\\"; }}"; done
kill() {{ if [ "$1" = -0 ]; then builtin kill "$@"; else '{shims}/kill' "$@"; fi; }}
# A launch whose output goes to a file is made once without that: the file may be refused, and then it is not made.
rehearse_launch() {{
    case "$1" in *torchrun*'>'* | *torch.distributed.*'>'*) ;; *) return 0 ;; esac
    eval "$('{shims}/rehearse-words' "$1")" || return 0
}}
trap 'rehearse_launch "$BASH_COMMAND"' DEBUG
set -o functrace {clobber}
"""


class StandIns:
    """The stand-ins in `folder`, and the files in which they take down what they are called for.

    record: launches, a JSON object each; missing: files and folders that are not here; skipped: commands that were
    not run; own: folder in which the script may write; writable: every folder in which it and the stand-ins write.
    """

    def __init__(self, folder: Path, *, clobber: bool) -> None:
        """clobber: whether the script's `>` may replace a file."""
        folder = folder.resolve()
        taken, self.own, shims = (folder / name for name in ("record", "own", "bin"))
        for each in (taken, self.own, shims):
            each.mkdir(parents=True)
        self.writable = (taken, self.own)
        self.record, self.missing, self.skipped = (taken / name for name in ("launches.jsonl", "missing", "skipped"))
        path = os.environ.get("PATH", os.defpath)
        named = {
            "python": sys.executable,
            "launchers": LAUNCHERS,
            "files": _FILES,
            "path": path,
            "own": str(self.own),
            "record": str(self.record),
            "skipped": str(self.skipped),
        }
        texts = {"tee": _TEE, "rehearse-words": _WORDS.format(**named)}
        texts |= dict.fromkeys(_PYTHONS, _LAUNCH.format(**named))
        texts |= dict.fromkeys(_FILES + _NEVER, _TAKE_DOWN.format(**named))
        for name, text in texts.items():
            (shims / name).write_text(text)
            (shims / name).chmod(0o755)
        prelude = folder / "prelude.sh"
        prelude.write_text(
            _PRELUDE.format(
                missing=f"'{self.missing}'",
                own=f"'{self.own}'",
                shims=shims,
                names=" ".join(n for n in texts if n != "rehearse-words"),
                clobber="" if clobber else "-o noclobber",
            )
        )
        self.environment = {
            **os.environ,
            "PATH": f"{shims}{os.pathsep}{path}",
            "BASH_ENV": str(prelude),
            "TMPDIR": str(self.own),
        }
