"""TRL's own tool loop over scripted turns, in an interpreter that has TRL.

    python trl_loop.py FOLDER      with tools.json and tokenizers; a line of stdin is an episode, one of stdout its row

Only sampling is scripted, and a tool answers with its argument; prompts, calls, suffixes, ids and masks are what TRL's
code makes.
"""

import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)
from trl.trainer.grpo_trainer import GRPOTrainer


class Scripted(GRPOTrainer):
    """Without a model: turns are those of the script."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]], turns: list[list[int]]) -> None:
        self.processing_class = self._tokenizer = tokenizer
        self.tools, self._turns, self._results = tools, iter(turns), list[tuple[str, str]]()

        def tool(name: str) -> Any:
            def call(text: str) -> str:
                self._results.append((name, text))
                return text

            return call

        self._sync_tool_dicts = [{tool_["function"]["name"]: tool(tool_["function"]["name"]) for tool_ in tools}]
        self._async_tool_dicts = [{}]
        self._is_vlm = self.use_vllm = False
        self.environment_factories = None
        self.max_completion_length, self.max_tool_calling_iterations = 10**6, len(turns)
        self.chat_template_kwargs = {"strftime_now": datetime.date(2024, 7, 26).strftime}
        preserving = is_chat_template_prefix_preserving(tokenizer)
        self.chat_template = None if preserving else get_training_chat_template(tokenizer)
        self.model = type("Model", (), {"config": type("Config", (), {"max_position_embeddings": 10**6})})

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **more: Any) -> Any:
        self.prompts = getattr(self, "prompts", []) + [prompt_ids[0]]
        return [list(next(self._turns))], [[0.0]]

    def row(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """An episode: ids of the prompt and behind it, mask, prompts of all turns, results of the calls."""
        prompt_ids, *_ = self._tokenize_prompts([messages])
        ids, _ = self._generate_single_turn(prompt_ids)
        completions = [[parse_response(self._tokenizer, ids[0], prefix=prompt_ids[0], tools=self.tools)]]
        mask, _, ids, *_ = self._tool_call_loop([messages], prompt_ids, ids, completions, None, None, {})
        return {
            "prompt": prompt_ids[0],
            "ids": ids[0],
            "mask": mask[0],
            "prompts": self.prompts,
            "results": self._results,
        }


def main(folder: Path) -> None:
    """Answer until stdin ends."""
    tools = json.loads((folder / "tools.json").read_text())
    load = functools.cache(lambda name: add_response_schema(AutoTokenizer.from_pretrained(folder / name)))
    answers, sys.stdout = sys.stdout, sys.stderr
    for episode in map(json.loads, sys.stdin):
        row = Scripted(load(episode["tokenizer"]), tools, episode["turns"]).row(episode["messages"])
        print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
