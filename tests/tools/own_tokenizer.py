"""A tokenizer with code of its own, as Kimi K2's: a class in Python, and a vocabulary in a file that it alone reads."""

import json
from pathlib import Path

CODE = """
from transformers import PreTrainedTokenizer
from .own_ids import read

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.model"}

    def __init__(self, vocab_file, **named):
        self._ids = read(vocab_file)
        self.vocab_size, self._tokens = len(self._ids), list(self._ids)
        self._tokenize, self.convert_tokens_to_string = list, "".join
        self._convert_token_to_id, self._convert_id_to_token = self._ids.get, self._tokens.__getitem__
        super().__init__(**named)

    vocab_size = 0

    def get_vocab(self):
        return dict(self._ids)
"""
READ = """
def read(path):
    return {line.strip("\\n"): number for number, line in enumerate(open(path))}
"""


def write(folder: Path) -> Path:
    """Its files; tokens and ids are those of examples/arithmetic: the characters of ASCII, <pad>, <eos>."""
    folder.mkdir()
    named = {"auto_map": {"AutoTokenizer": ["own_tokens.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"pad_token": "<pad>", "eos_token": "<eos>"}))
    (folder / "own.model").write_text("\n".join([*map(chr, range(32, 127)), "<pad>", "<eos>"]))
    (folder / "own_tokens.py").write_text(CODE)
    (folder / "own_ids.py").write_text(READ)
    return folder
