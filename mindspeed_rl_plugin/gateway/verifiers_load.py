"""Loads an environment of verifiers 0.4 in the interpreter that has verifiers: for an agents' process, or for the
command `tasks`, which wants its rows.

Of this package, it may import only modules that import nothing but the standard library. What else the gateway needs
there, uvicorn and Starlette, comes with verifiers; so an agents' process finds verifiers first.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any, NamedTuple

from mindspeed_rl_plugin.gateway.agent_messages import CLEAN_UP_SECONDS, AgentSetup
from mindspeed_rl_plugin.workers.child import Parent, outcome
from mindspeed_rl_plugin.workers.keeper import keep

SUPPORTED = "0.4."
ROWS_AT_ONCE = 256  # most rows of one answer
ROW = "verifiers"  # field of a data row that holds the row of verifiers


class Loaded(NamedTuple):
    """The module verifiers.v1, and the environment."""

    vf: Any
    env: Any


def load(environment: str) -> Loaded:
    """environment: id of an installed taskset, or a file.toml with a table [env], as for `vf-eval`. Raises ValueError
    for an environment that cannot be loaded."""
    vf = _verifiers()
    file = {"env": {"taskset": {"id": environment}}} if not environment.endswith(".toml") else _read(environment)
    try:
        config = vf.resolve_env_config(file["env"])
        _complete(vf, config)
        env = vf.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        raise ValueError(f"{environment!r} is no environment that {sys.executable} can load: {why}") from error
    return Loaded(vf, env)


def task_of(loaded: Loaded, data: dict[str, Any]) -> Any:
    kind = type(loaded.env.taskset).task_type()
    return kind(kind.data_type().model_validate(data), loaded.env.config.taskset.task)


def serve(connection: int, lifeline: int) -> None:
    """As `agent_process.main`; `agent` of the setup is what `load` takes."""
    keep(connection, lifeline, CLEAN_UP_SECONDS)
    parent = Parent(connection, None)
    setup: AgentSetup = parent.receive()
    loaded = parent.load("", load, setup.agent)
    agents = parent.load("", importlib.import_module, "mindspeed_rl_plugin.gateway.verifiers_agents")
    agents.run(parent, setup, loaded)


def main(connection: int, lifeline: int) -> None:
    """Send the rows of an environment. The first message is (environment, limit of rows or None); the answer is
    ("", None) or (None, error). Each further message is answered by (next rows, None), after the last row by
    ([], None), or by (None, error)."""
    parent = Parent(connection, lifeline)
    environment, most = parent.receive()
    rows = parent.load("", _rows, environment, most)
    parent.send(("", None))
    while True:
        parent.receive()
        parent.send(outcome(lambda: [*itertools.islice(rows, ROWS_AT_ONCE)]))


def _verifiers() -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ValueError(
            f"{sys.executable} has no verifiers ({error}); install it there ({sys.executable} -m pip install "
            f"'verifiers=={SUPPORTED}*'), or name the interpreter that has it with --rl-environment-python"
        ) from error
    if not verifiers.__version__.startswith(SUPPORTED):
        raise ValueError(
            f"{sys.executable} has verifiers {verifiers.__version__}; install {SUPPORTED}*, the supported version"
        )
    import verifiers.v1 as vf

    return vf


def _read(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if set(tables) != {"env"}:
        raise ValueError(
            f"{path} has {', '.join(sorted(tables)) or 'nothing'}; give a table [env], as for vf-eval, and no others"
        )
    return tables


def _complete(vf: Any, config: Any) -> None:
    """Set defaults instead of those of verifiers, which are a rented sandbox and a shell. An agent without a runtime
    runs on this machine. An agent is a plain chat with the task's tools if neither it nor its taskset has a harness."""
    plain = vf.default_harness_id(config.taskset.id) == "bash"
    for name, agent in [(name, value) for name, value in config if isinstance(value, vf.AgentConfig)]:
        if agent.client is None and agent.sampling is not None:
            raise ValueError(f"its agent {name!r} has settings for sampling, but the job's are used: remove [sampling]")
        more = {} if "runtime" in agent.model_fields_set else {"runtime": vf.SubprocessConfig()}
        if plain and agent.harness is None:
            more["harness"] = vf.harness_config_type("null")(id="null")
        setattr(config, name, agent.model_copy(update=more))


def _rows(environment: str, most: int | None) -> Any:
    """An iterator over rows with the fields prompt, answer and verifiers."""
    env = load(environment).env
    kind = type(env.taskset).task_type().data_type()
    if hidden := [name for name, field in kind.model_fields.items() if field.exclude]:
        raise ValueError(f"no row can hold {', '.join(hidden)}, left out of JSON by {kind.__name__} (exclude=True)")
    if most is None and not env.taskset.bounded:
        raise ValueError("it has no last task; give --limit")
    return (_row(task.data) for task in itertools.islice(env.taskset, most))


def _row(data: Any) -> dict[str, Any]:
    """The field `prompt` is for display and the length limit; verifiers makes the prompt from the field `verifiers`."""
    text = data.prompt_text or data.description or data.name or f"task {data.idx}"
    fields = data.model_dump(mode="json", exclude_defaults=True)
    answer = fields.get("answer")
    return {"prompt": text, "answer": "" if answer is None else answer, ROW: fields}
