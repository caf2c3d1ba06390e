"""Loads an environment of verifiers 0.4 in the interpreter that has it, and reads its rows, for `tasks`.

Of this package, only modules that need the standard library alone can be imported here (`workers.child`).
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, NamedTuple

from mindspeed_rl_plugin.workers.child import Parent, outcome

SUPPORTED = "0.4."
ROWS_AT_ONCE = 256  # rows of one answer
ROW = "verifiers"  # field of a data row that holds the row of verifiers
RENDERER = {"name": "custom", "import_path": "mindspeed_rl_plugin.episodes.verifiers_renderer.AppendingRenderer"}


class Loaded(NamedTuple):
    """verifiers.v1, its version, its environment, and the settings of the renderer of prompts."""

    vf: Any
    version: str
    env: Any
    renderer: dict[str, Any]


def load(environment: str) -> Loaded:
    """environment: id of an installed taskset, or a file.toml with a table [env], as for `vf-eval`, and maybe a table
    [renderer]. Raises ValueError for one that cannot be used."""
    vf, version = _verifiers()
    file = {"env": {"taskset": {"id": environment}}} if not environment.endswith(".toml") else _read(environment)
    try:
        config = vf.resolve_env_config(file["env"])
        _complete(vf, config)
        env = vf.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        raise ValueError(f"{environment!r} is no environment that {sys.executable} can load: {why}") from error
    return Loaded(vf, version, env, file.get("renderer", RENDERER))


def task_of(loaded: Loaded, data: dict[str, Any]) -> Any:
    kind = type(loaded.env.taskset).task_type()
    return kind(kind.data_type().model_validate(data), loaded.env.config.taskset.task)


def main(connection: int, lifeline: int) -> None:
    """Send the rows of an environment. The first message is (environment, most rows or None); the answer is "", or an
    error. Each further message is answered with the next rows, and after the last ones with none."""
    parent = Parent(connection, lifeline)
    environment, most = parent.receive()
    rows = parent.load("", _rows, environment, most)
    parent.send(("", None))
    while True:
        parent.receive()
        parent.send(outcome(lambda: [*itertools.islice(rows, ROWS_AT_ONCE)]))


def _verifiers() -> tuple[Any, str]:
    try:
        import verifiers
    except ImportError as error:
        raise ValueError(
            f"{sys.executable} has no verifiers ({error}); install it there ({sys.executable} -m pip install "
            f"'verifiers=={SUPPORTED}*'), or name the interpreter that has it with --rl-environment-python"
        ) from error
    if not verifiers.__version__.startswith(SUPPORTED):
        raise ValueError(
            f"{sys.executable} has verifiers {verifiers.__version__}; supported is {SUPPORTED}*: install that one"
        )
    import verifiers.v1 as vf

    return vf, verifiers.__version__


def _read(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not {"env"} <= set(tables) <= {"env", "renderer"}:
        raise ValueError(
            f"{path} has {', '.join(sorted(tables)) or 'nothing'}; give a table [env], as vf-eval takes it, and maybe "
            "[renderer], and nothing else"
        )
    return tables


def _complete(vf: Any, config: Any) -> None:
    """Fill in defaults other than those of verifiers, which are a rented sandbox and a shell. An agent without a
    runtime runs on this machine. An agent without a harness, of its own or of its taskset, is a plain chat with the
    task's tools."""
    plain = vf.default_harness_id(config.taskset.id) == "bash"
    for name, agent in [(name, value) for name, value in config if isinstance(value, vf.AgentConfig)]:
        if agent.client is None and agent.sampling is not None:
            raise ValueError(f"its agent {name!r} has settings for sampling; the job's own hold: remove [sampling]")
        more = {} if "runtime" in agent.model_fields_set else {"runtime": vf.SubprocessConfig()}
        if plain and agent.harness is None:
            more["harness"] = vf.harness_config_type("null")(id="null")
        setattr(config, name, agent.model_copy(update=more))


def _rows(environment: str, most: int | None) -> Any:
    """An iterator over {prompt, answer, verifiers}."""
    env = load(environment).env
    kind = type(env.taskset).task_type().data_type()
    if hidden := [name for name, field in kind.model_fields.items() if field.exclude]:
        raise ValueError(f"its rows have {', '.join(hidden)}, which {kind.__name__} keeps out of files (exclude=True)")
    if most is None and not env.taskset.bounded:
        raise ValueError("its tasks have no end; give --limit")
    return (_row(task.data) for task in itertools.islice(env.taskset, most))


def _row(data: Any) -> dict[str, Any]:
    """The prompt is a text for readers only; verifiers renders the real one from the field `verifiers`."""
    text = data.prompt_text or data.description or data.name or f"task {data.idx}"
    fields = data.model_dump(mode="json", exclude_defaults=True)
    answer = fields.get("answer")
    return {"prompt": text, "answer": "" if answer is None else answer, ROW: fields}
